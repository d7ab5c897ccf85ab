"""A dozen families of ``make zoo``, chosen for how their experts are written: three whole training steps each."""

from __future__ import annotations

import os

import pytest
import torch
from seeds import some

transformers = pytest.importorskip("transformers")

import peaks  # noqa: E402
from zoo import measure, page, tiny  # noqa: E402  the models need transformers

# family: (the step is one graph, expert regions, how many of them were lowered)
FAMILIES = {
    "mixtral": (True, 2, 2),
    "qwen3_moe": (True, 2, 2),  # normalised top-k
    "deepseek_v3": (True, 2, 2),  # grouped sigmoid routing, a shared expert
    "gpt_oss": (True, 2, 2),  # biases, interleaved and clamped gate
    "granitemoe": (True, 2, 2),
    "dbrx": (True, 2, 2),  # transposed weights
    "llama4": (True, 2, 2),  # all experts on all tokens, as batched products
    "jetmoe": (True, 6, 6),  # counts.tolist() drives split; in attention, experts are single projections
    "qwen3_next": (True, 2, 2),  # linear attention
    "muse_spark": (True, 2, 2),  # a norm after the experts
    "vitpose_backbone": (True, 2, 2),  # a dense sum over experts, masked
    "zaya": (True, 2, 2),  # top-1, a router that passes its state on
    "switch_transformers": (True, 4, 4),  # a parameter for each expert, which are nearly all of the model
}


WHOLE = "MOEBIUS_WHOLE" in os.environ


@pytest.fixture(scope="module", params=FAMILIES if WHOLE else some(list(FAMILIES), 3, "zoo"))
def measured(request):
    return request.param, {"ours": measure.ours(request.param)}


def test_equal_to_eager(measured):
    family, result = measured
    assert page.crash(result) is None
    assert page.equal(result), page.summary(family, result)


def test_graphs_and_regions(measured):
    family, result = measured
    one, regions, lowered = FAMILIES[family]
    ours = result["ours"]["moebius"]
    assert page.one_graph(result) == one, ours["breaks"][:3]
    assert page.lowered(result) == (lowered, regions), [r["refusal"] for r in ours["regions"]]


def test_memory(measured):
    """At its peak a step holds no more than plain Python's.

    To a thousandth: where both peaks are the optimizer's they are 32 bytes apart of 2 MB.
    """
    _, result = measured
    assert 0 < result["ours"]["moebius"]["peak_bytes"] <= result["ours"]["plain"]["peak_bytes"] * 1.001


def test_blocks_from_before_do_not_count():
    """Whether the profiler knows their addresses from an earlier session or not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
        before = [torch.empty(1000) for _ in range(20)]
    del before
    held = [torch.empty(1000) for _ in range(20)]

    def step():
        held.clear()
        torch.empty(500)

    assert peaks.peak_bytes(step) == 2000


def test_the_page_tells_a_difference():
    """What is wrong is said so on the page, and no region counts twice."""
    good = {
        "graphs": 1,
        "breaks": [],
        "regions": [{"lowered": True, "refusal": None, "at": "a.py:1"}],
        "cold_seconds": 1.0,
        "errors": {"loss": 0.0, "gradient": 0.0},
        "differs": None,
        "peak_bytes": 10,
    }
    plain = {"cold_seconds": 0.1, "peak_bytes": 10}
    bad = {**good, "differs": "the loss of step 2 differs by 1.0e-01"}
    results = {
        "fine": {"ours": {"eager": good, "moebius": good, "plain": plain}},
        "wrong": {"ours": {"eager": bad, "moebius": good, "plain": plain}},
        "gone": {"ours": {"crash": "the process ended with exit status -11"}},
    }
    results["fine"]["measured"] = "2001-02-03"
    text = page.write(results, 3, "versions")
    assert "2001-02-03" in text
    assert "Equal to eager: **1 of 3**" in text
    assert "one graph: **2 of 3**" in text
    assert "regions that were lowered: **2 of 2**" in text
    assert "| gone | **crash** |" in text and "exit status -11" in text
    assert "| wrong | **no** |" in text and "the loss of step 2 differs" in text


def test_a_wrong_gradient_is_seen():
    model, inputs = tiny.build("mixtral")

    def wrong(model, optimizer, inputs):
        loss = measure.train_step(model, optimizer, inputs)
        next(model.parameters()).grad.add_(1e-3)
        return loss

    plain = measure.Run(model, inputs, measure.train_step).train()
    model, _ = tiny.build("mixtral")
    other = measure.Run(model, inputs, wrong).train()
    assert measure.bitwise(other, plain) == "the gradient of model.embed_tokens.weight differs at step 1"
    assert measure.beyond(measure.errors(other, plain))


def test_families_are_found():
    assert set(FAMILIES) <= set(tiny.moe_families())

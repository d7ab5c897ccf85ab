"""Sizes that vary: ten batch and sequence sizes are at most two graphs, ten sets of experts are one."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moebius import capture, explain, mark_dynamic, stats
from moebius.python.domain import TrackingDomain

SIZES = [(5, 4), (6, 8), (7, 6), (9, 12), (12, 3), (16, 10), (5, 14), (23, 8), (31, 16), (40, 7)]


def slicing(x):
    return x[1:, :-1].sum(0) * x.shape[0]


def halves(x):
    return x[: x.shape[0] // 2].sum() + x[x.shape[0] // 2 :].mean()


def view(x):
    return x.view(x.shape[0], 1, -1).mean(1).reshape(-1)


def arange(x):
    return x + torch.arange(x.shape[1])[None] * torch.arange(x.shape[0])[:, None]


def attention_mask(x):
    s = x.shape[1]
    mask = torch.full((s, s), float("-inf")).triu(1)
    return torch.softmax(x[:, :, None] @ x[:, None, :] + mask, -1).sum(-1)


def branch(x):
    return x * 2 if x.shape[0] > 4 else x - 1


def parts(x):
    return torch.cat([x, x.new_zeros(x.shape[0], 2)], 1).chunk(2, 1)[0].sum()


def loop(x):
    return sum(x[i].sum() for i in range(min(3, x.shape[0])))


@pytest.mark.parametrize("function", [slicing, halves, view, arange, attention_mask, branch, parts, loop])
def test_ten_sizes_are_at_most_two_graphs(function):
    captured = capture(function)
    for rows, columns in SIZES:
        x = torch.randn(rows, columns)
        torch.testing.assert_close(captured(x), function(x))
    seen = stats(captured)
    assert (seen.graphs, seen.breaks) == (2, 0), [(r.guard, r.old, r.new) for r in seen.recompiles]


def test_the_other_branch_on_a_size_is_one_graph_more():
    captured = capture(branch)
    for rows in (8, 5, 6, 3, 2, 4, 30, 3):
        x = torch.randn(rows, 4)
        assert torch.equal(captured(x), branch(x))
    assert stats(captured).graphs == 3


def make(config_class, model_class, **more):
    torch.manual_seed(0)
    config = config_class(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_experts_per_tok=2, max_position_embeddings=64, use_cache=False,
        experts_implementation="eager", **more,
    )  # fmt: skip
    return model_class(config)


MODELS = {
    "mixtral": lambda: make(MixtralConfig, MixtralForCausalLM, num_local_experts=8),
    "qwen3_moe": lambda: make(Qwen3MoeConfig, Qwen3MoeForCausalLM, num_experts=8, moe_intermediate_size=8, head_dim=4),
}


def loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("name", MODELS)
def test_ten_batch_and_sequence_sizes_of_a_model(name):
    """The batch varies first and the sequence afterwards: what varied first opens the other."""
    model, captured = MODELS[name](), capture(loss)
    sizes = [(2, 8), (3, 8), (3, 5), (4, 7), (2, 12), (5, 4), (6, 9), (7, 3), (2, 16), (8, 11)]
    for batch, length in sizes:
        ids = torch.randint(0, 32, (batch, length))
        torch.testing.assert_close(captured(model, ids), loss(model, ids))
    seen = stats(captured)
    assert seen.graphs <= 2 and seen.breaks == 0, [(r.guard, r.old, r.new) for r in seen.recompiles]


@pytest.mark.parametrize("name", MODELS)
def test_ten_sets_of_experts_are_one_graph(name):
    model, captured, hit = MODELS[name](), capture(loss), set()
    gate = next(m for n, m in model.named_modules() if n.endswith("mlp.gate"))
    gate.register_forward_hook(lambda _, __, out: hit.add(tuple(out[-1].unique().tolist())))
    for token in range(10):
        ids = torch.tensor([[token, token]])
        with torch.no_grad():
            loss(model, ids)  # tells which experts the tokens choose
    gate._forward_hooks.clear()
    assert len(hit) >= 5  # sets of experts that differ
    for token in range(10):
        ids = torch.tensor([[token, token]])
        torch.testing.assert_close(captured(model, ids), loss(model, ids))
    seen = stats(captured)
    assert (seen.graphs, seen.breaks, seen.recompiles) == (1, 0, [])


def test_past_the_bound_the_report_names_the_guard_and_what_to_mark():
    def step(x):
        return x * x.shape[0]

    captured = capture(step, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(2, 24):
            assert torch.equal(captured(torch.ones(rows, 3)), torch.full((rows, 3), float(rows)))
    (warning,) = [str(w.message) for w in caught if "runs natively now" in str(w.message)]
    assert "L['x'] keeps changing" in warning and "mark_dynamic(x, (0,))" in warning
    report = explain(captured)(torch.ones(2, 3))
    assert report.recompiles[-1].guard == "L['x']" and report.recompiles[-1].hint == "moebius.mark_dynamic(x, (0,))"
    assert "mark_dynamic(x" in str(report).replace("\n", "")

    marked = capture(step)
    for rows in range(2, 24):
        x = torch.ones(rows, 3)
        mark_dynamic(x, 0)
        marked(x)
    assert stats(marked).graphs == 1


@pytest.mark.parametrize("kind", ["leaf", "result", "view", "frozen"])
def test_a_tensor_that_has_a_gradient_already(kind):
    """Its gradient has sizes of its own, which are not the graph's business."""

    def made(rows):
        x = (torch.ones(4, rows).t() if kind == "view" else torch.ones(rows, 4)).requires_grad_()
        if kind == "result":
            x = x * 2
            x.retain_grad()
        x.pow(2).sum().backward()
        return x.requires_grad_(False) if kind == "frozen" else x

    def step(x):
        x = x.detach() * x.shape[0] + x
        return x.sum(0), x.requires_grad

    captured = capture(step, fullgraph=kind in ("leaf", "frozen"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="moebius")
        for rows in (3, 4, 5, 6):
            (got, tracked), (want, expected) = captured(made(rows)), step(made(rows))
            assert torch.equal(got, want) and tracked is expected
    assert stats(captured).graphs == 2 or kind in ("view", "result")


def test_views_of_a_parameter_that_has_a_gradient():
    """The parameter is not an input; neither its sizes nor its gradient's may be in a guard."""
    table = torch.nn.Parameter(torch.rand(9, 4))
    table.pow(2).sum().backward()

    def step(x):
        return (x @ x.t()).sum() * x.shape[0]

    captured = capture(step, fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="moebius")
        for rows in (3, 4, 5, 6):
            assert torch.equal(captured(table[:rows]), step(table[:rows]))
    assert stats(captured).graphs == 2


@pytest.mark.parametrize("kind", ["a view that is a leaf", "a result"])
def test_sizes_of_what_holds_a_gradient_are_guarded(kind):
    def made(rows):
        x = torch.rand(9, 4)[:rows].requires_grad_()
        if kind == "a result":
            x = x * 2
            x.retain_grad()
        x.sum().backward(retain_graph=True)
        return x

    def step(x):
        return x.detach() * x.shape[0]

    captured = capture(step)
    for rows in (3, 4, 5, 6):
        x = made(rows)
        assert torch.equal(captured(x), step(x))


TABLE = [1.0, 2.0, 3.0, 4.0, 5.0]


class Swallows:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


def in_a_try(x):
    found = -1.0
    try:
        found = [*TABLE].pop((x > 0).nonzero().shape[0])
    except Exception:
        pass
    return x * found


def suppressed(x):
    found = -1.0
    with contextlib.suppress(Exception):
        found = [*TABLE].pop((x > 0).nonzero().shape[0])
    return x * found


def swallowed(x):
    found = -1.0
    with Swallows():
        found = [*TABLE].pop((x > 0).nonzero().shape[0])
    return x * found


def popped(x):
    return x * [*TABLE, *TABLE].pop((x > 0).nonzero().shape[0])


def check_numbers_of_the_data(step):
    captured = capture(step)
    for x in (torch.tensor([1.0, -1.0, 2.0]), torch.ones(4), torch.ones(9), -torch.ones(2)):
        assert torch.equal(captured(x), step(x))


@pytest.mark.parametrize("step", [in_a_try, suppressed, swallowed, popped])
def test_a_number_that_the_data_decide_is_no_error_of_the_steps(step):
    """torch's own exception for it must not meet the user's handlers."""
    check_numbers_of_the_data(step)
    reasons = {b.reason for b in explain(step)(torch.ones(2)).breaks}
    assert "size that depends on values" in reasons


@pytest.mark.parametrize("step", [in_a_try, suppressed, swallowed])
def test_noticed_where_it_meets_them(step, monkeypatch):
    monkeypatch.setattr(TrackingDomain, "meets_handler", lambda self, error: None)
    with pytest.raises(AssertionError):
        check_numbers_of_the_data(step)

"""Input that is wrong in one place: for each place and each way to be wrong, a plan or a PlannerError, nothing else."""
from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from moebius.lowering.planner import PlannerError, command, hardware, routing, search, shapes
from moebius.lowering.planner.costs import Predictor
from moebius.lowering.planner.models import MODELS
from moebius.lowering.planner.plans import Candidate, Job

WRONG = [None, True, 0, -1, 1.5, 3, 10**30, float("nan"), float("inf"), "x", "", [], [1], {}, {"a": 1}]
KEYS = sorted({key for entry in MODELS.values() for key in entry.config} | {
    "text_config", "moe_layer_freq", "use_qk_norm", "use_sliding_window", "num_shared_experts"})


def price(shape: shapes.ModelShape, device: hardware.Device) -> float:
    cluster = hardware.cluster(device, 8, 1)
    job = Job(shape, cluster, 8, 128, routing.Routing(shape.experts, shape.top_k, shape.groups, shape.group_limit))
    precision = next(iter(device.rates))
    cost = Predictor(job).cost(Candidate(4, 2, 1, precision) if shape.experts > 1 else Candidate(8, 1, 1, precision))
    assert 0 < cost.step < float("inf") and 0 < cost.memory.total < float("inf")
    return cost.step


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "deepseek-v3", "gpt-oss-20b"])
def test_a_configuration_that_is_wrong_in_one_key(name):
    refused = 0
    for key in KEYS:
        for wrong in WRONG:
            try:
                price(shapes.shape_of({**MODELS[name].config, key: wrong}), hardware.device("h100"))
            except PlannerError as error:
                refused += 1
                assert str(error)
    assert refused > 80


def test_a_device_that_is_wrong_in_one_figure(tmp_path):
    right, file = asdict(hardware.device("mi300x")), tmp_path / "device.json"
    places = [(None, key) for key in right] + [("reached", key) for key in right["reached"]] + [("rates", "bf16")]
    shape, taken = shapes.named("olmoe-1b-7b"), 0
    for inside, key in places:
        for wrong in WRONG:
            held = {**right, key: wrong} if inside is None else {**right, inside: {**right[inside], key: wrong}}
            file.write_text(json.dumps(held))
            try:
                price(shape, hardware.read(file))
                taken += 1
            except PlannerError as error:
                assert "device.json" in str(error)
    assert taken < len(places) * len(WRONG) / 2


@pytest.mark.parametrize("options, said", [
    (["--gpus", "0"], "at least one"), (["--gpus", "1000000007"], "at most"), (["--nodes", "3"], "--gpus 6"),
    (["--network", "nan"], "--network"), (["--network", "inf"], "--network"), (["--seq", "99999999999"], "at most"),
    (["--batch", "9999999999999"], "at most"), (["--batch", "-8"], "--batch"), (["--top", "0"], "--top"),
    (["--model", ""], "no model"), (["--gpu", ""], "no device"), (["--precision", "mxfp8"], "mxfp8"),
    (["--gpu", "a folder"], "no device"), (["--json", "/nowhere/at/all"], "cannot be written"),
])
def test_options_that_are_wrong(options, said):
    words = ["--model", "olmoe-1b-7b", "--gpus", "8", *options]
    with pytest.raises(PlannerError, match=said):
        command.run(words)


def test_divisors_by_trying_all():
    for number in range(1, 200):
        assert hardware.divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    assert len(search.divisors(2**20)) == 21

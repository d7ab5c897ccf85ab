"""The software pipeline of one layer of experts: what it may not do, what it saves at least and at most."""
from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from moebius.lowering.planner import PlannerError, command, schedule


def drawn(seed: int):
    """A layer with random times: both directions in random chunks."""
    draw = random.Random(seed)
    chunks, *seconds = draw.choice((1, 2, 3, 4, 8)), *(draw.choice((0.0, draw.random())) for _ in range(4))
    return chunks, seconds, draw.choice((schedule.forward, schedule.backward))(chunks, *seconds)


@pytest.mark.parametrize("seed", range(60))
def test_each_resource_does_one_thing_at_a_time_and_nothing_comes_too_early(seed):
    chunks, seconds, tasks = drawn(seed)
    runs = schedule.run(tasks)
    ends = {one.task.name: one.end for one in runs}
    assert len(ends) == len(tasks) and sum(one.seconds for one in tasks) == pytest.approx(sum(seconds))
    for on in (schedule.LINK, schedule.DEVICE):
        order = sorted((one for one in runs if one.task.on == on), key=lambda one: (one.begin, one.end))
        assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(order))
    for one in runs:
        assert all(ends[name] <= one.begin + 1e-12 for name in one.task.after)
    busiest = max(sum(one.seconds for one in tasks if one.on == on) for on in (schedule.LINK, schedule.DEVICE))
    assert busiest - 1e-12 <= schedule.length(tasks) <= sum(seconds) + 1e-12
    assert schedule.hidden(tasks) == pytest.approx(0) or chunks > 1


@pytest.mark.parametrize("way", [schedule.forward, schedule.backward])
def test_where_communication_and_products_are_equal_three_quarters_are_left(way):
    for chunks, most in ((2, 0.75), (4, 0.65)):
        assert schedule.length(way(chunks, 0.5, 1.0, 0.5)) <= most * 2.0


def test_what_waits_for_itself_is_refused():
    with pytest.raises(ValueError, match="never"):
        schedule.run([schedule.Task("a", schedule.LINK, 1.0, ("a",))])


def test_the_trace_is_the_schedule(tmp_path, capsys):
    file = tmp_path / "layer.json"
    words = ["--model", "deepseek-v3", "--gpus", "512", "--gpu", "h200", "--trace", str(file)]
    assert command.run([*words, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = min(found["running"][:1] + found["later"][:1], key=lambda plan: plan["seconds"]["step"])
    events = json.loads(file.read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    dispatches = [event for event in drawn if event["name"].startswith("forward: dispatch")]
    assert len(dispatches) == best["chunks"] and all(event["dur"] > 0 for event in drawn)
    with pytest.raises(PlannerError, match="no plan fits"):
        command.run(["--model", "kimi-k2", "--gpus", "1", "--trace", str(file)])

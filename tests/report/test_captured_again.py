"""What is captured already is refused in one sentence; what is captured under another name pickles."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from moebius import NotCapturableError, capture, explain
from moebius.api import captured_of, report_of

X = torch.ones(3)


class Trainer:
    @capture
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def plain(x: torch.Tensor) -> torch.Tensor:
    return x + 1


fast = capture(plain, backend="eager")


@capture
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x - 1


@pytest.mark.parametrize("of", [Trainer().step, Trainer.step, fast], ids=["bound", "function", "another name"])
def test_capture_of_what_is_captured(of: object) -> None:
    with pytest.raises(NotCapturableError, match="is captured already"):
        capture(of)


def test_explain_of_a_captured_method() -> None:
    report = explain(Trainer().step)(X)
    assert report.verdict == "Runs as one graph" and torch.equal(report.result, X * 2)


def test_capture_of_a_compiled_function() -> None:
    compiled = torch.compile(plain, backend="eager")
    assert torch.equal(capture(compiled)(X), X + 1)
    assert explain(compiled)(X).status == "captured"


def test_another_name_pickles_with_its_options() -> None:
    again = pickle.loads(pickle.dumps(fast))
    assert again is not fast and torch.equal(again(X), X + 1)
    assert explain(again)(X).status == "hit"
    assert pickle.loads(pickle.dumps(decorated)) is decorated and copy.deepcopy(fast) is fast


def test_a_local_function_pickles_as_little_as_plain() -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises((pickle.PicklingError, AttributeError), match="local"):
        pickle.dumps(capture(local))


def test_the_profiler_reads_its_stacks_after_a_warm_step_with_breaks() -> None:
    @capture
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + (id(y) > 0)

    for _ in range(3):
        step(X)
    with torch.profiler.profile(with_stack=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step(X)
    assert any("mul" in event.name for event in seen.events())


@pytest.mark.parametrize("breaks", [False, True])
def test_a_report_of_all_calls_says_what_one_call_runs(breaks: bool) -> None:
    def of_all_calls(x: torch.Tensor, kind: str) -> torch.Tensor:
        y = x * 2 if kind == "a" else x + 1
        return y * (id(y) > 0) + 1 if breaks else y

    captured = capture(of_all_calls, backend="eager")
    for kind in "abbab":
        captured(X, kind)
    report = report_of(captured_of(captured))
    graphs = "one graph" if not breaks else "2 graphs"
    assert report.verdict.startswith(f"Runs as {graphs}, of {len(report.graphs)} captured") and len(report.graphs) > 1
    assert "3 of 5 calls hit" in str(report)
    assert json.loads(report.to_json())["calls"]["hits"] == 3
    called = explain(captured)(X, "a")
    assert called.verdict.startswith(f"Runs as {graphs}") and " captured" not in called.verdict

"""What the process does beside capture: builtins that somebody has replaced, objects that another thread changes."""

from __future__ import annotations

import builtins
import threading
import warnings
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.cache import environment_changes
from moebius.guards.program import CompiledGuards


def one_more(original: Any) -> Any:
    return lambda *args, **kwargs: original(*args, **kwargs) + 1


def cut(original: Any) -> Any:
    return lambda *args, **kwargs: list(original(*args, **kwargs))[:1]


REPLACEMENTS = {
    "len": one_more, "sum": one_more, "abs": one_more, "zip": cut, "map": cut, "enumerate": cut, "sorted": cut,
    "isinstance": lambda original: lambda *args: False,
}  # fmt: skip


def model(x, parts):
    total = sum(abs(p) for p in parts) + len(parts) + isinstance(x, torch.Tensor)
    for a, b in zip(parts, map(int, "567"), strict=False):
        total += a * b
    for i, a in enumerate(sorted(parts)):
        total += i * a
    return torch.nn.functional.gelu(x) * total


@pytest.mark.parametrize("first", [True, False], ids=["before the first call", "after it"])
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_replaced_builtin_is_the_programs_alone(name, first, monkeypatch):
    monkeypatch.setattr(environment_changes, "TOLD", set())
    step, x, parts = capture(model, backend="eager"), torch.ones(2, 3), [3, -1, 2]
    usual = model(x, parts)
    if not first:
        assert step(x, parts).equal(usual)
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(builtins, name, REPLACEMENTS[name](getattr(builtins, name)))
        found = [step(x, parts), step(x, parts)]
        expected = model(x, parts)
    assert not expected.equal(usual) and all(f.equal(expected) for f in found)
    (said,) = [str(w.message) for w in warned]
    assert f"builtins.{name} was replaced" in said
    assert [step(x, parts).equal(usual) for _ in range(3)] == [True] * 3
    assert stats(step).graphs == 1 and stats(step).hits >= 2  # captured as if nothing had been


def test_notebooks_take_names_of_the_shell_away(monkeypatch):
    """IPython does while a cell runs."""
    for name in ("exit", "quit"):
        monkeypatch.delattr(builtins, name, raising=False)
    step = capture(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(torch.ones(2, 3), [3, -1, 2])
    assert stats(step).graphs == 1 and stats(step).hits == 2


def test_what_capture_does_not_call_may_be_replaced(monkeypatch, capsys):
    step = capture(lambda x: (print("on rank 0"), x * 2)[1], backend="eager", fullgraph=True)
    original = print
    monkeypatch.setattr(builtins, "print", lambda *args: original("replaced:", *args))
    assert [step(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert capsys.readouterr().out == "replaced: on rank 0\n" * 2


def spoiled(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], times: int) -> None:
    """The first captures find other settings at their end than at their beginning. A call that finds so the first time
    captures twice."""
    original, left = CompiledGuards.failure, [times]

    def failure(self, args, kwargs):
        if left[0]:
            left[0] -= 1
            settings["scale"] += 1.0
        return original(self, args, kwargs)

    monkeypatch.setattr(CompiledGuards, "failure", failure)


@pytest.fixture
def another_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


def races(step, calls):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = [step(torch.ones(2))[0].item() for _ in range(calls)]
    return found, [str(w.message) for w in warned]


@pytest.mark.faults
def test_what_another_thread_changes_while_it_is_captured_is_named(monkeypatch, another_thread):
    settings = {"scale": 1.0}
    step = capture(lambda x: x * settings["scale"], backend="eager")
    spoiled(monkeypatch, settings, 2)
    found, said = races(step, 3)
    assert found == [3.0, 3.0, 3.0] and len(said) == 1
    assert "settings" in said[0] and "other threads run" in said[0] and "the next is captured anew" in said[0]
    assert stats(step).graphs == 1 and stats(step).hits == 1


@pytest.mark.faults
def test_what_is_changed_each_time_runs_natively_in_the_end(monkeypatch, another_thread):
    settings = {"scale": 1.0}
    step = capture(lambda x: x * settings["scale"], backend="eager")
    spoiled(monkeypatch, settings, 99)
    found, said = races(step, 5)
    assert found == [3.0, 5.0, 7.0, 7.0, 7.0] and len(said) == environment_changes.MAX_CHANGES
    assert "natively from now on" in said[-1] and not stats(step).graphs


@pytest.mark.faults
@pytest.mark.parametrize("times", (1, 2))
def test_without_another_thread_it_is_a_defect_of_capture_where_it_changes_twice(monkeypatch, times):
    """Once, what capture itself has asked natively may have changed it: a cache that fills."""
    settings = {"scale": 1.0}
    step = capture(lambda x: x * settings["scale"], backend="eager")
    spoiled(monkeypatch, settings, times)
    if threading.active_count() > 1:
        pytest.skip("a thread of another test is alive")
    found, said = races(step, 2)
    assert found == [1.0 + times] * 2 and len(said) == times - 1 and stats(step).graphs == 2 - times
    assert all("could not capture" in text for text in said)

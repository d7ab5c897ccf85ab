"""A capture that is made again names the guard that failed, of each older capture, in the user's names and lines."""

from __future__ import annotations

import itertools
import linecache
import math
import types
import warnings
from typing import Any

import pytest
import torch

from moebius import capture, disable, explain, stats
from moebius.guards.sources import LEFT, as_written
from moebius.report.groups import guard_groups
from moebius.report.model import Findings
from moebius.report.records import LIBRARIES, Guard
from moebius.trace.provenance import LOCAL

X = torch.ones(3)


def moded(x: torch.Tensor, mode: str, k: int) -> torch.Tensor:
    if mode == "a":
        x = x + 1
    for _ in range(k):
        x = x * 2
    return x


def line_of(recompile: Any) -> str:
    return linecache.getline(recompile.file, recompile.line).strip()


def test_the_capture_that_fitted_best_is_blamed(monkeypatch: Any) -> None:
    step = capture(moded)
    for mode, k in (("a", 1), ("b", 1), ("a", 9)):
        step(X, mode, k)
    first, second = stats(step).recompiles
    assert (first.guard, first.old, first.new, line_of(first)) == ("L['mode']", "'a'", "'b'", 'if mode == "a":')
    assert (second.guard, second.old, second.new) == ("L['k']", "1", "9") and "range(k)" in line_of(second)
    assert [entry.partition(":")[0] for entry in second.entries] == ["capture 2", "capture 1"]
    assert "L['mode']" in second.entries[0] and "L['k']" in second.entries[1]


def by_remainder(x: torch.Tensor, n: int) -> torch.Tensor:
    if n % 4 == 0:
        x = x + 1
    return x * n


def by_kind(x: torch.Tensor, n: int) -> torch.Tensor:
    if 2 ** -n < 0.1:
        x = x + 1
    return x * n


def by_helper(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * n + (1 if math.sqrt(n) >= 3 else 2)


def by_size(x: torch.Tensor, n: int) -> torch.Tensor:
    y = x.new_zeros(n)
    if y.shape[0] > 5:
        return y.sum() + x
    return x


def by_shape(x: torch.Tensor, n: int) -> torch.Tensor:
    rows = x.new_zeros(n, 2)
    return inner(rows)


def inner(rows: torch.Tensor) -> torch.Tensor:
    return rows.sum() if rows.shape[0] > 5 else rows.mean()


WAYS = {
    by_remainder: ((1, 2, 3, 4), "n % 4", "if n % 4 == 0:"),
    by_kind: ((1, 2, 3, 4), "2.0 ** float(-n) >= 0.1 was True, is False (n is 4)", "if 2 ** -n < 0.1:"),
    by_helper: ((2, 3, 4, 9), "sqrt(n) >= 3 was False, is True (n is 9)", "if math.sqrt(n) >= 3"),
    by_size: ((2, 3, 4, 9), "n <= 5", "if y.shape[0] > 5:"),
    by_shape: ((2, 3, 4, 9), "n <= 5", "if rows.shape[0] > 5"),
}


@pytest.mark.parametrize("step", WAYS)
def test_a_decision_on_a_number_is_told_as_the_expression_at_its_line(step: Any) -> None:
    """The user's expression, what it was, what it is and of which number; never the place alone."""
    numbers, change, line = WAYS[step]
    captured = capture(step)
    for n in numbers:
        assert torch.equal(captured(X, n), step(X, n))
    found = stats(captured).recompiles[-1]
    assert change in found.change and f"(n is {numbers[-1]})" in found.change, found
    assert line in line_of(found) and "what the step computes" not in str(explain(captured)(X, numbers[-1]))


SCORES = itertools.count(107, 7)


@disable
def scored(x: torch.Tensor) -> int:
    return next(SCORES)


def scores(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    k = scored(x)
    return x * 2 if k > 1 else x


def test_what_a_graph_break_left_is_told_as_the_expression_at_its_line() -> None:
    captured = capture(scores)
    for _ in range(2):
        captured(X)
    found = stats(captured).recompiles[-1]
    assert found.change.startswith("scored(x) was 107, is 114") and line_of(found) == "k = scored(x)"


TENSORS = {
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "float64": lambda: torch.ones(3, dtype=torch.float64),
    "strides (2,)": lambda: torch.ones(6)[::2],
    "another storage offset": lambda: torch.ones(4)[1:],
}


@pytest.mark.parametrize("what", TENSORS)
def test_of_another_tensor_what_differs_is_told(what: str) -> None:
    captured = capture(lambda x: x * 2)
    captured(X)
    captured(TENSORS[what]())
    for found in stats(captured).recompiles:
        assert what in found.new and found.old != found.new


@pytest.mark.parametrize(
    "source, written",
    [
        ("L['k']", "k"), ("L['args[0]']", "args[0]"), ("G(__main__)['cfg'].mode", "cfg.mode"),
        ("L['net']._modules['0']._parameters['weight'].grad", "net[0].weight.grad"),
        ("closure make.<locals>.step.sch.cell_contents.last_epoch", "sch.last_epoch"),
        ("(L['n'] % 4) == 0 (L['n'] is 4)", "(n % 4) == 0 (n is 4)"),
    ],
)  # fmt: skip
def test_places_are_named_as_the_program_does(source: str, written: str) -> None:
    assert as_written(source) == written


def test_a_place_in_torch_is_told_as_the_users_line() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))

    @capture
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    step(X)
    model.eval()
    step(X)
    (found,) = stats(step).recompiles
    assert found.guard.endswith(".training") and (found.old, found.new) == ("True", "False")
    assert line_of(found) == "return model(x)"
    report = explain(step)(X)
    assert {guard.file for guard in report.guards} == {__file__}
    assert all(guard.cost_ns is not None for guard in report.guards)


class Settings:
    first, second = 2, 3


def test_an_entry_of_a_class_has_its_own_line() -> None:
    @capture
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * Settings.first
        return x + Settings.second

    step(X)
    Settings.second = 4
    assert step(X).tolist() == [6.0, 6.0, 6.0]
    (found,) = stats(step).recompiles
    assert found.guard.endswith("Settings.second") and line_of(found) == "return x + Settings.second"


def test_no_name_of_a_continuations_stack_is_shown() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        class Made:  # a graph break, which leaves another class in each call
            number = 3

        return x * Made.number

    captured = capture(step)
    for _ in range(3):
        captured(X)
    report = explain(captured)(X)
    assert report.recompiles and LEFT in str(report.to_json())
    assert "m_stack" not in report.to_json() and "m_stack" not in str(report)


def test_guards_are_grouped_by_what_they_look_at() -> None:
    optimizer = "L['optimizer']"
    guards = [
        Guard(f"{optimizer}.state[<Parameter>]['step']", "float32", "a.py", 1, 5.0),
        Guard(f"{optimizer}.state[<Parameter>]['exp_avg']", "float32", "a.py", 1, 7.0),
        Guard(f"{optimizer}.defaults", "2 entries", "a.py", 1, 1.0),
        Guard("G(__main__)['cfg'].k", "== 2", "a.py", 1),
        Guard("G(moebius.python.substitutes)['torch'].autograd", "the same", "a.py", 1, 2.0),
        Guard("builtins", "22 entries", "a.py", 1, 2.0),
    ]
    groups = guard_groups(Findings(guards=guards))
    assert [(group.owner, len(group.guards), group.cost_ns) for group in groups] == [
        ("optimizer state", 2, 12.0), (LIBRARIES, 2, 4.0), ("optimizer", 1, 1.0), ("G(__main__)['cfg']", 1, None),
    ]  # fmt: skip


def test_a_tensor_among_the_guards_is_told_apart() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(2)))
    step = capture(lambda x: layers(x).sum())
    step(X)
    layers[1].bias.requires_grad_(False)
    step(X)
    assert len(stats(step).recompiles) == 1 and not stats(step).breaks


def keywords(x: torch.Tensor, **options: int) -> torch.Tensor:
    return x + len(options)


def test_another_form_of_the_call_is_told_by_its_arguments() -> None:
    captured = capture(keywords)
    captured(X)
    captured(X, a=1, b=2)
    assert stats(captured).recompiles[-1].change == "the form of the call was 1 argument, is 1 argument, a=…, b=…"
    assert stats(captured).recompiles[-1].call == 2


LEFT_ON_THE_STACK = {
    "pair(next(SCORES), scored(x))": "next(SCORES)",
    "pair(f'{scored(x)} of it', scored(x))": "f'{scored(x)} of it'",
    "pair(-scored(x), scored(x))": "-scored(x)",
    "pair([scored(x)][0], scored(x))": "[scored(x)][0]",
}


@pytest.mark.parametrize("expression", LEFT_ON_THE_STACK)
def test_what_a_break_left_on_the_stack_is_told_as_its_expression(expression: str, tmp_path: Any) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"def step(x):\n    x = x + 1\n    k = {expression}\n    return x * len(k)\n")
    namespace: dict[str, Any] = {"SCORES": SCORES, "scored": scored, "pair": lambda *values: str(values)}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    captured = capture(namespace["step"])
    for _ in range(3):
        captured(X)
    assert LEFT not in str([item.change for item in stats(captured).recompiles])
    assert all(item.line == 3 for item in stats(captured).recompiles)


def test_a_captured_modules_graph_begins_in_the_users_file() -> None:
    from moebius import explain

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    report = explain(capture(Net()))(X)
    (graph,) = report.graphs
    assert {report.file, graph.file} == {__file__} and graph.name.endswith("Net.forward")
    assert graph.line == report.line + 1


class Flags:
    mode, limit = "a", 3


def by_instance(x: torch.Tensor, settings: Flags, table: dict[str, int]) -> torch.Tensor:
    y = x if settings.mode == "a" else x + 1
    y = y * table.get("k", 2)
    return y * settings.limit


def test_what_was_not_there_before_is_said_with_its_name() -> None:
    step, settings, table = capture(by_instance), Flags(), {"other": 1}
    step(X, settings, table)
    settings.mode = "b"
    step(X, settings, table)
    table["k"] = 7
    step(X, settings, table)
    told = [as_written(f"{item.guard} was {item.old}, is {item.new}") for item in stats(step).recompiles]
    assert told == ["settings.mode was not set on the object, is 'b'", "table['k'] was missing, is 7"]


def left_behind(x: torch.Tensor, k: int, mode: str) -> torch.Tensor:
    y = x * k if mode == "a" else x - k
    return y * disabled(y) + (1 if mode == "a" else 2)


disabled = disable(lambda y: y.sum())


def test_captures_of_a_continuation_stand_in_the_order_of_the_calls() -> None:
    step = capture(left_behind)
    for k, mode in ((1, "a"), (1, "b"), (2, "a"), (2, "b")):
        step(X, k, mode)
    report = explain(step)(X.double(), 2, "b")
    calls = [item.call for item in stats(step).recompiles]
    assert calls == sorted(calls) == [item.call for item in report.recompiles] and calls[-1] == 5
    assert report.verdict.count("captured again, since x was float32[3]") == 1, report.verdict


def test_several_places_and_expressions_are_owners_of_their_own() -> None:
    found = {
        "L['y']": "y", "L['y'].shape[0]": "y", "y": "y", "y + id(y)*0": "y + id(y)*0", "id(y)": "id(y)",
        "L['k'], L['cfg'].limit": "k, L['cfg'].limit", "G(__main__)['t'].a": "G(__main__)['t']",
    }  # fmt: skip
    assert {source: guard_groups(Findings(guards=[Guard(source, "", "", 0)]))[0].owner for source in found} == found
    assert as_written("G(__main__)") == "the globals of __main__" and as_written("G(a.b)['c'].d") == "c.d"


def through_a_text(x: torch.Tensor, text: str) -> torch.Tensor:
    y = x * 2
    for letter in text:
        y = y + ord(letter)
    return y


def at_a_break(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y * disabled(y) + math.ceil(y.sum())


def test_warnings_stand_at_the_users_line_and_nothing_says_a_name_of_ours(caplog: Any) -> None:
    """The call is at the top of a file, in a function, and behind a decorator of the standard library's."""
    step = capture(through_a_text)
    calls = "for n in range(9):\n    step(X, 'a' * n)\n"
    for text, line in ((calls, 2), (f"def f():\n {calls.replace(chr(10), chr(10) + ' ')}\nf()", 3)):
        step = capture(types.FunctionType(through_a_text.__code__, globals()))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            exec(compile(text, "program.py", "exec"), {"step": step, "X": X})
        mine = [each for each in found if "was captured again" in str(each.message)]
        assert mine and {(each.filename, each.lineno) for each in mine} == {("program.py", line)}
    report = explain(step)(X, "bbbb")
    assert report.breaks and "m_stack" not in report.to_json() + str(report)
    with caplog.at_level("INFO", "moebius"):
        report = explain(at_a_break)(X)
    assert "y.sum()" in caplog.text and LEFT not in caplog.text and "m_stack" not in caplog.text
    assert "1 operation from" in caplog.text and "1 operations" not in caplog.text
    counts = [int(record.args[1]) for record in caplog.records if record.name == "moebius.graphs"]
    assert counts == [graph["operations"] for graph in report.to_dict()["graphs"]]
    assert "L['" not in explain(at_a_break)(X.double()).diff(report)


def test_an_attribute_that_the_class_had_is_not_called_absent() -> None:
    class Cache:
        hits = 0

    cache, table = Cache(), {"a": 1}

    def step(x: torch.Tensor) -> torch.Tensor:
        cache.hits += 1
        table["b"] = table.get("b", 0) + 1
        return x * 2

    captured = capture(step)
    captured(X)
    (item, *_) = explain(captured)(X).recompiles
    assert (item.old, item.new) == ("not set on the object", "1")


class Holder(torch.nn.Module):
    factor = 2


@disable
def apart(*_: Any) -> None:
    pass


def guarded(x, holder, number=3, *rest, flag=True, **named):
    x = x * holder.factor
    first(x)  # noqa: F821
    x = x + number
    second(x, holder)  # noqa: F821
    x = x * rest[0] + rest[1]
    third()  # noqa: F821
    return x * named["scale"] if flag else x


@pytest.mark.parametrize("native", list(itertools.product([False, True], repeat=3)), ids=str)
def test_no_guard_of_an_argument_stands_at_the_def(native: tuple[bool, ...]) -> None:
    """Also of one that only lives on: a part of the function that begins at a break may take what it never reads."""
    names = ("first", "second", "third")
    between = {name: apart if breaks else passes for name, breaks in zip(names, native, strict=True)}
    function = types.FunctionType(guarded.__code__, between, argdefs=guarded.__defaults__)
    function.__kwdefaults__ = guarded.__kwdefaults__
    report = explain(capture(function))(X, Holder(), 4, 2.0, 3.0, flag=True, scale=5.0)
    assert len(report.breaks) == sum(native)
    of_arguments = [(LOCAL.match(guard.source), line_of(guard)) for guard in report.guards]
    found = {(match[1].partition("[")[0], line) for match, line in of_arguments if match is not None}
    names = {name for name, _ in found}
    assert {"x", "holder", "number", "rest", "flag"} <= names and {"scale", "named"} & names
    assert [(name, line) for name, line in found if name not in line or "def " in line] == []


def passes(*_: Any) -> None:
    pass

"""A value that is another one in each call: after few captures its number, text or size is the graph's, or the graph
ends where the value is needed. Kinds of values, each at each place that can hold one; and questions about a number."""

from __future__ import annotations

import collections
import functools
import os
import pathlib
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import seeds
import torch

from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.cache import varying
from moebius.heap.varying import VaryingPlaces
from moebius.trace.assumptions import Assumptions

CALLS = 14


@pytest.fixture(autouse=True)
def after_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is what happens then, not when."""
    monkeypatch.setattr(varying, "OFTEN", 3)


HELD: Any = None  # the global that holds one


def lambda_of(i: int) -> Callable[..., Any]:
    return lambda x: x * (2 + i)


def with_default(i: int) -> Callable[..., Any]:
    return lambda x, i=i: x * i


# Kind: how it is made, how it is used, captures at most.
KINDS: dict[str, tuple[Callable[[int], Any], Callable[..., Any], int]] = {
    "an int": (lambda i: 7 + i, lambda x, v: x * v, 2),
    "a size": (lambda i: 7 + i, lambda x, v: x.sum() * torch.ones(v), 2),
    "a float": (lambda i: 0.5 + i / 8, lambda x, v: x * v, 2),
    "a complex number": (lambda i: complex(i, 1), lambda x, v: x * v, 2),
    "a text": (lambda i: f"e{i}", lambda x, v: (x * 2, f"{v}: "), 2),
    "a text that decides": (lambda i: f"e{i}", lambda x, v: x * 2 if v.startswith("e") else x, 9),
    "yes or no": (lambda i: i % 2 == 0, lambda x, v: x * 2 if v else x * 3, 2),
    "a list": (lambda i: [torch.full((3,), 1.0)] * (1 + i), lambda x, v: x + sum(v), 8),
    "floats": (lambda i: [1.0] * (1 + i), lambda x, v: x * sum(v), 8),
    "keys": (lambda i: {f"k{i}": torch.ones(3)}, lambda x, v: x + sum(v.values()), 9),
    "a dict that grows": (lambda i: {f"k{j}": 1.0 for j in range(i + 1)}, lambda x, v: x * sum(v.values()), 10),
    "an object": (lambda i: types.SimpleNamespace(scale=1.5 + i), lambda x, v: x * v.scale, 10),
    "a function": (with_default, lambda x, v: v(x), 9),
    "a closure": (lambda_of, lambda x, v: v(x), 9),
    "a tensor's size": (lambda i: torch.ones(3 + i), lambda x, v: x.sum() * v, 3),
    "a tensor's dtype": (lambda i: torch.ones(3, dtype=(torch.float, torch.double)[i % 2]), lambda x, v: x * v, 3),
    "a gradient that is wanted": (lambda i: torch.ones(3, requires_grad=i % 2 == 0), lambda x, v: x * v, 3),
    "a tuple": (lambda i: (1,) * (1 + i), lambda x, v: x * len(v), 9),
    "none or a tensor": (lambda i: None if i % 2 else torch.ones(3), lambda x, v: x if v is None else x * v, 3),
    "a set": (lambda i: {i, i + 1}, lambda x, v: x * len(v), 8),
    "a class": (lambda i: type("C", (), {"k": 2.0}), lambda x, v: x * v.k, 9),
    "bytes": (lambda i: bytes([i]), lambda x, v: x * v[0], 9),
    "a dtype": (lambda i: (torch.float32, torch.float64)[i % 2], lambda x, v: x.to(v), 2),
    "a range": (lambda i: range(i + 1), lambda x, v: x * len(v), 9),
    "a slice": (lambda i: slice(0, i + 1), lambda x, v: torch.arange(40.0)[v] * 2, 9),
    "a path": (lambda i: pathlib.PurePath(f"/{i}"), lambda x, v: (x * 2, str(v)), 9),
}  # fmt: skip
METHODS = ("a function", "a closure", "a class")  # of a class, such an attribute would be a method or look like one


class Box:
    held: Any = None


def at_an_argument(use: Callable[..., Any]) -> tuple[Any, Any]:
    return (lambda x, v: use(x + 1, v)), lambda v: (v,)


def at_an_attribute(use: Callable[..., Any]) -> tuple[Any, Any]:
    box = Box()
    return (lambda x: use(x + 1, box.held)), lambda v: setattr(box, "held", v) or ()


def at_a_key(use: Callable[..., Any]) -> tuple[Any, Any]:
    table: dict[str, Any] = {}
    return (lambda x: use(x + 1, table["v"])), lambda v: table.update(v=v) or ()


def in_a_list(use: Callable[..., Any]) -> tuple[Any, Any]:
    items = [None]
    return (lambda x: use(x + 1, items[0])), lambda v: items.__setitem__(0, v) or ()


def in_a_global(use: Callable[..., Any]) -> tuple[Any, Any]:
    return (lambda x: use(x + 1, HELD)), lambda v: globals().__setitem__("HELD", v) or ()


def in_a_cell(use: Callable[..., Any]) -> tuple[Any, Any]:
    cell = None

    def put(v: Any) -> tuple[()]:
        nonlocal cell
        cell = v
        return ()

    return (lambda x: use(x + 1, cell)), put


def in_a_class(use: Callable[..., Any]) -> tuple[Any, Any]:
    own = type("Own", (), {"held": None})
    return (lambda x: use(x + 1, own.held)), lambda v: setattr(own, "held", v) or ()  # type: ignore[attr-defined]


PLACES = (at_an_argument, at_an_attribute, at_a_key, in_a_list, in_a_global, in_a_cell, in_a_class)
CELLS = [(k, p) for k in KINDS for p in PLACES if p is not in_a_class or k not in METHODS]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def calls_that_captured(step: Any, captured: Any, arguments: Callable[[int], tuple]) -> list[int]:
    """After each of the calls: whether it was a capture. Each gives what plain Python gives."""
    found, x = [], torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "moebius: .* was captured again")
        for i in range(CALLS):
            given, before = arguments(i), stats(captured).misses
            assert same(captured(x, *given), step(x, *given)), i
            if stats(captured).misses > before:
                found.append(i)
    return found


def share() -> list[tuple[str, Any]]:
    """Each kind at two places, others in each commit."""
    if os.environ.get("MOEBIUS_VARYING") == "all":
        return CELLS
    offset = seeds.seed_of_the_code()
    return [cell for i, cell in enumerate(CELLS) if (i + offset) % 4 == 0]


@pytest.mark.parametrize(("kind", "place"), share(), ids=lambda v: v if type(v) is str else v.__name__)
def test_few_captures_whatever_varies_and_wherever_it_stands(kind: str, place: Any) -> None:
    make, use, most = KINDS[kind]
    step, put = place(use)
    captured = capture(step, backend="eager")
    found = calls_that_captured(step, captured, lambda i: put(make(i)))
    assert len(found) <= most, found


DECIDES: dict[str, tuple[Callable[..., Any], int]] = {
    "iterations": (lambda x, n: [x + i for i in range(n)][-1], 8),
    "a text's table": (lambda x, n: x * {f"e{i}": i for i in range(40)}[f"e{n}"], 6),
    "its bits": (lambda x, n: x * bin(n).count("1"), 6),
    "a memo": (lambda x, n, memo={}: x * memo.setdefault(n, float(n)), 8),  # noqa: B006
    "seeded": (lambda x, n: (torch.manual_seed(n), x + torch.rand(3))[1], 4),
    "three branches": (lambda x, n: x * (1 + (n % 2 == 0)) + (n % 3 == 0) * 2 if n % 5 else x, 12),
}


def counted_down(x: torch.Tensor, n: int) -> torch.Tensor:
    while n > 0:
        x, n = x * 1.01 + n, n - 1
    return x


@pytest.mark.parametrize("name", [*DECIDES, "counted down"])
def test_few_captures_whatever_a_number_decides(name: str) -> None:
    step, most = DECIDES.get(name, (counted_down, 6))
    captured = capture(step, backend="eager")
    assert len(calls_that_captured(step, captured, lambda i: (7 + i,))) <= most


def test_the_warning_names_the_line_the_value_and_the_cure() -> None:
    captured = capture(counted_down, backend="eager")
    with pytest.warns(UserWarning) as told:
        for n in range(2, 9):
            captured(torch.ones(2), n)
    (text,) = [str(w.message) for w in told]
    line = counted_down.__code__.co_firstlineno
    assert re.search(rf"{__file__}:({line}|{line + 1}|{line + 2})\)", text), text
    assert " n was 3, 4, 5 " in text and "let it take few ways" in text


def test_what_is_captured_below_knows_what_varies() -> None:
    """The function that a break leaves to run natively is captured once, not four times."""

    def inner(x: torch.Tensor, log: list[float]) -> torch.Tensor:
        return x * 2 * sum(log)

    def step(x: torch.Tensor, history: list[float]) -> torch.Tensor:
        return inner(x, history) + 1

    captured = capture(step, backend="eager")
    calls = calls_that_captured(step, captured, lambda i: ([1.0] * (i + 1),))
    assert len(calls) <= varying.GROWING + 2  # the first, those that find it longer, and the one with the break


def test_a_value_that_comes_back_or_serves_long_stays_a_constant() -> None:
    def step(x: torch.Tensor, task: str) -> torch.Tensor:
        return x * len({"a": "1", "b": "22", "c": "333"}[task])

    captured = capture(step, backend="eager")
    for i in range(60):
        assert torch.equal(captured(torch.ones(2), "abc"[i % 3]), torch.ones(2) * (1 + i % 3))
    assert stats(captured).misses == 3 and not stats(captured).breaks


def test_a_varying_value_may_be_compared_by_identity_with_no_other_of_its_type() -> None:
    first, other = (1, 2), (3, 4)

    def step(x: torch.Tensor, v: tuple) -> Any:
        return x * 2, v is first, v is None, len(v)

    captured = capture(step, backend="eager")
    values = [(5,) * i for i in range(6)] + [first, other, first, (1, 2, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for v in values:
            assert same(captured(torch.ones(2), v), step(torch.ones(2), v)), v


@pytest.mark.parametrize("where", ["learn", "enter", "decide"])
def test_switched_off_each_call_is_captured(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "learn":
        monkeypatch.setattr(varying.Varying, "learn", lambda *_: "")
    elif where == "enter":
        monkeypatch.setattr(VaryingPlaces, "varies", lambda *_: False)
    else:
        monkeypatch.setattr(VaryingPlaces, "refuse_varying", lambda *_: None)
    kind = "a tuple" if where != "decide" else "its bits"
    step = KINDS[kind][1] if kind in KINDS else DECIDES[kind][0]
    captured = capture(step, backend="eager")
    found = calls_that_captured(step, captured, lambda i: ((1,) * (i + 1) if where != "decide" else 2 ** (i + 1) - 1,))
    assert len(found) == CALLS


def test_the_report_says_what_varied() -> None:
    def step(x: torch.Tensor, v: tuple) -> torch.Tensor:
        return x * len(v)

    captured = capture(step, backend="eager")
    calls_that_captured(step, captured, lambda i: ((1,) * (i + 1),))
    (broken,) = report_of(captured_of(captured)).breaks
    assert broken.reason == "value that varies from call to call" and "v was a tuple of" in broken.detail


@functools.lru_cache
def asked_once() -> int:
    return sum(__import__("random").choices([2], k=1))  # C code that asks what nobody can follow


def test_a_cached_function_is_asked_beside_a_symbolic_number() -> None:
    """What is asked of tensors that came in is not asked of numbers that did."""

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n * asked_once()

    captured = capture(step, backend="eager")
    assert len(calls_that_captured(step, captured, lambda i: (7 + i,))) == 2
    assert not [b for b in report_of(captured_of(captured)).breaks if b.reason == "exception"]


def rectified(x: torch.Tensor, table: list[list], n: int) -> torch.Tensor:
    """As RAdam keeps its step sizes, of each tenth call, in a row that is looked for."""
    row = next(row for row in table if row[2] == n % 10)
    if row[0] != n:
        row[0], row[1] = n, 1.0 + n
    return x * row[1]


@pytest.mark.parametrize("general", [True, False])
def test_what_would_run_natively_is_taken_in_the_general_way(general: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varying, "OFTEN", 60)
    monkeypatch.setattr(varying, "GROWING", 60)
    if not general:
        monkeypatch.setattr(varying.Varying, "leave_open", lambda *_: "")
    captured = capture(rectified, backend="eager")
    table: list[list] = [[None, None, n] for n in range(10)]
    plain = [list(row) for row in table]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in range(50):
            before = stats(captured).misses
            assert torch.equal(captured(torch.ones(2), table, n), rectified(torch.ones(2), plain, n))
            assert table == plain
    texts = [str(w.message) for w in told]
    assert any("runs natively now" in text for text in texts) is not general
    assert any("changed again and again" in text for text in texts) is general
    assert not general or stats(captured).misses == before


@pytest.mark.parametrize("grad", [False, True])
def test_a_loop_of_an_optimizer_that_breaks_in_each_iteration_runs_natively_as_a_whole(grad: bool) -> None:
    """Under no_grad alone: an epoch's loop over batches is cut into pieces, which hold graphs."""

    def update(params: list[torch.Tensor], n: int) -> None:
        for p in params:
            p.mul_(float(bin(n).count("1")))

    captured = capture(update, backend="eager")
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.simplefilter("ignore")
        for n in range(CALLS):
            params, plain = [torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(3)]
            captured(params, n * n + 3)
            update(plain, n * n + 3)
            assert same(params, plain)
    details = [one.detail for one in report_of(captured_of(captured)).breaks]
    assert any("the whole frame runs natively" in detail for detail in details) is not grad, details


def test_places_that_come_without_an_end_are_given_up() -> None:
    known, assumptions, found = varying.Varying(), Assumptions(), []
    for i in range(varying.ROUNDS + 2):
        known.counts["L['rows'][]", "step.py", 1] += 2  # (items of one list are one place)
        known.values[f"L['rows'][{i}]"] = collections.deque(["1.0"])
        found.append(bool(known.leave_open(assumptions, "hint")))
    assert found == [False, *[True] * (varying.ROUNDS - 1), False, False]  # the first place alone varied too rarely

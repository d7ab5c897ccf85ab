"""Lists that are longer in each call: what the step reads at their end, and their length, is captured a few times.

Each use of such a list, wherever the list is found, with a graph break behind the append or without: results and the
list are plain Python's, and after some calls nothing is captured.
"""

from __future__ import annotations

import collections
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moebius
from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.heap.varying import VaryingPlaces

CALLS = 14
SETTLED = 7  # captures: with and without items, with each length that decides, the number

USES: dict[str, Callable[[list, torch.Tensor, int], Any]] = {
    "the last number": lambda log, y, i: (log.append(y.item()), log[-1])[1],
    "the last tensor": lambda log, y, i: (log.append(y), log[-1] * 2)[1],
    "the length": lambda log, y, i: (log.append(i), len(log))[1],
    "the length before": lambda log, y, i: (len(log), log.append(i))[0],
    "the change": lambda log, y, i: (log.append(y.item()), log[-1] - log[-2] if len(log) > 1 else 0.0)[1],
    "rows": lambda log, y, i: (
        log.append({}), log[-1].update(a=y.item()), log[-1]["a"] - log[-2]["a"] if len(log) > 1 else 0.0
    )[2],
    "two at once": lambda log, y, i: (log.extend([i, i + 1]), log[-2], log[-1], len(log))[1:],
    "the first call": lambda log, y, i: (log.append(y.item()), "first" if len(log) == 1 else "later")[1],
    "each fourth": lambda log, y, i: (log.append(i), len(log) % 4 == 0)[1],
    "what was last": lambda log, y, i: (log[-1] if log else None, log.append(i))[0],
    "the best so far": lambda log, y, i: (log.append(max(y.item(), log[-1]) if log else y.item()), log[-1])[1],
    "too far": lambda log, y, i: (log.append(i), tried(log, -100))[1],
    "another object": lambda log, y, i: (log.append(types.SimpleNamespace(i=i)), log[-1].i)[1],
    "the item itself": lambda log, y, i: (log.append([i]), log[-1].append(7), log[-1])[2],
    "a slice": lambda log, y, i: (log.append(i), log[-2:])[1],
    "given a place": lambda log, y, i: (log.append(i), log.__setitem__(-1, i + 1), log[-1])[2],
}  # fmt: skip
WHOLE = ("a slice", "given a place", "too far")  # they read the list as a whole, as they did


def tried(log: list, key: int) -> Any:
    try:
        return log[key]
    except IndexError as error:
        return str(error)


@moebius.disable
def native() -> int:
    return 1


class Box:
    log: list
    logs: dict[str, list]


LOG: list = []


def in_a_cell(use: Callable[..., Any], breaks: bool) -> tuple[Any, list]:
    log: list = []

    def step(x: torch.Tensor, i: int) -> Any:
        y = (x * 2).sum()
        return use(log, y, i * native() if breaks else i)

    return step, log


def at_an_attribute(use: Callable[..., Any], breaks: bool) -> tuple[Any, list]:
    box = Box()
    box.log = []

    def step(x: torch.Tensor, i: int) -> Any:
        y = (x * 2).sum()
        return use(box.log, y, i * native() if breaks else i)

    return step, box.log


def at_a_key(use: Callable[..., Any], breaks: bool) -> tuple[Any, list]:
    logs: dict[str, list] = {"train": []}

    def step(x: torch.Tensor, i: int) -> Any:
        y = (x * 2).sum()
        return use(logs["train"], y, i * native() if breaks else i)

    return step, logs["train"]


def an_argument(use: Callable[..., Any], breaks: bool) -> tuple[Any, list]:
    log: list = []

    def step(x: torch.Tensor, i: int, log: list) -> Any:
        y = (x * 2).sum()
        return use(log, y, i * native() if breaks else i)

    return (lambda x, i, log=log: step(x, i, log)), log


def shown(value: Any) -> Any:
    """What can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [shown(v) for v in value]
    return vars(value) if isinstance(value, types.SimpleNamespace) else value


PLACES = (in_a_cell, at_an_attribute, at_a_key, an_argument)
CELLS = [(use, place, breaks) for use in USES for place in PLACES for breaks in (False, True)]


def calls_that_captured(use: str, place: Any, breaks: bool) -> list[int]:
    wanted, plain_log = place(USES[use], breaks)
    step, log = place(USES[use], breaks)
    captured, found = capture(step, backend="eager"), []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "moebius: .* was captured again")
        for i in range(CALLS):
            x, before = torch.linspace(-1, 1, 3) * (i % 5), stats(captured).misses
            assert shown(captured(x, i)) == shown(wanted(x, i)), i
            assert shown(log) == shown(plain_log), i
            if stats(captured).misses > before:
                found.append(i)
    return found


@pytest.mark.share(16)
@pytest.mark.parametrize(("use", "place", "breaks"), CELLS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_each_use_is_plain_pythons_and_is_captured_a_few_times(use: str, place: Any, breaks: bool) -> None:
    found = calls_that_captured(use, place, breaks)
    assert use in WHOLE or len(found) <= SETTLED, found


@pytest.mark.parametrize("switched_off", ["item_from_end", "of_open_length"])
def test_switched_off_the_list_is_read_as_a_whole(switched_off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moebius.hook import ABSENT

    nothing = ABSENT if switched_off == "item_from_end" else None
    monkeypatch.setattr(VaryingPlaces, switched_off, lambda *_: nothing)
    use = USES["the last number" if switched_off == "item_from_end" else "the length"]
    step, _ = in_a_cell(use, False)
    captured = capture(step, backend="eager")
    for i in range(CALLS):
        captured(torch.ones(3), i)
    reasons = [one.reason for one in report_of(captured_of(captured)).breaks]
    assert reasons == ["container that changes from call to call"]


@pytest.mark.parametrize("most", [None, 0, 1, 3])
def test_the_last_of_a_deque(most: int | None) -> None:
    def step(x: torch.Tensor, ring: collections.deque) -> Any:
        ring.extend([x.sum().item(), 2.0])
        ring.append(x.mean().item())
        try:
            return ring[-1], ring[-2]
        except IndexError as error:
            return str(error)

    captured = capture(step, backend="eager")
    for n in (most, most, 2, most, most):
        ring, plain = collections.deque([1.0] * 5, n), collections.deque([1.0] * 5, n)
        assert captured(torch.ones(3), ring) == step(torch.ones(3), plain)
        assert ring == plain
    if most is None:
        kept: collections.deque = collections.deque()
        found = [(captured(torch.ones(3) * i, kept), stats(captured).misses)[1] for i in range(8)]
        assert found[-1] == found[2]


def test_two_lists_that_become_one() -> None:
    def step(x: torch.Tensor, a: list, b: list) -> Any:
        a.append(x.sum().item())
        return b[-1], len(b)

    captured = capture(step, backend="eager")
    for together in (False, False, False, True, True, False):
        a, b = [1.0, 2.0], [3.0, 4.0]
        b = a if together else b
        plain_a, plain_b = list(a), list(b)
        plain_b = plain_a if together else plain_b
        assert captured(torch.ones(3), a, b) == step(torch.ones(3), plain_a, plain_b)
        assert (a, b) == (plain_a, plain_b)


class Layer(torch.nn.Module):
    def __init__(self, log: list):
        super().__init__()
        self.linear, self.log = torch.nn.Linear(3, 3), log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.log[-1] if self.log else 0.0
        self.log.append(self.linear(x).mean())
        return x + self.log[-1] + before * len(self.log)


@pytest.mark.parametrize("again", [False, True])
def test_layers_that_share_a_list(again: bool) -> None:
    """Each layer reads what the one before has added; recomputed, what stands there by then."""

    def made() -> tuple[Any, list, Any]:
        torch.manual_seed(0)
        log: list = []
        layers = torch.nn.ModuleList(Layer(log) for _ in range(3))

        def step(x: torch.Tensor) -> Any:
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            x.sum().backward()
            log[:] = [entry.detach() for entry in log]
            return x.detach(), len(log)

        return step, log, layers

    (plain, plain_log, plain_layers), (step, log, layers) = made(), made()
    captured = capture(step, backend="eager")
    for i in range(8):
        x = torch.full((2, 3), 1.0 + i)
        want, got = outcome(plain, x), outcome(captured, x)
        assert want == got
        assert shown(log) == shown(plain_log)
        for a, b in zip(plain_layers.parameters(), layers.parameters(), strict=True):
            assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def outcome(step: Any, x: torch.Tensor) -> Any:
    """What it gives or raises."""
    try:
        return shown(step(x))
    except Exception as error:
        return type(error).__name__


READS: list[Any] = [sum, max, torch.tensor, lambda log: [x * 2 for x in log], lambda log: log.index(log[0])]


@pytest.mark.parametrize("read", READS)
def test_a_history_that_is_read_as_a_whole_settles_after_a_few_calls(read: Any) -> None:
    """Two lengths tell that it is a log: from then on to read it is a graph break."""

    def made() -> Callable[[torch.Tensor], Any]:
        log: list[float] = []

        def step(x: torch.Tensor) -> Any:
            y = (x * 2).exp()
            log.append(y.sum().item())
            return read(log), y * 3

        return step

    plain, captured = made(), capture(made(), backend="eager")
    for i in range(CALLS):
        x, before = torch.full((2,), float(i % 3)), stats(captured).misses
        assert repr(captured(x)) == repr(plain(x))
        missed = stats(captured).misses > before
        assert i < 5 or not missed

"""What trainers keep of their steps: lists of losses read now and then, meters, dicts that are written and printed.

A step that logs in one call of ten is two captures: one for each side, whatever has been logged by then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.cache import generalize_guards
from moebius.heap.objects import Objects

CALLS = 45


class Meter:
    def __init__(self) -> None:
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self) -> str:
        return "{val:.3f} ({avg:.3f})".format(**self.__dict__)


def formatted(meters: dict[str, Meter], logs: list, x: torch.Tensor, i: int) -> Any:
    if i % 10 == 0:
        logs.append("\t".join(f"{name} {meter}" for name, meter in meters.items()))
    return len(logs)


def last_line(meters: dict[str, Meter], logs: list, x: torch.Tensor, i: int) -> Any:
    if i % 10 == 0:
        logs.append(f"{i}: {meters['loss'].avg:.4f}")
    return logs[-1]


def last_number(meters: dict[str, Meter], logs: list, x: torch.Tensor, i: int) -> Any:
    if i % 10 == 0:
        logs.append(meters["loss"].avg)
    return x * logs[-1]


def how_many(meters: dict[str, Meter], logs: list, x: torch.Tensor, i: int) -> Any:
    if i % 10 != 0:
        return x * len(logs)
    logs.append(i)
    return x + len(logs)


def as_a_dict(meters: dict[str, Meter], logs: list, x: torch.Tensor, i: int) -> Any:
    return {name: dict(meter.__dict__) for name, meter in meters.items()} if i % 10 == 0 else None


LOGGED = {f.__name__: f for f in (formatted, last_line, last_number, how_many, as_a_dict)}


def calls_that_captured(logged: str) -> list[int]:
    def made() -> Callable[..., Any]:
        meters, logs = {"loss": Meter(), "accuracy": Meter()}, []

        def step(x: torch.Tensor, i: int) -> Any:
            meters["loss"].update((x * x).sum().item(), len(x))
            meters["accuracy"].update(float(i // 12), len(x))  # the same in several calls
            return LOGGED[logged](meters, logs, x, i), meters["loss"].avg

        return step

    plain, captured, missed = made(), capture(made(), backend="eager"), []
    for i in range(CALLS):
        x, before = torch.tensor([1.0, 2.0]) + i, stats(captured).misses
        assert str(captured(x, i)) == str(plain(x, i)), i
        missed += [i] * (stats(captured).misses > before)
    assert stats(captured).breaks == 0
    return missed


@pytest.mark.parametrize("logged", LOGGED)
def test_two_sides_are_two_captures(logged: str) -> None:
    missed = calls_that_captured(logged)
    assert len(missed) <= 4 and max(missed) <= 20, missed


SWITCHED_OFF: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("last_line", Objects, "appended", lambda self: set()),
    ("formatted", generalize_guards, "open_alike", lambda *_: None),
]


@pytest.mark.parametrize("logged, owner, name, off", SWITCHED_OFF)
def test_without_what_is_tested_there_are_more(
    logged: str, owner: Any, name: str, off: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_it = len(calls_that_captured(logged))
    monkeypatch.setattr(owner, name, off)
    assert len(calls_that_captured(logged)) > with_it


# ----------------------------------------------------------------------------------------------------------------------
# A dict that the step writes, and then reads as a whole: what stood there before, nobody asks
# ----------------------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[dict, Any], Any]] = {
    "over": lambda d, v: d.__setitem__("a", v),
    "two": lambda d, v: d.update(a=v, b=v * 2),
    "new": lambda d, v: d.__setitem__("z", v),
    "after a deletion": lambda d, v: (d.pop("a"), d.__setitem__("a", v)),
    "read first": lambda d, v: d.__setitem__("a", d["a"] + v),
    "the same again": lambda d, v: d.__setitem__("a", d["a"]),
}
READS: dict[str, Callable[[dict], Any]] = {
    "copy": dict,
    "items": lambda d: [*d.items()],
    "keywords": lambda d: "{a} {c}".format(**d),
    "equal": lambda d: d == {"a": 1, "b": 2, "c": 3},
    "sum": lambda d: sum(v for v in d.values() if isinstance(v, int | float)),
}
THEN: dict[str, Callable[[dict], Any]] = {
    "nothing": lambda d: None,
    "deleted": lambda d: d.pop("a"),
    "over again": lambda d: d.__setitem__("a", 17),
    "popitem": lambda d: d.popitem(),
    "cleared": lambda d: d.clear(),
    "back": lambda d: d.update(a=1),
}


class Holder:
    pass


@pytest.mark.share(20)
@pytest.mark.parametrize(
    "write, read, then, held", [*itertools.product(WRITES, READS, THEN, ("argument", "attributes", "cell"))]
)
def test_a_dict_that_is_written_and_then_read(write: str, read: str, then: str, held: str) -> None:
    def step_of(d: dict | None) -> Callable[..., Any]:
        def step(given: Any, x: torch.Tensor, v: Any) -> Any:
            one = d if held == "cell" else vars(given) if held == "attributes" else given
            assert one is not None
            WRITES[write](one, v)
            found = READS[read](one)
            THEN[then](one)
            return found, x * 2

        return step

    inside: dict = {}
    captured = capture(step_of(inside), backend="eager")
    for i in range(6):
        outcomes = []
        for run in (captured, None):
            d: dict = {"a": 1 + i // 2, "b": [2.5, 2, "t"][i % 3], "c": 3}
            holder = Holder()
            vars(holder).update(d)
            if held == "cell" and run is not None:
                inside.clear()
                inside.update(d)
            own = inside if held == "cell" and run is not None else d
            given = holder if held == "attributes" else own
            found = (run or step_of(own))(given, torch.ones(2), 5 + i)
            outcomes.append((str(found), [*(vars(holder) if held == "attributes" else own).items()]))
        assert outcomes[0] == outcomes[1], i

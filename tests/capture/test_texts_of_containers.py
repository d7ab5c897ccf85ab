"""Texts of lists, dicts and sets that were there before the step: as they are now, whatever has become of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius import capture, stats


class Shown:
    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return f"<{self.n}>"


def in_itself() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


MADE: dict[str, Callable[[], Any]] = {
    "list": lambda: ["a", 1, (2.5, None)],
    "dict": lambda: {"k": [1, 2], "v": {"b"}, 3: {}},
    "set": lambda: {"a", 17, 1, 9, "bb"},
    "empty": lambda: set(),
    "nested": lambda: [[{1: {2}}], ({3: []},), set()],
    "objects": lambda: [Shown(1), {"x": Shown(2)}],
    "in itself": in_itself,
    "frozen": lambda: (frozenset({1, 2}), [frozenset()]),
}
WRITTEN: dict[str, Callable[[Any], str]] = {
    "f-string": lambda v: f"of {v}",
    "repr": repr,
    "percent": lambda v: "%s and %r" % (v, v),  # noqa: UP031
    "format": lambda v: "{} {!r:>40}".format(v, v),  # noqa: UP032
    "in another": lambda v: str([v, (v, 1)]),
}


def changed(value: Any) -> None:
    if isinstance(value, list):
        value.append(5)
    elif isinstance(value, dict):
        value["more"] = 5
    elif isinstance(value, set):
        value.add(33)


@pytest.mark.share(8)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("made", MADE)
def test_as_plain_python(made: str, written: str) -> None:
    def step(x: torch.Tensor, held: Any, change: bool) -> Any:
        y = x * 2
        if change:
            changed(held.value)
        return y, WRITTEN[written](held.value)

    found = []
    captured = capture(step, backend="eager")
    for run in (step, captured):
        held, texts = SimpleNamespace(value=MADE[made]()), []
        for call in range(9):
            if call == 5:
                held.value = MADE[made]()  # (an equal one)
            if call == 6 and isinstance(held.value, set):
                held.value = {9, 1, 17, *held.value} - {33}  # (in another order)
            if call == 7:
                changed(held.value)
            texts.append(run(torch.ones(2), held, call in (2, 4))[1])
        found.append(texts)
    assert found[0] == found[1]
    counts = stats(captured)
    assert counts.hits and (made == "in itself" or counts.breaks == 0), counts

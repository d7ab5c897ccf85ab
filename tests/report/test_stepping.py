"""A debugger that is entered in a captured step says what it says in plain Python: each frame, line, local and return,
in each of three calls. Where it is entered x what is typed there."""

from __future__ import annotations

import io
import pdb
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moebius import capture, disable

Step = Callable[[torch.Tensor], torch.Tensor]


def entered(x: torch.Tensor) -> torch.Tensor:
    breakpoint()
    y = x * 3
    return y + 1


@disable
def away(x: torch.Tensor) -> torch.Tensor:
    breakpoint()
    return x * 3


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        breakpoint()
        return h


LAYER = Layer()


def key(value: int) -> int:
    breakpoint()
    return -value


def pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for k in range(2):
        breakpoint()
        yield x * k


def in_helper(x: torch.Tensor) -> torch.Tensor:
    y = entered(x)
    return y.sum()


def in_disabled(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = away(y)
    return (z + x).sum()  # (of the caller's variables those are there that are read later)


def in_module(x: torch.Tensor) -> torch.Tensor:
    y = LAYER(x)
    return y * 2


def in_sort(x: torch.Tensor) -> torch.Tensor:
    first = sorted([1, 2], key=key)[0]
    return x * first


def in_generator(x: torch.Tensor) -> torch.Tensor:
    total = x
    for piece in pieces(x):
        total = total + piece
    return total


def behind_a_break(x: torch.Tensor) -> torch.Tensor:
    y = x * x.sum().item()
    away(y)
    z = y + 1
    breakpoint()
    return z


def in_with(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
        breakpoint()
        z = y + 1
    return z


def in_loop(x: torch.Tensor) -> torch.Tensor:
    for i in range(2):
        x = x + i
        breakpoint()
    return x


def in_try(x: torch.Tensor) -> torch.Tensor:
    try:
        y = x * 2
        breakpoint()
        raise ValueError(1)
    except ValueError:
        y = x * 3
    return y


def in_closure(x: torch.Tensor) -> torch.Tensor:
    def inner() -> torch.Tensor:
        y = x * 2
        breakpoint()
        return y

    return inner() + x


def before_a_closure(x: torch.Tensor) -> torch.Tensor:
    def inner() -> torch.Tensor:
        return x * 2

    away(x)
    return inner()


PROGRAMS: list[Step] = [
    entered, in_helper, in_disabled, in_module, in_sort, in_generator, behind_a_break, in_with, in_loop, in_try,
    in_closure, before_a_closure,
]  # fmt: skip
TYPED = {
    "n": "n\n" * 40,
    "s": "s\n" * 60,
    "r": "r\n" * 20,
    "w": "w\nn\nw\nn\nw\nn\nw\nc\n" * 3,
    "p": "p x\nup\np x\nn\nn\nc\n" * 3,
}


def said(function: Step, typed: str) -> list[str]:
    """What pdb says in each of three calls."""
    given, out = io.StringIO(typed + "c\n" * 400), io.StringIO()

    def hook() -> None:
        pdb.Pdb(stdin=given, stdout=out, nosigint=True, readrc=False).set_trace(sys._getframe(1))

    before, sys.breakpointhook = sys.breakpointhook, hook
    texts = []
    try:
        for call in range(3):
            result = function(torch.ones(2))
            sys.settrace(None)
            texts.append(f"{out.getvalue()}\ncall {call}: {result}")
            out.truncate(0)
            out.seek(0)
    finally:
        sys.settrace(None)
        sys.breakpointhook = before
    return texts


@pytest.mark.share(14)
@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_pdb_says_what_it_says_in_plain_python(function: Any, typed: str) -> None:
    plain, captured = (said(one, TYPED[typed]) for one in (function, capture(function)))
    assert any("(Pdb)" in text for text in plain)
    assert captured == plain


@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("function", [in_disabled, behind_a_break, before_a_closure], ids=lambda f: f.__name__)
def test_a_disabled_function_is_stepped_into_as_it_is(
    function: Any, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``s`` lands in the function, ``up`` in its caller."""
    texts = []
    for disabled in (away, away.__wrapped__):  # type: ignore[attr-defined]
        monkeypatch.setitem(globals(), "away", disabled)
        texts.append(said(function, TYPED[typed]))
    assert texts[0] == texts[1]

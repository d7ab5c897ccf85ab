"""Statements that leave nothing on the stack, broken at, inside of what keeps something there.

From 3.14 on a with-block keeps a NULL on top, from 3.15 on a loop does. What is handed over behind the break has it as
NULL again.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from moebius import capture, stats

STATEMENTS = {
    "attribute": "named.__name__ = 'x' * n",
    "deleted attribute": "there.value = n; del there.value",
    "item": "numbers[0] = n",
    "deleted item": "numbers.append(n); del numbers[-1]",
    "slice": "numbers[0:1] = array.array('i', [n])",
    "call": "numbers.append(n)",
    "global": "globals()['seen'] = n",
    "import": "import colorsys as other",
    "unpacked": "numbers[0], numbers[1] = n, n + 1",
    "augmented": "numbers[0] += n",
}
AROUND = {
    "with": "with block:\n {0}",
    "two withs": "with block, torch.no_grad():\n {0}",
    "for": "for k in [1, 2]:\n {0}\n x = x + k",
    "for of a tuple": "for k in (1, 2):\n {0}\n x = x + k",
    "for of a text": "for k in '12':\n {0}\n x = x + int(k)",
    "for of bytes": "for k in b'12':\n {0}\n x = x + k",
    "for of an iterator": "for k in iter([1, 2]):\n {0}\n x = x + k",
    "for of a generator": "for k in (q for q in [1, 2]):\n {0}\n x = x + k",
    "with in for": "for k in [1, 2]:\n with block:\n  {0}\n x = x + k",
    "for in with": "with block:\n for k in [1, 2]:\n  {0}\n  x = x + k",
    "for in for": "for k in [1, 2]:\n for q in [1, 2]:\n  {0}\n x = x + k",
    "try in for": "for k in [1, 2]:\n try:\n  {0}\n  if k == 2: raise ValueError\n except ValueError:\n  x = x * 3",
    # (the first two raise, so that Python itself goes around the outer loop, and begins the inner one)
    **{
        f"error in a for of a for, {kind}": (
            f"for k in [0, 1]:\n for q in {kind}:\n  try:\n   named.__name__ = (3, 'y')[k]\n  except TypeError:\n"
            "   x = x + 9\n   continue\n  x = x * int(q)\n {0}"
        )
        for kind in ("[5, 7]", "(5, 7)", "'57'", "b'57'", "iter([5, 7])", "{{5, 7}}", "range(5, 8)")
    },
    "for with else": "for k in [1, 2]:\n {0}\nelse:\n x = x * 5",
}
HEAD = """
import array, threading, torch
class Block:
    def __enter__(self): log.append('in')
    def __exit__(self, *given): log.append('out')
def named(): pass
log, block, there, numbers = [], Block(), threading.local(), array.array('i', [1, 2, 3])
def step(x, n):
    x = x * 2
"""


def program(statement: str, around: str) -> dict[str, Any]:
    lines = AROUND[around].format(STATEMENTS[statement]).replace("\n", "\n    ")
    space: dict[str, Any] = {}
    exec(compile(f"{HEAD}    {lines}\n    return x + n\n", "<statements>", "exec"), space)
    return space


@pytest.mark.share(35)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_as_in_plain_python(statement: str, around: str) -> None:
    plain, traced = program(statement, around), program(statement, around)
    captured = capture(traced["step"], backend="eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in (1, 2, 3):
            x = torch.full((2,), float(n))
            assert torch.equal(captured(x, n), plain["step"](x, n))
            for name in ("log", "numbers"):
                assert traced[name] == plain[name]
            assert traced["named"].__name__ == plain["named"].__name__
    assert not [w for w in told if "please report" in str(w.message)]
    assert stats(captured).graphs

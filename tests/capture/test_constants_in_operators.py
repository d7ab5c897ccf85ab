"""A graph's code is text: an operator between a constant and what varies means there what it means in the program."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import moebius

# fmt: off
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<<", ">>", "<", "<=", "==", "!=", ">", ">=")
CONSTANTS = ("(-1)", "(-3)", "2", "0", "True", "(-0.0)", "(-1.5)", "0.5", "(-2j)", "(1-2j)", "(-math.inf)", "math.nan")
VARYING: dict[str, tuple[str, tuple[Any, ...]]] = {  # what varies, as the step gets it from v; the values of v
    "int": ("v", (1, 2, 3, 4, 5)),
    "float": ("v * 1.5", (1, 2, 3, 4, 5)),
    "negative": ("-v", (1, 2, 3, 4, 5)),
    "size": ("torch.ones(v + 1).shape[0]", (1, 2, 3, 4, 5)),
    "item": ("int(x.sum()) + v", (1, 2, 3, 4, 5)),
    "float item": ("float(x.sum()) + v", (1, 2, 3, 4, 5)),
    "tensor": ("x + v", (1, 2, 3, 4, 5)),
    "ints": ("x.long() + v", (1, 2, 3, 4, 5)),
}
# fmt: on
FORMS = ("{k} {op} n", "n {op} {k}", "({k} {op} n) + 1", "-({k}) {op} n", "n {op} n", "abs({k} {op} n)",
         "torch.full((), n {op} {k})")


def runs(text: str, varying: str) -> bool:
    """Whether plain Python computes it of each value."""
    made, values = VARYING[varying]
    try:
        for v in values:
            step_of([text], made)(torch.ones(2), v)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, RuntimeError):
        return False
    return True


def step_of(texts: list[str], made: str) -> Any:
    space = {"torch": torch, "math": math}
    exec(f"def step(x, v):\n    n = {made}\n    return [{', '.join(texts)}], x * 2", space)
    return space["step"]


@pytest.mark.share(12)
@pytest.mark.parametrize("constant, varying", list(itertools.product(CONSTANTS, VARYING)))
@pytest.mark.filterwarnings("ignore")
def test_operator_between_a_constant_and_what_varies(constant: str, varying: str) -> None:
    texts = [form.format(k=constant, op=op) for form, op in itertools.product(FORMS, OPERATORS)]
    texts = [text for text in texts if runs(text, varying)]
    made, values = VARYING[varying]
    step = step_of(texts, made)
    captured = moebius.capture(step, backend="eager")
    for v in values:
        plain, found = step(torch.ones(2), v)[0], captured(torch.ones(2), v)[0]
        for text, a, b in zip(texts, plain, found, strict=True):
            assert repr(a) == repr(b), f"{text} for {v}"

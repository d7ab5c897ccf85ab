"""Operators between a number that varies from call to call and an object whose class has a say: each method runs once,
with the number of that call, and what it gives is the result."""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import fractions
import itertools
import operator

import pytest
import torch
from answers import told

from moebius import capture

LOG: list[str] = []
OPERATORS = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "@": operator.matmul, "&": operator.and_, "|": operator.or_,
    "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift,
}  # fmt: skip
NAMES = ("lt", "le", "eq", "ne", "gt", "ge")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")


def methods(answer, names, log=True):
    def made(name):
        def method(self, other):
            if log:
                LOG.append(f"{name} {other}")
            return answer(self, other)

        return method

    return {f"__{name}__": made(name) for name in names}


ALL = (*NAMES, *BINARY, *(f"r{name}" for name in BINARY))
Grows = type("Grows", (), methods(lambda self, other: (other, 1), [f"i{name}" for name in BINARY]))
DECLINES = methods(lambda self, other: NotImplemented, ("iadd", "imul", "isub"))
Adds = type("Adds", (), methods(lambda self, other: 0, BINARY) | DECLINES)
Says = type("Says", (), methods(lambda self, other: other * 2, ALL))
Quiet = type("Quiet", (), methods(lambda self, other: other + 1, ALL, log=False))
Silent = type("Silent", (), methods(lambda self, other: NotImplemented, ALL))
Raises = type("Raises", (), methods(lambda self, other: [][other], ALL))
Number = type("Number", (int,), methods(lambda self, other: (int(self), other), ALL))
Own = type("Own", (int,), methods(lambda self, other: NotImplemented, ALL))
Single = type("Single", (), methods(lambda self, other: other > 2, ("eq",)) | {"__hash__": object.__hash__})
Less = type("Less", (), methods(lambda self, other: torch.ones(2) * other, ("gt", "radd", "rmul", "mul")))
Kept = type("Kept", (), {"__radd__": lambda self, other: setattr(self, "total", other) or self.total * 3})


class Level(enum.IntEnum):
    LOW = 2
    HIGH = 5


OBJECTS = {
    "says": Says(), "grows": Grows(), "adds": Adds(), "quiet": Quiet(), "silent": Silent(),
    "raises": Raises(), "number": Number(3), "own": Own(3),
    "single": Single(), "less": Less(), "kept": Kept(), "level": Level.LOW, "fraction": fractions.Fraction(3, 2),
    "decimal": decimal.Decimal("1.5"), "timedelta": datetime.timedelta(2), "none": None, "list": [1, 2],
    "text": "ab", "object": object(), "complex": 1 + 2j, "type": int, "set": {1},
}  # fmt: skip
GROWING = ("list", "text")
# How the number comes to vary, and what the calls are given.
NUMBERS = {
    "an argument": ("n = k", [2, 3, 5, 4, 3]),
    "a float": ("n = k", [2.5, 3.5, 1.25, 4.0, 2.0]),
    "a size": ("n = x.shape[0]", [2, 3, 5, 4, 3]),
    "a sum": ("n = int(x.sum().item())", [2, 3, 5, 4, 3]),
    "an item": ("n = x.mean().item()", [2, 3, 5, 4, 3]),
    "a count": ("n = x.count_nonzero().item()", [2, 3, 5, 4, 3]),
}
CASES = [*itertools.product(OBJECTS, NUMBERS, ("y = n {} o", "y = o {} n", "y = o; y {}= n", "y = n; y {}= o"))]
IN_PLACE = tuple(op for op in OPERATORS if op not in ("<", "<=", "==", "!=", ">", ">="))


def result(step, x, k):
    LOG.clear()
    found = told(step, x, k)
    return found if not isinstance(found, fractions.Fraction | datetime.timedelta) else repr(found), [*LOG]


@pytest.mark.share(90)
@pytest.mark.parametrize(("name", "number", "order"), CASES)
def test_each_method_runs_once(name, number, order):
    set_up, calls = NUMBERS[number]
    for op in IN_PLACE if "=" in order[4:] else OPERATORS:
        ours, plain = ({"o": copy.deepcopy(OBJECTS[name]), "torch": torch} for _ in range(2))
        text = f"def step(x, k):\n    {set_up}\n    {order.format(op)}\n    return y, x * 2"
        exec(text, plain)
        exec(text, ours)
        captured = capture(ours["step"], backend="eager")
        for k in calls[:3] if name in GROWING else calls:
            x = torch.ones(int(k))
            found, wanted = result(captured, x, k), result(plain["step"], x, k)
            assert found[1] == wanted[1] and str(found[0]) == str(wanted[0]), (op, k, found, wanted)

"""Functions of ``math`` of tensors with one element, of each dtype and shape: as Python, which asks ``__float__``."""

import math
import types

import pytest
import torch

from moebius import capture, stats
from moebius.python import natives

FUNCTIONS = [f for f in vars(math).values() if isinstance(f, types.BuiltinFunctionType)]
OPERANDS = {
    "a sum": lambda x: (x.sum(),),
    "of one row": lambda x: (x[:1],),
    "double": lambda x: (x.double().mean(),),
    "half": lambda x: (x.bfloat16().sum(),),
    "ints": lambda x: (x.long().sum(),),
    "yes or no": lambda x: ((x > 0).any(),),
    "two": lambda x: (x.sum(), x.max()),
    "and a number": lambda x: (x.sum(), 2),
    "a number and": lambda x: (2.5, x.sum()),
    "too many": lambda x: (x,),
    "complex": lambda x: (x.sum() * 1j,),
    "with a gradient": lambda x: ((x * torch.ones(3, requires_grad=True)).sum(),),
    "a text": lambda x: (x.sum(), "a"),
    "a list": lambda x: ([x.sum(), 1.0],),
}


def outcome(run, x):
    try:
        return repr(run(x))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.share(4)
@pytest.mark.parametrize("operands", OPERANDS)
def test_as_plain_python(operands):
    for function in FUNCTIONS:

        def step(x, function=function):
            y = x * 2
            return function(*OPERANDS[operands](y)), y

        run = capture(step, backend="eager")
        for x in ([1.0, 2.0, -1.0], [0.25, 0.0, 0.1], [-3.0, 1.0, -1.0], [math.nan, 1.0, 2.0], [400.0, 1e30, 3.0]):
            assert outcome(run, torch.tensor(x)) == outcome(step, torch.tensor(x)), (function.__name__, x)


@pytest.mark.parametrize("function", [math.exp, math.isfinite, math.isnan, math.sqrt, math.pow, math.acosh])
def test_in_one_graph(function):
    assert function in natives.OF_FLOATS and math.factorial not in natives.OF_FLOATS
    count = 2 if function is math.pow else 1
    run = capture(lambda x: (function(*[x.square().sum() + 1] * count), x * 2), backend="eager")
    for call in range(4):
        run(torch.full((3,), call + 1.0))
    assert stats(run).breaks == 0 and stats(run).hits == 3

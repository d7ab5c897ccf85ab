"""The functions of the ``operator`` module in a captured step: what they give, what they change, what they raise."""

from __future__ import annotations

import copy
import operator
import random

import numpy as np
import pytest
import torch

from moebius import capture, explain
from moebius.python import operator_functions


class Value:
    def __init__(self, held):
        self.held = held

    def __iadd__(self, other):
        self.held += other
        return self

    def __add__(self, other):
        return Value(self.held + other)

    def __lt__(self, other):
        return self.held < other.held

    def __neg__(self):
        return Value(-self.held)

    def __eq__(self, other):
        return self.held is other.held

    __hash__ = None

    def __repr__(self):
        return f"Value({self.held})"


FUNCTIONS = [f for name, f in vars(operator).items() if type(f) is type(operator.add) and not name.startswith("_")]
ARGUMENTS = [
    (torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.25])),
    (torch.tensor([3, 5]), torch.tensor([2, 1])),
    (torch.tensor([3, 5]), 2),
    (torch.tensor([0.5, 2.0]), 2.5),
    (2, torch.tensor([0.5, 2.0])),
    (torch.tensor([True, False]), torch.tensor([True, True])),
    (torch.tensor([[0.5, 2.0], [1.0, 3.0]]), torch.tensor([[1.5, 1.0], [0.0, 1.0]])),
    (torch.ones(2, requires_grad=True), 2),
    (torch.tensor([0.5, 1.0]), np.ones(2)),
    (np.ones(2), torch.tensor([0.5, 1.0])),
    (np.ones(2), 2),
    (torch.ones(2), [1, 2]),
    ([1, 2], torch.tensor(1)),
    ([1, 2, 1], 1),
    ([1], [2]),
    ((1, 2), 0),
    ({1}, {2}),
    ({1: 2}, {3: 4}),
    (Value(1), Value(2)),
    (Value(1), 3),
    (Value(2), torch.tensor([0.5, 2.0])),
    (3, 4),
    (3.5, 2),
    ("a", "b"),
    (1, 2, 3),
    (torch.tensor([0.5, -2.0]),),
    (torch.tensor(2),),
    (torch.tensor(-2.5),),
    (Value(1),),
    ([1],),
    (1,),
    (True,),
]


def outcome(step, values):
    """What came out (or the error), which of the arguments it is, and what the arguments are then."""
    values = copy.deepcopy(values)
    try:
        _, result = step(torch.ones(1), *values)
    except Exception as error:
        return type(error), str(error).split("\n")[0], [*map(repr, values)]
    return type(result), repr(result), [i for i, v in enumerate(values) if v is result], [*map(repr, values)]


@pytest.mark.share(16)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # numpy's, of torch's __array_wrap__
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_as_in_plain_python(function):
    def step(x, *values):
        return x + 1, function(*values)

    for values in ARGUMENTS:
        assert outcome(capture(step, backend="eager"), values) == outcome(step, values), values


def test_what_the_table_leaves_out_runs_natively(monkeypatch):
    def step(x, *values):
        return x + 1, operator.imul(*values)

    table = operator_functions.OPERATIONS
    monkeypatch.setattr(operator_functions, "OPERATIONS", {op: f for op, f in table.items() if op != "*="})
    assert outcome(capture(step, backend="eager"), ARGUMENTS[0]) == outcome(step, ARGUMENTS[0])
    assert explain(step, backend="eager")(torch.ones(1), *ARGUMENTS[0]).breaks


def test_what_call_calls_is_called_by_each_step(capsys):
    """It may do anything: what it gives, or does, is not known while the step is captured."""

    def step(x):
        operator.call(print, "hello")
        return x * operator.call(random.random), operator.call(torch.add, x, other=x)

    captured = capture(step, backend="eager", fullgraph=True)
    for run in (step, captured):
        random.seed(0)
        results = [run(torch.ones(1, dtype=torch.float64)) for _ in range(3)]
        random.seed(0)
        assert [x.item() for x, _ in results] == [random.random() for _ in range(3)]
        assert all(doubled.item() == 2.0 for _, doubled in results)
        assert capsys.readouterr().out == "hello\n" * 3

"""Tables that a counter looks into (a list of momenta, numpy's array of learning rates), and arrays without an axis as
numbers: values and types are plain Python's, no value is a constant, nothing is a graph break."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moebius import capture, disable, stats
from moebius.api import captured_of, report_of
from moebius.hook import ABSENT
from moebius.tensors import array_calls, array_inputs, arrays

STEPS = 8
FLOATS = [0.5 / (i + 1) for i in range(STEPS)]
TABLES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(FLOATS),
    "tuple": lambda: tuple(FLOATS),
    "float64": lambda: np.array(FLOATS),
    "float32": lambda: np.array(FLOATS, dtype=np.float32),
    "int64": lambda: np.arange(STEPS),
    "bool": lambda: np.arange(STEPS) % 3 == 0,
    "part": lambda: np.array(FLOATS * 2)[3 : 3 + STEPS],
}
LINEAR = torch.nn.Linear(4, 4)


def of_an_optimizer(x: torch.Tensor, value: Any) -> Any:
    weight = LINEAR.weight.detach().clone().requires_grad_()
    (weight * x).sum().backward()
    with torch.no_grad():
        weight -= float(value) * weight.grad
    return weight


USES: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "times a tensor": lambda x, v: x * float(v),
    "returned": lambda x, v: (x + 1, v),
    "with numbers": lambda x, v: (x + 1, v * 2.5, 1 - v / 3),
    "a rate": of_an_optimizer,
    "twice": lambda x, v: (x * float(v), v + v),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


@pytest.mark.share(16)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_looked_into_by_a_counter(name: str, use: str) -> None:
    table, function = TABLES[name](), USES[use]

    def step(x: torch.Tensor, i: int) -> Any:
        return function(x, table[i])

    captured, x = capture(step, backend="eager"), torch.ones(4, 4)
    for i in (*range(STEPS), -1, 3):
        assert same(captured(x, i), step(x, i)), i
    with pytest.raises(IndexError) as found:
        captured(x, STEPS)
    with pytest.raises(IndexError) as wanted:
        step(x, STEPS)
    assert str(found.value) == str(wanted.value)
    counted = stats(captured)
    assert counted.hits >= STEPS - 2, counted.recompiles


def test_an_array_that_is_changed_between_calls() -> None:
    table = np.array(FLOATS)

    @capture(backend="eager")
    def step(x: torch.Tensor, i: int) -> Any:
        return x * (2.0 if table[i] > 0.2 else 3.0) * float(table[i])

    x = torch.ones(3)
    for i in range(STEPS):
        table[i] += 0.01 * i
        assert torch.equal(step(x, i), step.__wrapped__(x, i))
    assert report_of(captured_of(step)).breaks == []


def test_a_list_that_stays_is_a_constant() -> None:
    """Of a capture that fails for another reason nothing is learnt of the lists that hold what they held."""
    table, kept, native = list(FLOATS), {"center": torch.zeros(3)}, disable(lambda: None)
    weight = torch.ones(3, requires_grad=True)

    @capture(backend="eager")
    def step(x: torch.Tensor, i: int) -> torch.Tensor:
        y = weight * x * table[i]
        rows = y - kept["center"]
        native()
        kept["center"] = kept["center"] * 0.9 + y.detach() * 0.1
        rows.sum().backward()
        with torch.no_grad():
            return weight.grad * table[i]

    for i in range(STEPS):
        step(torch.ones(3), i)
    assert len(stats(step).recompiles) <= 2, stats(step).recompiles


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, ">": operator.gt}
OTHERS: dict[str, Any] = {"int": 3, "float": 0.7, "float32": np.float32(0.3), "float64": np.float64(0.3)}


@pytest.mark.share(20)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("other", OTHERS)
def test_an_array_without_an_axis_is_a_number(dtype: torch.dtype, op: str, other: str) -> None:
    function, value = OPERATIONS[op], OTHERS[other]

    def step(x: torch.Tensor, log: list) -> Any:
        loss = (x * 2).sum().detach().cpu().numpy()
        log[0] = log[0] + 1
        return function(loss, value), function(value, loss)

    captured = capture(step, backend="eager")
    for i in range(4):
        x = torch.full((3,), i + 1).to(dtype)
        assert same(captured(x, [i]), step(x, [i]))
    if dtype.is_floating_point and op != ">":
        assert report_of(captured_of(captured)).breaks == []


def test_items_of_an_array_that_the_graph_makes() -> None:
    @capture(backend="eager")
    def step(x: torch.Tensor, total: list) -> Any:
        found = (x * 2).numpy()
        total[0] += found[0, 1] * 3
        return found[-1, 0], float(found[1, 1]), total[0]

    totals: list[list] = [[0.0], [0.0]]
    for i in range(6):
        x = torch.arange(4.0).view(2, 2) + i
        assert same(step(x, totals[0]), step.__wrapped__(x, totals[1]))
    assert report_of(captured_of(step)).breaks == []


def test_a_write_into_an_array_without_an_axis_is_numpys() -> None:
    def step(x: torch.Tensor) -> Any:
        y = x * 2
        a = y.numpy()
        a *= 3
        return y

    assert torch.equal(capture(step, backend="eager")(torch.tensor(2.0)), step(torch.tensor(2.0)))


def test_switched_off_they_are_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_inputs.ArrayInputs, "number", lambda *_: None)
    monkeypatch.setattr(array_calls.ArrayCalls, "call", lambda *_: ABSENT)
    monkeypatch.setattr(arrays.Array, "operand", lambda self, what: self.refuse(what))
    table = np.array(FLOATS)
    for step in (lambda x: x * float(table[1]), lambda x: x.sum().numpy() * 2):
        captured = capture(step, backend="eager")
        captured(torch.ones(3))
        assert report_of(captured_of(captured)).breaks

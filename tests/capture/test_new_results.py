"""What a call gives is new in each call, and one object in it stays one, also inside of tuples of plain values."""

from __future__ import annotations

import collections
import sys
import types

import pytest
import torch
from answers import broken

from moebius import capture
from moebius.codegen import residual
from moebius.python import natives


def in_a_tuple(x):
    return x, (1, [1, 2])


def twice(x):
    row = [1, 2]
    return x, (0, row), row


def enumerated(x):
    rows = [[1], [2]]
    return x, list(enumerate(rows)), rows


def bound(x):
    row = [1]
    return x, ("append", row.append), row


def deep(x):
    return x, (1, (2, ({"a": {1}}, collections.deque([1])))), (1, (2, 3))


def across_a_break(x):
    row = [1]
    pair = (0, row)
    broken()
    row.append(2)
    return x, pair, row


def parts(value):
    """Everything that can change in a value, with its place."""
    if isinstance(value, list | tuple | dict | set | collections.deque):
        if not isinstance(value, tuple):
            yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from parts(part)
    elif hasattr(value, "__self__"):
        yield from parts(value.__self__)


def shape(result):
    """Which of its parts are one, and what they hold."""
    met = list(parts(result[1:]))
    return [[a is b for b in met] for a in met], repr(met)


PROGRAMS = [in_a_tuple, twice, enumerated, bound, deep, across_a_break]


@pytest.mark.parametrize("program", PROGRAMS)
def test_new_in_each_call(program):
    captured, x = capture(program), torch.ones(2)
    results = [captured(x) for _ in range(3)]
    for result in results:
        assert shape(result) == shape(program(x))
    first, second = (list(parts(result[1:])) for result in results[-2:])
    assert first and all(a is not b for a in first for b in second)


def test_lists_kept_as_constants(monkeypatch):
    """Were a tuple of plain values a constant with all that is in it, its lists would be shared by all calls."""
    monkeypatch.setattr(residual, "is_constant", lambda value: natives.is_plain(value, lambda _: False))
    captured, x = capture(twice), torch.ones(2)
    captured(x)
    assert shape(captured(x)) != shape(twice(x))


class Named:
    def __repr__(self):
        return "Named"

    def __format__(self, spec):
        return f"formatted {spec}"


@pytest.mark.parametrize("text", ["{0!r:>30}", "{0!s}", "{0:>3}", "{0}", "{0.__class__}", "{{}} {}", "{:{}}"])
def test_str_format(text):
    def step(x, width):
        return x * 2, text.format(Named(), width), text.format(collections.UserList([1]), width)

    def told(function):
        try:
            return function(torch.ones(1), "9")[1:]
        except Exception as error:
            return type(error), str(error)

    captured = capture(step)
    assert [told(captured) for _ in range(2)] == [told(step)] * 2


SIZES = (5, 5, 6, 7, 8)


def told_of_errors(x, n):
    """Tuples and exceptions that hold a number which varies."""
    found = [(n, "a"), (n, (n + 1,))]
    for error in (ValueError(n), KeyError(n), ValueError(n, "a"), OSError(n, "text"), StopIteration(n)):
        found += [str(error), error.args]
    try:
        raise KeyError(n)
    except KeyError as error:
        found.append(f"{error}")
    return x, found


class Own(Exception):
    factor = 1

    def __str__(self):
        return f"own {self.args[0] * self.factor}"


def told_of_its_own(x, n):
    return x, str(Own(n)), str(Own(3))


@pytest.mark.parametrize("program", [told_of_errors, told_of_its_own])
def test_numbers_that_vary(program):
    captured, x = capture(program), torch.ones(2)
    for n in SIZES:
        assert captured(x, n)[1:] == program(x, n)[1:]


def test_a_text_of_the_users_own_is_interpreted(monkeypatch):
    captured, x = capture(told_of_its_own), torch.ones(2)
    assert captured(x, 5)[1:] == ("own 5", "own 3")
    monkeypatch.setattr(Own, "factor", 10)
    assert captured(x, 5)[1:] == ("own 50", "own 30")


def test_a_module_that_was_replaced(monkeypatch):
    """``import`` in the step asks ``sys.modules`` at each call."""

    def step(x):
        import replaced_between_calls
        from replaced_between_calls import factor

        return x * factor, replaced_between_calls.factor

    captured, x = capture(step), torch.ones(1)
    for factor in (2, 2, 3):
        module = types.ModuleType("replaced_between_calls")
        module.factor = factor
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert captured(x) == (factor, factor)
    module.factor = 4
    assert captured(x) == (4, 4)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ImportError):
        captured(x)


@pytest.mark.parametrize("backend", ["eager", None])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.new(x.size()).fill_(1),
        lambda x: x.new(x[0].shape).fill_(1),
        lambda x: x.new(torch.Size((x.shape[0], 4))).fill_(1),
        lambda x: x.new(size=x.size()).fill_(1),
        lambda x: x.new(2, 3).fill_(1),
        lambda x: x.new((2.0, 3.0)),
        lambda x: x.new([2.0, 3.0]),
        lambda x: torch.Tensor(x.size()).fill_(1),
        lambda x: torch.LongTensor(x.shape).fill_(1),
        lambda x: torch.IntTensor(list(x.shape)),
    ],
)
def test_torchs_old_constructors_tell_sizes_from_values(make, backend):
    captured = capture(make, backend=backend) if backend else capture(make)
    for shape in [(2, 3), (4, 5), (5, 7), (6, 2)]:
        x = torch.rand(shape)
        found, plain = captured(x), make(x)
        assert found.dtype == plain.dtype and torch.equal(found, plain), shape


def test_torchs_old_types():
    kinds = (torch.FloatTensor, torch.LongTensor, torch.BoolTensor, torch.Tensor, (int, torch.DoubleTensor))

    def step(x):
        values = (x, x + 1, x.long(), x > 0, x.double())
        return x + 1, [isinstance(v, kind) for v in values for kind in kinds]

    captured = capture(step, backend="eager")
    for dtype in (torch.float32, torch.int64):
        assert captured(torch.ones(2).to(dtype))[1] == step(torch.ones(2).to(dtype))[1]


@pytest.mark.parametrize("keywords", [{}, {"dtype": None}, {"dtype": torch.float64}, {"device": "cpu", "dtype": None}])
def test_a_tensor_as_a_tensor(keywords):
    """It is the tensor itself where it has the type, and has its history."""

    def step(x):
        return torch.as_tensor(x * 2, **keywords), torch.as_tensor(x, **keywords) is x

    captured = capture(step, fullgraph=True)
    for x in (torch.rand(3, requires_grad=True), torch.arange(3.0)):
        (found, same), (plain, is_same) = captured(x), step(x)
        assert torch.equal(found, plain) and found.dtype == plain.dtype and same == is_same
        assert found.requires_grad == plain.requires_grad

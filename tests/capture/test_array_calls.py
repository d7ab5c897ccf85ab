"""What numpy computes of arrays, in the graph: each function and method, the same results, errors and warnings."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moebius import capture, stats
from moebius.hook import ABSENT
from moebius.lowering.step import arrays as nodes
from moebius.tensors.array_calls import ArrayCalls, is_maker, is_method
from moebius.values.numpy_numbers import is_numpy_function

NOT_RUN = ("save", "printoptions", "print_function", "show", "info", "test", "einsum_path")  # files, what is printed
FUNCTIONS = sorted(
    name
    for name, function in vars(np).items()
    if (is_numpy_function(function) or is_maker(function)) and not any(part in name for part in NOT_RUN)
)
METHODS = sorted(
    name
    for name, function in vars(np.ndarray).items()
    if is_method(function) and not name.startswith("__") and name not in ("tofile", "dump", "setflags")
)
FORMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "alone": lambda f, a, b: f(a),
    "with another": lambda f, a, b: f(a, b),
    "with a number": lambda f, a, b: f(a, 1),
    "a list": lambda f, a, b: f([a, b]),
    "an axis": lambda f, a, b: f(a, axis=0),
    "sizes": lambda f, a, b: f((len(a), 2)),
    "a type": lambda f, a, b: f(a, np.float32),
}
CASES = [("numpy", name, form) for name in FUNCTIONS for form in FORMS]
CASES += [("method", name, form) for name in METHODS for form in FORMS if form != "sizes"]
KEPT = np.arange(6.0).reshape(2, 3)


def outcome(step: Callable[..., Any], *args: Any) -> list[Any]:
    """The results, with type, dtype and layout; the error; the warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = step(*args)
        except Exception as error:
            return [type(error), str(error), {str(w.message) for w in warned}]
    return [described(found), {str(w.message) for w in warned if w.category is RuntimeWarning}]


def described(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value), [described(item) for item in value]
    if isinstance(value, np.ndarray):
        strides = [stride for size, stride in zip(value.shape, value.strides, strict=True) if size > 1]
        held = repr(value.tolist()) if value.dtype == object else value.tobytes()
        return value.dtype, value.shape, strides, held, value.flags.writeable
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.tolist().__repr__()
    return type(value), repr(value)


def step_of(where: str, name: str, form: str) -> Callable[..., Any]:
    call = FORMS[form]

    def step(x: torch.Tensor, i: int) -> Any:
        a = x.numpy() * 2
        b = KEPT if i < 0 else a + 1
        function = getattr(np, name) if where == "numpy" else lambda first, *more, **named: getattr(first, name)(
            *more, **named
        )
        found = call(function, a, b)
        return found, a, torch.from_numpy(a) + 1

    return step


@pytest.mark.share(6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize(("where", "name", "form"), CASES)
def test_each_function(where: str, name: str, form: str, dtype: torch.dtype) -> None:
    step = step_of(where, name, form)
    captured = capture(step, backend="eager")
    for i, rows in ((0, 2), (1, 2), (-1, 2), (3, 3)):
        x = ((torch.arange(3.0 * rows).view(rows, 3) * 7 + i) % 5 - 1).to(dtype)
        assert outcome(captured, x.clone(), i) == outcome(step, x.clone(), i)


@pytest.mark.parametrize("turned", [np.flipud, np.fliplr, np.flip, np.rot90, lambda a: a[::-1]])
@pytest.mark.parametrize("made", [lambda a: [a, a + 1], lambda a: a + 1, np.sort], ids=["list", "sum", "sorted"])
def test_what_lies_backwards(turned, made):
    def step(x: torch.Tensor) -> Any:
        return turned(made(x.numpy())), x + 1

    captured = capture(step, backend="eager")
    for x in (torch.arange(6.0).view(2, 3), torch.ones(2, 3), torch.arange(9.0).view(3, 3)):
        assert outcome(captured, x.clone()) == outcome(step, x.clone())


KEYS = [0, slice(None), slice(0, 2), np.array([1, 0]), None, ..., slice(1, None), -1, np.array([True, False])]
BASE = np.arange(24.0).reshape(2, 3, 4)


@pytest.mark.share(30)
@pytest.mark.parametrize("places", [*itertools.product(range(len(KEYS)), repeat=3)], ids=str)
def test_each_index(places: tuple[int, ...]) -> None:
    """Of an array from before the step and of one that the graph makes: views, and what arrays choose."""
    key = tuple(KEYS[place] for place in places)

    def before(x: torch.Tensor) -> Any:
        return BASE[key] * 1.0, x + 1

    def made(x: torch.Tensor) -> Any:
        a = x.numpy() * 2.0
        return a, a[key], torch.as_tensor(a[key] * 3.0)

    for step, x in ((before, torch.ones(2)), (made, torch.arange(24.0).view(2, 3, 4))):
        captured = capture(step, backend="eager")
        for _ in range(2):
            assert outcome(captured, x) == outcome(step, x)


def weighted(x: torch.Tensor) -> Any:
    w = x.numpy() ** 2
    w /= np.sum(w)
    w *= 0.5
    w += 0.1 / len(w)
    return torch.from_numpy(w), w[1:3], w.mean()


def explained(x: torch.Tensor) -> Any:
    y, z = (x + 1).numpy(), (x * 2).numpy()
    v = np.var(z)
    return np.nan if v == 0 else 1 - np.var(z - y) / v


def padded(x: torch.Tensor) -> Any:
    a = np.concatenate([np.zeros((1, 2)), (x.numpy() - KEPT[:1, 0])[None, :2]], axis=0)
    return torch.from_numpy(a).float() @ x[:2], np.ones((2, 3)) * -10.0


@pytest.mark.parametrize("step", [weighted, explained, padded], ids=lambda step: step.__name__)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_is_one_graph(step: Callable[..., Any], backend: str) -> None:
    captured = capture(step, backend=backend)
    for rows in (4, 4, 5, 6, 6):
        x = torch.rand(rows)
        assert outcome(captured, x) == outcome(step, x)
    assert (stats(captured).breaks, stats(captured).graphs) <= (0, 2)


def divides(x: torch.Tensor) -> Any:
    return x.numpy() / (x.numpy() - x.numpy()), x + 1


def chooses(x: torch.Tensor) -> Any:
    return np.trim_zeros(x.numpy() * 1.0), x + 1


def writes(x: torch.Tensor) -> Any:
    a = x.numpy() * 1.0
    b = a[1:]
    a += 1
    b *= 2
    return a, b, torch.from_numpy(b), np.shares_memory(a, b)


@pytest.mark.parametrize("step", [divides, chooses, writes], ids=lambda step: step.__name__)
def test_what_a_try_does_not_show(step: Callable[..., Any]) -> None:
    """Warnings, sizes that values decide, and what lies in one memory."""
    captured = capture(step, backend="eager")
    for x in (torch.ones(3), torch.tensor([0.0, 2.0, 0.0]), torch.ones(3)):
        assert outcome(captured, x) == outcome(step, x)


def test_with_its_looks_switched_off_the_answer_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def unasked(function: Any, template: Any, named: Any, kind: type) -> Any:
        def of_arrays(dtype: Any, sizes: Any, strides: Any, *operands: Any) -> Any:
            with np.errstate(all="ignore"):
                found = function(*nodes.filled(template, operands), **named)
            return torch.from_numpy(found)

        return of_arrays

    monkeypatch.setattr("moebius.tensors.array_calls.computed_array", unasked)
    captured = capture(divides, backend="eager")
    assert outcome(captured, torch.ones(3)) != outcome(divides, torch.ones(3))


@pytest.mark.parametrize("step", [weighted, explained, padded], ids=lambda step: step.__name__)
def test_without_them_there_are_breaks(step: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrayCalls, "call", lambda *_: ABSENT)
    captured, x = capture(step, backend="eager"), torch.rand(4)
    assert outcome(captured, x) == outcome(step, x)
    assert stats(captured).breaks


def labelled(x: torch.Tensor, y: torch.Tensor) -> Any:
    found = x > 0
    n = x[found].shape[0]
    t = torch.zeros(n, 3)
    t[range(n), y[found]] = 1.0
    return t.sum(), t[range(n), y[found]].sum(), range(n)


def counted(x: torch.Tensor, y: torch.Tensor) -> Any:
    n = x[x > 0].shape[0]
    return [i * 2 for i in range(n)], len(range(n)), list(range(n)), x + 1


@pytest.mark.parametrize(("step", "breaks"), [(labelled, 0), (counted, 4)], ids=["an index", "gone through"])
def test_a_range_of_a_size_that_values_decide(step: Callable[..., Any], breaks: int) -> None:
    captured = capture(step, backend="eager")
    for i in range(5):
        x, y = torch.randn(9, generator=torch.manual_seed(i)), torch.arange(9) % 3
        assert outcome(captured, x, y) == outcome(step, x, y)
    assert stats(captured).breaks <= breaks


class Halves:
    def __call__(self, array):
        LOG.append("halved")
        return array / 2


class Holds:
    def __init__(self, array):
        LOG.append("held")
        self.array = array


LOG: list[str] = []
OF_THE_USER = {
    "an object": Halves(),
    "a method": Halves().__call__,
    "a partial": functools.partial(Halves()),
    "a class": lambda array, made=Holds: made(array).array,
    "np.vectorize": np.vectorize(lambda number: LOG.append("one") or number + np.random.rand(), otypes=[float]),
    "np.vectorize that asks": np.vectorize(lambda number: LOG.append("one") or number + 1.0),
    "np.frompyfunc": np.frompyfunc(lambda number: LOG.append("one") or number + 1.0, 1, 1),
    "apply_along_axis": lambda array: np.apply_along_axis(lambda row: LOG.append("row") or row * 2, 0, array),
    "piecewise": lambda array: np.piecewise(array, [array < 1], [lambda part: LOG.append("part") or part * 2, 5.0]),
}


@pytest.mark.parametrize("name", OF_THE_USER)
def test_code_of_the_user_is_not_tried(name):
    """Whoever calls it with an array of the graph's, it runs as often as in plain Python."""
    called = OF_THE_USER[name]

    def step(x):
        return x + torch.as_tensor(np.asarray(called(x.numpy()), dtype=np.float64))

    outcomes = []
    for run in (step, capture(step)):
        np.random.seed(3)
        LOG.clear()
        found = [run(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64) + call).tolist() for call in range(3)]
        outcomes.append((found, list(LOG), np.random.rand()))
    assert outcomes[0] == outcomes[1]

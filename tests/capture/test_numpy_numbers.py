"""numpy's numbers in a step, and its functions of numbers: found in numpy itself, compared with plain Python."""

import operator
import random
import warnings

import numpy as np
import pytest
import torch

from moebius import capture, stats
from moebius.lowering.step import arrays, asks_plain_python
from moebius.tensors import numbers
from moebius.values.numpy_numbers import NUMPY_NUMBERS, is_numpy_function

KINDS = (int, float, bool, np.float64, np.float32, np.float16, np.int64, np.int32, np.int8, np.uint8, np.bool_)
FUNCTIONS = {
    f"{home.__name__}.{name}": found
    for home in (np, np.linalg)
    for name in sorted(vars(home))
    if is_numpy_function(found := getattr(home, name)) and name != "empty_like"  # (which gives what was in memory)
}
OPERATORS = {
    name: getattr(operator, name)
    for name in ("add sub mul truediv floordiv mod pow lt le eq ne gt ge and_ or_ xor lshift rshift").split()
}
OF_ONE = {name: getattr(operator, name) for name in ("neg", "pos", "invert", "abs", "index")} | {
    "round": round,
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "type": type,
    "divmod": lambda v: divmod(v, 2),
    "largest": lambda v: max(v, 1),
    "total": lambda v: sum([v, v, 1]),
    "sorted": lambda v: sorted([v, 1, 0.5]),
    "key": lambda v: {v: 1},
    "member": lambda v: v in [1, 2],
    "branch": lambda v: 1 if v > 1 else 2,
    "index of a list": lambda v: [5, 6, 7, 8][v],
    "range": lambda v: list(range(v)),
    "text": lambda v: f"{v:.3f}",
    "tensor": torch.tensor,
    "tensors": lambda v: torch.tensor([v, v]),
    "full": lambda v: torch.full((2,), v),
    "clamped": lambda v: torch.ones(2).clamp(max=v),
    "zeros": torch.zeros,
    "row": lambda v: torch.arange(5)[v],
    "rows": lambda v: torch.arange(5)[:v],
    "left": lambda v: v * torch.arange(3),
    "power": lambda v: v ** torch.arange(3),
    "less": lambda v: v < torch.arange(3),
    "right": lambda v: torch.arange(3) / v,
    "written": lambda v: written(v),  # (defined below)
    "new": lambda v: torch.ones(2).new_tensor(v),
    "where": lambda v: torch.where(torch.ones(2) > 0, torch.ones(2), v),
} | {kind.__name__: kind for kind in NUMPY_NUMBERS}
METHODS = sorted(n for n in dir(np.float64) if not n.startswith("_") and n not in ("data", "tofile", "dump"))
FORMS = ("f(v)", "f(v, c)", "f(c, v)", "f([v, c])", "f([v, c, v], c)", "f(v, c, c)")
WAYS = {"constant": "C", "argument": "a", "attribute": "a.v", "item": "a[1]"}
USES = ("r", "(r, x * r)", "(r, r * x)", "(r, x + v)")
NUMBERS = (2, 3, 1, 0, 0.5, -1, 4, 0.25, 100, -0.0, 7, float("inf"), float("nan"), 1e-30, 300, 1000)


class Holder:
    def __init__(self, v):
        self.v = v


def written(v):
    t = torch.zeros(3)
    t[1] = v
    return t


def number(kind, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kind(value)
        except (OverflowError, ValueError):
            return kind(1)


def outcome(function, *args):
    """The value with all types in it, or the error; and what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = function(*args)
        except Exception as error:
            found = error
    parts = found if type(found) in (tuple, list) else (found,)
    shown = [(type(part), repr(part), getattr(part, "dtype", None)) for part in parts]
    return type(found), shown, [str(one.message) for one in told if not str(one.message).startswith("moebius")]


def program(rng):
    """A random step of one operation, its arguments for some calls, and its text."""
    kind, c = rng.choice(KINDS), number(rng.choice(KINDS), rng.choice(NUMBERS))
    family = rng.choice(("function", "function", "operator", "one", "one", "method"))
    if family == "function":
        name, form = rng.choice([*FUNCTIONS]), rng.choice(FORMS)
        f = FUNCTIONS[name]
    elif family == "operator":
        name, form = rng.choice([*OPERATORS]), rng.choice(("f(v, c)", "f(c, v)", "f(v, v)"))
        f = OPERATORS[name]
    elif family == "one":
        name, form = rng.choice([*OF_ONE]), "f(v)"
        f = OF_ONE[name]
    else:
        name, f = rng.choice(METHODS), None
        form = rng.choice((f"v.{name}", f"v.{name}()", f"v.{name}(c)"))
    way = rng.choice([*WAYS])
    some = rng.random() < 0.4
    values = [number(kind, v) for v in ((2, 3, 1, 4, 3, 2) if some else [rng.choice(NUMBERS) for _ in range(6)])]
    text = f"def step(x, a):\n    v = {WAYS[way]}\n    r = {form}\n    r = 0 if callable(r) else r\n"
    text += f"    return {rng.choice(USES)}\n"
    names = {"f": f, "c": c, "C": values[0], "callable": callable}
    exec(text, names)
    made = {"attribute": Holder, "item": lambda v: [0, v]}.get(way, lambda v: v)
    return names["step"], [made(v) for v in values], f"{name} {text} c={c!r} values={values!r}"


@pytest.mark.share(6)
@pytest.mark.parametrize("seed", range(12))
def test_what_numpy_computes_of_numbers(seed):
    rng = random.Random(f"{seed}")
    x = torch.arange(1.0, 4.0)
    for _ in range(25):
        step, values, text = program(rng)
        captured = capture(step, backend="eager")
        for value in values:
            assert outcome(captured, x, value) == outcome(step, x, value), text


def test_the_functions_are_numpys_own():
    assert len(FUNCTIONS) > 200
    assert not is_numpy_function(np.frompyfunc(lambda a: a, 1, 1))


SCHEDULES = {
    "cosine": lambda it: 1e-3 + 0.5 * (1 + np.cos(np.pi * it / 20)),
    "root": lambda it: np.sqrt(it) ** -1,
    "clipped": lambda it: np.clip(it / 20, 0.1, 0.9),
    "mean": lambda it: np.mean([it, it / 2, 1.0]),
    "between": lambda it: np.interp(it, [0, 5, 20], [0.0, 1.0, 0.1]),
    "numpy's count": lambda it: np.float64(0.97) ** np.int64(3) * it,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_one_graph(name):
    def trained(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(1e-3), weight_decay=np.float32(0.01).item())

        def step(x, it):
            for group in optimizer.param_groups:
                group["lr"] = SCHEDULES[name](it) * 1e-2
            loss = model(x).square().mean() * np.sqrt(4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach(), np.mean([loss.item(), 1.0]), group["lr"]

        called = wrap(step)
        found = [called(torch.full((3, 4), 0.1 * it), it) for it in range(2, 22)]
        return called, found, [p.detach() for p in model.parameters()]

    captured, found, parameters = trained(lambda step: capture(step, backend="eager", fullgraph=True))
    _, expected, plain = trained(lambda step: step)
    assert all(map(torch.equal, parameters, plain))
    found, expected = ([[(type(v), repr(v)) for v in one] for one in every] for every in (found, expected))
    assert found == expected
    assert len(stats(captured).recompiles) == 1  # the second value makes it a number of the graph
    assert stats(captured).hits == 18


def test_where_numpy_warns_plain_python_does_it():
    captured = capture(logarithm, backend="eager", fullgraph=True)
    for v in (3.0, 2.0, 1.5, 0.0, 2.5):
        assert outcome(captured, torch.ones(2), v) == outcome(logarithm, torch.ones(2), v)
    assert stats(captured).hits == 3


def test_another_type_is_plain_pythons_again():
    """An int that numpy's own cannot hold is one of Python's in an array of objects."""

    def step(x, n):
        return np.max([n, 2]), x + 1

    captured = capture(step, backend="eager")
    for n in (3, 4, 5, 1 << 40, 1 << 63, 1 << 70, 6):
        assert outcome(captured, torch.ones(2), n) == outcome(step, torch.ones(2), n)


def typed(x, v):
    return x + 1, isinstance(np.emath.sqrt(v), np.complex128)


def logarithm(x, v):
    return x * np.log(v)


@pytest.mark.parametrize("backend", ["eager", None])
def test_the_type_is_looked_at_where_nobody_reads_the_number(backend):
    captured = capture(typed, **({} if backend is None else {"backend": backend}))
    for v in (3.0, 4.0, -1.0, 5.0):
        assert outcome(captured, torch.ones(2), v) == outcome(typed, torch.ones(2), v)


@pytest.mark.parametrize("off", ["what it gives is not looked at", "what numpy says is lost"])
def test_with_a_look_switched_off_the_answer_is_another(monkeypatch, off):
    def quietly(function, kind=None):
        def of_numbers(*operands):
            with np.errstate(all="ignore"):
                return function(*operands)

        return of_numbers

    monkeypatch.setattr(numbers, "computed_quietly", quietly)

    step, values = (typed, (3.0, 4.0, -1.0)) if off.startswith("what it gives") else (logarithm, (3.0, 2.0, 0.0))
    captured = capture(step, backend="eager")
    found, expected = ([outcome(f, torch.ones(2), v) for v in values] for f in (captured, step))
    assert found != expected


def test_which_nodes_plain_python_may_be_asked_for():
    assert asks_plain_python(arrays.computed_quietly(np.cos))
    assert not asks_plain_python(torch.add)

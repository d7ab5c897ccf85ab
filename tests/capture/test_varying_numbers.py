"""Numbers that differ from call to call: what is computed of them is in the graph, a branch is a guard on its outcome.

Places where a number lives × what is done with it × sequences of values, beside plain Python; and every function of
``math``, ``cmath`` and ``operator``, and every method of a number, over numbers of each kind.
"""

from __future__ import annotations

import cmath
import contextlib
import io
import math
import operator
import warnings

import pytest
import torch

from moebius import capture, stats

SCHEDULES = {
    "cosine": "y = x * (1e-4 + 0.5 * (1e-3 - 1e-4) * (1 + math.cos(math.pi * n / 60)))",
    "warmup": "y = x * (n / 5 if n < 5 else 1.0)",
    "polynomial": "y = x * max(0.0, 1 - n / 2000) ** 0.9",
    "exponential": "y = x * 0.97 ** n",
    "inverse square root": "y = x * (n + 1) ** -0.5",
    "noam": "y = x * 512 ** -0.5 * min((n + 1) ** -0.5, (n + 1) * 4 ** -1.5)",
    "step": "y = x * 0.5 ** (n // 7)",
    "one cycle": "t = n / 50; y = x * (1 - abs(2 * t - 1)) * math.exp(-t)",
    "sigmoid": "y = x / (1 + math.exp(-0.01 * (n - 5)))",
    "tanh": "y = x * (1 - math.tanh(n / 5))",
    "gumbel": "y = torch.nn.functional.softmax(x / max(0.5, math.exp(-3e-5 * n)), 0)",
    "ema": "d = min(0.999, (1 + n) / (10 + n)); y = x * d + (1 - d)",
    "log": "y = x * math.log(n + 2)",
    "learning rate": (
        "opt.param_groups[0]['lr'] = 0.1 * math.cos(n); opt.zero_grad(); (w * x).sum().backward(); opt.step(); "
        "y = w.detach().clone()"
    ),
    "dropout": "y = torch.nn.functional.dropout(x, min(0.5, 0.04 * (n % 10)))",
    "table": "y = x * table[int(n) % 4]",
    "by key": "y = x * {0: 1.0, 1: 2.0, 2: 3.0}[int(n) % 3]",
    "row": "y = x * rows[int(n) % 7]",
    "slot": "y = torch.zeros(7, 4); y[int(n) % 7] = x",
    "slice": "y = x * rows[: 2 + int(n) % 5].sum()",
    "tensor": "y = x * torch.tensor(n) + torch.tensor([n, n * 0.5, 1, 2])",
    "scalars": "y = torch.add(x, x, alpha=n).clamp(-n, n + 1) * n",
    "text": "out.append(f'step {n} lr {n * 0.1:.3f}'); y = x * 1",
    "print": "print('step', n, n / 3); y = x * 1",
    "helper": "y = x * helper(n, k=n + 1)",
    "kept": "out.append((n, n * 2, n / 3)); y = x + 1",
    "rounded": "y = x * round(n / 7, 2) * int(n * 0.3) * math.floor(n / 2)",
    "parts": "a, b = divmod(n, 3); c, d = math.frexp(n); y = x * a + b * c - d",
    "methods": "y = x * (2 if (n / 4).is_integer() else 1) + int(n).bit_length()",
    "among": "y = x * (2 if n in (3, 6) else 1) + (1 if int(n) in {3, 6} else 0)",
    "every tenth": "y = x * 1\n    if n % 10 == 0: out.append(n)",
    "phases": "y = x * (1.0 if n < 9 else 0.5)",
    "complex": "y = x * abs(cmath.exp(1j * n))",
}
SEQUENCES = {
    "up": lambda i: i,
    "cycle": lambda i: i % 4,
    "decay": lambda i: 3.0 * 0.9**i,
    "large": lambda i: 100 * i + 1000,
}
PLACES = {
    "argument": ("x, n", ""),
    "keyword": ("x, *, n", ""),
    "attribute": ("x", "n = obj.n"),
    "item": ("x", "n = cfg['n']"),
    "global": ("x", "n = N"),
    "element": ("x", "n = items[0]"),
}
MOST = 8  # captures of one program: two values before it is known to vary, -1, 0 and 1 apart, and each way of a branch


class Holder:
    n = 0


def world(place: str, use: str) -> dict:
    parameters, head = PLACES[place]
    names: dict = {"math": math, "cmath": cmath, "torch": torch, "obj": Holder(), "cfg": {}, "items": [0], "out": []}
    names |= {"table": [1.0, 2.0, 3.0, 4.0], "rows": torch.arange(28.0).view(7, 4)}
    names["w"] = torch.nn.Parameter(torch.arange(4.0) + 1)
    names["opt"] = torch.optim.SGD([names["w"]], lr=0.1)
    source = (
        f"def helper(n, k):\n    return n * 2 + k\ndef step({parameters}):\n    {head}\n    {SCHEDULES[use]}\n"
        "    return y, n\n"
    )
    exec(compile(source, f"<{place}: {use}>", "exec", dont_inherit=True), names)
    return names


def run(names: dict, step, place: str, values) -> list:
    results = []
    for value in values:
        names["obj"].n = names["cfg"]["n"] = names["N"] = names["items"][0] = value
        torch.manual_seed(0)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            found = step(torch.arange(4.0) / 3, **({"n": value} if place in ("argument", "keyword") else {}))
        results.append((found, list(names["out"]), said.getvalue()))
    return results


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and repr(a.tolist()) == repr(b.tolist())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@pytest.mark.share(3)
@pytest.mark.parametrize("use", SCHEDULES)
def test_a_number_that_varies_is_captured_a_few_times(use):
    for place in PLACES:
        for sequence, value in SEQUENCES.items():
            values = [value(i) for i in range(14)]
            plain, mine = world(place, use), world(place, use)
            step = capture(mine["step"], backend="eager")
            expected, found = run(plain, plain["step"], place, values), run(mine, step, place, values)
            for i, (a, b) in enumerate(zip(expected, found, strict=True)):
                assert same(a, b), (place, sequence, i, a, b)
            counts = stats(step)
            assert counts.misses <= MOST and counts.breaks == 0, (place, sequence, counts)


OPERANDS = ("n", "n, 2", "2, n", "[n, 1]", "n * 0.1")
FUNCTIONS = [
    f"{module.__name__}.{name}"
    for module in (math, cmath)
    for name in dir(module)
    if callable(getattr(module, name)) and not name.startswith("_")
] + [f"operator.{name}" for name in operator.__all__ if name not in ("attrgetter", "itemgetter", "methodcaller")]
METHODS = sorted({*dir(int), *dir(float)} - set(dir(object)) - {"__getnewargs__"})
VALUES = (5, 7, -3, 0, 12, 2.5, 7.0, -2.5, 1e300, -0.0, True)
KINDS = {"argument": "n", "size": "x.shape[0]", "item": "(x.sum() * 0 + n).item()"}


def answers(expressions: list[str], kind: str, step_of) -> list:
    body = "".join(
        f"    try: said.append(repr({expression}))\n    except Exception as error: said.append(repr(error))\n"
        for expression in expressions
    )
    source = f"def step(x, n, said):\n    n = {KINDS[kind]}\n{body}    return x * 1\n"
    obj = Holder()
    names = {"math": math, "cmath": cmath, "operator": operator, "obj": obj}
    exec(compile(source, f"<{kind}>", "exec", dont_inherit=True), names)
    step, found = step_of(names["step"]), []
    for value in VALUES:
        obj.n, said = value, []
        size = value if kind == "size" and type(value) is int and value > 0 else 3
        step(torch.ones(size), value, said)
        found.append(said)
    return found


@pytest.mark.share(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [*FUNCTIONS, "methods"])
def test_every_function_of_numbers(function, kind):
    """Python's value, of its type, or its error, in each call."""
    calls = [f"{function}({operands})" for operands in OPERANDS]
    if function == "methods":
        calls = [f"n.{name}({given})" for name in METHODS for given in ("", "2")] + ["n.real", "n.imag", "n.numerator"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for some in [calls] if function != "methods" else [[call] for call in calls]:
            assert answers(some, kind, lambda f: capture(f, backend="eager")) == answers(some, kind, lambda f: f), some


def handled(x, n):
    found = []
    for value in (n, n - 3, n - 1):
        try:
            found.append(math.log(value))
        except ValueError as error:
            found.append(str(error))
    return x * 1, found


def test_an_error_in_the_graph_at_0_and_1_is_seen_by_its_handler():
    """Captured with other numbers; the trace that finds the handler meets 0 and 1."""
    step = capture(handled, backend="eager")
    for n in (2, 3, 4, -1, 5, 0, 1, -7, 0, 6, 1):
        assert str(step(torch.ones(2), n)) == str(handled(torch.ones(2), n)), n

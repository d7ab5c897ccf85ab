"""Arrays of numpy's that a program iterates over: weights of losses, places of a schedule."""

import itertools

import numpy as np
import pytest
import torch
from answers import broken, same, told

from moebius import capture, stats

BODIES = {
    "for": "t = x.sum() * 0\n  for v in w:\n   t = t + x.sum() * v\n  return t",
    "enumerate": "return sum(v * x[i].sum() for i, v in enumerate(w))",
    "zip": "return sum(v * t.sum() for v, t in zip(w, [x, x + 1]))",
    "break inside": "t = x.sum() * 0\n  for v in w:\n   t = t + x.sum() * v\n   broken()\n  return t",
    "break once": "t = 0\n  for i, v in enumerate(w):\n   t = t + x.sum() * v\n   if i == 1: broken()\n  return t",
    "break after": "it = iter(w)\n  a = next(it)\n  broken()\n  return x * a + next(it), next(it, None)",
    "list": "return x.sum() * list(w)[0], len(list(w)), [type(v) for v in w]",
    "star": "a, *b = w\n  return x * a, len(b), b",
    "unpack": "a, b, c = w\n  return x * a + b * c",
    "reversed": "return [x.sum() * v for v in reversed(w)]",
    "max": "return x * max(w), min(w), sum(w)",
    "sorted": "return sorted(w), x * 2",
    "in": "return 0.5 in w, any(w), all(w), x * 2",
    "dict": "return x * dict(zip('abc', w))['a']",
    "arguments": "return (lambda a, b, c: x * a + b * c)(*w)",
    "written": "t = 0\n  for i, v in enumerate(w):\n   w[(i + 1) % 3] = 2\n   t = t + v * x.sum()\n  return t, w * 1",
    "left": "for v in w:\n   if v > 0.4: return x * v\n  return x",
    "nested": "return sum(a * b * x.sum() for a in w for b in w)",
    "map": "return list(map(lambda v: v * x.sum(), w))",
    "its class": "return type(iter(w)).__name__, x * 2",
    "floats": "return torch.stack([x.sum() * float(v) for v in w])",
    "chain": "return [x.sum() * v for v in itertools.chain(w, w)], [*itertools.islice(w, 2)]",
    "extend": "l = []\n  l.extend(w)\n  l += w\n  return l, len(set(w)), x * 2",
    "text": "return ','.join(str(v) for v in w), x * 2",
    "rows": "return [torch.from_numpy(r).sum() * x.sum() for r in w.reshape(3, 1)]",
}
ARRAYS = {
    "float64": lambda n: np.array([0.5 + n, 0.25, 1.5]),
    "float32": lambda n: np.array([0.5 + n, 0.25, 1.5], dtype=np.float32),
    "int": lambda n: np.array([1 + n, 2, 3]),
    "bool": lambda n: np.array([n % 2 == 0, True, False]),
    "objects": lambda n: np.array([1.5, n, None], dtype=object),
    "no axis": lambda n: np.array(2.0 + n),
    "two axes": lambda n: np.arange(9.0).reshape(3, 3) + n,
    "as long as": lambda n: np.array([1.0] * (1 + n)),
    "empty": lambda n: np.array([]),
    "text": lambda n: np.array(["a", "b", "c"]),
}
ONE_GRAPH = ("for", "enumerate", "zip", "star", "unpack", "reversed", "max", "dict", "map", "floats", "chain", "left")


# Of x (float32[3, 2]) and w (float64[3]), in the step.
COMPUTED = {
    "arange": "np.arange(0.0, 2.0, 0.5)", "ints": "np.arange(3)", "stacked": "np.stack([w, w])", "product": "w * 2 + 1",
    "rows": "np.outer(w, w)", "of a tensor": "x.numpy()", "column": "x[:, 0].numpy()", "flags": "w > 0.3",
    "number": "w.sum()", "nothing": "w[:0] * 2", "float32": "(w * 2).astype(np.float32)",
}  # fmt: skip


def made(body, held):
    names = {"torch": torch, "np": np, "broken": broken, "itertools": itertools}
    exec(f"def outer(w):\n def step(x{'' if held else ', w'}):\n  {body}\n return step", names)
    return names["outer"]


@pytest.mark.share(60)
@pytest.mark.parametrize(("body", "kind", "held"), [*itertools.product(BODIES, ARRAYS, (True, False))])
def test_each_item_is_pythons(body, kind, held):
    outer = made(BODIES[body], held)
    captured, plain = capture(outer(ARRAYS[kind](0)), backend="eager"), outer(ARRAYS[kind](0))
    for number in range(3):
        x = torch.arange(6.0).view(3, 2)
        ours, theirs = (told(step, x, *([] if held else [ARRAYS[kind](number)])) for step in (captured, plain))
        assert same(ours, theirs) or repr(ours) == repr(theirs)  # (same() asks numpy, of which objects know no ==)


@pytest.mark.share(40)
@pytest.mark.parametrize(("body", "computed"), [*itertools.product(BODIES, COMPUTED)])
def test_each_item_of_what_the_step_computes_is_pythons(body, computed):
    source = f"w = {COMPUTED[computed]}\n  {BODIES[body]}"
    captured, plain = capture(made(source, False)(None), backend="eager"), made(source, False)(None)
    for number in range(3):
        x, w = torch.arange(6.0).view(3, 2), ARRAYS["float64"](number)
        ours, theirs = (told(step, x.clone(), w) for step in (captured, plain))
        assert same(ours, theirs) or repr(ours) == repr(theirs)


@pytest.mark.parametrize("body", ONE_GRAPH)
def test_the_numbers_are_the_graphs(body):
    captured = capture(made(BODIES[body], False)(None), backend="eager")
    for number in range(4):
        captured(torch.ones(3, 2), ARRAYS["float64"](number))
    assert (stats(captured).graphs, stats(captured).breaks, stats(captured).misses) == (1, 0, 1)

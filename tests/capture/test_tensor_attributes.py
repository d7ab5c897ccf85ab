"""Attributes that a step gives to tensors, and the special methods of tensors that are called by their names."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.heap import tensor_attributes

MODEL = "m = torch.nn.Linear(3, 3)\n"
CAPTURED = {
    "of a result": "def step(x):\n  y = x * 2\n  y.l_aux = x.sum()\n  return y",
    "read again": "def step(x):\n  y = x * 2\n  y.l_aux = x.sum()\n  return y + y.l_aux",
    "of an argument": "def step(x):\n  x.cache = x * 2\n  return x.cache + 1",
    "a count of an argument's calls": "def step(x):\n  x.n = getattr(x, 'n', 0) + 1\n  return x * x.n",
    "main_grad": MODEL
    + """
def step(x):
  for p in m.parameters(): p.grad = None
  m(x).sum().backward()
  for p in m.parameters():
    p.main_grad = p.grad.float() + (p.main_grad if hasattr(p, 'main_grad') else 0)
    p.grad = None
  return m.weight.main_grad * 1, m.bias
""",
    "a flag": MODEL
    + """
def step(x):
  for i, p in enumerate(m.parameters()):
    if not getattr(p, 'done', False):
      p.done = True
      x = x + i + 1
  return m(x), m.weight
""",
    "under two names": "def step(x):\n  y = x * 2\n  z = y\n  z.a = 1\n  y.b = z.a + 1\n  return [y, z, z.b]",
    "of what is written to": "def step(x):\n  y = x * 2\n  y.a = 1\n  z = y.add_(1)\n  return z, z.a, z is y",
    "of what nobody gets": "def step(x):\n  y = x * 2\n  y.a = [1, 2]\n  return y.a + [x.sum()]",
    "of tensors in a list": "def step(x):\n  ys = [x * i for i in range(3)]\n"
    "  for i, y in enumerate(ys): y.i = i\n  return ys",
    "twice": "def step(x):\n  y = x * 2\n  y.b = 0\n  y.a = 3\n  y.b = 4\n  return y",
    "the tensor itself": "def step(x):\n  y = x * 2\n  y.l = [y]\n  return y, y.l[0] is y",
    "with a gradient": "w = torch.nn.Parameter(torch.ones(3))\n"
    "def step(x):\n  y = (x * w).sum()\n  y.aux = y * 2\n  return y + y.aux, w",
    "in a hook": MODEL
    + "def h(m, a, o): o.seen = m.bias.sum()\nm.register_forward_hook(h)\n"
    "def step(x):\n  o = m(x)\n  return o, o.seen",
    "by setattr": "def step(x):\n  y = x * 2\n  setattr(y, 'a', 1)\n"
    "  return y, getattr(y, 'a'), hasattr(y, 'c')",
    "by object": "def step(x):\n  y = x * 2\n  object.__setattr__(y, 'a', 1)\n  y.__setattr__('b', 2)\n  return y, y.a",
    "not of its copies": "def step(x):\n  y = x * 2\n  y.a = 1\n"
    "  return y.clone(), y.detach(), y.view(-1), y.to(y.dtype)",
    "an object": "class A: pass\ndef step(x):\n  y = x * 2\n  y.o = A()\n  y.o.v = x.sum()\n  return y, y.o.v",
    "by size": "def step(x):\n  y = x * 2\n  if x.shape[0] > 2: y.big = True\n  return y",
}
BREAKS = {
    "before and after a break": "def step(x):\n  y = x * 2\n  y.a = x.sum()\n  open('/dev/null').close()\n"
    "  y.b = y.a * 2\n  return y + y.a, y",
    "raised after it": "def step(x):\n  y = x * 2\n  K.append(y)\n  y.a = 1\n"
    "  if x.shape[0] == 3: raise ValueError('three')\n  return y\nK = []",
    "an operator that raises after it": "def step(x):\n  y = x * 2\n  K.append(y)\n  y.a = 1\n"
    "  try: y @ y\n  except RuntimeError: y.b = 2\n  return y\nK = []",
    "its dict": "def step(x):\n  y = x * 2\n  y.a = 1\n  return y, sorted(vars(y))",
    "its dict, written to": "def step(x):\n  y = x * 2\n  y.__dict__['a'] = 1\n  return y",
    "deleted": "def step(x):\n  y = x * 2\n  y.a = 1\n  del y.a\n  return y, hasattr(y, 'a')",
    "deleted of an argument": "def step(x):\n  y = x * 2\n  x.a = 1\n  del x.a\n  return y, hasattr(x, 'a')",
    "deep-copied": "def step(x):\n  y = (x * 2).detach()\n  y.a = [1]\n  return y, copy.deepcopy(y)",
    "a method's name": "def step(x):\n  y = x * 2\n  y.norm = 3\n  return y, y.norm",
    "torch's own": "def step(x):\n  y = x * 2\n  try: y.shape = (1,)\n"
    "  except AttributeError as e: return str(e)\n  return y",
    "in a checkpoint": """
import torch.utils.checkpoint as c
w = torch.nn.Parameter(torch.ones(3))
def f(x):
  y = x * w
  y.tag = 5
  return y
def step(x):
  y = c.checkpoint(f, x, use_reentrant=False)
  y.sum().backward()
  return y.detach(), hasattr(y, 'tag'), w.grad
""",
}  # fmt: skip


def shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        own = {k: "itself" if k == "l" else shown(v) for k, v in vars(value).items()}
        return str(value.dtype), value.tolist(), value.requires_grad, own
    if isinstance(value, list | tuple):
        return [*map(shown, value)]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def calls(source: str, captured: bool, backend: str = "moebius", count: int = 8) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    world: dict[str, Any] = {"torch": torch, "copy": copy}
    exec(source, world)
    step = capture(world["step"], backend=backend) if captured else world["step"]
    found, kept = [], torch.arange(6.0).reshape(2, 3)
    for n in range(count):
        x = kept if n % 3 else torch.arange(3.0 * (2 + n % 2)).reshape(2 + n % 2, 3) + n
        try:
            result = shown(step(x))
        except ValueError as error:
            result = str(error)
        found.append((result, shown(x), shown(world.get("K", []))))
    return found, stats(step) if captured else None


@pytest.mark.share(12)
@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize("name", CAPTURED)
def test_attributes_that_a_step_sets(name, backend):
    plain, _ = calls(CAPTURED[name], False)
    ours, seen = calls(CAPTURED[name], True, backend)
    assert ours == plain
    assert seen.graphs and not seen.breaks and seen.misses <= 6


def test_a_list_on_a_tensor_that_grows_in_each_call() -> None:
    source = "def step(x):\n  x.hist = getattr(x, 'hist', []) + [x.sum()]\n  return x * len(x.hist), x"
    plain, _ = calls(source, False, count=16)
    ours, seen = calls(source, True, count=16)
    assert ours == plain
    assert seen.misses <= 8 and seen.breaks == 1  # once its length was seen to vary, the step breaks before it


@pytest.mark.parametrize("name", BREAKS)
def test_attributes_over_graph_breaks(name):
    plain, _ = calls(BREAKS[name], False)
    ours, seen = calls(BREAKS[name], True)
    assert ours == plain and seen.hits


def test_without_the_effect_they_are_lost(monkeypatch):
    monkeypatch.setattr(tensor_attributes, "replay", lambda *_: None)
    plain, _ = calls(CAPTURED["of a result"], False)
    ours, _ = calls(CAPTURED["of a result"], True)
    assert ours != plain


def test_a_class_that_gets_the_attribute_later(monkeypatch):
    def step(x):
        y = x * 2
        y.l_aux = 3
        return y

    captured, x = capture(step, backend="eager"), torch.ones(2)
    for _ in range(2):
        assert vars(captured(x)) == {"l_aux": 3}
    seen = []
    monkeypatch.setattr(torch.Tensor, "l_aux", property(lambda t: 0, lambda t, v: seen.append(v)), raising=False)
    assert vars(captured(x)) == {} and seen == [3]


ASKED = [
    "y.__str__()", "y.__repr__()", "y.__format__('')", "torch.Tensor.__repr__(y)", "torch.Tensor.__str__(y)",
    "y.__repr__(tensor_contents='a')", "object.__repr__(y)[:12]", "object.__str__(y)", "x.sum().__format__('.2f')",
    "y.__hash__() == hash(y)", "y.__hash__() == object.__hash__(y)", "'b' in y.__dir__()", "'fake_mode' in y.__dir__()",
    "y.__sizeof__()", "y.__getattribute__('b')", "object.__getattribute__(y, 'b')", "y.__setattr__()",
    "y.__setattr__('a')", "y.__getitem__()", "y.__getitem__(0)", "y.__setitem__(0)", "y.__setitem__(0, 1.0)",
    "y.__delattr__('b')", "object.__delattr__(y, 'b')", "y.__getattribute__()", "y.__len__()", "y.__contains__(2.0)",
    "y.__doc__ == torch.Tensor.__doc__", "y.__class__", "y.__dict__", "y.__reduce_ex__(2)[0].__name__",
]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_special_methods_by_their_names(asked):
    """What the fake of a tensor would say of itself is not what the tensor says."""
    world: dict[str, Any] = {"torch": torch}
    answer = f"  try: r = {asked}\n  except Exception as e: r = type(e), str(e)\n"
    exec(f"def step(x):\n  y = x * 2\n  y.b = 1\n{answer}  return y, r", world)
    step = capture(world["step"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(4):
            (y, plain), (ours, result) = world["step"](torch.ones(2) * n), step(torch.ones(2) * n)
            assert repr(result) == repr(plain) and shown(ours) == shown(y)
    assert stats(step).graphs


def marked_for_another_compiler(x):
    torch._dynamo.maybe_mark_dynamic(x, 0)
    y = x * 2
    torch._dynamo.mark_static(y, (0, 1))
    return y.sum(0), y, sorted(x._dynamo_weak_dynamic_indices)


def test_marks_for_torch_compile_are_attributes():
    captured = capture(marked_for_another_compiler)
    for rows in (3, 4, 5, 6, 6):
        x, twin = torch.ones(rows, 2), torch.ones(rows, 2)
        want, got = marked_for_another_compiler(twin), captured(x)
        assert torch.equal(got[0], want[0]) and got[2] == want[2]
        assert vars(x) == vars(twin) and vars(got[1]) == vars(want[1])
    assert not stats(captured).breaks

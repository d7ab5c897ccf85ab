"""What a branch on values changes of a tensor besides its numbers is known only once it has run, or has not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from moebius import capture

# name: before the branch, in it, after it
PROGRAMS = {
    "transposed in place": ("y = x * 1", "y.t_()", "y, y.shape, y.stride()"),
    "a dimension more": ("y = x * 1", "y.unsqueeze_(0)", "y, y.shape, y.dim()"),
    "two dimensions swapped": ("y = x * 1", "y.transpose_(0, 1)", "y, y.size(0)"),
    "detached in place": ("y = m(x)", "y.detach_()", "y.detach(), y.requires_grad"),
    "an attribute lost": ("y = x * 1; y.tag = 3", "y = y * 2", "y, getattr(y, 'tag', None)"),
    "another tensor": ("y = z = x * 1", "y = y * 2", "y, y is z, y is not z"),
    "one of two": ("y = x * 1; z = x * 2", "y = z", "y, y is z"),
    "the argument": ("y = x * 1", "y = x", "y, y is x, x is None"),
    "two exchanged": ("y = z = x * 1", "y, z = z + 1, y * 2", "y, z, y is z"),
    "never the same": ("y = x * 1; z = x * 3", "y = y * 2", "y, y is z, y is x"),
    "a key": ("y = z = x * 1", "y = y * 2", "y, {z: 1}.get(y, 0), y in {z: 1}"),
    "in a list": ("y = z = x * 1", "y = y * 2", "y, any(y is each for each in [x, z])"),
    "gradients off": (
        "y = x",
        "torch.set_grad_enabled(False)",
        "(m(y).requires_grad, torch.set_grad_enabled(True))[0]",
    ),
    "a gradient read": (
        "m.weight.grad = None; m(x).sum().backward()",
        "m.weight.grad.mul_(2)",
        "m.weight.grad.clone()",
    ),
    "written through another name": ("y = z = x * 1", "y = y * 2", "y.add_(1), z, y"),
}


def shown(value):
    if isinstance(value, tuple):
        return tuple(map(shown, value))
    if isinstance(value, torch.Tensor):
        return value.detach().tolist(), tuple(value.shape), value.stride(), value.requires_grad, vars(value)
    return value


@pytest.mark.parametrize("name", PROGRAMS)
def test_gives_what_plain_python_gives(name):
    before, inside, after = PROGRAMS[name]
    torch.manual_seed(0)
    world = {"torch": torch, "m": nn.Linear(3, 3)}
    exec(f"def step(x, flag):\n  {before}\n  if flag > 0:\n    {inside}\n  return {after}", world)
    captured = capture(world["step"])
    for i, flag in enumerate([1, 1, 0, 0, 1, 0]):
        x, given = torch.arange(12.0).view(4, 3) + i, torch.tensor(flag)
        want = shown((world["step"](x, given), x))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="moebius")
            assert shown((captured(x, given), x)) == want, f"call {i}"

"""Hooks that a step registers, and removes or leaves: captured, or a graph break whose hint says what to do.

Six calls of each beside plain Python (``tests/support/tables.py``).
"""

# ruff: noqa: B006, B007, B008, B018, B023, B028, B904, B905, E731, E741, E742, F841 (as users write)

from __future__ import annotations

import pytest
import torch
from tables import hold, net
from torch import nn


def h_tensor():
    def step(x):
        y = x * 2
        h = y.register_hook(lambda g: g * 3)
        z = (y * y).sum()
        return z

    return step, []


def h_tensor_removed():
    def step(x):
        y = x * 2
        h = y.register_hook(lambda g: g * 3)
        z = (y * y).sum()
        h.remove()
        return z

    return step, []


def h_param_inside():
    m = nn.Linear(4, 4)

    def step(x):
        h = m.weight.register_hook(lambda g: g * 0.5)
        m(x).sum().backward()
        h.remove()
        return m.weight.grad.clone()

    return step, [m]


def h_forward():
    m = net()
    acts = {}

    def step(x):
        def hook(mod, inp, out):
            acts["a"] = out.detach()

        h = m[0].register_forward_hook(hook)
        y = m(x)
        h.remove()
        return y, acts["a"] * 2

    return step, [m, acts]


def h_forward_many():
    m = net()

    def step(x):
        feats = []
        hs = [l.register_forward_hook(lambda mod, i, o: feats.append(o)) for l in m]
        try:
            y = m(x)
        finally:
            for h in hs:
                h.remove()
        return y, sum(f.sum() for f in feats), len(m[0]._forward_hooks)

    return step, [m]


def h_pre():
    m = net()

    def step(x):
        with m[0].register_forward_pre_hook(lambda mod, args: (args[0] * 2,)):
            y = m(x)
        return y + m(x)

    return step, [m]


def h_keep():
    m = net()
    hs = []

    def step(x):
        hs.append(m.register_forward_hook(lambda mod, i, o: o + 1))
        y = m(x)
        if len(hs) > 2:
            hs.pop(0).remove()
        return y, len(m._forward_hooks)

    return step, [m]


def h_kept_twice():
    m = net()
    hs = []
    seen = []

    def step(x):
        hs.append(m[0].register_forward_hook(lambda mod, i, o: seen.append(o.shape[0])))
        y = m(x)
        return y, len(seen), len(hs), len({h.id for h in hs})

    return step, [m, seen]


def h_exception():
    m = net()
    n = [0]

    def step(x):
        n[0] += 1
        h = m[0].register_forward_pre_hook(lambda mod, i: None)
        try:
            y = m(x)
            if n[0] % 2:
                raise KeyError("k")
        except KeyError:
            return x
        finally:
            h.remove()
        return y, len(m[0]._forward_pre_hooks)

    return step, [m, n]


def h_op_fails():
    m = net()
    n = [0]
    left = []

    def step(x):
        n[0] += 1
        h = m[0].register_forward_hook(lambda mod, i, o: o * 2)
        left.append(h)
        y = m(x)
        z = torch.embedding(x.detach(), torch.tensor([n[0]]))
        h.remove()
        return y + z.sum(), len(m[0]._forward_hooks)

    return step, [m, n]


def h_optim():
    m = net()
    opt = torch.optim.SGD(m.parameters(), 0.1)
    seen = []

    def step(x):
        h = opt.register_step_post_hook(lambda o, a, k: seen.append(len(a)))
        m(x).sum().backward()
        opt.step()
        opt.zero_grad()
        h.remove()
        return x * 1

    return step, [m, seen]


def h_state_dict():
    m = net()

    def step(x):
        h = m.register_forward_hook(lambda mod, a, kw, o: o + len(kw), with_kwargs=True, always_call=True)
        y = m(x)
        h.remove()
        g = m.register_forward_hook(lambda mod, a, o: o * 3, prepend=True)
        z = m(x)
        g.remove()
        g.remove()
        return y, z, g.id in m._forward_hooks

    return step, [m]


def hp_each():
    m = net()

    def step(x):
        hs = [p.register_hook(lambda g, k=i: g * (k + 1)) for i, p in enumerate(m.parameters())]
        m(x).sum().backward()
        for h in hs:
            h.remove()
        gs = [p.grad.clone() for p in m.parameters()]
        m.zero_grad()
        m(x).sum().backward()
        return gs

    return step, [m]


def hp_stays():
    m = nn.Linear(4, 4)

    def step(x):
        m.weight.register_hook(lambda g: g * 2)
        m(x).sum().backward()
        return m.weight.grad.clone()

    return step, [m]


def hp_input():
    def step(x):
        h = x.register_hook(lambda g: g * 2)
        y = (x * x).sum()
        return y

    return step, []


def hp_module():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            y = self.l(x)
            if y.requires_grad:
                y.register_hook(self.scale)
            return y

        def scale(self, g):
            return g * 0.5

    m = M()

    def step(x):
        m(x).sum().backward()
        return m.l.weight.grad.clone()

    return step, [m]


def h_saved():
    m = nn.Linear(4, 4)
    m.weight.register_hook(lambda g: g.clamp(-1, 1))

    def step(x):
        m(x).pow(2).sum().backward()
        return m.weight.grad.clone()

    return step, [m]


def h_log():
    norms = []

    def step(x):
        y = x * 2
        y.register_hook(lambda g: norms.append(g.norm().item()))
        (y * y).sum().backward()
        return y.detach()

    return step, [norms]


def h_full_backward():
    m = nn.Linear(4, 4)
    seen = []

    def step(x):
        h = m.register_full_backward_hook(lambda mod, gi, go: seen.append(len(gi)))
        m(x).sum().backward()
        h.remove()
        return m.weight.grad.clone()

    return step, [m, seen]


def h_across_break():
    m = net()
    seen = []

    def step(x):
        h = m[0].register_forward_hook(lambda mod, i, o: seen.append(o.shape[0]))
        y = m(x)
        b = y.data_ptr() > 0
        y = m(y)
        h.remove()
        return m(y), b, len(m[0]._forward_hooks)

    return step, [m, seen]


def hp_break():
    m = nn.Linear(4, 4)

    def step(x):
        h = m.weight.register_hook(lambda g: g * 2)
        b = m.weight.data_ptr() > 0
        m(x).sum().backward()
        h.remove()
        return m.weight.grad.clone()

    return step, [m]


def hp_existing():
    m = nn.Linear(4, 4)
    m.weight.register_hook(lambda g: g + 1)

    def step(x):
        h = m.weight.register_hook(lambda g: g * 3)
        m(x).sum().backward()
        h.remove()
        return m.weight.grad.clone(), len(m.weight._backward_hooks)

    return step, [m]


def hp_stays_handle():
    m = nn.Linear(4, 4)
    hs = []

    def step(x):
        if len(hs) > 1:
            hs.pop().remove()
        hs.append(m.weight.register_hook(lambda g: g * 2))
        m(x).sum().backward()
        return m.weight.grad.clone()

    return step, [m]


TABLE = {
    h_tensor: None,
    h_tensor_removed: None,
    h_param_inside: None,
    h_forward: None,
    h_forward_many: None,
    h_pre: None,
    h_keep: None,
    h_kept_twice: None,
    h_exception: None,
    h_op_fails: None,
    h_optim: None,
    h_state_dict: None,
    hp_each: None,
    hp_stays: None,
    hp_input: None,
    hp_module: None,
    h_saved: None,
    h_log: ("gradient hook changes Python state", "natively"),
    h_full_backward: ("module backward hook", "output.register_hook"),
    h_across_break: ("tensor read as a number", "keep them in tensors"),
    hp_break: ("tensor read as a number", "keep them in tensors"),
    hp_existing: ("Tensor._backward_hooks", "outside of the step"),
    hp_stays_handle: ("result cannot be rebuilt", "return tensors"),
}


@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break_that_says_what_to_do(recipe):
    hold(recipe, TABLE[recipe])

"""``torch.autograd.Function`` as it is written: in the graph, or a graph break that says why.

Six calls of each beside plain Python (``tests/support/tables.py``), and equal to the bit with backend="eager".
"""

# ruff: noqa: E731 (as users write)

from __future__ import annotations

import plain_python
import pytest
import torch
import torch.nn.functional as F
from tables import ROWS, hold, net
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Square(Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Mapped(Square):
    @staticmethod
    def vmap(info, in_dims, x):
        return Mapped.apply(x), in_dims[0]


class Generated(Square):
    generate_vmap_rule = True


class Forward(Square):
    @staticmethod
    def jvp(ctx, tangent):
        return tangent


class WithNone(Function):
    """Outputs that are no tensors, between those that are."""

    @staticmethod
    def forward(ctx, x, aux):
        return None, x * 2, "name", aux * 1, 3

    @staticmethod
    def backward(ctx, nothing, g, name, of_aux, number):
        assert nothing is name is number is None
        return g * 2, of_aux * 5


class Constants(Function):
    @staticmethod
    def forward(ctx, x, k, name, settings, flag=True):
        ctx.k, ctx.settings, ctx.name = k, settings, name
        return x * k * settings["a"]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k * ctx.settings["a"], None, None, None, None


class Attributes(Function):
    """A tensor kept in an attribute, which torch does not look at: it may change, and may be asked for twice."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.w, None


class Largest(Function):
    @staticmethod
    def forward(ctx, x):
        value, index = x.max(-1)
        mask = x > 0.5
        ctx.mark_non_differentiable(index, mask)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return value, index, mask

    @staticmethod
    def backward(ctx, g, of_index, of_mask):
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape).scatter(1, index[:, None], g[:, None])


class SavesAll(Function):
    @staticmethod
    def forward(ctx, x, w):
        h = x @ w.t()
        y = h.tanh()
        ctx.save_for_backward(x, w, h, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, w, h, y = ctx.saved_tensors
        d = g * (1 - y * y)
        return d @ w if ctx.needs_input_grad[0] else None, d.t() @ x


class Recomputes(Function):
    """As a checkpoint written by hand: forward once more in backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.silu(x @ w.t())

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            y = F.silu(x @ w.t())
        return torch.autograd.grad(y, (x, w), g)


class KeepsHistory(Function):
    """Its backward differentiates what forward has recorded."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.sin()
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, g):
        return torch.autograd.grad(ctx.y, ctx.x, g)[0]


class RunsBackward(Function):
    """As torch's reentrant checkpoint: its backward adds to the gradients of parameters."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.run(x).backward(g)
        return None, x.grad


class AuxiliaryLoss(Function):
    """How routers add a loss of their own to the graph."""

    scale = torch.tensor(1.0)

    @staticmethod
    def forward(ctx, out, loss):
        ctx.save_for_backward(loss)
        return out

    @staticmethod
    def backward(ctx, g):
        return g, torch.ones_like(ctx.saved_tensors[0]) * AuxiliaryLoss.scale


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Undefined(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return sum(g * k for g, k in ((a, 2), (b, 3)) if g is not None)


class Counts(Function):
    calls: list[int] = []

    @staticmethod
    def forward(ctx, x):
        Counts.calls.append(1)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Nothing(Function):
    @staticmethod
    def forward(ctx, x):
        return None

    @staticmethod
    def backward(ctx, g):
        return None


def gradient_of(function, *more):
    """A step that applies the function, and reads the gradient that x then has."""

    def recipe():
        def step(x):
            y = function.apply(x, *more)
            parts = y if isinstance(y, tuple) else (y,)
            sum(t.sum() for t in parts if t.requires_grad).backward()
            return x.grad * 1, [t.detach() for t in parts]

        return step, []

    recipe.__name__ = function.__name__
    return recipe


def with_weight(function):
    def recipe():
        m = net()

        def step(x):
            m.zero_grad()
            function.apply(x, m[0].weight).pow(2).sum().backward()
            return m[0].weight.grad.clone(), x.grad * 1

        return step, [m]

    recipe.__name__ = function.__name__
    return recipe


def with_none():
    def step(x):
        nothing, y, name, aux, number = WithNone.apply(x, x * 3)
        (y + aux).sum().backward()
        return x.grad * 1, nothing, name, number, y.requires_grad

    return step, []


def kept_in_an_attribute():
    w = torch.ones(4)

    def step(x):
        y = Attributes.apply(x, w)
        w.mul_(3)
        y.sum().backward()
        y.sum().backward()
        return x.grad * 1

    return step, [w]


def saved_and_changed():
    w = torch.ones(4, 4)

    def step(x):
        y = SavesAll.apply(x, w)
        w.mul_(3)
        try:
            y.sum().backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)

    return step, [w]


def several():
    def step(x):
        sum(Square.apply(t).sum() for t in (x, x * 2, Square.apply(x))).backward()
        return x.grad * 1

    return step, []


def auxiliary():
    m = net()

    def step(x):
        m.zero_grad()
        y = m(x)
        AuxiliaryLoss.apply(y, y.pow(2).mean()).sum().backward()
        return m[0].weight.grad.clone()

    return step, [m]


def runs_backward():
    m = net()

    def step(x):
        RunsBackward.apply(m, x * 1).pow(2).sum().backward()
        return m[0].weight.grad.clone(), x.grad * 1

    return step, [m]


def in_place():
    def step(x):
        h = x * 1
        (InPlace.apply(h) + h).sum().backward()
        return x.grad * 1

    return step, []


def counts():
    Counts.calls.clear()

    def step(x):
        Counts.apply(x).sum().backward()
        return x.grad * 1

    return step, [Counts.calls]


def gives_nothing():
    return lambda x: (Nothing.apply(x), x * 2), []


NATIVELY = ("autograd.Function", "natively")
TABLE = {
    gradient_of(Square): None,
    gradient_of(Mapped): None,
    gradient_of(Generated): None,
    gradient_of(Constants, 3, "n", {"a": 2.0}): None,
    gradient_of(Largest): None,
    gradient_of(KeepsHistory): None,
    with_weight(SavesAll): None,
    with_weight(Recomputes): None,
    with_none: None,
    kept_in_an_attribute: None,
    saved_and_changed: None,
    several: None,
    auxiliary: None,
    gradient_of(Forward): NATIVELY,
    gradient_of(Undefined): NATIVELY,
    in_place: NATIVELY,
    gives_nothing: ("autograd.Function", "return a clone"),
    counts: ("autograd.Function changes Python state", "natively"),
    runs_backward: ("Tensor.backward", "torch.autograd.grad"),
}


@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break(recipe):
    hold(recipe, TABLE[recipe])
    plain_python.compare(recipe, backend="eager", sizes=ROWS)

"""What the backward of an ``autograd.Function`` reads, changed between call and backward (Megatron's loss scalers)."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moebius import capture, stats

KINDS = {  # kind of state: begins as, how it is read, how it is set
    "attribute of a class": (
        lambda: type("S", (), {"scale": 1.0}),
        lambda s: s.scale,
        lambda s, v: setattr(s, "scale", v),
    ),
    "attribute": (lambda: SimpleNamespace(scale=1.0), lambda s: s.scale, lambda s, v: setattr(s, "scale", v)),
    "dict": (lambda: {"scale": 1.0}, lambda s: s["scale"], lambda s, v: s.__setitem__("scale", v)),
    "list": (lambda: [1.0], lambda s: s[0], lambda s, v: s.__setitem__(0, v)),
    "module": (lambda: Holder(), lambda s: s.scale, lambda s, v: setattr(s, "scale", v)),
    "attribute of a tensor": (
        lambda: torch.ones(()),
        lambda s: getattr(s, "scale", 1.0),
        lambda s, v: setattr(s, "scale", v),
    ),
    "tensor": (
        lambda: torch.ones(()),
        lambda s: s,
        lambda s, v: s.fill_(v) if type(v) is float else s.copy_(v.sum()),
    ),
}
VALUES = {
    "number": lambda loss, x: 3.0,
    "of the loss": lambda loss, x: loss.detach() * 0.5,
    "of the batch": lambda loss, x: x.sum() / len(x),
    "kept by forward": lambda loss, x: x,
    "as it was": lambda loss, x: 1.0,
}
WAYS = ("plain", "saved is written", "checkpointed")


class Holder(nn.Module):
    scale = 1.0


def backward(loss, m, change):
    change("now")
    loss.sum().backward()


def twice(loss, m, change):
    change("now")
    loss.sum().backward(retain_graph=True)
    change("back")
    loss.sum().backward(retain_graph=True)
    change("now")
    loss.sum().backward()


def grad(loss, m, change):
    change("now")
    parameters = list(m.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss.sum(), parameters, allow_unused=True), strict=True):
        p.grad = g


def in_a_branch(loss, m, change):
    if len(list(m.parameters())) > 1:
        change("now")
    loss.sum().backward()


def after_a_break(loss, m, change):
    change("now")
    print(end="", file=open("/dev/null", "w"))  # noqa: SIM115
    loss.sum().backward()


def changed_after_a_break(loss, m, change):
    print(end="", file=open("/dev/null", "w"))  # noqa: SIM115
    change("now")
    loss.sum().backward()


def outside(loss, m, change):
    """The caller changes it and calls backward."""


def changed_before_outside(loss, m, change):
    change("now")


ENDS = (backward, twice, grad, in_a_branch, after_a_break, changed_after_a_break, outside, changed_before_outside)


def program(kind, value, way, used, end, wrap):
    torch.manual_seed(0)
    begins, read, put = KINDS[kind]
    state = begins()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            by = read(state)
            return g * w * by, g * x * (1.0 if by is None else by)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(3))

        def forward(self, x):
            if way == "checkpointed":
                return checkpoint(Scaled.apply, x, self.w, use_reentrant=False) + 1
            return Scaled.apply(x, self.w) + 1

    model = nn.ModuleList([Layer() for _ in range(3)])

    def step(x):
        put(state, 1.0)
        x = x * 2
        outputs = [layer(x) for layer in model]
        loss = outputs[used] if used < 3 else outputs[0] * outputs[1] * outputs[2]
        if way == "saved is written":
            x.add_(1)
        end(loss, model, lambda now: put(state, VALUES[value](loss, x) if now == "now" else 1.0))
        return loss if end in (outside, changed_before_outside) else loss.detach()

    step, found = wrap(step), []
    for size in (4, 4, 2, 3):
        x = torch.rand(size, 3)
        try:
            found.append((loss := step(x)).tolist())
            if loss.requires_grad:
                put(state, VALUES[value](loss, x) if end is outside else 5.0)
                loss.sum().backward()
        except RuntimeError as error:
            found.append(str(error)[:60])
        found.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
    return found, step


@pytest.mark.share(22)
@pytest.mark.parametrize("kind, value, way, used, end", [*itertools.product(KINDS, VALUES, WAYS, (0, 2, 3), ENDS)])
def test_as_in_python(kind, value, way, used, end):
    want, _ = program(kind, value, way, used, end, lambda step: step)
    got, step = program(kind, value, way, used, end, lambda step: capture(step, backend="eager"))
    assert got == want
    if way == "plain" and value != "kept by forward" and kind != "tensor" and end is backward:
        assert stats(step).breaks == 0


PLAIN = {
    "of the context": lambda ctx, g: g * ctx.factor,
    "a library's constant": lambda ctx, g: g * math.pi * ctx.factor,
    "functions": lambda ctx, g: F.softmax(g, -1) * torch.sigmoid(g).to(torch.float32),
    "a function of the user's": lambda ctx, g: tripled(g),
}


def tripled(g):
    return g * 3


@pytest.mark.parametrize("reads", PLAIN)
def test_what_reads_no_state_is_in_the_graph(reads):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.factor = 2.0
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return PLAIN_READS[0](ctx, g)

    PLAIN_READS[:] = [PLAIN[reads]]
    step = capture(lambda w: Own.apply(w).sin(), backend="eager")
    for _ in range(3):
        ours, plain = torch.rand(4, requires_grad=True), None
        plain = ours.detach().clone().requires_grad_()
        step(ours).sum().backward()
        Own.apply(plain).sin().sum().backward()
        assert torch.equal(ours.grad, plain.grad)
    assert stats(step).breaks == 0


PLAIN_READS = []
FACTOR = 3.0


class ByAGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * FACTOR


@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_a_global_that_changes_before_the_callers_backward_is_an_error(backend, monkeypatch):
    """Most are constants, for which nothing is to run natively. One that was set is seen when backward runs."""
    step = capture(lambda w: ByAGlobal.apply(w).sin(), backend=backend)
    for _ in range(2):
        w = torch.zeros(2, requires_grad=True)
        step(w).sum().backward()
        assert w.grad.tolist() == [3.0, 3.0]
    assert stats(step).breaks == 0
    w = torch.zeros(2, requires_grad=True)
    found = step(w)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    with pytest.raises(RuntimeError, match="FACTOR, which backward of ByAGlobal reads, was changed"):
        found.sum().backward()
    step(w).sum().backward()
    assert w.grad.tolist() == [4.0, 4.0]

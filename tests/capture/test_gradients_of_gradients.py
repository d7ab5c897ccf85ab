"""``torch.autograd.grad`` in every form: of results in mid-graph, with None among the gradients, differentiated again.

Six calls of each beside plain Python (``tests/support/tables.py``), and equal to the bit with backend="eager".
"""

# ruff: noqa: E731, E741 (as users write)

from __future__ import annotations

import plain_python
import pytest
import torch
import torch.nn.functional as F
from gradient_programs import FusedExperts, tanh_net
from tables import ROWS, hold
from torch import nn
from torch.utils.checkpoint import checkpoint

import moebius.lowering.pipeline
import moebius.tensors.gradients
from moebius import capture, explain, stats

grad = torch.autograd.grad


def fresh(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def unused():
    m, other = tanh_net(), nn.Linear(2, 2)

    def step(x):
        gradients = grad(m(x).sum(), [*m.parameters(), *other.parameters()], allow_unused=True)
        return [None if g is None else g * 2 for g in gradients], sum(g is None for g in gradients)

    return step, [m, other]


def materialized():
    m, other = tanh_net(), nn.Linear(2, 2)
    return lambda x: [g + 1 for g in grad(m(x).sum(), [m[0].bias, other.weight], materialize_grads=True)], [m, other]


def in_the_middle():
    m = tanh_net()

    def step(x):
        h = m[0](x)
        a = m[1](h)
        loss = m[2](a).pow(2).sum()
        first = grad(loss, [h, a, m[0].weight], retain_graph=True)
        loss.backward()
        return [g * 2 for g in first], m[0].weight.grad.clone()

    return step, [m]


def penalty():
    """WGAN-GP."""
    critic = tanh_net()
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad()
        mixed = (x.detach() * 0.5).requires_grad_(True)
        score = critic(mixed)
        (g,) = grad(
            outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True,
            only_inputs=True,
        )  # fmt: skip
        loss = critic(x.detach()).mean() + 10 * ((g.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [critic]


def scaled_penalty():
    m = tanh_net()
    optimizer, scaler = torch.optim.Adam(m.parameters()), torch.amp.GradScaler("cpu", init_scale=128.0)

    def step(x):
        x = fresh(x)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = m(x).float().pow(2).mean()
        (scaled,) = grad(scaler.scale(loss), x, create_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss + (scaled / scaler.get_scale()).norm()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step, [m]


def hessian_vector():
    m = tanh_net()
    vector = [torch.ones_like(p) for p in m.parameters()]

    def step(x):
        parameters = list(m.parameters())
        first = grad(m(x).pow(2).mean(), parameters, create_graph=True)
        return grad(sum((g * v).sum() for g, v in zip(first, vector, strict=True)), parameters)

    return step, [m]


def inner_loop():
    """MAML."""
    m = tanh_net()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def step(x):
        slow = dict(m.named_parameters())
        inner = torch.func.functional_call(m, slow, (x,)).pow(2).mean()
        gradients = grad(inner, list(slow.values()), create_graph=True)
        fast = {name: p - 0.01 * g for (name, p), g in zip(slow.items(), gradients, strict=True)}
        outer = torch.func.functional_call(m, fast, (x,)).pow(2).mean()
        optimizer.zero_grad()
        outer.backward()
        optimizer.step()
        return outer.detach()

    return step, [m]


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, at):
        energy = self.out(self.inner(at).tanh()).sum()
        return energy, -grad(energy, at, create_graph=True)[0]


def forces():
    """Two models of one class: the second is not written again from the first, as gradients go through it."""
    first, second = Energy(), Energy()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])

    def step(x):
        at = fresh(x)
        (e, f), (e_2, f_2) = first(at), second(at)
        optimizer.zero_grad()
        loss = (e + e_2).pow(2) + (f - 1).pow(2).mean() + (f_2 + 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [first, second]


def three_times():
    def step(x):
        first, = grad((x**4).sum(), x, create_graph=True)
        second, = grad(first.sum(), x, create_graph=True)
        return first.detach(), second.detach(), grad(second.sum(), x)[0], first.requires_grad

    return step, []


def through_a_checkpoint():
    m = tanh_net()

    def step(x):
        x = fresh(x)
        y = checkpoint(m, x, use_reentrant=False).pow(2).sum()
        (g,) = grad(y, x, create_graph=True)
        (y + g.pow(2).sum()).backward()
        return m[0].weight.grad.clone()

    return step, [m]


def kept_before_a_checkpoint():
    m = tanh_net()

    def step(x):
        m.zero_grad()
        h = m[0](x)
        h.retain_grad()
        (checkpoint(m[2], h.tanh(), use_reentrant=False) + checkpoint(m[2], h, use_reentrant=False)).sum().backward()
        return h.grad * 1, m[0].weight.grad.clone()

    return step, [m]


def strides():
    def step(x):
        a, = grad(x.sum(), x)
        b, = grad((x.t() @ torch.ones(x.shape[0], 2)).pow(2).sum(), x)
        return a.stride(), b.stride(), a.is_contiguous(), a * 2, b * 2

    return step, []


def one_object():
    def step(x):
        v, y, a, b = torch.ones_like(x), x + 1, x * 2, x * 3
        of_a, of_b = grad((a + b).sum(), [a, b])
        return grad(y, x, v)[0] is v, of_a is of_b, of_a * 2

    return step, []


def from_outside():
    m = nn.Linear(4, 4)
    held = list(m.parameters())

    def step(x):
        first, second = grad(m(x).sum(), m.parameters()), grad(m(x).pow(2).sum(), held)
        m(x).pow(3).sum().backward(inputs=held)
        torch.autograd.backward(loss for loss in [m(x).sum()])
        return first[0] * 2, second[1], m.weight.grad.clone()

    return step, [m]


def without_recording():
    m = nn.Linear(4, 4)

    def step(x):
        y = m(x).pow(2).sum()
        with torch.no_grad():
            (g,) = grad(y, m.weight, create_graph=True)
        return g.requires_grad, g.pow(2).sum()

    return step, [m]


def other_hooks():
    """Hooks that autograd.grad does not call."""
    m = nn.Linear(4, 4)
    m.weight.register_hook(lambda g: g * 100)
    m.bias.register_post_accumulate_grad_hook(lambda p: None)
    return lambda x: (grad(m(x).pow(2).sum(), m.bias)[0] * 2, grad(m(x).pow(2).sum(), x)[0]), [m]


def hooked():
    m = nn.Linear(4, 4)
    m.weight.register_hook(lambda g: g * 100)
    return lambda x: grad(m(x).pow(2).sum(), m.weight)[0] * 2, [m]


def changed_in_between():
    m = tanh_net()

    def step(x):
        y = m(x).pow(2).sum()
        with torch.no_grad():
            m[2].weight.mul_(0.5)
        try:
            return grad(y, x, create_graph=True)[0]
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)

    return step, [m]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def of_a_function():
    return lambda x: grad(Square.apply(x).sum(), x)[0] * 2, []


def of_a_function_twice():
    def step(x):
        (g,) = grad(Square.apply(x).sum(), x, create_graph=True)
        g.pow(2).sum().backward()
        return x.grad * 1

    return step, []


TABLE = {
    unused: None,
    materialized: None,
    in_the_middle: None,
    penalty: None,
    scaled_penalty: None,
    hessian_vector: None,
    inner_loop: None,
    forces: None,
    three_times: None,
    through_a_checkpoint: None,
    kept_before_a_checkpoint: None,
    strides: None,
    one_object: None,
    from_outside: None,
    without_recording: None,
    other_hooks: None,
    of_a_function: None,
    hooked: ("torch.autograd.grad", "natively"),
    changed_in_between: ("operator that raises", "natively"),
    # what runs natively between its two backwards may change what the function reads
    of_a_function_twice: ("autograd.Function", "give it as an argument"),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break(recipe):
    hold(recipe, TABLE[recipe])
    plain_python.compare(recipe, backend="eager", sizes=ROWS)


# ----------------------------------------------------------------------------------------------------------------------
# Through experts
# ----------------------------------------------------------------------------------------------------------------------


def first_order(loss, x, y, m):
    return loss * (1 + grad(loss, x, retain_graph=True)[0].norm().detach())


def of_the_output(loss, x, y, m):
    return loss * (1 + grad(loss, y, retain_graph=True)[0].norm().detach())


def second_order(loss, x, y, m):
    return loss + grad(loss, x, create_graph=True)[0].pow(2).sum()


def of_all(loss, x, y, m):
    gradients = grad(loss, list(m.parameters()), allow_unused=True, retain_graph=True)
    return loss * sum(g.norm().detach() for g in gradients if g is not None)


def inputs_of_backward(loss, x, y, m):
    loss.backward(inputs=[y, m.router.weight], retain_graph=True)
    return loss * 2


WAYS = [first_order, of_the_output, second_order, of_all, inputs_of_backward]


def trained(capturing, how, way):
    torch.manual_seed(0)
    m = FusedExperts(how).double()
    optimizer = torch.optim.SGD(m.parameters(), lr=1e-3)

    def step(x):
        x = fresh(x)
        optimizer.zero_grad()
        y = m(x)
        loss = way(y.pow(2).mean(), x, y, m)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = capturing(step)
    losses = [run(torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i))) for i in range(4)]
    return run, [*losses, *m.parameters()]


@pytest.mark.share(10)
@pytest.mark.filterwarnings("error:moebius could not capture")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("how", ["hits", "range", "dense", "product"])
def test_through_experts(how, way):
    """In float64: grouped experts, and experts that stay as they are written where one operator cannot say it."""
    captured, ours = trained(capture, how, way)
    _, plain = trained(lambda step: step, how, way)
    for got, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert stats(captured).breaks == 0


@pytest.mark.share(3)
@pytest.mark.filterwarnings("error:moebius could not capture")
@pytest.mark.parametrize("asking", ["nothing", "grad", "retain_grad", "inputs"])
def test_inside_of_dense_experts(asking, monkeypatch):
    """The gradient of what one expert computes: in one operator for all there is none."""

    def step(x):
        weight, chosen = router(x).softmax(-1).topk(2)
        dense = torch.zeros(len(x), 4, dtype=x.dtype).scatter(1, chosen, weight)
        each = [expert(x) for expert in experts]
        loss = sum(y * dense[:, e, None] for e, y in enumerate(each)).pow(2).mean()
        if asking == "nothing":
            return (loss.detach(),)
        if asking == "grad":
            return grad(loss, [each[1], dense])
        each[1].retain_grad()
        loss.backward(inputs=[each[1]] if asking == "inputs" else None)
        return (each[1].grad * 1,)

    torch.manual_seed(0)
    router = nn.Linear(4, 4).double()
    experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(4)).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    captured = capture(step)
    for _ in range(2):
        for got, want in zip(captured(x), step(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert stats(captured).breaks == 0
    regions = explain(capture(step))(x).expert_regions
    assert [r.lowered for r in regions] == [asking == "nothing"]
    assert [bool(r.refusal) for r in regions] == [asking != "nothing"]
    monkeypatch.setattr(moebius.lowering.pipeline, "observed", lambda gm: {})
    monkeypatch.setattr(moebius.lowering.pipeline, "readers_before_writes", lambda gm: {})  # (sees two of the three)
    if asking != "nothing":
        with pytest.raises((AssertionError, RuntimeError, TypeError)):
            torch.testing.assert_close(capture(step)(x), step(x))


@pytest.mark.parametrize("how", ["hits", "range", "dense", "product"])
def test_experts_before_a_graph_break_are_differentiated_twice(how):
    """What is asked for after the break is not known when the experts become one operator."""
    found = []
    for run in (capture, lambda f: f):
        torch.manual_seed(0)
        m = FusedExperts(how).double()

        @run
        def step(x, m):
            loss = m(x).pow(2).sum()
            look(loss)
            (g,) = grad(loss, x, create_graph=True)
            (loss + g.pow(2).sum()).backward()

        for i in range(2):
            x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_()
            step(x, m)
        found.append([x.grad, *(p.grad for p in m.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@moebius.disable
def look(loss):
    """A graph break."""


def test_the_report_says_why_experts_stay():
    m = FusedExperts("hits")

    def step(x):
        (g,) = grad(m(x).pow(2).sum(), x, create_graph=True)
        return g.pow(2).sum()

    report = explain(capture(step))(torch.randn(6, 4, requires_grad=True))
    assert "create_graph" in report.expert_regions[0].refusal


class Apart(nn.Module):
    """Experts of their own modules: those that no token chose get no gradient."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 4, bias=False), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for e in F.one_hot(chosen, 4).sum((0, 1)).nonzero()[:, 0]:
            token, _ = torch.where(chosen == e)
            out.index_add_(0, token, self.experts[e](x[token]) * weight[token])
        return out


def counted():
    m = Apart()

    def step(x):
        y = m(x.detach()).pow(2).sum()
        gradients = grad(y, list(m.parameters()), allow_unused=True)
        with torch.no_grad():
            for p, g in zip(m.parameters(), gradients, strict=True):
                if g is not None:
                    p.sub_(g, alpha=0.1)
        return y.detach(), [g is None for g in gradients]

    return step, [m]


def test_which_gradients_are_none_is_checked(monkeypatch):
    """Which experts get no gradient is the data's: where it is others than in the first call, Python goes on."""
    captured = plain_python.compared(counted, "eager", ROWS)
    assert any("reaches other tensors" in r.new for r in stats(captured).recompiles)
    monkeypatch.setattr(moebius.tensors.gradients, "require_given", looks_away)
    with pytest.raises(AssertionError, match="call"):
        plain_python.compare(counted, "eager", ROWS)


def looks_away(gradients, expected):
    """In the place of ``require_given``."""

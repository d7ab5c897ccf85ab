"""``register_post_accumulate_grad_hook``: an optimizer for each parameter that steps in backward, and other hooks.

Six calls of each beside plain Python (``tests/support/tables.py``), equal to the bit with backend="eager".
"""

from __future__ import annotations

import plain_python
import pytest
import torch
from gradient_programs import FusedExperts
from tables import ROWS, hold, net
from torch import nn

import moebius
from moebius import capture, explain, stats
from moebius.kernels import experts_op
from moebius.lowering.experts import saved_for_backward
from moebius.tensors import gradients


def in_backward(model, make, hook=None, **more):
    """The step, and all that it reaches, where each parameter has an optimizer of its own."""
    optimizers = {p: make([p]) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook(p, optimizers[p]) if hook else update)

    def step(x):
        loss = model(x.detach() - 0.5).pow(2).mean()
        loss.backward()
        return loss.detach(), [p.grad is None for p in model.parameters()]

    return step, [model, list(optimizers.values())]


def adamw():
    return in_backward(net(), lambda p: torch.optim.AdamW(p, lr=0.1))


def momentum():
    return in_backward(net(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))


def adafactor():
    return in_backward(net(), torch.optim.Adafactor)


def zero_grad_and_clip():
    def hook(p, optimizer):
        def update(q):
            nn.utils.clip_grad_norm_([q], 0.1)
            optimizer.step()
            optimizer.zero_grad()

        return update

    return in_backward(net(), lambda p: torch.optim.Adam(p, lr=0.1), hook)


def tied():
    m = net()
    m.extend([nn.ReLU(), nn.Linear(4, 4)])
    m.append(m[4])
    return in_backward(m, lambda p: torch.optim.AdamW(p, lr=0.1))


def scheduled():
    step, reached = in_backward(net(), lambda p: torch.optim.SGD(p, lr=0.1))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in reached[1]]

    def run(x):
        result = step(x)
        for schedule in schedules:
            schedule.step()
        return result, [s.get_last_lr() for s in schedules]

    return run, reached


def accumulated():
    """Two backwards a step: the second is through what the first has changed."""
    step, reached = in_backward(net(), lambda p: torch.optim.AdamW(p, lr=0.1))
    return lambda x: (step(x), step(x * 2)), reached


def halved(p, optimizer):
    return lambda q: None if q.grad is None else q.grad.mul_(0.5) and None


def hooked(*hooks):
    """An ordinary optimizer, and hooks on each parameter after accumulation."""
    m = net()
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
    for p in m.parameters():
        for hook in hooks:
            p.register_post_accumulate_grad_hook(hook)

    def step(x):
        optimizer.zero_grad()
        loss = m(x.detach()).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), [p.grad * 1 for p in m.parameters()]

    return step, [m, optimizer]


def clamped():
    def hook(p):
        p.grad.clamp_(-0.01, 0.01)

    return hooked(hook)


def before_and_after():
    step, reached = clamped()
    for p in reached[0].parameters():
        p.register_hook(lambda g: g * 3)
    return step, reached


def printed():
    """Hooks of both kinds print numbers and scale by them; the lines stand where plain Python has them."""

    def after(p):
        print(f"after {p.grad.abs().max().item():.5f}", p.shape)
        p.grad.div_(1 + p.grad.norm().item())

    def before(g):
        print("before", g.sum().item())
        return g * g.abs().mean().item()

    step, reached = hooked(after)
    for p in reached[0].parameters():
        p.register_hook(before)
    return step, reached


def twice_through_one_graph():
    m, seen = net(), torch.zeros(())
    for p in m.parameters():

        def hook(q):
            seen.add_(q.grad.norm())
            q.grad.mul_(0.5)

        p.register_post_accumulate_grad_hook(hook)

    def step(x):
        m.zero_grad()
        seen.zero_()
        loss = m(x.detach()).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return seen * 1, [p.grad * 1 for p in m.parameters()]

    return step, [m, seen]


def gradient_from_before():
    """What the hook drops is there already when backward begins, now and then."""
    m, count = net(), [0]
    for p in m.parameters():

        def hook(q):
            q.grad = None

        p.register_post_accumulate_grad_hook(hook)

    def step(x):
        m(x.detach()).pow(2).mean().backward()
        return [p.grad for p in m.parameters()]

    def run(x):
        count[0] += 1
        if count[0] == 3:
            for p in m.parameters():
                p.grad = torch.ones_like(p)
        return step(x)

    return run, [m, count]


def weights_of_what_is_to_come():
    """A hook writes into a weight that backward has yet to multiply with, past autograd's counts."""
    m = net()
    weight = m[0].weight

    def hook(p):
        weight.data.mul_(0.5)

    m[2].bias.register_post_accumulate_grad_hook(hook)

    def step(x):
        x = x.detach().requires_grad_()
        m(x).pow(2).mean().backward()
        return x.grad

    return step, [m]


def fails_in_the_hook():
    m, count = net(), [0]
    for p in m.parameters():

        def hook(q):
            torch.zeros(4).index_select(0, (q.grad.flatten()[:1] * 0).nan_to_num(77).long())
            q.grad = None

        p.register_post_accumulate_grad_hook(hook)

    def step(x):
        count[0] += 1
        try:
            (m(x.detach()) * (float("nan") if count[0] == 3 else 1)).mean().backward()
        except IndexError as error:
            return str(error)
        return x * 1

    return step, [m, count]


# ----------------------------------------------------------------------------------------------------------------------
# What is a graph break
# ----------------------------------------------------------------------------------------------------------------------


def by_a_number():
    """Which way its branch goes only the running hook knows."""
    return hooked(lambda p: (p.grad.mul_(2), None)[1] if p.grad.norm().item() > 0.05 else None)


def logged():
    log = []
    return hooked(lambda p: log.append(p.shape))


def anothers_gradient():
    """One optimizer for all: when a hook runs, nobody knows which of the other gradients are there."""
    m = net()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def hook(p):
        optimizer.step()
        optimizer.zero_grad()

    m[0].weight.register_post_accumulate_grad_hook(hook)

    def step(x):
        m(x.detach()).pow(2).mean().backward()
        return [p.grad is None for p in m.parameters()]

    return step, [m, optimizer]


def sets_a_gradient():
    def hook(p):
        p.grad = p.grad * 2

    return hooked(hook)


def gives_something():
    return hooked(lambda p: p.grad.mul_(0.5))


def added_in_the_step():
    m = net()

    def step(x):
        handles = [p.register_post_accumulate_grad_hook(halved(p, None)) for p in m.parameters()]
        m(x.detach()).pow(2).mean().backward()
        for handle in handles:
            handle.remove()
        return [p.grad * 1 for p in m.parameters()]

    return step, [m]


class Experts(nn.Module):
    """Experts of their own modules: those that no token chose get no gradient, and their hooks do not run."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        weight, chosen = self.router(x * 9).softmax(-1).max(-1)
        out = x * 1.0
        for e, expert in enumerate(self.experts):
            token = torch.where(chosen == e)[0]
            if token.numel() > 0:
                out = out.index_add(0, token, expert(x[token]) * weight[token, None])
        return out


def left_out():
    return in_backward(Experts(), lambda p: torch.optim.AdamW(p, lr=0.1))


TABLE = {
    adamw: None,
    momentum: None,
    adafactor: None,
    zero_grad_and_clip: None,
    tied: None,
    scheduled: None,
    accumulated: None,
    clamped: None,
    before_and_after: None,
    printed: None,
    twice_through_one_graph: None,
    gradient_from_before: None,
    weights_of_what_is_to_come: None,
    fails_in_the_hook: None,
    by_a_number: None,
    logged: ("gradient hook changes Python state", "natively"),
    anothers_gradient: ("gradient hook", "natively"),
    sets_a_gradient: ("Tensor.grad", "set it after"),
    gives_something: ("gradient hook", "natively"),
    added_in_the_step: ("Tensor.register_post_accumulate_grad_hook", "nothing to do"),
    left_out: ("Tensor.backward", "remove the graph breaks"),
}


@pytest.mark.share(7)
@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_as_the_table_says(recipe):
    hold(recipe, TABLE[recipe])


@pytest.mark.parametrize("recipe", [adamw, momentum], ids=lambda r: r.__name__)
def test_one_graph_for_all_steps(recipe):
    step, _ = plain_python.seeded(recipe)
    captured = capture(step, backend="eager", fullgraph=True)
    for i in range(4):
        captured(torch.rand(3, 4, generator=torch.Generator().manual_seed(i)))
    assert (stats(captured).graphs, stats(captured).recompiles, stats(captured).hits) == (1, [], 3)


def test_a_hook_that_does_not_run_is_noticed(monkeypatch):
    """Otherwise an expert that no token chose would have an optimizer's state."""
    monkeypatch.setattr(gradients, "require_accumulated", looks_away)
    with pytest.raises(AssertionError, match="call 0: reached"):
        plain_python.compare(left_out, "eager", ROWS)


def looks_away(waiting):
    """In the place of ``require_accumulated``."""


def test_grouped_experts():
    """In float64: their parameters are updated while backward is on its way to the layers before."""
    found = []
    for run in (capture, lambda step: step):
        torch.manual_seed(0)
        step, (model, _) = in_backward(nn.Sequential(FusedExperts(), FusedExperts()).double(), torch.optim.AdamW)
        step = run(step)
        losses = [step(torch.rand(6, 4, dtype=torch.float64))[0] for _ in range(4)]
        found.append([*losses, *model.parameters()])
        if run is capture:
            assert (stats(step).breaks, stats(step).graphs) == (0, 1)
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    torch.manual_seed(0)
    step, _ = in_backward(nn.Sequential(FusedExperts(), FusedExperts()).double(), torch.optim.AdamW)
    regions = explain(capture(step))(torch.rand(6, 4, dtype=torch.float64)).expert_regions
    assert [r.lowered for r in regions] == [True, True]


class Between(nn.Module):
    """Experts, and a layer after them: when its hooks run, the experts' own backward is still to come."""

    def __init__(self):
        super().__init__()
        self.experts, self.last = FusedExperts(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.experts(x))


def test_a_hook_that_writes_into_experts(monkeypatch):
    """Past autograd's counts: then the loop stays, as what it keeps is another thing than what the operator keeps."""

    def gradients_of(run):
        torch.manual_seed(0)
        model = Between().double()

        def hook(p):
            model.experts.down.data.mul_(2)

        model.last.bias.register_post_accumulate_grad_hook(hook)

        def step(x):
            model(x).pow(2).sum().backward()

        step = run(step)
        step(torch.rand(6, 4, dtype=torch.float64))
        return [p.grad for p in model.parameters()]

    def same():
        pairs = zip(gradients_of(capture), gradients_of(lambda step: step), strict=True)
        return all(torch.allclose(a, b, rtol=1e-9) for a, b in pairs)

    assert same()
    monkeypatch.setattr(saved_for_backward, "writes_of_hooks", lambda node: [])
    monkeypatch.setattr(experts_op, "refuse_changed", lambda *_: None)
    assert not same()


def test_hooks_stay_on_their_tensors():
    step, (model, _) = plain_python.seeded(adamw)
    captured = capture(step)
    hooks = {p: dict(p._post_accumulate_grad_hooks) for p in model.parameters()}
    for _ in range(2):
        captured(torch.rand(3, 4))
        assert {p: dict(p._post_accumulate_grad_hooks) for p in model.parameters()} == hooks
    moebius.disable(step)(torch.rand(3, 4))
    assert all(p.grad is None for p in model.parameters())

"""Gradient hooks, retain_grad() and requires_grad_() inside the step's graph, equal to Python to the bit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import moebius
import moebius.lowering.pipeline
from moebius import capture, explain, stats

F = torch.nn.functional


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)


def plain_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def compare(step, prepare=lambda model: None, steps=4, between=lambda model, i: None, **options):
    """Captured and plain side by side; returns the counts. What ``prepare`` returns is kept alive."""
    mine, plain = build(), build()
    kept = [prepare(mine[0]), prepare(plain[0])]
    captured = capture(step, **{"backend": "eager", **options})
    for i in range(steps):
        for model in (mine[0], plain[0]):
            between(model, i)
        found, expected = captured(*mine, *batch(i)), step(*plain, *batch(i))
        if isinstance(expected, str):
            assert found == expected
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for p, q in zip(mine[0].parameters(), plain[0].parameters(), strict=True):
            assert torch.equal(p, q) and (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
            assert len(p._backward_hooks or ()) == len(q._backward_hooks or ())
    counts = stats(captured)
    assert kept
    return counts


def one_graph(counts, recompiles=0):
    assert (counts.breaks, counts.graphs, len(counts.recompiles)) == (0, 1 + recompiles, recompiles)


# ----------------------------------------------------------------------------------------------------------------------
# Hooks that the step registers
# ----------------------------------------------------------------------------------------------------------------------


def scaled(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model[0](x)
    h.register_hook(lambda g: g * 2)
    h.register_hook(lambda g: g.clamp(-0.01, 0.01))
    loss = F.mse_loss(model[2](model[1](h)), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def bound_late(model, optimizer, x, y):
    optimizer.zero_grad()
    factor = 2.0
    h = model[0](x)
    h.register_hook(lambda g: g * factor)
    loss = F.mse_loss(model[2](model[1](h)), y)
    factor = loss.detach() + 3.0  # what the hook reads when backward calls it
    loss.backward()
    optimizer.step()
    return loss.detach()


def removed(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model[0](x)
    handles = [h.register_hook(lambda g: g * 2), h.register_hook(lambda g: g + 1)]
    handles[0].remove()
    loss = F.mse_loss(model[2](model[1](h)), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def gives_nothing(model, optimizer, x, y):
    optimizer.zero_grad()
    norms = torch.zeros(1)
    h = model[0](x)

    def note(g):
        norms.add_(g.norm())

    h.register_hook(note)
    loss = F.mse_loss(model[2](model[1](h)), y)
    loss.backward()
    optimizer.step()
    return loss.detach(), norms


def twice(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model(x)
    h.register_hook(lambda g: g * 0.5)
    a, b = F.mse_loss(h, y), F.l1_loss(h, y)
    a.backward(retain_graph=True)
    b.backward()
    optimizer.step()
    return a.detach(), b.detach()


def several(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model(x)
    h.register_hook(lambda g: g.sign() * 0.1)
    torch.autograd.backward([F.mse_loss(h, y), h], [None, torch.ones_like(h)])
    optimizer.step()
    return h.detach()


def of_an_input(model, optimizer, x, y):
    x = x.clone().requires_grad_()
    x.register_hook(lambda g: g * 3)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    return x.grad


REGISTERED = [scaled, bound_late, removed, gives_nothing, twice, several, of_an_input]


@pytest.mark.parametrize("step", REGISTERED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_hooks_of_the_step_are_in_its_graph(step, backend):
    one_graph(compare(step, backend=backend))


def lives_on(model, optimizer, x, y):
    h = model[0](x)
    h.register_hook(lambda g: g * 2)
    return F.mse_loss(model[2](model[1](h)), y)


def retained_for_later(model, optimizer, x, y):
    h = model[0](x)
    h.register_hook(lambda g: g * 2)
    loss = F.mse_loss(model[2](model[1](h)), y)
    loss.backward(retain_graph=True)
    return loss


def with_a_break(model, optimizer, x, y):
    h = model[0](x)
    h.register_hook(lambda g: g * 2)
    print(end="", flush=True)
    torch.linalg.norm(h).item().hex()
    return F.mse_loss(model[2](model[1](h)), y)


@pytest.mark.parametrize("step", [lives_on, retained_for_later, with_a_break], ids=lambda f: f.__name__)
def test_a_hook_waits_for_a_backward_outside_of_the_step(step):
    kept = []

    def whole(function):
        model, optimizer = build()
        kept.append((model, optimizer))  # what was captured goes when they die
        function(model, optimizer, *batch(0)).backward()
        return [p.grad for p in model.parameters()]

    captured = capture(step, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(whole(captured), whole(step), rtol=0, atol=0)
    assert stats(captured).graphs >= 1


def changed_in_place(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model[0](x)
    h.register_hook(lambda g: g * 2)
    h.mul_(3)
    loss = F.mse_loss(model[2](model[1](h)), y)
    loss.backward()
    return loss.detach()


def by_autograd_grad(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model[0](x)
    h.register_hook(lambda g: g * 2)
    loss = F.mse_loss(model[2](model[1](h)), y)
    return torch.autograd.grad(loss, list(model.parameters()))


def without_gradient(model, optimizer, x, y):
    try:
        x.detach().register_hook(lambda g: g)
    except RuntimeError as error:
        return str(error)


def wrong_shape(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model[0](x)
    h.register_hook(lambda g: g[:2])
    try:
        model[2](h).sum().backward()
    except RuntimeError as error:
        return str(error)


def branches(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model(x)
    h.register_hook(lambda g: g * 2 if g.sum() > 0 else None)
    loss = F.mse_loss(h, y)
    loss.backward()
    return loss.detach()


def reads_grad(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model(x)
    h.register_hook(lambda g: g if model[2].weight.grad is None else g * 2)
    loss = F.mse_loss(h, y)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    "step",
    [changed_in_place, by_autograd_grad, without_gradient, wrong_shape, branches, reads_grad],
    ids=lambda f: f.__name__,
)
def test_what_is_not_captured_is_as_in_python(step):
    compare(step)


def test_effects_of_a_hook_on_python_break_the_graph():
    seen = []

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        h = model(x)
        h.register_hook(lambda g: seen.append(tuple(g.shape)))
        loss = F.mse_loss(h, y)
        loss.backward()
        return loss.detach()

    assert compare(step).breaks >= 1
    assert seen == [(5, 4)] * 8


# ----------------------------------------------------------------------------------------------------------------------
# Hooks that parameters bring
# ----------------------------------------------------------------------------------------------------------------------


def clip_each(model):
    return [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_hooks_of_parameters_are_in_the_graph(backend):
    one_graph(compare(plain_step, clip_each, backend=backend))


def test_a_hook_that_comes_later_and_one_that_goes():
    handles = []

    def between(model, i):
        if i == 1:
            handles.append(model[0].weight.register_hook(lambda g: g * 2))
        if i == 3:
            handles.pop(0).remove()

    counts = compare(plain_step, clip_each, between=between, steps=5)
    assert counts.breaks == 0 and len(counts.recompiles) >= 1


def test_the_hooks_are_there_again_when_backward_raises():
    model, optimizer = build()
    handle = model[0].weight.register_hook(lambda g: g[:2])
    captured = capture(plain_step, backend="eager")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="hook"):
            captured(model, optimizer, *batch(0))
        assert len(model[0].weight._backward_hooks) == 1
    handle.remove()
    captured(model, optimizer, *batch(0))


# ----------------------------------------------------------------------------------------------------------------------
# Lowering
# ----------------------------------------------------------------------------------------------------------------------

EXPERTS, TOP = 4, 2


def experts_step(x, router, up, down, where):
    logits = x @ router
    weights, chosen = torch.topk(logits.softmax(-1), TOP)
    flat = weights.reshape(-1)
    if where == "weights":
        flat.register_hook(lambda g: g * 10)
    weights = flat.reshape(-1, TOP)
    if where == "kept":
        weights.retain_grad()
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(chosen == e)
        h = F.silu(x[token] @ up[e]) @ down[e]
        if where == "inside" and e == 1:
            h.register_hook(lambda g: g * 10)
        out.index_add_(0, token, h * weights[token, slot, None])
    out.square().mean().backward()
    return out.detach(), weights.grad if where == "kept" else None


def expert_inputs():
    torch.manual_seed(1)
    made = (torch.randn(6, 8), torch.randn(8, EXPERTS), torch.randn(EXPERTS, 8, 6), torch.randn(EXPERTS, 6, 8))
    return [t.double().requires_grad_() for t in made]


def expert_gradients(step, where):
    inputs = expert_inputs()
    found = step(*inputs, where)
    return found, [t.grad for t in inputs]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("where", ["nowhere", "weights", "kept", "inside"])
def test_a_loop_whose_gradients_are_looked_at_keeps_their_way(where):
    expected = expert_gradients(experts_step, where)
    report = None

    def reported(*args):
        nonlocal report
        report = explain(experts_step)(*args)
        return report.result

    torch.testing.assert_close(expert_gradients(reported, where), expected)
    assert report is not None
    if where == "nowhere":
        assert [r.lowered for r in report.expert_regions] == [True]
    torch.testing.assert_close(expert_gradients(capture(experts_step), where), expected)


def test_without_the_check_a_hook_would_miss_its_gradient(monkeypatch):
    """The check in the pipeline, switched off: else nothing shows that it is needed."""
    expected = expert_gradients(experts_step, "inside")
    monkeypatch.setattr(moebius.lowering.pipeline, "observed", lambda gm: {})
    found = expert_gradients(capture(experts_step), "inside")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, expected)


# ----------------------------------------------------------------------------------------------------------------------
# retain_grad() and requires_grad_()
# ----------------------------------------------------------------------------------------------------------------------


def kept_gradient(model, optimizer, x, y):
    optimizer.zero_grad()
    h = model[0](x)
    h.retain_grad()
    before = h.grad
    loss = F.mse_loss(model[2](model[1](h)), y)
    loss.backward()
    optimizer.step()
    return loss.detach(), h.grad, before


def frozen_for_a_while(model, optimizer, x, y):
    optimizer.zero_grad()
    for p in model[0].parameters():
        p.requires_grad_(False)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for p in model[0].parameters():
        p.requires_grad = True
    optimizer.step()
    return loss.detach()


def adversarial(model, optimizer, x, y):
    x = x.detach()
    x.requires_grad = True
    F.mse_loss(model(x), y).backward()
    x = (x + 0.1 * x.grad.sign()).detach()
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("step", [kept_gradient, frozen_for_a_while, adversarial], ids=lambda f: f.__name__)
def test_what_autograd_keeps_and_follows_is_in_the_graph(step):
    one_graph(compare(step))


def read_between(model, optimizer, x, y):
    h = model[0](x)
    h.retain_grad()
    h.sum().backward(retain_graph=True)
    first = h.grad.clone()
    (h * 2).sum().backward()
    return first, h.grad


def no_leaf(model, optimizer, x, y):
    h = model(x)
    try:
        h.requires_grad_(False)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("step", [read_between, no_leaf], ids=lambda f: f.__name__)
def test_their_limits_are_as_in_python(step):
    compare(step)


@pytest.mark.parametrize("step", [scaled, twice, frozen_for_a_while], ids=lambda f: f.__name__)
def test_they_are_exported(step, tmp_path):
    mine, plain = build(), build()
    captured = capture(step)
    for i in range(2):
        captured(*mine, *batch(i)), step(*plain, *batch(i))
    captured.export(tmp_path / "step")
    loaded = moebius.load(tmp_path / "step")
    for i in range(2, 4):
        torch.testing.assert_close(loaded(*batch(i)), step(*plain, *batch(i)), rtol=0, atol=0)


def test_nothing_is_kept():
    """The hooks' graphs hold neither the model nor what the hooks read."""
    model, optimizer = build()
    captured = capture(scaled, backend="eager")
    captured(model, optimizer, *batch(0))
    dead = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert dead() is None


FIRST = {"backward": "q.sum().backward()", "retained": "q.sum().backward(retain_graph=True)", "nothing": "pass"}
SECOND = {
    "grad of another": "torch.autograd.grad(r.sum(), [b])",
    "grad of the leaf": "torch.autograd.grad((a * 5).sum(), [a])",
    "another": "r.sum().backward()",
    "both": "(r + a).sum().backward()",
}


@pytest.mark.parametrize("on", ["q", "r", "a"])
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", FIRST)
def test_a_hook_waits_for_the_backward_that_reaches_it(first, second, on):
    """An earlier backward of another graph does not call it: the next one does, also where it only gives gradients."""
    lines = [
        "def step(x):", "a, b = x.detach().requires_grad_(), x.detach().requires_grad_()", "q, r = a * 2, b * 3",
        f"{on}.register_hook(lambda g: g * 10)", FIRST[first], f"given = {SECOND[second]}",
        "return given, a.grad, b.grad",
    ]  # fmt: skip
    space = {"torch": torch}
    exec("\n    ".join(lines), space)
    expected, found = (call(torch.ones(2)) for call in (space["step"], moebius.capture(space["step"])))
    assert str(found) == str(expected)

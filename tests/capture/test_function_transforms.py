"""``torch.func``: a transform of a function that only computes is a node; of any other, a graph break with its reason.

A captured function inside of a transform runs natively. Neither warns, and answers and gradients are plain Python's.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from gradient_programs import tanh_net
from plain_python import compared, graph_breaks
from seeds import some
from tables import ROWS, hold
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from moebius import capture, stats
from moebius.heap.heap import Heap
from moebius.regions import function_transforms
from moebius.torch_facts import torch_private

W_DD = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
SEEN: list[int] = []
FACTOR = 3.0


def of_a_closure(x_D):
    return (x_D @ W_DD).tanh()


def of_a_module(x_D):
    return NET(x_D)


def of_other_parameters(x_D):
    return functional_call(NET, {name: p * 2 for name, p in NET.named_parameters()}, (x_D,))


def without_gradients(x_D):
    with torch.no_grad():
        scale_D = x_D.exp()
    return x_D * scale_D


def of_its_own_tensor(x_D):
    out_D = torch.zeros_like(x_D)
    out_D[1:] += x_D[1:] * 2
    return out_D + x_D.shape[-1] * FACTOR


def of_a_library(x_D):
    return F.layer_norm(F.silu(x_D), x_D.shape) - F.log_softmax(x_D, -1)


FUNCTIONS = [of_a_closure, of_a_module, of_other_parameters, without_gradients, of_its_own_tensor, of_a_library]


def in_dicts(f):
    def of_dict(named, shift):
        return {"out": f(named["x"]) + shift, "parts": [named["x"], (shift,)]}

    return lambda x_TD: vmap(of_dict, in_dims=({"x": 0}, None), out_dims=0)({"x": x_TD}, W_DD[0])["out"]


TRANSFORMS = {
    "vmap": lambda f: lambda x_TD: vmap(f)(x_TD),
    "vmap, other axes": lambda f: lambda x_TD: vmap(f, in_dims=1, out_dims=1)(x_TD.T),
    "vmap, in chunks": lambda f: lambda x_TD: vmap(f, chunk_size=2)(x_TD),
    "vmap, of dicts": in_dicts,
    "grad": lambda f: lambda x_TD: grad(lambda x: f(x).sum())(x_TD),
    "grad, with more": lambda f: lambda x_TD: grad(lambda x: (f(x).sum(), {"y": x * 2}), has_aux=True)(x_TD)[1]["y"],
    "grad_and_value": lambda f: lambda x_TD: torch.stack(grad_and_value(lambda x: f(x).sum())(x_TD[0])[:1]),
    "grad of grad": lambda f: lambda x_TD: grad(lambda x: grad(lambda y: f(y).pow(2).sum())(x).sum())(x_TD),
    "each row's gradient": lambda f: lambda x_TD: vmap(grad(lambda x: f(x).pow(2).sum()))(x_TD),
    "jacrev": lambda f: lambda x_TD: jacrev(f)(x_TD[0]),
    "jacfwd": lambda f: lambda x_TD: jacfwd(f)(x_TD[0]),
    "hessian": lambda f: lambda x_TD: hessian(lambda x: f(x).sum())(x_TD[0]),
    "jvp": lambda f: lambda x_TD: jvp(f, (x_TD,), (torch.ones_like(x_TD),))[1],
    "jvp of grad": lambda f: lambda x_TD: jvp(grad(lambda x: f(x).sum()), (x_TD,), (torch.ones_like(x_TD),))[1],
    "functionalize": lambda f: lambda x_TD: functionalize(f)(x_TD),
}
NATIVE = {
    "vjp": lambda f: lambda x_TD: (lambda out, back: back(torch.ones_like(out))[0])(*vjp(f, x_TD)),
    "linearize": lambda f: lambda x_TD: linearize(f, x_TD)[1](torch.ones_like(x_TD)),
}


def outcome(step, x_TD):
    """What it gives, and the gradients that a backward through it leaves."""
    leaves = [W_DD, *NET.parameters()]
    for leaf in leaves:
        leaf.grad = None
    try:
        out = step(x_TD)
    except Exception as error:
        return [type(error).__name__, str(error)]
    if out.requires_grad:
        out.pow(2).sum().backward()
    gradients = [leaf.grad is not None and leaf.grad.tolist() for leaf in leaves]
    return [out.detach().tolist(), out.requires_grad, *gradients]


def compare(step, sizes=(3, 3, 3)):
    captured = capture(step, backend="eager")
    for number, size in enumerate(sizes):
        x_TD = torch.randn(size, 4, generator=torch.Generator().manual_seed(number))
        assert outcome(captured, x_TD) == outcome(step, x_TD), number
    return captured


def named(value):
    return value if type(value) is str else value.__name__


BOTH = [(transform, function) for transform in TRANSFORMS for function in FUNCTIONS]


@pytest.mark.share(12)
@pytest.mark.parametrize(("transform", "function"), some(BOTH, 30, "transforms"), ids=named)
def test_a_transform_of_what_only_computes_is_in_the_graph(transform, function):
    step = TRANSFORMS[transform](function)
    captured = compare(lambda x_TD: step(x_TD) * 2)
    native = outcome(step, torch.ones(3, 4))[0] == "RuntimeError"  # torch itself refuses
    if not native:
        assert not graph_breaks(captured) and stats(captured).graphs == 1
    compare(lambda x_TD: step(x_TD) * 2, sizes=(3, 4, 5, 3))


@pytest.mark.parametrize("transform", NATIVE)
def test_a_transform_that_gives_a_function_of_its_own_runs_natively(transform):
    captured = compare(NATIVE[transform](of_a_closure))
    assert "function transform" in {found.reason for found in graph_breaks(captured)}


def appends(x_D):
    SEEN.append(len(SEEN) % 2)
    return x_D * SEEN[0]


def writes_into_its_argument(x_D):
    return x_D.mul_(2) + x_D


def writes_into_what_was_there(x_D):
    with torch.no_grad():
        W_DD.add_(0.5)
    return x_D @ W_DD


def draws_numbers(x_D):
    return x_D + torch.rand_like(x_D)


def draws_in_a_library(x_D):
    return F.multi_head_attention_forward(
        x_D[None], x_D[None], x_D[None], 4, 2, torch.ones(12, 4), None, None, None, False, 0.5, torch.eye(4), None
    )[0][0]


def asks_for_history(x_D):
    return x_D * 2 if x_D.requires_grad else x_D * 3


def asks_for_gradients(x_D):
    return x_D * 2 if torch.is_grad_enabled() else x_D * 3


def asks_which_transform_runs(x_D):
    return x_D * (torch._C._functorch.maybe_current_level() or 7)


def asks_the_data(x_D):
    return x_D * 2 if x_D.sum() > 0 else x_D * 3


def says_something(x_D):
    print("one")
    return x_D * 2


REFUSED = [
    appends, writes_into_its_argument, writes_into_what_was_there, draws_numbers, draws_in_a_library, asks_for_history,
    asks_for_gradients, asks_which_transform_runs, asks_the_data, says_something,
]  # fmt: skip
OVER = {
    "vmap": lambda f: lambda x_TD: vmap(f, randomness="different")(x_TD * 1) + x_TD,
    "grad": lambda f: lambda x_TD: grad(lambda x: f(x).sum())(x_TD[:1].reshape(4) * 1) + x_TD,
    "jvp": lambda f: lambda x_TD: jvp(f, (x_TD[0] * 1,), (x_TD[1],))[1] + x_TD,
}


@pytest.mark.share(14)
@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("transform", OVER)
def test_a_function_that_does_more_is_a_graph_break(transform, function, capsys):
    step = OVER[transform](function)
    captured = capture(step, backend="eager")
    for number in range(3):
        x_TD = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        found = []
        for each in (step, captured):
            SEEN.clear()
            torch.manual_seed(0)
            with torch.no_grad():
                W_DD.fill_(0.5)
            found.append([outcome(each, x_TD), list(SEEN), W_DD.tolist(), capsys.readouterr().out])
        assert found[0] == found[1]
    assert stats(captured).breaks


# what each check is for: without it, a function of the list above gives something else, or none of its reasons
@pytest.mark.parametrize(
    ("switched_off", "function", "transform"),
    [
        ((Heap, "puts_back", lambda self, mark: True), appends, "vmap"),
        ((function_transforms, "draws", lambda *_: False), draws_numbers, "vmap"),
    ],
)
def test_each_refusal_is_needed(switched_off, function, transform, monkeypatch):
    monkeypatch.setattr(*switched_off)
    with pytest.raises(AssertionError):
        for _ in range(2):
            step = OVER[transform](function)
            captured = capture(step, backend="eager")
            for _ in range(3):
                found = []
                for each in (step, captured):
                    SEEN.clear()
                    torch.manual_seed(0)
                    found.append([outcome(each, torch.ones(3, 4)), list(SEEN)])
                assert found[0] == found[1]
            assert "function transform" in " ".join(b.reason for b in graph_breaks(captured))


@pytest.mark.parametrize("make", [jacrev, jacfwd, hessian, functionalize, vmap, grad], ids=lambda f: f.__name__)
def test_what_a_transform_gives_lives_on(make):
    held = []

    def step(x_TD):
        held.append(make(of_a_library))
        return x_TD * 2

    captured = capture(step, backend="eager")
    for each in (step, captured, captured):
        each(torch.ones(2, 4))
    x = torch.ones(4) if make not in (vmap, grad) else torch.ones(2, 4)
    if make is grad:
        with pytest.raises(RuntimeError) as one:
            held[0](x)
        for other in held[1:]:
            with pytest.raises(RuntimeError) as two:
                other(x)
            assert str(one.value) == str(two.value)
    else:
        assert all(torch.equal(other(x), held[0](x)) for other in held)
    assert {f.__name__ for f in held} == {"of_a_library"}


def experts_as_one_batch():
    """Experts of one shape, stacked: one call for all (the ensembles of torch's tutorials)."""
    experts = [tanh_net() for _ in range(3)]
    weights, buffers = stack_module_state(experts)
    base, gate = copy.deepcopy(experts[0]).to("meta"), nn.Linear(4, 3)
    for name, p in weights.items():
        gate.register_parameter(name.replace(".", "_"), nn.Parameter(p.detach()))

    def step(x_TD):
        named = {name: getattr(gate, name.replace(".", "_")) for name in weights}
        out_ETO = vmap(lambda w, b: functional_call(base, (w, b), (x_TD,)))(named, buffers)
        loss = torch.einsum("te,eto->to", gate(x_TD).softmax(-1), out_ETO).pow(2).mean()
        loss.backward()
        return loss.detach()

    return step, [gate]


def learning_to_learn():
    m = tanh_net()

    def step(x_TD):
        weights = dict(m.named_parameters())
        inner = grad(lambda w: functional_call(m, w, (x_TD,)).pow(2).mean())(weights)
        faster = {name: p - 0.1 * inner[name] for name, p in weights.items()}
        loss = functional_call(m, faster, (x_TD + 1,)).pow(2).mean()
        loss.backward()
        return loss.detach()

    return step, [m]


def each_samples_gradient():
    m = tanh_net()

    def loss(weights, x_D):
        return functional_call(m, weights, (x_D[None],)).pow(2).mean()

    def step(x_TD):
        weights = {name: p.detach() for name, p in m.named_parameters()}
        per_sample, losses = vmap(grad_and_value(loss), in_dims=(None, 0))(weights, x_TD.detach())
        norms_T = sum(g.flatten(1).pow(2).sum(1) for g in per_sample.values()).sqrt()
        for name, p in m.named_parameters():
            p.grad = torch.einsum("t,t...->...", (1 / norms_T.clamp(min=1)), per_sample[name])
        return losses

    return step, [m]


def jacobian_of_parameters():
    m = tanh_net()

    def step(x_TD):
        weights = {name: p.detach() for name, p in m.named_parameters()}
        return jacrev(functional_call, argnums=1)(m, weights, (x_TD.detach(),))["0.weight"]

    return step, [m]


RECIPES = [experts_as_one_batch, learning_to_learn, each_samples_gradient, jacobian_of_parameters]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.__name__)
def test_what_people_do_with_transforms(recipe):
    # backend "eager": of the first, lowering makes experts, whose sums have other bits (tests/expert_loops)
    assert graph_breaks(compared(recipe, "eager", ROWS)) == []


def functional():
    m = tanh_net()

    def step(x):
        loss = functional_call(m, {name: p * 1.1 for name, p in m.named_parameters()}, (x,)).pow(2).mean()
        loss.backward()
        return loss.detach()

    return step, [m]


def test_functional_call_is_in_the_graph():
    hold(functional, None)


@pytest.mark.parametrize("warm", [False, True])
def test_a_captured_function_inside_of_a_transform(warm):
    m = tanh_net()

    def plain(x):
        return m(x).pow(2).sum()

    step = capture(plain)
    x = torch.randn(3, 4)
    for _ in range(2):
        if warm:
            assert torch.equal(step(x), plain(x))
        assert torch.equal(grad(step)(x), grad(plain)(x))
        assert torch.equal(vmap(step)(x.expand(2, 3, 4)), vmap(plain)(x.expand(2, 3, 4)))
        for got, want in zip(jvp(step, (x,), (x,)), jvp(plain, (x,), (x,)), strict=True):
            assert torch.equal(got, want)
    assert stats(step).graphs == warm
    assert any("inside of torch.func" in b.detail for b in graph_breaks(step))


def asks(x):
    return x * 2 if torch._C._are_functorch_transforms_active() else x * 3


def test_it_is_guarded_that_no_transform_runs(monkeypatch):
    x, rows = torch.randn(3), torch.randn(2, 3)
    step = capture(asks)
    step(x)
    assert torch.equal(vmap(step)(rows), rows * 2)
    readers = torch_private.global_state()
    monkeypatch.setattr(torch_private, "global_state", lambda: readers[:-1])
    step = capture(asks)
    step(x)
    assert torch.equal(vmap(step)(rows), rows * 3)  # wrong: nothing looked

"""What breaks a step's graph, makes a part of it native or asks backward something, at each place of a step on ranks
with batches of their own: equal to one process on the mean of the ranks' losses, or one error, soon, on all ranks."""
from __future__ import annotations

import functools
import itertools
import time
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
from rank_layers import Experts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import moebius
from moebius import capture, stats
from moebius.errors import MoebiusError
from moebius.lowering.distribution import DistributionError, Sharded

E, D, N, K = 4, 6, 5, 2
BOUND = 10  # seconds, for a call that fails


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t.tanh() ** 2

    @staticmethod
    def backward(ctx, grad):
        (t,) = ctx.saved_tensors
        return grad * 2 * t.tanh() * (1 - t.tanh() ** 2)


@moebius.disable
def natively(function, *args):
    return function(*args)


def hooked(t):
    t = t * 1
    if t.requires_grad:
        t.register_hook(lambda grad: grad * 2)
    return t


def watched(t, seen):
    t = t * 1
    if t.requires_grad:
        t.register_hook(lambda grad: seen.append(float(grad.sum())))
    return t


def branched(t):
    return t * 2 if float(t.detach()[..., 0].sum()) > 0 else t.tanh()


def halved(t):
    while float(t.detach().abs().max()) > 0.5:
        t = t / 2
    return t


def by_number(t):
    parts = []
    for number in range(len(t)):
        if t[number, 0] > 0:
            parts.append(t[number] * 2)
    return t + sum(parts) if parts else t


def caught(t):
    try:
        raise_if(float(t.detach()[..., 0].sum()) > 0)
    except ValueError:
        t = t * 2
    return t


def raise_if(condition):
    if condition:
        raise ValueError("caught")


def kept(t):
    t = t * 1
    if t.requires_grad:
        t.retain_grad()
    return t


def checkpointed(t):
    return checkpoint(torch.tanh, t, use_reentrant=False)


def hooks_of_saved(t):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 2):
        return t.tanh() * t


def graph_wide(t):
    torch.autograd.graph.register_multi_grad_hook((t,), lambda grads: None) if t.requires_grad else None
    return t * 1


DISTURBANCES = {  # of a tensor [tokens, width], or of nothing but the time at which it happens
    "nothing": lambda t: t * 1,
    "print": lambda t: print(float(t.detach().sum())) or t,
    "item": lambda t: t * (1 + t.detach().sum().item() / 100),
    "numpy": lambda t: t + torch.from_numpy(numpy.tanh(t.detach().numpy())),
    "tolist": lambda t: t * len([x for x in t.detach().flatten().tolist() if x > 0]) / 10,
    "native": lambda t: natively(torch.tanh, t),
    "function": Square.apply,
    "hook": hooked, "hook that looks": lambda t: watched(t, []), "branch": branched, "while": halved,
    "a loop over tokens": by_number, "try": caught, "retain_grad": kept, "checkpoint": checkpointed,
    "saved tensors": hooks_of_saved, "multi hook": graph_wide,
    "break": lambda t: natively(bool) or t,
}
PLACES = ("first", "before experts", "after experts", "between layers", "loss")


class Layer(Experts):
    """The way that the experts are looped over is the model's."""

    def __init__(self, way):
        super().__init__(E, D, N)
        self.norm, self.router, self.way = nn.LayerNorm(D), nn.Linear(D, E), way

    def forward(self, x, disturbed):
        h = self.norm(x)
        weights, index = self.router(h).softmax(-1).topk(K)
        h = disturbed("before experts", h)
        mixed = self.mix(h, index, weights) if self.way == "hits" else self.each(h, index, weights)
        return x + disturbed("after experts", mixed)

    def each(self, x, index, weights):
        out = torch.zeros_like(x)
        for number in range(len(self.gate_up)):
            token, slot = torch.where(index == number)
            if self.way == "range, asked" and not token.numel():
                continue
            gate, up = nn.functional.linear(x[token], self.gate_up[number]).chunk(2, dim=-1)
            current = nn.functional.linear(nn.functional.silu(gate) * up, self.down[number])
            out.index_add_(0, token, current * weights[token, slot, None])
        return out


class Model(nn.Module):
    def __init__(self, way, disturbance, place):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(way) for _ in range(2)), nn.Linear(D, 3)
        self.disturbance, self.place = DISTURBANCES[disturbance], place

    def disturbed(self, place, t):
        return self.disturbance(t) if place == self.place else t

    def forward(self, x):
        x = self.disturbed("first", x)
        x = self.layers[0](x, self.disturbed)
        x = self.disturbed("between layers", x)
        return self.disturbed("loss", self.head(self.layers[1](x, self.disturbed)))


def mean_of_losses(model, parts):
    loss = 0
    for x, y in parts:
        loss = loss + nn.functional.cross_entropy(model(x), y, reduction="sum") / 9 / len(parts)
    return loss


def once(model, optimizer, parts):
    """parts: of one rank, or, in one process, of each."""
    optimizer.zero_grad()
    loss = mean_of_losses(model, parts)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach(), norm


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def differ(ours, theirs):
    """Where two models, and their optimizers' state, are apart, in words."""
    found = []
    state = itertools.chain(
        ((f"{name}", a, b) for (name, a), b in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True)),
        ((f"gradient of {name}", a.grad, b.grad)
         for (name, a), b in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True)),
        ((f"{key} of {name}", ours[1].state[a].get(key), value)
         for (name, a), b in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True)
         for key, value in theirs[1].state.get(b, {}).items()),
    )
    for what, mine, other in state:
        if (mine is None) != (other is None):
            found.append(f"{what}: {mine is None}, {other is None}")
        elif isinstance(other, torch.Tensor):
            apart = (whole(mine).detach() - other.detach()).abs().max().item() if other.numel() else 0
            if not apart <= 1e-10:
                found.append(f"{what} is {apart:.2g} apart")
        elif other is not None and mine != other:
            found.append(f"{what}: {mine}, {other}")
    return found


def parts_of_all(tokens, generator):
    return [(torch.randn(count, D, generator=generator, dtype=torch.float64),
             torch.randint(3, (count,), generator=generator)) for count in tokens]


def beside_one_process(build, step, tokens, steps=3):
    """Where this rank is apart from one process, or the error; how long the last call took; whether the experts
    are split over the ranks, or it is said why not."""
    plain, spread = build(), build()
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    generator = torch.Generator().manual_seed(2)
    apart, error = [], ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(steps):
            parts = parts_of_all(tokens, generator)
            began = time.perf_counter()
            try:
                mine = run(*spread, [parts[dist.get_rank()]])
            except (DistributionError, MoebiusError) as raised:
                error = f"{type(raised).__name__}: {raised}"
            took = time.perf_counter() - began
            if error:
                break
            theirs = step(*plain, parts)
            if mine is not None and not torch.allclose(mine[1], theirs[1], rtol=1e-10, atol=1e-10):
                apart.append(f"norm: {mine[1]}, {theirs[1]}")
            if apart := apart + differ(spread, plain):
                apart.insert(0, f"after step {number}")
                break
    experts = [p for name, p in spread[0].named_parameters() if name.endswith(("gate_up", "down"))]
    told = any(words in str(one.message) for one in said for words in ("each rank runs all", "stay whole on each"))
    told = told or stats(run).breaks > 0
    return apart, error, took, told or all(isinstance(p, Sharded) for p in experts)


def disturb(way, disturbance, place, tokens):
    def build():
        torch.manual_seed(0)
        model = Model(way, disturbance, place).double()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    return beside_one_process(build, once, tokens)


LOOPS = ("hits", "range", "range, asked")
CASES = [*itertools.product(LOOPS, DISTURBANCES, PLACES)]


def look_at(answers):
    """Each rank is where one process is, or all have an error, soon; and no rank has all experts without a word."""
    assert len({bool(error) for _, error, _, _ in answers}) == 1, answers
    for apart, error, took, told in answers:
        assert not apart and (not error or took < BOUND) and told, (apart, error, took, told)


@pytest.mark.share(2)
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_disturbed_step_is_that_of_one_process(on_ranks, case):
    look_at(on_ranks(2, disturb, *case, (5, 3)))


# Steps as people write them, and what they hang on a model.


class Signs(torch.optim.Optimizer):
    """An optimizer of the user's own, with state."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                    parameter.add_(torch.tanh(state["mean"]), alpha=-group["lr"])
        return loss


def around(function):
    """A step that clips by norm, with what the function does between zero_grad() and that."""
    @functools.wraps(function)
    def step(model, optimizer, parts):
        optimizer.zero_grad()
        loss = function(model, optimizer, parts)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), norm

    return step


@around
def clip_by_value(model, optimizer, parts):
    (loss := mean_of_losses(model, parts)).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return loss


@around
def two_losses(model, optimizer, parts):
    loss = mean_of_losses(model, parts)
    other = sum(model(x).square().mean() for x, _ in parts) / len(parts)
    loss.backward(retain_graph=True)
    other.backward()
    return loss


@around
def one_graph_twice(model, optimizer, parts):
    loss = mean_of_losses(model, parts)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


@around
def the_worst_token(model, optimizer, parts):
    loss = sum(nn.functional.cross_entropy(model(x), y, reduction="none").max() for x, y in parts) / len(parts)
    loss.backward()
    return loss


@around
def looked_at_before(model, optimizer, parts):
    model.eval()
    with torch.no_grad():
        mean_of_losses(model, parts)
    model.train()
    (loss := mean_of_losses(model, parts)).backward()
    return loss


@around
def model_called_again(model, optimizer, parts):
    loss = sum(nn.functional.cross_entropy(model(x) + model(x * 2), y, reduction="sum") for x, y in parts) / len(parts)
    loss.backward()
    return loss


@around
def norms_are_logged(model, optimizer, parts):
    (loss := mean_of_losses(model, parts)).backward()
    print([(float(p.grad.norm()), p.detach().abs().max().item()) for p in model.parameters() if p.grad is not None])
    return loss


def where_it_is_finite(model, optimizer, parts):
    optimizer.zero_grad(set_to_none=False)
    loss = mean_of_losses(model, parts)
    if torch.isfinite(loss):
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
        optimizer.step()
        return loss.detach(), norm
    return loss.detach(), loss.detach()


def in_a_closure(model, optimizer, parts):
    def closure():
        optimizer.zero_grad()
        (loss := mean_of_losses(model, parts)).backward()
        return loss

    loss = optimizer.step(closure)
    return loss.detach(), nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def clamp_gradient(parameter):
    parameter.grad.clamp_(-0.001, 0.001)


def of_the_model(kind):
    def build():
        torch.manual_seed(0)
        model = Model("hits", "nothing", "").double()
        if kind == "frozen experts":
            model.layers[0].gate_up.requires_grad_(False)
            model.layers[1].down.requires_grad_(False)
        elif kind == "shared experts":
            model.layers[1].gate_up, model.layers[1].down = model.layers[0].gate_up, model.layers[0].down
        elif kind == "forward hook":
            model.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)
        elif kind == "forward pre-hook":
            model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2, *inputs[1:]))
        elif kind == "backward hook":
            model.layers[0].register_full_backward_hook(lambda module, inputs, outputs: None)
        elif kind == "parameter's hook":
            model.head.weight.register_hook(lambda grad: grad * 2)
        elif kind == "parameter's hook that clips":
            model.head.weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
        elif kind == "parameter's hook after":
            model.head.weight.register_post_accumulate_grad_hook(clamp_gradient)
        elif kind == "expert's hook":
            model.layers[0].down.register_hook(lambda grad: grad * 2)
        elif kind == "expert's hook that clips":
            model.layers[0].down.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
        optimizer = Signs(model.parameters()) if kind == "own optimizer" else torch.optim.AdamW(
            (p for p in model.parameters() if p.requires_grad), lr=1e-2, eps=1e-3)
        return model, optimizer

    return build


KINDS = ("plain", "frozen experts", "shared experts", "forward hook", "forward pre-hook", "backward hook",
         "parameter's hook", "parameter's hook that clips", "parameter's hook after", "expert's hook",
         "expert's hook that clips", "own optimizer")
STEPS = {step.__name__: step for step in (
    once, clip_by_value, two_losses, one_graph_twice, the_worst_token, looked_at_before, model_called_again,
    norms_are_logged, where_it_is_finite, in_a_closure)}


def take_steps(kind, step):
    return beside_one_process(of_the_model(kind), STEPS[step], (5, 3))


STEP_CASES = [*itertools.product(KINDS, STEPS)]


@pytest.mark.share(2)
@pytest.mark.parametrize("case", STEP_CASES, ids=", ".join)
def test_a_step_as_people_write_it_is_that_of_one_process(on_ranks, case):
    look_at(on_ranks(2, take_steps, *case))


def test_what_hooks_of_parameters_see_is_averaged(on_ranks):
    """What was there before the mesh, what comes after it, what is on experts that are split; with replicas too."""
    for ranks in (2, 4):
        answers = on_ranks(ranks, hooks_that_clip)
        assert len({tuple(answer) for answer in answers}) == 1 and not answers[0], answers


def hooks_that_clip():
    ranks = dist.get_world_size()
    plain, spread = of_the_model("plain")(), of_the_model("plain")()
    for model, _ in (plain, spread):
        model.head.weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
    names = ("dp", "ep")[-(1 + (ranks > 2)):]
    run = capture(once, mesh=init_device_mesh("cpu", (ranks // 2, 2)[-len(names):], mesh_dim_names=names))
    generator = torch.Generator().manual_seed(4)
    for number in range(4):
        parts = parts_of_all((5, 3, 0, 4)[:ranks], generator)
        run(*spread, [parts[dist.get_rank()]])
        once(*plain, parts)
        if number == 1:
            for model, _ in (plain, spread):
                model.layers[0].down.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
                model.layers[1].router.bias.register_post_accumulate_grad_hook(clamp_gradient)
                weight = model.layers[1].router.weight
                model.held = torch.autograd.graph.get_gradient_edge(weight).node  # (with it its hooks would go)
                model.held.register_hook(lambda *_, weight=weight: clamp_gradient(weight))
    return [*differ(spread, plain), *(() if isinstance(spread[0].layers[0].down, Sharded) else ("whole",))]


def reached_alone():
    model, optimizer = of_the_model("plain")()
    model.spare = nn.Linear(D, D).double()
    model.spare.weight.register_hook(lambda grad: grad * 2)
    run = capture(one_reaches_more, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    for more in (False, True):  # captured
        run(model, torch.ones(3, D, dtype=torch.float64), more)
    began = time.perf_counter()
    with pytest.raises(DistributionError) as raised:
        run(model, torch.ones(3, D, dtype=torch.float64), dist.get_rank() == 1)
    return str(raised.value), time.perf_counter() - began


def one_reaches_more(model, x, more):
    (model(model.spare(x) if more else x) ** 2).sum().backward()


def test_a_parameter_with_hooks_that_one_rank_reaches(on_new_ranks):
    for error, took in on_new_ranks(2, reached_alone):
        assert "rank 0 is at" in error and "which has hooks" in error and took < BOUND

"""A backward that fails, and is caught: what comes after it is that of one process, or an optimizer's step on what it
left is one error, with weights as they were."""
from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moebius
from moebius import capture
from moebius.lowering.distribution import DistributionError, RanksDisagreeError, Sharded

D = 8
fails = []  # whether the backward that runs does


@moebius.disable
def strike(grad):
    if fails:
        raise ValueError("a bad gradient")


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        strike(grad)
        return grad


def hooked(x):
    x = x * 1
    x.register_hook(strike)
    return x


WAYS = {"a function's backward": Function.apply, "a hook": hooked, "a parameter's hook": lambda x: x}


class Model(nn.Module):
    """Two heads, of which a batch takes one: the other has no gradient then."""

    def __init__(self, way):
        super().__init__()
        self.first, self.way, self.experts = nn.Linear(D, D), WAYS[way], Layer()
        self.heads = nn.ModuleList(nn.Linear(D, 3) for _ in range(2))
        if way == "a parameter's hook":
            self.first.weight.register_hook(strike)

    def forward(self, x, head):
        return self.heads[head](self.experts(self.way(self.first(x))))


def step(model, optimizer, parts, head):
    """parts: of one rank, or, in one process, of each."""
    optimizer.zero_grad()
    loss = sum(model(x, head).square().sum() / len(parts) for x in parts)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm


def build(way):
    torch.manual_seed(0)
    model = Model(way).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def go_on(held, take, weights, way):
    take(*held, 1)


def other_head(held, take, weights, way):
    """What the failed backward had reached has no gradient in this step, and is not decayed."""
    take(*held, 0)


def restored(held, take, weights, way):
    held[0].load_state_dict(weights)
    take(*held, 0)


def rebuilt(held, take, weights, way):
    held.clear()
    gc.collect()
    held += build(way)
    take(*held, 0)


THEN = {then.__name__: then for then in (go_on, other_head, restored, rebuilt)}


def train(way, then, run, parts_of):
    number = itertools.count()

    def take(model, optimizer, head):
        norms.append(run(model, optimizer, parts_of(next(number)), head))

    norms: list = []
    held = [*build(way)]
    for head in (0, 1):
        take(*held, head)
    weights = copy.deepcopy(held[0].state_dict())
    fails.append(True)
    with pytest.raises(ValueError, match="a bad gradient"):
        take(*held, 1)
    fails.clear()
    THEN[then](held, take, weights, way)
    take(*held, 1)
    model, optimizer = held
    return [*norms, *model.parameters(), *(t for p in model.parameters() for t in optimizer.state[p].values())]


def parts(number):
    generator = torch.Generator().manual_seed(number)
    counts = [(number + 2 * rank) % 5 for rank in range(dist.get_world_size())]
    return [torch.randn(count, D, generator=generator, dtype=torch.float64) for count in counts]


def captured(function=step):
    ranks = dist.get_world_size()
    names = ("dp", "ep")[-(1 + (ranks > 2)):]
    return capture(function, mesh=init_device_mesh("cpu", (ranks // 2, 2)[-len(names):], mesh_dim_names=names))


def beside_one_process(way, then):
    ours = train(way, then, captured(), lambda number: [parts(number)[dist.get_rank()]])
    theirs = train(way, then, step, parts)
    return max(float((whole(a) - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


CASES = [*itertools.product(WAYS, THEN, (2,)), ("a hook", "other_head", 4)]


@pytest.mark.share(3)
@pytest.mark.parametrize("way, then, ranks", CASES)
def test_what_comes_after_it_is_that_of_one_process(on_ranks, way, then, ranks):
    assert max(on_ranks(ranks, beside_one_process, way, then)) < 1e-10


def local(model):
    return [(p.local if isinstance(p, Sharded) else p.detach()).clone() for p in model.parameters()]


def steps_on_what_is_left(way, alone):
    """What an optimizer's step says, outside of a captured call and in one, and whether a weight is another one;
    whether it says nothing once gradients are gone."""
    (model, optimizer), run = build(way), captured()
    for number in range(2):
        run(model, optimizer, [parts(number)[dist.get_rank()]], 1)
    if not alone or dist.get_rank() == 1:
        fails.append(True)
    with pytest.raises(RanksDisagreeError if alone and dist.get_rank() != 1 else ValueError, match="a bad gradient"):
        run(model, optimizer, [parts(2)[dist.get_rank()]], 1)
    fails.clear()
    before, said = local(model), []
    for tries in (optimizer.step,) if alone else (optimizer.step, captured(lambda: optimizer.step())):
        with pytest.raises(DistributionError) as raised:
            tries()
        said.append(str(raised.value))
    same = all(map(torch.equal, before, local(model)))
    optimizer.zero_grad()
    optimizer.step()
    return said, same


@pytest.mark.share(2)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_does_not_step_on_what_it_left(on_new_ranks, way, alone):
    for said, same in on_new_ranks(2, steps_on_what_is_left, way, alone):
        assert same and all("is of this rank alone" in text and "call zero_grad()" in text for text in said), said

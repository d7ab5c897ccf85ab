"""Two models with experts, each with an optimizer, trained in turns as a GAN is: captured steps equal one process on
the mean of the ranks' losses, and no rank is said to be at another place."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture
from moebius.lowering.distribution import Sharded

D, T, STEPS = 8, 6, 4
SHAPES = {"4": (4,), "2x2": (2, 2)}


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, D), Layer(), nn.Linear(D, D)

    def forward(self, z):
        return self.last(self.layer(self.first(z)))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = Layer(), nn.Linear(D, 1)

    def forward(self, x):
        return self.head(self.layer(x))


def real(out):
    return F.binary_cross_entropy_with_logits(out, torch.ones_like(out))


def fake(out):
    return F.binary_cross_entropy_with_logits(out, torch.zeros_like(out))


def critic_step(g, d, og, od, batches):
    od.zero_grad()
    loss = sum(real(d(x)) + fake(d(g(z).detach())) for x, z in batches) / len(batches)
    loss.backward()
    od.step()
    return loss.detach()


def generator_step(g, d, og, od, batches):
    og.zero_grad()
    loss = sum(real(d(g(z))) for _, z in batches) / len(batches)
    loss.backward()
    og.step()
    return loss.detach()


def both_steps(g, d, og, od, batches):
    return critic_step(g, d, og, od, batches), generator_step(g, d, og, od, batches)


def one_forward(g, d, og, od, batches):
    """The generator's results are used by both losses, three backward passes."""
    od.zero_grad()
    (sum(real(d(x)) for x, _ in batches) / len(batches)).backward()
    made = [g(z) for _, z in batches]
    (sum(fake(d(one.detach())) for one in made) / len(batches)).backward()
    od.step()
    og.zero_grad()
    (sum(real(d(one)) for one in made) / len(batches)).backward()
    og.step()


def frozen_in_turns(g, d, og, od, batches):
    d.requires_grad_(True)
    critic_step(g, d, og, od, batches)
    d.requires_grad_(False)
    generator_step(g, d, og, od, batches)


def now_and_then(g, d, og, od, batches, number):
    critic_step(g, d, og, od, batches)
    if number % 2:
        generator_step(g, d, og, od, batches)


@torch.no_grad()
def evaluate(g, d, batches):
    return sum(d(g(z)).mean() + d(x).mean() for x, z in batches) / len(batches)


def programs(wrap):
    """By name: a program of a model pair, its optimizers, a batch and its number. wrap: captures, or not."""
    critic, generator, now, score = wrap(critic_step), wrap(generator_step), wrap(now_and_then), wrap(evaluate)

    def skipped(*args):
        critic(*args[:-1])
        if args[-1] % 2:
            generator(*args[:-1])

    def looked_at(*args):
        critic(*args[:-1])
        score(*args[:2], args[-2])
        generator(*args[:-1])

    def looked_at_natively(*args):
        critic(*args[:-1])
        # (as often as a rank likes: the experts are gathered once for what was written)
        for _ in range(1 + (dist.get_rank() if len(args[-2]) == 1 else 0)):
            evaluate(*args[:2], args[-2])
        generator(*args[:-1])

    def whole(function):
        run = wrap(function)
        return lambda *args: run(*args[:-1])

    return {
        "two captures": lambda *args: (critic(*args[:-1]), generator(*args[:-1])), "one capture": whole(both_steps),
        "one forward": whole(one_forward), "frozen in turns": whole(frozen_in_turns), "skipped in the step": now,
        "skipped outside": skipped, "an evaluation between": looked_at,
        "an evaluation that is not captured": looked_at_natively,
        "one step is not captured": lambda *args: (critic(*args[:-1]), generator_step(*args[:-1])),
        "the other is not captured": lambda *args: (generator(*args[:-1]), critic_step(*args[:-1])),
    }


PROGRAMS = [*programs(lambda function: function)]


def train(name, shape, sizes):
    """How far the parameters are from those of one process that trains on all ranks' batches."""
    torch.manual_seed(0)
    ours = Generator().double(), Discriminator().double()
    theirs = copy.deepcopy(ours)
    pairs = [(*models, *(torch.optim.Adam(model.parameters(), 1e-3) for model in models)) for models in (ours, theirs)]
    names = ("dp", "ep")[-len(SHAPES[shape]):]
    mesh = init_device_mesh("cpu", SHAPES[shape], mesh_dim_names=names)
    captured = programs(lambda function: capture(function, mesh=mesh))[name]
    plain = programs(lambda function: function)[name]
    draw = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        batches = []
        for rank in range(dist.get_world_size()):
            size = T + (rank + number) % 2 if sizes == "own" else T
            batches.append([torch.randn(size, width, generator=draw, dtype=torch.float64) for width in (D, 4)])
        captured(*pairs[0], [batches[dist.get_rank()]], number)
        plain(*pairs[1], batches, number)
    pairs = zip((p for m in ours for p in m.parameters()), (p for m in theirs for p in m.parameters()), strict=True)
    return max(float(((p.full_tensor() if isinstance(p, Sharded) else p) - q).abs().max()) for p, q in pairs)


@pytest.mark.share(1)
@pytest.mark.parametrize("sizes", ["same", "own"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_models_in_turns(on_ranks, name, shape, sizes):
    assert max(on_ranks(4, train, name, shape, sizes)) < 1e-10

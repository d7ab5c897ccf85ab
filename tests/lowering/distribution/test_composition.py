"""What else splits a model or averages its gradients, together with mesh=: equal to one process on the joined batch, or
one error on all ranks that says what to write."""
from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moebius import capture
from moebius.lowering.distribution import Sharded

D, STEPS, SPIKE = 8, 6, 3  # SPIKE: the step whose batch overflows, on the first rank alone


def experts_of(model):
    return [p for layer in model if isinstance(layer, Layer) for p in (layer.gate_up, layer.down)]


def build(split=None, experts_first=False):
    """The model and its optimizer. split: the mesh that fully_shard gets for the dense parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.Tanh(), Layer(), nn.Linear(D, 3)).double()
    experts = experts_of(model)
    if split is not None:
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=split, ignored_params=set(experts))
    dense = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    groups = [{"params": dense}, {"params": experts}]
    return model, torch.optim.AdamW(groups[::-1] if experts_first else groups, lr=1e-2, eps=1e-3)


def step(model, optimizer, x, scaler):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def scaled(model, optimizer, x, scaler):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def micro_batches(model, x):
    for half in range(2):
        loss = model(x[half::2]).square().mean() / 2
        loss.backward()
        yield loss.detach()


def in_a_generator(model, optimizer, x, scaler):
    optimizer.zero_grad()
    loss = sum(micro_batches(model, x))
    optimizer.step()
    return loss


def one_reduction(model, optimizer, x, scaler):
    """FSDP2's own way to accumulate: its gradients are reduced in the last backward."""
    optimizer.zero_grad()
    together = 0
    for half in range(2):
        if isinstance(model, torch.distributed.fsdp.FSDPModule):
            model.set_requires_gradient_sync(half == 1)
        loss = model(x[half::2]).square().mean() / 2
        loss.backward()
        together = together + loss.detach()
    optimizer.step()
    return together


STEP = {way.__name__: way for way in (step, scaled, in_a_generator, one_reduction)}


def same(ours, theirs):
    whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
    torch.testing.assert_close(whole.detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


def train(way, sizes, split, experts_first=False):
    """sizes: of the mesh for capture. split: of that for fully_shard, which replicates over the first of two axes."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    over = init_device_mesh("cpu", split, mesh_dim_names=("replicas", "shards")[-len(split):])
    model, optimizer = build(over, experts_first)
    plain, whole_run = build(experts_first=experts_first)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    run = capture(STEP[way], mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes):]))
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        x = torch.randn(16, D, generator=generator, dtype=torch.float64)
        if way == "scaled" and number == SPIKE:
            x[0] = torch.inf
        loss = run(model, optimizer, x.chunk(ranks)[rank], scalers[0])
        expected = STEP[way](plain, whole_run, x, scalers[1])
        dist.all_reduce(loss)
        if number != SPIKE:
            same(loss / ranks, expected)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine, theirs)
        for name, value in whole_run.state[theirs].items():
            same(optimizer.state[mine][name], value)
    return [isinstance(expert, Sharded) for expert in experts_of(model)]


@pytest.mark.share(2)
@pytest.mark.parametrize("way, sizes, split, experts_first", [
    ("scaled", (2,), (2,), False), ("scaled", (2,), (2,), True), ("in_a_generator", (2,), (2,), False),
    ("one_reduction", (2,), (2,), False), ("step", (2, 2), (2, 2), False), ("step", (4,), (2, 2), False),
    ("scaled", (2, 2), (2, 2), False), ("in_a_generator", (2, 2), (4,), False),
])
def test_fsdp_beside_experts_is_one_process(on_new_ranks, way, sizes, split, experts_first):
    ranks = torch.Size(sizes).numel()
    for placed in on_new_ranks(ranks, train, way, sizes, split, experts_first):
        assert way == "in_a_generator" or all(placed)  # (what only a generator reaches stays whole)


class Slots:
    """What no look at the arguments finds."""

    __slots__ = ("model",)


def step_of_slots(held, optimizer, x, scaler):
    optimizer.zero_grad()
    loss = held.model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def without_sync(model, optimizer, x, scaler):
    """DDP's own way to accumulate."""
    optimizer.zero_grad()
    together = 0
    for half in range(2):
        no_sync = getattr(model, "no_sync", contextlib.nullcontext) if half == 0 else contextlib.nullcontext
        with no_sync():
            loss = model(x[half::2]).square().mean() / 2
            loss.backward()
        together = together + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return together


WRAPPED = {"in_slots": step, **{way.__name__: way for way in (step, scaled, in_a_generator, without_sync)}}


def train_wrapped(way, sizes, parts):
    """The model in DDP, or each of its layers (parts)."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes):])
    (model, optimizer), (plain, whole_run) = build(), build()
    wrapped = nn.Sequential(*(DistributedDataParallel(one) if [*one.parameters()] else one for one in model)) \
        if parts else DistributedDataParallel(model)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    run, held = capture(step_of_slots if way == "in_slots" else WRAPPED[way], mesh=mesh), wrapped
    if way == "in_slots":
        held = Slots()
        held.model = wrapped
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(16, D, generator=generator, dtype=torch.float64)
        loss = run(held, optimizer, x.chunk(ranks)[rank], scalers[0])
        expected = WRAPPED[way](plain, whole_run, x, scalers[1])
        dist.all_reduce(loss)
        same(loss / ranks, expected)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine, theirs)
        for name, value in whole_run.state[theirs].items():
            same(optimizer.state[mine][name], value)
    return [isinstance(expert, Sharded) for expert in experts_of(model)]


@pytest.mark.share(2)
@pytest.mark.parametrize("way, sizes, parts", [
    *((way, (2,), False) for way in WRAPPED), ("step", (2,), True), ("without_sync", (2, 2), False),
])
def test_ddp_around_the_model_is_one_process(on_new_ranks, way, sizes, parts):
    for placed in on_new_ranks(torch.Size(sizes).numel(), train_wrapped, way, sizes, parts):
        assert way == "in_a_generator" or all(placed)  # (what only a generator reaches stays whole)


def train_what_ddp_wraps(around):
    """``ddp.module`` in the step, or DDP around a captured model: the experts may stay whole, and that is said."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    (model, optimizer), (plain, whole_run) = build(), build()
    if around:
        run, given = step, DistributedDataParallel(capture(model, mesh=mesh))
    else:
        run, given = capture(step, mesh=mesh), DistributedDataParallel(model).module
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            x = torch.randn(16, D, generator=generator, dtype=torch.float64)
            run(given, optimizer, x.chunk(ranks)[rank], None)
            step(plain, whole_run, x, None)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine, theirs)
    return [str(one.message) for one in said]


@pytest.mark.share(1)
@pytest.mark.parametrize("around", [False, True])
def test_what_ddp_wraps_trains_as_one_process(on_new_ranks, around):
    for said in on_new_ranks(2, train_what_ddp_wraps, around):
        # (DDP whose last reference is gone no longer holds them.)
        assert bool(said) == around and all("DistributedDataParallel around the model" in text for text in said)


def train_with_compiled(which):
    """torch.compile around a layer of the model: what is on the ranks within it has its gradients all the same."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    (model, optimizer), (plain, whole_run) = build(), build()
    model[which] = torch.compile(model[which], backend="eager")
    run = capture(step, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(16, D, generator=generator, dtype=torch.float64)
        run(model, optimizer, x.chunk(ranks)[rank], None)
        step(plain, whole_run, x, None)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine, theirs)
        same(mine.grad, theirs.grad)
    return isinstance((model[0]._orig_mod if which == 0 else model[0]).down, Sharded)


@pytest.mark.share(1)
@pytest.mark.parametrize("which", [0, 3], ids=["experts", "dense"])
def test_a_compiled_layer_trains_as_one_process(on_new_ranks, which):
    assert on_new_ranks(2, train_with_compiled, which) == [True, True]

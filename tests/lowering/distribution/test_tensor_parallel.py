"""Dense layers in tensor parallel (parallelize_module) beside experts on ranks: one process on the joined batch."""
from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_layers import Layer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moebius import capture
from moebius.errors import MeshError, OptionError
from moebius.lowering.distribution import Sharded

D, STEPS = 8, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.experts = nn.LayerNorm(D), nn.Linear(D, 16), nn.Linear(16, D), Layer()

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(gelu(self.up(h))) + self.experts(h)


def split(model, tp):
    plan = {f"{n}.{name}": how() for n in "01" for name, how in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    parallelize_module(model, tp, plan)


def build(tp=None):
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), nn.Linear(D, 3)).double()
    if tp is not None:
        split(model, tp)
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == dense] for dense in (True, False)]
    return model, torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=1e-3)


def whole_of(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def same(ours, theirs):
    torch.testing.assert_close(whole_of(ours).detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


def clipped(optimizer):
    """To the norm of all groups together: torch takes that of each, as they are split in two ways."""
    groups = [[p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
    total = torch.stack([whole_of(get_total_norm([p.grad for p in group])) for group in groups]).norm()
    for group in groups:
        clip_grads_with_norm_(group, 0.1, total)
    return total


def step(model, optimizer, scaler, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norm = clipped(optimizer)
    optimizer.step()
    return loss.detach(), norm


def in_parts(model, optimizer, scaler, x):
    optimizer.zero_grad()
    losses = []
    for part in x.chunk(2):
        loss = model(part).square().mean() / 2
        loss.backward()
        losses.append(loss.detach())
    norm = clipped(optimizer)
    optimizer.step()
    return sum(losses), norm


def scaled(model, optimizer, scaler, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clipped(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), norm


WAYS = {"step": step, "in_parts": in_parts, "scaled": scaled}


def mesh_of(**sizes):
    """All ranks; those with data of their own; which part of a batch is this rank's, and of how many."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data = tuple(name for name in sizes if name != "tp")
    part, parts = 0, 1
    for name in data:
        part, parts = part * sizes[name] + mesh.get_local_rank(name), parts * sizes[name]
    return mesh, mesh[data], part, parts


def train(way, sizes):
    mesh, data, part, parts = mesh_of(**sizes)
    (model, optimizer), (plain, whole) = build(mesh["tp"]), build()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4) for _ in range(2)]
    run, generator = capture(WAYS[way], mesh=data), torch.Generator().manual_seed(1)
    for number in range(STEPS):
        x = torch.randn(24, D, generator=generator, dtype=torch.float64)
        if way == "scaled" and number == 7:
            x[-1] = torch.inf  # on the last part alone: no rank steps
        loss, norm = run(model, optimizer, scalers[0], x.chunk(parts)[part])
        one = [each.square().mean() for each in plain(x).detach().chunk(parts)]
        halves = torch.cat([each.chunk(2)[i] for i in (0, 1) for each in x.chunk(parts)])
        _, wanted = WAYS[way](plain, whole, scalers[1], halves)
        if x.isfinite().all():
            same(loss, one[part])
            same(norm, wanted)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine, theirs)
        for name, value in whole.state[theirs].items():
            same(optimizer.state[mine][name], value)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    return [sum(isinstance(p, kind) for p in model.parameters()) for kind in (Sharded, DTensor)]


@pytest.mark.share(2)
@pytest.mark.parametrize("sizes", [{"tp": 2, "ep": 2}, {"ep": 2, "tp": 2}, {"dp": 2, "ep": 2, "tp": 2}])
@pytest.mark.parametrize("way", WAYS)
def test_dense_layers_in_tensor_parallel_are_one_process(on_new_ranks, way, sizes):
    for experts, dense in on_new_ranks(torch.Size(sizes.values()).numel(), train, way, sizes):
        assert (experts, dense) == (4, 8)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # (layouts have other groups of parameters)
LAYOUTS = {  # of a checkpoint: before, and after
    "tp first": ({"ep": 2, "tp": 2}, {"tp": 2, "ep": 2}), "more ep": ({"ep": 2, "tp": 2}, {"ep": 4}),
    "more tp": ({"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}), "dp": ({"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}),
    "less ep": ({"ep": 2, "tp": 2}, {"ep": 1, "tp": 4}),
}


def train_part(model, optimizer, sizes, batches):
    _, data, part, parts = mesh_of(**sizes)
    run = capture(step, mesh=data)
    for x in batches:
        run(model, optimizer, None, x.chunk(parts)[part])


def resumed(before, after, folder):
    """Half of the steps at one layout, a checkpoint, the others at another one; and one process that takes them all."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(24, D, generator=generator, dtype=torch.float64) for _ in range(6)]
    for sizes, steps in ((before, batches[:3]), (after, batches[3:])):
        model, optimizer = build(mesh_of(**sizes)[0]["tp"] if "tp" in sizes else None)
        if sizes is after:
            weights, state = get_state_dict(model, optimizer, options=FLAT)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FLAT)
        train_part(model, optimizer, sizes, steps)
        if sizes is before:
            weights, state = get_state_dict(model, optimizer, options=FLAT)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    plain, whole = build()
    for x in batches:
        step(plain, whole, None, x)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine, theirs)
        for name, value in whole.state[theirs].items():
            same(optimizer.state[mine][name], value)


@pytest.mark.share(2)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_training_goes_on_at_another_layout(on_new_ranks, tmp_path, layouts):
    on_new_ranks(4, resumed, *LAYOUTS[layouts], str(tmp_path))


def overflow():
    """A gradient that overflowed in the experts of one rank alone."""
    mesh, data, *_ = mesh_of(ep=2, tp=2)
    model, optimizer = build(mesh["tp"])
    capture(step, mesh=data)(model, optimizer, None, torch.randn(6, D, dtype=torch.float64))
    before, scaler = [whole_of(p).detach().clone() for p in model.parameters()], torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    if mesh.get_local_rank("ep"):
        next(p for p in model.parameters() if isinstance(p, Sharded)).grad.local.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, before, map(whole_of, model.parameters())))
    return scaler.get_scale()


def test_no_rank_steps_where_the_experts_of_one_overflowed(on_new_ranks):
    assert on_new_ranks(4, overflow) == [2.0**15] * 4


def other_weights():
    """A weight of one rank's alone, in a part that tensor parallelism has split."""
    mesh, data, part, _ = mesh_of(ep=2, tp=2)
    model, optimizer = build(mesh["tp"])
    run = capture(step, mesh=data)
    with pytest.raises(Exception, match="a parameter of shape .* has other values on another rank"):
        for number in range(4):
            run(model, optimizer, None, torch.randn(6, D, dtype=torch.float64))
            if number == 1 and part:
                with torch.no_grad():
                    model[0].up.weight.to_local().add_(1.0)


def test_a_part_that_one_rank_wrote_alone_is_told(on_new_ranks):
    on_new_ranks(4, other_weights)


def refused():
    mesh, data, *_ = mesh_of(dp=1, ep=2, tp=2)
    with pytest.raises(OptionError) as axis:
        capture(step, mesh=mesh)
    model, optimizer = build(data["ep"])
    with pytest.raises(MeshError) as over:
        capture(step, mesh=data["ep"])(model, optimizer, None, torch.randn(4, D, dtype=torch.float64))
    return str(axis.value), str(over.value)


def test_what_shares_an_axis_with_data_is_refused_with_what_to_write(on_new_ranks):
    for axis, over in on_new_ranks(4, refused):
        assert "pass mesh['dp', 'ep']" in axis
        assert "parallelize_module(model, all['tp'], ...), capture(step, mesh=all['dp', 'ep'])" in over

"""Training that is saved on some ranks goes on, optimizer state and all, on another number of them, or on one."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_layers import Layer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture
from moebius.lowering.distribution import Sharded

STEPS = 3  # before, and after


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(Layer(), nn.Tanh(), Layer()).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, 8, generator=generator, dtype=torch.float64) for _ in range(2 * STEPS)]


def train(model, optimizer, steps):
    """Each rank on its part of the batch, experts on their ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    run = capture(step, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))
    for x in steps:
        run(model, optimizer, x.chunk(ranks)[rank])


def save(folder, how):
    model, optimizer = build(0)
    train(model, optimizer, batches()[:STEPS])
    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": state}
    if how == "beside training":
        group = dist.new_group()  # (a thread has collectives of its own)
        saving = dcp.async_save(held, checkpoint_id=folder, process_group=group)
        train(model, optimizer, batches()[:STEPS])
        saving.result(timeout=30)
        dist.destroy_process_group(group)
    else:
        dcp.save(held, checkpoint_id=folder)


def resume(folder, spread):
    """Go on from the checkpoint, on ranks or plainly, and compare with training that was never stopped."""
    model, optimizer = build(1)
    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": state}
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    if spread:
        train(model, optimizer, batches()[STEPS:])
    else:
        for x in batches()[STEPS:]:
            step(model, optimizer, x)
    plain, whole_run = build(0)
    for x in batches():
        step(plain, whole_run, x)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine, theirs)
        for name, value in whole_run.state[theirs].items():
            same(optimizer.state[mine][name], value)
    if spread:  # this rank's part of the memory, of optimizer state too
        ranks, down = dist.get_world_size(), model[0].down
        for tensor in (down, optimizer.state[down]["exp_avg"], optimizer.state[down]["exp_avg_sq"]):
            assert tensor.untyped_storage().nbytes() == down.numel() // ranks * 8


def same(ours, theirs):
    whole = ours.full_tensor() if isinstance(ours, Sharded) else ours
    torch.testing.assert_close(whole.detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.share(1)
@pytest.mark.parametrize("how", ["at once", "beside training"])
@pytest.mark.parametrize("ranks, then", [(2, 4), (4, 2), (2, 1)])
def test_goes_on_at_another_number_of_ranks(on_ranks, tmp_path, ranks, then, how):
    on_ranks(ranks, save, str(tmp_path), how)
    if then > 1:
        on_ranks(then, resume, str(tmp_path), True)
    else:
        resume(str(tmp_path), False)

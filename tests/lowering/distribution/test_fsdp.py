"""FSDP2 over all ranks of the mesh for dense parameters, moebius for the experts: equal to one process."""
from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_layers import Layer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from moebius import capture
from moebius.errors import MeshError
from moebius.lowering.distribution import Sharded, traffic

D, STEPS = 8, 20
spec = importlib.util.spec_from_file_location(
    "train_fsdp", Path(__file__).resolve().parents[3] / "examples/train_fsdp.py")
example = importlib.util.module_from_spec(spec)


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norm = example.clip([group["params"] for group in optimizer.param_groups], 0.1)
    optimizer.step()
    return loss.detach(), norm


def build(seed, mesh=None, experts_too=False):
    torch.manual_seed(seed)
    model = nn.Sequential(Layer(), nn.Tanh(), Layer(), nn.Linear(D, 3)).double()
    experts = [p for layer in model if isinstance(layer, Layer) for p in (layer.gate_up, layer.down)]
    if mesh is not None:
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, ignored_params=set() if experts_too else set(experts))
    if experts_too:
        experts = [p for layer in (model[0], model[2]) for p in (layer.gate_up, layer.down)]
    dense = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    return model, torch.optim.AdamW([{"params": dense}, {"params": experts}], lr=1e-3)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, D, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def same(ours, theirs):
    whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
    torch.testing.assert_close(whole.detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


def train(sizes, experts_too=False, folder="", first=0, last=STEPS):
    """Train on ranks and in one process; the weights, the optimizers' state, losses and norms are the same. folder:
    where to go on from, or else what to save."""
    spec.loader.exec_module(example)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    everywhere = init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
    model, optimizer = build(first, everywhere, experts_too)
    if first:
        held = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(held, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    run = capture(step, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes):]))
    plain, whole_run = build(0)
    for number, x in enumerate(batches()[:last]):
        expected = step(plain, whole_run, x)
        if number >= first:
            traffic.reset()
            loss, norm = run(model, optimizer, x.chunk(ranks)[rank])
            dist.all_reduce(loss)
            same(loss / ranks, expected[0])
            same(norm, expected[1])
    assert traffic.dispatch and traffic.combine  # tokens went to their experts
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine, theirs)
        for name, value in whole_run.state[theirs].items():
            same(optimizer.state[mine][name], value)
    assert all(isinstance(layer.down, Sharded) != experts_too for layer in (model[0], model[2]))
    assert model[0].router.weight.to_local().numel() <= -(-model[0].router.weight.numel() // ranks) + D
    if folder and not first:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


@pytest.mark.share(1)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_equal_to_one_process(on_new_ranks, sizes):
    on_new_ranks(sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0], train, sizes)


def test_experts_that_fsdp_splits_stay_with_it(on_new_ranks):
    on_new_ranks(2, train, (2,), True)


def test_goes_on_at_another_number_of_ranks(on_new_ranks, tmp_path):
    on_new_ranks(2, train, (2,), False, str(tmp_path), 0, 5)
    on_new_ranks(4, train, (4,), False, str(tmp_path), 5, 10)


def over_other_ranks():
    """FSDP2 over this rank's row of a 2x2 mesh alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model, optimizer = build(0, mesh["ep"])
    with pytest.raises(MeshError, match="fully_shard averages over the ranks"):
        capture(step, mesh=mesh)(model, optimizer, torch.randn(4, D, dtype=torch.float64))


def test_over_other_ranks_it_is_refused(on_new_ranks):
    on_new_ranks(4, over_other_ranks)


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def beside_checkpoints(outside):
    """Whether the experts are split, what was warned of, and how far the weights are from those of one process."""
    models = []
    for ours in (True, False):
        model = build(0)[0]
        experts = {p for layer in (model[0], model[2]) for p in (layer.gate_up, layer.down)}
        everywhere = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
        for place in (0, 2):
            within = model[place] if outside else Checkpointed(model[place])
            within = fully_shard(within, mesh=everywhere, ignored_params=experts) if ours else within
            model[place] = Checkpointed(within) if outside else within
        models.append(model)
    run = capture(plain_step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x in batches()[:3]:
            run(models[0], x.chunk(dist.get_world_size())[dist.get_rank()])
    for x in batches()[:3]:
        plain_step(models[1], x)
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        same(mine, theirs)
    return any(isinstance(p, Sharded) for p in models[0].parameters()), [str(one.message) for one in said]


def plain_step(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=1e-2)


@pytest.mark.parametrize("outside", [False, True])
def test_a_checkpoint_within_what_fsdp_wraps_or_around_it(on_new_ranks, outside):
    """Around it, it is Python that runs the checkpoint, and experts stay whole, which is said."""
    for split, said in on_new_ranks(2, beside_checkpoints, outside):
        assert split != outside
        assert any("no token travels" in words for words in said) == outside

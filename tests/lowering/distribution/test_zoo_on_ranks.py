"""Models of transformers on a mesh of two axes, each rank its own batch, of another size: 20 steps, as one process."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture, stats
from moebius.lowering.distribution import Sharded

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))


def step(model, optimizer, batches):
    optimizer.zero_grad()
    loss = 0
    for batch in batches:
        logits = model(input_ids=batch).logits  # (its own loss is computed in float32)
        loss = loss + nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()) / len(batches)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), norm


def build(family):
    from zoo.tiny import tiny_models

    torch.manual_seed(0)
    model, _ = tiny_models()[family]()
    model = model.double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def same(ours, theirs):
    torch.testing.assert_close(whole(ours).detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


def train(family, sizes):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plain, spread = build(family), build(family)
    captured = capture(step, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes) :]))
    generator = torch.Generator().manual_seed(3)
    for number in range(20):
        lengths = [(16, 9, 12, 20)[(number // 8 + i) % 4] for i in range(ranks)]
        batches = [torch.randint(3, 128, (2, length), generator=generator) for length in lengths]
        loss, norm = captured(*spread, [batches[rank]])
        expected, expected_norm = step(*plain, batches)
        dist.all_reduce(loss)
        same(loss / ranks, expected)
        same(norm, expected_norm)
    for mine, theirs in zip(spread[0].parameters(), plain[0].parameters(), strict=True):
        same(mine, theirs)
        for name, value in plain[1].state.get(theirs, {}).items():
            same(spread[1].state[mine][name], value)
    return sum(isinstance(p, Sharded) for p in spread[0].parameters()), stats(captured).breaks


@pytest.mark.share(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_family_on_two_axes(on_ranks, family):
    assert on_ranks(4, train, family, (2, 2)) == [(4, 0)] * 4

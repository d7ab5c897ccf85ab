"""Experts on ranks under backends of torch.compile: they see collectives of torch's, forward and backward."""
from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture
from moebius.lowering.distribution import Plan, RanksDisagreeError, Sharded, traffic

D = 8


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Layer(), nn.Tanh()).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    loss = sum((model(batch) ** 2).mean() for batch in batches) / len(batches)
    loss.backward()
    optimizer.step()
    return loss.detach()


def on_mesh(backend, chunks=1):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    return capture(step, mesh=mesh, backend=backend, plan=Plan("ep", chunks=chunks))


def train(backend, tokens, chunks):
    generator = torch.Generator().manual_seed(1)
    plain, spread = build(), build()
    captured = on_mesh(backend, chunks)
    for _ in range(3):
        batches = [torch.randn(count, D, generator=generator, dtype=torch.float64) for count in tokens]
        step(*plain, batches)
        captured(*spread, [batches[dist.get_rank()]])
    for mine, theirs in zip(spread[0].parameters(), plain[0].parameters(), strict=True):
        mine = mine.full_tensor() if isinstance(mine, Sharded) else mine
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.share(1)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("backend, tokens", [("aot_eager", [5, 9]), ("inductor", [5, 9]), ("aot_eager", [7, 1])])
def test_trains_as_one_process(on_new_ranks, backend, tokens, chunks):
    on_new_ranks(2, train, backend, tokens, chunks)


def graphs():
    """The text of forward's and backward's graphs, as AOTAutograd hands them to a compiler; and that they send as many
    bytes as our own."""
    seen = []

    def record(gm, examples):
        seen.append(gm.code)
        return gm.forward

    sent = []
    for backend in ("moebius", aot_autograd(fw_compiler=record, bw_compiler=record)):
        run, training, batch = on_mesh(backend), build(), [torch.full((6, D), 0.1, dtype=torch.float64)]
        run(*training, batch)
        traffic.reset()
        run(*training, batch)
        sent.append((traffic.dispatch, traffic.combine))
    assert sent[0] == sent[1] != (0, 0)
    return [text for text in seen if "all_to_all" in text]


def test_collectives_are_torchs_own_and_the_text_is_the_same_on_all_ranks(on_new_ranks):
    first, second = on_new_ranks(2, graphs)
    assert first == second and len(first) >= 2
    for text in first:  # a header, rows out, rows back
        counts = [text.count(f"_c10d_functional.{name}.default(") for name in ("all_to_all_single", "wait_tensor")]
        assert counts == [3, 3]
        assert "ep of 2 ranks" in text
        assert {name.partition("(")[0] for name in text.split("torch.ops.moebius.")[1:]} <= {
            "begin_meeting.default", "end_meeting.default", "after.default", "experts.default", "experts_save.default",
            "experts_backward.default", "own_experts.default", "pad_experts.default",
        }


def lose_a_rank(backend):
    run, training = on_mesh(backend), build()
    batch = [torch.randn(6, D, dtype=torch.float64)]
    for _ in range(2):
        run(*training, batch)
    if dist.get_rank():
        with pytest.raises(TypeError, match="NoneType"):
            run(*training, None)
        return 0.0
    start = time.monotonic()
    with pytest.raises(RanksDisagreeError, match="rank 1 raised TypeError"):
        run(*training, batch)
    return time.monotonic() - start


def test_a_rank_that_fails_is_named_in_what_a_backend_made(on_new_ranks):
    assert max(on_new_ranks(2, lose_a_rank, "aot_eager")) < 10

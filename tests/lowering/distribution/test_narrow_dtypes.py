"""bfloat16 and autocast on ranks: within the rounding of the dtype.

The bound: eps = 2^-8, a unit in the last place of bfloat16. From the same weights, a gradient is no more than twice as
far from that of one process in float64 as that of one process in the narrow dtype is, and 1 eps: norms over that of the
gradient, root mean square of the steps. (Ranks add a rounding of results that travel and one of the mean.) Tokens
choose their experts by number, so that rounding sends none elsewhere."""
from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from rank_layers import Experts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture, stats
from moebius.lowering.distribution import Sharded
from moebius.lowering.distribution.exchange import sum_rows
from moebius.lowering.distribution.packing import pack, unpack

E, D, N, K, OUT, STEPS, DIVISOR = 4, 16, 12, 2, 3, 4, 16
EPS = 2.0**-8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.first, self.last = nn.Linear(D, E), Experts(E, D, N), nn.Linear(D, OUT)

    def forward(self, x, index):
        weights = self.router(x).softmax(-1).gather(-1, index)
        return self.last(x + self.first(x, index, weights.to(x.dtype)))


SCALERS = {}


def step(model, optimizer, dtype, parts, halves):
    """parts: of one rank, or, in one process, of each. dtype: of autocast, if any."""
    optimizer.zero_grad()
    scaler = SCALERS.get(id(model))
    for half in range(halves):
        loss = 0
        for x, index, y in parts:
            with torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext():
                logits = model(x[half::halves], index[half::halves])
            logits = logits if logits.dtype == torch.float64 else logits.float()
            part = nn.functional.cross_entropy(logits, y[half::halves], reduction="sum")
            loss = loss + part / DIVISOR / len(parts) / halves
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


WAYS = {  # the model's dtype, autocast's, scaler, backward passes a step
    "bfloat16": (torch.bfloat16, None, False, 1),
    "bfloat16, accumulation": (torch.bfloat16, None, False, 2),
    "autocast": (torch.float32, torch.bfloat16, False, 1),
    "autocast, accumulation": (torch.float32, torch.bfloat16, False, 2),
    "autocast, scaler, accumulation": (torch.float32, torch.bfloat16, True, 2),
    "float32, scaler": (torch.float32, None, True, 1),
}


def build(way):
    dtype, _, scaler, _ = WAYS[way]
    torch.manual_seed(0)
    model = Model().to(dtype)
    if scaler:
        SCALERS[id(model)] = torch.amp.GradScaler("cpu", init_scale=256.0)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, Sharded) else tensor).detach().double()


def train(way, tokens):
    """For each parameter, how far its gradient is from one in float64, and how far that of one process is, in
    eps; breaks; the dtypes of gradients; whether experts are split."""
    dtype, cast, _, halves = WAYS[way]
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    plain, exact, spread = build(way), build(way), build(way)
    exact[0].double()
    names = [name for name, _ in spread[0].named_parameters()]
    squares = torch.zeros(len(names), 2, dtype=torch.float64)
    for _ in range(STEPS):
        with torch.no_grad():
            for other in (plain, exact):
                for mine, theirs in zip(spread[0].parameters(), other[0].parameters(), strict=True):
                    theirs.copy_(whole(mine))
        parts = [
            (torch.randn(count, D, generator=generator).to(dtype),
             torch.rand(count, E, generator=generator).topk(K)[1], torch.randint(OUT, (count,), generator=generator))
            for count in tokens
        ]
        run(*spread, cast, [parts[rank]], halves)
        step(*plain, cast, parts, halves)
        step(*exact, None, [(x.double(), *rest) for x, *rest in parts], halves)
        triples = zip(*(pair[0].parameters() for pair in (spread, plain, exact)), strict=True)
        for place, parameters in enumerate(triples):
            ours, one, right = (whole(parameter.grad) for parameter in parameters)
            far = torch.stack([(grad - right).norm() for grad in (ours, one)]) / right.norm() / EPS
            squares[place] += far**2 / STEPS
    found = dict(zip(names, squares.sqrt().tolist(), strict=True))
    return found, stats(run).breaks, {p.grad.dtype for p in spread[0].parameters()}, isinstance(
        spread[0].first.down, Sharded)


@pytest.mark.share(2)
@pytest.mark.parametrize("tokens", [(8, 8), (11, 0), (2, 9)])
@pytest.mark.parametrize("way", WAYS)
def test_within_the_rounding_of_the_dtype(on_ranks, way, tokens):
    for found, breaks, dtypes, sharded in on_ranks(2, train, way, tokens):
        assert all(ours <= 2 * one + 1 for ours, one in found.values()), found
        assert max(one for _, one in found.values()) < 16  # (or the bound says nothing)
        assert breaks == 0 or "scaler" in way
        assert sharded and dtypes == {WAYS[way][0]}


@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_rows_that_return_are_summed_in_float32(dtype, unit):
    """One rounding a token, however many ranks send it results: 1 + unit alone is rounded back to 1."""
    rows = torch.tensor([[1.0], [unit], [unit]], dtype=dtype)
    assert sum_rows(rows, torch.zeros(3, dtype=torch.int64), 1).item() == 1 + 2 * unit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beside", [(), (torch.int64,), (torch.float32, torch.int64)])
def test_rows_travel_to_the_bit(dtype, beside):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 15), 1 << 15, (9, 4), generator=generator).to(torch.int16)
    tensors = [bits.view(dtype), *(torch.randn(9, 3, generator=generator).mul(100).to(other) for other in beside)]
    order = torch.randperm(9, generator=generator)
    back = unpack(pack(tensors, order), tensors)
    assert torch.equal(back[0].contiguous().view(torch.int16), bits[order])
    assert all(torch.equal(mine, tensor[order]) for mine, tensor in zip(back[1:], tensors[1:], strict=True))

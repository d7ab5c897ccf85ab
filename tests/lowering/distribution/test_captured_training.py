"""A captured training step on two ranks: nothing of the model or the step says so, and it trains as in one process."""
from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture, stats
from moebius.errors import OptionError
from moebius.lowering.distribution import Sharded, traffic
from moebius.lowering.distribution.errors import RanksDisagreeError
from moebius.lowering.distribution.plan import chunk_span

E, D, N, K = 5, 12, 7, 2


class Experts(nn.Module):
    """Experts as people write them: a Python loop."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * N, D) / D**0.5)
        self.down_proj = nn.Parameter(torch.randn(E, D, N) / N**0.5)

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        with torch.no_grad():
            mask = nn.functional.one_hot(index, num_classes=E).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for row in hit:
            expert = row[0]
            slot, token = torch.where(mask[expert])
            gate, up = nn.functional.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            current = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert])
            current = current * weights[token, slot, None]
            out.index_add_(0, token, current.to(out.dtype))
        return out


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.norm = nn.LayerNorm(D)
        self.experts = Experts()

    def forward(self, x):
        h = self.norm(x)
        weights, index = torch.topk(self.router(h).softmax(-1), K)
        return x + self.experts(h, index, weights / weights.sum(-1, keepdim=True))


def step(model, optimizer, scheduler, batch):
    optimizer.zero_grad()
    loss = (model(batch) ** 2).mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    return loss.detach(), norm


def build():
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.Tanh(), Layer()).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train():
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(tokens, D, generator=generator, dtype=torch.float64) for tokens in (17, 17, 17, 17, 30, 3)]
    plain, spread = build(), build()
    captured = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    traffic.reset()
    found = [captured(*spread, batch) for batch in batches]
    expected = [step(*plain, batch) for batch in batches]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    low, high = chunk_span(E, dist.get_world_size(), dist.get_rank())
    experts = [p for name, p in spread[0].named_parameters() if "experts" in name]
    assert len(experts) == 4
    for parameter in experts:
        assert isinstance(parameter, Sharded)
        rows = parameter.numel() // E * (high - low)
        for tensor in (parameter, parameter.grad, spread[1].state[parameter]["exp_avg"]):
            assert tensor.untyped_storage().nbytes() == rows * 8
    others = [p for name, p in spread[0].named_parameters() if "experts" not in name]
    assert others and not any(isinstance(p, Sharded) for p in others)
    assert traffic.dispatch and traffic.combine
    for mine, theirs in zip(spread[0].parameters(), plain[0].parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, Sharded) else mine
        torch.testing.assert_close(whole, theirs, rtol=1e-10, atol=1e-10)
    return stats(captured).graphs, [loss.item() for loss, _ in found]


def test_captured_training_on_ranks(on_ranks):
    results = on_ranks(2, train)
    assert all(result == results[0] for result in results)
    assert results[0][0] >= 1


def labelled_step(model, optimizer, batch, labels, scale):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), labels) * scale
    loss.backward()
    optimizer.step()
    return loss.detach()


def disagree(which: str):
    """The error of a call whose input is another one on each rank, after two calls that agree; and whether any weight
    or state of the optimizer is another one after it."""
    model, optimizer, _ = build()
    captured = capture(labelled_step, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    generator = torch.Generator().manual_seed(1)

    def inputs():
        return {
            "batch": torch.randn(9, D, generator=generator, dtype=torch.float64),
            "labels": torch.randint(0, D, (9,), generator=generator),
            "scale": torch.ones((), dtype=torch.float64),
        }

    for _ in range(2):
        captured(model, optimizer, **inputs())
    state = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    before = [(t.full_tensor() if isinstance(t, Sharded) else t).clone() for t in state]
    given = inputs()
    if which == "batch":
        given[which] = given[which] * (1 + dist.get_rank() * 1e-6)  # goes to the same experts
    elif which == "labels":
        given[which] = (given[which] + dist.get_rank()) % D
    elif which == "scale":
        given[which] = given[which] * (1 + dist.get_rank())
    try:
        captured(model, optimizer, **given)
        error = ""
    except RanksDisagreeError as raised:
        error = str(raised)
    after = [t.full_tensor() if isinstance(t, Sharded) else t for t in state]
    return error, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("which", ["batch", "labels", "scale"])
def test_other_inputs_end_in_one_error_on_all_ranks(on_ranks, which):
    for rank, (error, unchanged) in enumerate(on_ranks(2, disagree, which)):
        assert f"rank {rank} " in error and f"ranks [{1 - rank}]" in error
        assert f"other values in L['{which}']" in error
        assert unchanged


def test_the_same_inputs_are_no_error(on_ranks):
    assert all(not error and not unchanged for error, unchanged in on_ranks(2, disagree, ""))


def two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    try:
        capture(step, mesh=mesh)
    except OptionError as error:
        capture(step, mesh=mesh["ep"])
        return str(error)
    return ""


def test_an_axis_over_which_nothing_is_reduced_is_refused(on_ranks):
    for error in on_ranks(4, two_axes):
        assert "'dp' (2 ranks)" in error and "Pass mesh['ep']" in error


def fewer_experts_than_ranks_need():
    model, optimizer, scheduler = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        capture(step, mesh=mesh)(model, optimizer, scheduler, torch.randn(4, D, dtype=torch.float64))
    return [str(w.message) for w in caught]


def test_ranks_without_experts_are_said(on_ranks):
    for said in on_ranks(4, fewer_experts_than_ranks_need):  # 5 experts: 2, 2, 1 and none
        assert sum("5 experts on 4 ranks" in message for message in said) == 1, said

"""A step that enters autocast itself: experts are lowered wherever it is entered, whichever dtype their rows have by
then, and are as far from float32 as plain PyTorch is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, one_hot, silu
from torch.utils.checkpoint import checkpoint

from moebius import explain

T, D, N, E, K = 48, 16, 24, 4, 2
NARROW = torch.bfloat16


def modules(moe: Layer, x: torch.Tensor, w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, (expert(x[token]) * w[token, slot, None]).to(out.dtype))
    return out


def stacked(moe: Layer, x: torch.Tensor, w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out, mask = torch.zeros_like(x), one_hot(index, E).permute(2, 1, 0)
    for e in range(E):
        slot, token = torch.where(mask[e])
        gate, up = linear(x[token], moe.gate_up[e]).chunk(2, dim=-1)
        out.index_add_(0, token, (linear(silu(gate) * up, moe.down[e]) * w[token, slot, None]).to(out.dtype))
    return out


def masked(moe: Layer, x: torch.Tensor, w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    gates = torch.zeros(len(x), E, dtype=w.dtype).scatter(1, index, w)
    return sum(expert(x) * gates[:, e, None].to(x.dtype) for e, expert in enumerate(moe.experts))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, N), nn.Linear(D, N), nn.Linear(N, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, loop: Callable[..., torch.Tensor], rows: str) -> None:
        super().__init__()
        self.before, self.router = nn.Linear(D, D), nn.Linear(D, E, bias=False)
        if loop is stacked:
            self.gate_up = nn.Parameter(torch.randn(E, 2 * N, D) * 0.2)
            self.down = nn.Parameter(torch.randn(E, D, N) * 0.2)
        else:
            self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.loop, self.rows = loop, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)  # (of what is given: which experts are chosen is the same in each dtype)
        x = ROWS[self.rows](self, x)
        w, index = logits.float().softmax(-1).topk(K)
        return self.loop(self, x, w, index)


ROWS = {
    "as given": lambda moe, x: x,
    "of a product": lambda moe, x: moe.before(x),
    "cast": lambda moe, x: x.to(NARROW),
    "wide again": lambda moe, x: moe.before(x).float(),
}


def autocast(**kwargs: bool) -> torch.autocast:
    return torch.autocast("cpu", NARROW, **kwargs)


def around(moe: Layer, x: torch.Tensor) -> torch.Tensor:
    with autocast():
        return moe(x)


def without_copies(moe: Layer, x: torch.Tensor) -> torch.Tensor:
    with autocast(cache_enabled=False):
        return moe(x)


def by_decorator(moe: Layer, x: torch.Tensor) -> torch.Tensor:
    return autocast()(moe.forward)(x)


def around_a_checkpoint(moe: Layer, x: torch.Tensor) -> torch.Tensor:
    with autocast():
        return checkpoint(moe, x, use_reentrant=False)


def in_a_checkpoint(moe: Layer, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(around, moe, x, use_reentrant=False)


def off_within(moe: Layer, x: torch.Tensor) -> torch.Tensor:
    with autocast():
        x = x + 0 * moe.before(x)
        with autocast(enabled=False):
            return moe(x.float()) if moe.rows in ("as given", "wide again") else around(moe, x.float())


def twice(moe: Layer, x: torch.Tensor) -> torch.Tensor:
    with autocast():
        y = moe(x)
    with autocast():
        return moe(x + 0 * y.float())


PLACES = (around, without_copies, by_decorator, around_a_checkpoint, in_a_checkpoint, off_within, twice)


def trained(step: Callable, moe: Layer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    moe.zero_grad()
    out = step(moe, x)
    out.float().square().mean().backward()
    return {"out": out.detach(), **{name: p.grad for name, p in moe.named_parameters() if p.grad is not None}}


@pytest.mark.share(12)
@pytest.mark.parametrize("loop", [modules, stacked, masked])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("place", PLACES)
def test_they_are_lowered(place: Callable, rows: str, loop: Callable) -> None:
    torch.manual_seed(0)
    moe, x = Layer(loop, rows), torch.randn(T, D)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setitem(globals(), "NARROW", torch.float32)
        exact = trained(lambda moe, x: moe(x), moe, x)
    plain = trained(place, moe, x)
    reports = []

    def explained(moe: Layer, x: torch.Tensor) -> torch.Tensor:
        reports.append(explain(place)(moe, x))
        return reports[-1].result

    ours = trained(explained, moe, x)
    assert len(reports[0].expert_regions) >= 1 and all(one.lowered for one in reports[0].expert_regions), reports[0]
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in plain.items()}
    for name, own in plain.items():
        truth = exact.get(name, torch.zeros_like(own))
        assert (ours[name] - truth).norm() <= 2 * (own - truth).norm() + 1e-5 * truth.norm(), name

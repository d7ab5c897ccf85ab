"""The sum of a lowered loop has the strides that plain Python's has: views that only those allow may follow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moebius.lowering.experts.writing as writing
from moebius import capture, explain


class Layer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.router = how, nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        if self.how == "hits":
            mask = F.one_hot(chosen, 3).permute(2, 1, 0)
            for e in mask.sum((1, 2)).nonzero()[:, 0]:
                slot, token = torch.where(mask[e])
                out.index_add_(0, token, self.experts[e](x[token]) * weight[token, slot, None])
        elif self.how == "range":
            for e in range(3):
                token, slot = torch.where(chosen == e)
                out[token] += self.experts[e](x[token]) * weight[token, slot, None]
        else:
            for e in range(3):
                token, slot = torch.where(chosen == e)
                out = out.index_add(0, token, self.experts[e](x[token]) * weight[token, slot, None])
        return out


@pytest.mark.share(2)
@pytest.mark.parametrize("how", ["hits", "range", "out of place"])
def test_a_transposed_batch(how: str) -> None:
    layer = Layer(how).double()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return y if how == "out of place" else y.t().view(-1)  # (fakes take index_add's strides for others)

    captured = capture(step)
    for rows in (5, 5, 7, 6):
        x = torch.rand(4, rows, dtype=torch.float64).t()
        torch.testing.assert_close(captured(x), step(x))
        assert capture(layer)(x).stride() == layer(x).stride()
    assert [r.lowered for r in explain(step)(x).expert_regions] == [True]


def test_noticed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "lies_in_rows", lambda value: True)
    layer, x = Layer("hits"), torch.rand(4, 5).t()
    assert capture(layer)(x).stride() != layer(x).stride()


# two batched products: how they are written, and views of x that they take
BATCHED = {
    "becd": ("becd,edn->becn", "becn,end->becd", (2, 3, -1, 4)),
    "ebcd": ("ebcd,edn->ebcn", "ebcn,end->ebcd", (3, 2, -1, 4)),
    "edbc": ("becd,edn->ebcn", "ebcn,end->edbc", (2, 3, -1, 4)),
    "ecd": ("ecd,edn->ecn", "ecn,end->ecd", (3, -1, 4)),
    "ted": ("td,edn->ten", "ten,end->ted", (-1, 4)),
    "tde": ("td,edn->ten", "ten,end->tde", (-1, 4)),
    "etd": ("td,edn->etn", "etn,end->etd", (-1, 4)),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("how", BATCHED)
def test_batched_products(how: str) -> None:
    up, down, shape = BATCHED[how]
    first, second = (torch.rand(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 6), (3, 6, 4)))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum(down, F.silu(torch.einsum(up, x.view(shape), first)), second)

    for rows in (24, 36, 36, 48, 6):
        x = torch.rand(rows, 4, dtype=torch.float64)
        plain = layer(x)
        order = sorted(range(plain.dim()), key=plain.stride, reverse=True)

        def flat(x: torch.Tensor, order: list[int] = order) -> torch.Tensor:
            return layer(x).permute(order).view(-1)

        for step in (layer, flat):
            torch.testing.assert_close(capture(step)(x), step(x))
        strides = zip(capture(layer)(x).stride(), plain.stride(), plain.shape, strict=True)
        assert all(mine == own or size == 1 for mine, own, size in strides)
    assert [r.lowered for r in explain(layer)(x).expert_regions] == [True]

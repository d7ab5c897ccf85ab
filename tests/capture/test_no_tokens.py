"""A batch without tokens runs no iteration of a loop over hits: backward is the error that it is in plain Python."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, explain

F = torch.nn.functional


class Experts(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.gate = how, torch.nn.Linear(4, 4)
        self.gate_up = torch.nn.Parameter(torch.randn(4, 16, 4) * 0.3)
        self.down = torch.nn.Parameter(torch.randn(4, 4, 8) * 0.3)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, 4).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for hit in (mask.sum((-1, -2)) > 0).nonzero() if self.how == "hits" else range(4):
            expert = hit[0] if self.how == "hits" else hit
            slot, token = torch.where(mask[expert])
            if self.how == "any" and token.numel() == 0:
                continue
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, slot, None])
        return out


def step(model, optimizer, x):
    optimizer.zero_grad()
    y = model(x)
    y.square().sum().backward()
    optimizer.step()
    return y.detach()


@pytest.mark.share(2)
@pytest.mark.parametrize("how", ["hits", "range", "any"])
def test_a_batch_without_tokens(how):
    def run(function):
        torch.manual_seed(0)
        model = Experts(how)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for rows in (6, 0, 6, 1, 0):
            try:
                found.append(function(model, optimizer, torch.randn(rows, 4)))
            except RuntimeError as error:
                assert "does not require grad" in str(error)
                found.append(torch.tensor(False))
            found += [torch.tensor(p.grad is None) for p in model.parameters()]
        return [*found, *(p.detach() for p in model.parameters())]

    torch.manual_seed(0)
    model = Experts(how)
    report = explain(step)(model, torch.optim.SGD(model.parameters()), torch.randn(6, 4))
    assert [r.lowered for r in report.expert_regions] == [True]
    for ours, plain in zip(run(capture(step)), run(step), strict=True):
        torch.testing.assert_close(ours, plain)

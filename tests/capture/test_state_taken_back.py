"""A parameter that got no gradient has no optimizer state, though the step was captured as if it would get one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moebius import capture


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, index):
        out = x * 1.0
        for e, expert in enumerate(self.experts):
            token = torch.where(index == e)[0]
            if token.numel() > 0:
                out = out.index_add(0, token, expert(x[token]))
        return out


def step(model, optimizer, x, index):
    optimizer.zero_grad()
    loss = model(x, index).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_state(name):
    mine, plain = Experts(), Experts()
    a, b = (OPTIMIZERS[name](model.parameters()) for model in (mine, plain))
    captured = capture(step)
    for batch in ([3, 1, 1], [0, 0, 3], [1, 1, 1], [2, 1, 0]):
        x, index = torch.randn(3, 3), torch.tensor(batch)
        torch.testing.assert_close(captured(mine, a, x, index), step(plain, b, x, index))
        ours, theirs = a.state_dict()["state"], b.state_dict()["state"]
        assert list(ours) == list(theirs)
        for key, state in theirs.items():
            torch.testing.assert_close(ours[key], state)

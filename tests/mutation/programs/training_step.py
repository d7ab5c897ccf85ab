"""A whole training step: two groups of AdamW, a schedule, clipping, a log of what it did."""

import torch
from torch import nn

WARM_UP = 3.0
CLIP = 1.0


def rate(step):
    return min(1.0, (step + 1) / WARM_UP)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(nn.functional.silu(self.first(x)))


def f(model, optimizer, schedule, log, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    schedule.step()
    log["steps"] += 1
    log["rates"].append(schedule.get_last_lr()[0])
    return loss.detach(), norm


def make():
    model = Net()
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.second.parameters()), "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return f, [model, optimizer, schedule, {"steps": 0, "rates": []}, torch.randn(5, 3), torch.randn(5, 2)], {}

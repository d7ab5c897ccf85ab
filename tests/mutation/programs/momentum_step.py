"""A step of SGD with momentum under closures: the optimizer is a cell, the schedule a plain attribute of a trainer."""

import torch
from torch import nn


class Trainer:
    decay = 0.5

    def __init__(self):
        self.model = nn.Linear(3, 2)
        weights = self.model.parameters()
        self.optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
        self.every = 2
        self.count = 0

    def schedule(self):
        self.count += 1
        if self.count % self.every == 0:
            for group in self.optimizer.param_groups:
                group["lr"] *= self.decay


def make():
    trainer = Trainer()
    optimizer = trainer.optimizer

    def f(x, y):
        loss = (trainer.model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        trainer.schedule()
        return loss.detach()

    return f, [torch.randn(4, 3), torch.randn(4, 2)], {}

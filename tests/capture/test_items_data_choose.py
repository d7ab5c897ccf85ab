"""Data choose an item in each iteration of a loop: the loop runs natively to its end, and breaks the graph once."""

import pytest
import torch
from reconciling import plain_counts, reported_counts
from torch import nn

import moebius
from moebius.codegen import resume


class Bank(nn.Module):
    """Experts, of which each token's index chooses one."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.named = nn.ModuleDict({str(e): expert for e, expert in enumerate(self.experts)})


class Ranges(Bank):
    def forward(self, x_TD):
        index_T, rows = self.router(x_TD).argmax(-1), []
        for t in range(x_TD.shape[0]):
            rows.append(self.experts[index_T[t].item()](x_TD[t]))
        return torch.stack(rows).sin()


class Nested(Bank):
    def forward(self, x_TD):
        weight_TK, index_TK = self.router(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for t in range(x_TD.shape[0]):
            for k in range(2):
                e = index_TK[t, k].item()
                out_TD[t] = out_TD[t] + weight_TK[t, k] * self.experts[e](x_TD[t])
        return out_TD.sin()


class Zipped(Bank):
    def forward(self, x_TD):
        total_D = x_TD.sum(0)
        for x_D, e in zip(x_TD, self.router(x_TD).argmax(-1).tolist(), strict=True):
            total_D = total_D + self.experts[e](x_D)
        return total_D.sin()


class Left(Bank):
    """The loop is left early, skips iterations, and has an ``else``."""

    def forward(self, x_TD):
        index_T, total_D, seen = self.router(x_TD).argmax(-1), x_TD[0], 0
        for t, x_D in enumerate(x_TD):
            if t == 1:
                continue
            total_D = total_D + self.experts[index_T[t].item()](x_D)
            seen += 1
            if seen == 3:
                break
        else:
            total_D = total_D * 2
        return total_D.sin() * seen


class Returns(Bank):
    def forward(self, x_TD):
        index_T, total_D = self.router(x_TD).argmax(-1), x_TD[0]
        for t in range(x_TD.shape[0]):
            total_D = total_D + self.experts[int(index_T[t])](x_TD[t])
            if t == 3:
                return total_D.cos()
        return total_D.sin()


class SetInside(Bank):
    """What the loop sets for the first time is read behind it."""

    def forward(self, x_TD):
        index_T = self.router(x_TD).argmax(-1)
        for t in range(x_TD.shape[0]):
            y_D = self.experts[index_T[t].item()](x_TD[t])
        return y_D.sin() * t


class SetAgain(Bank):
    """What the loop sets, and the graph behind it needs, an earlier loop of one node has set before."""

    def forward(self, x_TD):
        index_T, out_TD = self.router(x_TD).argmax(-1), torch.zeros_like(x_TD)
        for row in (index_T > 0).nonzero():
            y_D = x_TD[row[0]] * 2
            out_TD[row[0]] = y_D
        for t in range(x_TD.shape[0]):
            y_D = self.experts[index_T[t].item()](x_TD[t])
            out_TD[t] = out_TD[t] + y_D
        return out_TD.sin() + y_D


class BehindAnother(Bank):
    """Of an earlier loop the handler stands, from CPython 3.12 on, behind all else, and jumps back to that loop."""

    def forward(self, x_TD):
        index_T, total_D = self.router(x_TD).argmax(-1), x_TD[0]
        for t in range(3):
            try:
                total_D = total_D + {0: 1, 1: 2}[t]
            except KeyError:
                continue
        for t in range(x_TD.shape[0]):
            total_D = total_D + self.experts[index_T[t].item()](x_TD[t])
        return total_D.sin()


class Handled(Bank):
    def forward(self, x_TD):
        index_T, total_D = self.router(x_TD).argmax(-1), x_TD[0]
        for t in range(x_TD.shape[0]):
            try:
                total_D = total_D + self.experts[index_T[t].item() + 1](x_TD[t])
            except IndexError:
                total_D = total_D * 0.5
        return total_D.sin()


class InNoGrad(Bank):
    def forward(self, x_TD):
        index_T, total_D = self.router(x_TD).argmax(-1), x_TD[0]
        for t in range(x_TD.shape[0]):
            with torch.no_grad():
                total_D = total_D + self.experts[index_T[t].item()](x_TD[t])
        return total_D.sin() + self.router(x_TD).sum()


class Generated(Bank):
    def rows(self, x_TD):
        index_T = self.router(x_TD).argmax(-1)
        for t in range(x_TD.shape[0]):
            yield self.experts[index_T[t].item()](x_TD[t])

    def forward(self, x_TD):
        return torch.stack([*self.rows(x_TD)]).sin()


class Comprehended(Bank):
    def forward(self, x_TD):
        index_T = self.router(x_TD).argmax(-1)
        return torch.stack([self.experts[e.item()](x_D) for x_D, e in zip(x_TD, index_T, strict=True)]).sin()


class While(Bank):
    def forward(self, x_TD):
        index_T, total_D, t = self.router(x_TD).argmax(-1), x_TD[0], 0
        while t < x_TD.shape[0]:
            total_D = total_D + self.experts[index_T[t].item()](x_TD[t])
            t += 1
        return total_D.sin()


class Named(Bank):
    def forward(self, x_TD):
        index_T, total_D = self.router(x_TD).argmax(-1), x_TD[0]
        for t in range(x_TD.shape[0]):
            total_D = total_D + self.named[str(index_T[t].item())](x_TD[t])
        return total_D.sin()


LAYERS = [
    Ranges, Nested, Zipped, Left, Returns, SetInside, SetAgain, BehindAnother, Handled, InNoGrad, Generated,
    Comprehended, While, Named,
]  # fmt: skip
WHOLE = [Ranges, Nested, Zipped, Left, Returns, BehindAnother, Named]


def steps(kind, wrap):
    torch.manual_seed(0)
    layer = kind().double()
    optimizer, found = torch.optim.SGD(layer.parameters(), lr=0.1), []
    step = wrap(lambda x_TD: step_of(layer, optimizer, x_TD))
    for count in (5, 5, 6, 4, 5):
        found.append(step(torch.randn(count, 4, dtype=torch.float64)).item())
    return found, [p.detach().clone() for p in layer.parameters()], step


def step_of(layer, optimizer, x_TD):
    optimizer.zero_grad()
    loss = layer(x_TD).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("kind", LAYERS)
def test_training_steps_are_those_of_plain_python(kind):
    plain, captured = steps(kind, lambda step: step), steps(kind, lambda step: moebius.capture(step, backend="eager"))
    assert captured[0] == plain[0]
    assert all(map(torch.equal, captured[1], plain[1]))


def pieces(kind):
    """How often the graph of the layer's forward breaks."""
    torch.manual_seed(0)
    captured, x_TD = moebius.capture(kind().forward, backend="eager"), torch.randn(5, 4)
    for _ in range(3):
        captured(x_TD)
    return len(moebius.explain(captured)(x_TD).breaks)


@pytest.mark.parametrize("kind", WHOLE)
def test_the_loop_breaks_the_graph_once(kind):
    assert pieces(kind) == 1


@pytest.mark.parametrize("kind", WHOLE)
def test_each_instruction_is_counted(kind):
    torch.manual_seed(0)
    layer, x_TD = kind(), torch.randn(5, 4)
    captured = moebius.capture(layer.forward, backend="eager")
    for _ in range(3):
        captured(x_TD)
    assert reported_counts(moebius.explain(captured)(x_TD)) == plain_counts(layer.forward, x_TD)


def test_with_it_switched_off_each_iteration_does(monkeypatch):
    monkeypatch.setattr(resume.Continuation, "behind_outermost_loop", lambda self: [])
    assert pieces(Ranges) > 1

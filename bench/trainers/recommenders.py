# mypy: ignore-errors
"""Recommenders and time series: experts for tasks, tables of embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .models import MixtralExperts, SoftExperts
from .script import STEPS, Script, labelled, mlp, rows, script, vectors

RECOMMENDERS, SERIES = "recommenders", "time series and speech"


def clicks() -> list[tuple]:
    return [(torch.randint(50, (rows(i), 3)), torch.randn(rows(i), 4), torch.rand(rows(i), 2).round())
            for i in range(STEPS)]  # fmt: skip


class Tables(nn.Module):
    def __init__(self, fields=3, size=50, width=8):
        super().__init__()
        self.tables = nn.ModuleDict({f"f{i}": nn.Embedding(size, width) for i in range(fields)})

    def forward(self, ids, dense):
        found = [table(ids[:, i]) for i, table in enumerate(self.tables.values())]
        return torch.cat([*found, dense], -1)


@script(RECOMMENDERS)
def mmoe() -> Script:
    tables, experts = Tables(), SoftExperts(28, 16, 4, 2)
    towers = nn.ModuleList(mlp(16, 8, 1) for _ in range(2))
    modules = [tables, experts, towers]
    optimizer = torch.optim.Adam([p for m in modules for p in m.parameters()], lr=1e-3)

    def step(ids, dense, y):
        outputs = [tower(h) for tower, h in zip(towers, experts(tables(ids, dense)), strict=True)]
        predicted = torch.cat(outputs, -1).sigmoid()
        loss = sum(F.binary_cross_entropy(predicted[:, i], y[:, i], reduction="sum") for i in range(2))
        reg = sum(p.pow(2).sum() for p in tables.parameters()) * 1e-5
        optimizer.zero_grad()
        (loss + reg).backward()
        optimizer.step()
        return loss.item()

    return Script(step, clicks(), modules, 1)


@script(RECOMMENDERS)
def ple() -> Script:
    tables = Tables()
    own = nn.ModuleList(nn.ModuleList(mlp(28, 16) for _ in range(2)) for _ in range(2))
    shared, gates = nn.ModuleList(mlp(28, 16) for _ in range(2)), nn.ModuleList(nn.Linear(28, 4) for _ in range(2))
    towers = nn.ModuleList(mlp(16, 8, 1) for _ in range(2))
    modules = [tables, own, shared, gates, towers]
    optimizer = torch.optim.Adagrad([p for m in modules for p in m.parameters()], lr=0.01)

    def step(ids, dense, y):
        x = tables(ids, dense)
        common = [e(x) for e in shared]
        loss = torch.zeros(())
        for task in range(2):
            stacked = torch.stack([e(x) for e in own[task]] + common, 1)
            mixed = torch.matmul(gates[task](x).softmax(-1)[:, None], stacked).squeeze(1)
            loss = loss + F.binary_cross_entropy_with_logits(towers[task](mixed)[:, 0], y[:, task])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, clicks(), modules, 1)


@script(RECOMMENDERS)
def deepfm_with_metrics() -> Script:
    tables, deep = Tables(), mlp(28, 16, 1)
    optimizer = torch.optim.Adam([*tables.parameters(), *deep.parameters()])
    seen = {"loss": [], "acc": []}

    def step(ids, dense, y):
        x = tables(ids, dense)
        fields = x[:, :24].view(-1, 3, 8)
        fm = 0.5 * (fields.sum(1).pow(2) - fields.pow(2).sum(1)).sum(1)
        logit = deep(x).squeeze(-1) + fm
        loss = F.binary_cross_entropy_with_logits(logit, y[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen["loss"].append(loss.item())
        seen["acc"].append(((logit > 0) == y[:, 0].bool()).float().mean().item())
        return seen["loss"][-1]

    return Script(step, clicks(), [tables, deep])


@script(RECOMMENDERS)
def two_towers() -> Script:
    user, item = nn.EmbeddingBag(50, 16, mode="mean"), mlp(4, 16)
    optimizer = torch.optim.SGD([*user.parameters(), *item.parameters()], lr=0.1)

    def step(ids, dense, y):
        u, v = F.normalize(user(ids), dim=-1), F.normalize(item(dense), dim=-1)
        scores = u @ v.T / 0.07
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, clicks(), [user, item])


@script(SERIES)
def forecasting_with_experts() -> Script:
    encoder, experts, head = nn.Linear(1, 32), MixtralExperts(), nn.Linear(32, 1)
    modules = [encoder, experts, head]
    optimizer = torch.optim.Adam([p for m in modules for p in m.parameters()], lr=1e-3)

    def step(series):
        mean, std = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-5
        x = ((series - mean) / std).unsqueeze(-1)
        predicted = head(experts(encoder(x[:, :-1]))).squeeze(-1) * std + mean
        loss = F.mse_loss(predicted, series[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, vectors(16), modules, 1)


@script(SERIES)
def lstm_with_state_carried_on() -> Script:
    embed, lstm, head = nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 20)
    modules = [embed, lstm, head]
    params = [p for m in modules for p in m.parameters()]
    hidden = [None]
    batches = [(torch.randint(20, (8, 10)), torch.randint(20, (8, 10))) for _ in range(STEPS)]

    def step(x, y):
        if hidden[0] is not None:
            hidden[0] = tuple(h.detach() for h in hidden[0])
        for p in params:
            p.grad = None
        out, hidden[0] = lstm(embed(x), hidden[0])
        loss = F.cross_entropy(head(out).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.25)
        for p in params:
            p.data.add_(p.grad, alpha=-0.5)
        return loss.item()

    return Script(step, batches, modules)


@script(SERIES)
def speech_with_ctc() -> Script:
    front, experts, head = nn.Conv1d(8, 32, 3, padding=1), MixtralExperts(), nn.Linear(32, 11)
    modules = [front, experts, head]
    optimizer = torch.optim.Adam([p for m in modules for p in m.parameters()], lr=1e-3)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    batches = [(torch.randn(n, 8, 20), torch.randint(1, 11, (n, 5)), torch.full((n,), 20), torch.full((n,), 5))
               for n in (rows(i) for i in range(STEPS))]  # fmt: skip

    def step(wave, target, frames, lengths):
        logp = head(experts(front(wave).transpose(1, 2))).log_softmax(-1).transpose(0, 1)
        loss = ctc(logp, target, frames, lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, batches, modules, 1)


@script(SERIES)
def gaussian_likelihood() -> Script:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.GaussianNLLLoss()

    def step(x, y):
        mean, var = model(x).chunk(2, -1)
        loss = criterion(mean, y[:, None].float(), F.softplus(var) + 1e-3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, labelled(6, 3), [model])

# mypy: ignore-errors
"""Rows, classes and tensors whose number differs from call to call: capacities, lengths, copies of a module."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import STEPS, Script, mlp, rows, script, texts

LANGUAGE, SPEECH, OPTIMIZERS = "language models", "time series and speech", "optimizers"


class CapacityRouter(nn.Module):
    def __init__(self, width, experts, k):
        super().__init__()
        self.k, self.route, self.noise = k, nn.Linear(width, experts), nn.Linear(width, experts)

    def forward(self, x):
        logits = self.route(x)
        noisy = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, chosen = noisy.topk(self.k, dim=-1)
        zeros = torch.full_like(noisy, float("-inf"))
        return F.softmax(zeros.scatter(-1, chosen, top), dim=-1), chosen


class CapacityMoE(nn.Module):
    """makeMoE's with a capacity: what comes late to a full expert is dropped."""

    def __init__(self, width=16, experts=4, k=2, factor=1.0):
        super().__init__()
        self.router, self.k, self.factor = CapacityRouter(width, experts, k), k, factor
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
            for _ in range(experts)
        )

    def forward(self, x):
        batch, length, width = x.shape
        gates, chosen = self.router(x)
        flat_x, flat_gates = x.view(-1, width), gates.view(-1, gates.size(-1))
        capacity = int((batch * length * self.k / len(self.experts)) * self.factor)
        updates = torch.zeros_like(flat_x)
        for i, expert in enumerate(self.experts):
            flat_mask = (chosen == i).any(dim=-1).view(-1)
            selected = torch.nonzero(flat_mask).squeeze(-1)
            limited = selected[:capacity] if selected.numel() > capacity else selected
            if limited.numel() > 0:
                updates.index_add_(0, limited, expert(flat_x[limited]) * flat_gates[limited, i].unsqueeze(1))
        return updates.view(batch, length, -1)


class CapacityBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.moe = nn.Linear(16, 16), CapacityMoE()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.moe(self.norm2(x))


@script(LANGUAGE)
def make_moe_with_capacity() -> Script:
    model = nn.Sequential(nn.Embedding(40, 16), CapacityBlock(), CapacityBlock(), nn.Linear(16, 40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        logits = model(x)
        batch, length, words = logits.shape
        loss = F.cross_entropy(logits.view(batch * length, words), y.reshape(batch * length))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return Script(step, texts(), [model], 2)


class TopNGate(nn.Module):
    """ST-MoE's, as st-moe-pytorch has it: the dispatch is of as many slots as the length asks for."""

    def __init__(self, width, experts, n=2, threshold=0.2, factor=1.25):
        super().__init__()
        self.n, self.threshold, self.factor, self.experts = n, threshold, factor, experts
        self.to_gates = nn.Linear(width, experts, bias=False)

    def forward(self, x):
        length = x.shape[1]
        capacity = max(min(length, int(length * self.factor / self.experts)), 4)
        raw = self.to_gates(x).softmax(dim=-1)
        gates, index = (t.permute(2, 0, 1) for t in raw.topk(self.n, dim=-1))
        gates = gates / gates.sum(0, keepdim=True).clamp(min=1e-9)
        first = F.one_hot(index, self.experts).float()
        routed = torch.zeros_like(gates).uniform_(0.0, 1.0) < gates / self.threshold
        routed[0, ...] = True
        mask = first * routed[..., None].float()
        places, before = [], 0.0
        for each in range(self.n):
            place = (F.pad(mask[each].cumsum(-2), (0, 0, 1, -1)) + before) * mask[each]
            mask[each] = mask[each] * (place < float(capacity)).float()
            before = mask[each].sum(-2, keepdim=True) + before
            places.append(place.sum(-1))
        kept = (gates * mask.sum(-1))[..., None, None]
        slots = F.one_hot(torch.stack(places).long().clamp(max=capacity), capacity + 1)[..., None, :capacity].float()
        combine = (kept * F.one_hot(index, self.experts).float()[..., None] * slots).sum(0)
        balance = (raw.mean(-2) * first[0].mean(-2)).mean() * float(self.experts**2)
        return combine.bool().type(x.dtype), combine, balance


@script(LANGUAGE)
def st_moe_with_slots() -> Script:
    embedding, head, gate = nn.Embedding(40, 16), nn.Linear(16, 40), TopNGate(16, 4)
    experts = nn.ModuleList([mlp(16, 32, 16) for _ in range(4)])
    model = nn.ModuleList([embedding, head, gate, experts])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x, y):
        h = embedding(x)
        dispatch, combine, balance = gate(h)
        given = torch.einsum("bnd,bnec->ebcd", h, dispatch)
        found = torch.stack([expert(part) for expert, part in zip(experts, given.unbind(0), strict=True)])
        h = h + torch.einsum("ebcd,bnec->bnd", found, combine)
        loss = F.cross_entropy(head(h).transpose(1, 2), y) + 1e-2 * balance
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    batches = []
    for i in range(STEPS):
        tokens = torch.randint(40, (rows(i), 9 + i * 7 % 12))
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return Script(step, batches, [model])


def pad_mask(lengths):
    """ESPnet's ``make_pad_mask``."""
    if not isinstance(lengths, list):
        lengths = lengths.long().tolist()
    number, longest = int(len(lengths)), int(max(lengths))
    places = torch.arange(0, longest, dtype=torch.int64)
    return places.unsqueeze(0).expand(number, longest) >= places.new(lengths).unsqueeze(-1)


def pad_list(xs, value):
    """ESPnet's."""
    padded = xs[0].new(len(xs), max(x.size(0) for x in xs), *xs[0].size()[1:]).fill_(value)
    for i in range(len(xs)):
        padded[i, : xs[i].size(0)] = xs[i]
    return padded


@script(SPEECH)
def espnet_joint_ctc_and_attention() -> Script:
    encoder, ctc, embedding = nn.Linear(6, 16), nn.Linear(16, 12), nn.Embedding(12, 16)
    decoder, out = nn.GRU(16, 16, batch_first=True), nn.Linear(32, 12)
    model = nn.ModuleList([encoder, ctc, embedding, decoder, out])
    optimizer = torch.optim.Adadelta(model.parameters(), eps=1e-8)
    counted = {"accumulated": 0}

    def forward(xs, lengths, ys):
        mask = ~pad_mask(lengths).unsqueeze(-1)
        h = torch.tanh(encoder(xs[:, : max(lengths)])) * mask
        words = [y[y != -1] for y in ys]
        scores, wanted = ctc(h).transpose(0, 1).log_softmax(2), torch.cat(words).int()
        sizes = [torch.tensor([len(y) for y in words], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)]
        aligned = F.ctc_loss(scores, wanted, sizes[1], sizes[0], reduction="sum", zero_infinity=True) / len(xs)
        ends = ys.new([11])
        given = pad_list([torch.cat([ends, y]) for y in words], 11)
        taught = pad_list([torch.cat([y, ends]) for y in words], -1)
        d, _ = decoder(embedding(given))
        weights = (d @ h.transpose(1, 2)).masked_fill(~mask.transpose(1, 2), float("-inf")).softmax(-1)
        logits = out(torch.cat([d, weights @ h], -1))
        said = F.cross_entropy(logits.view(-1, 12), taught.view(-1), ignore_index=-1)
        known = taught != -1
        right = (logits.argmax(2).masked_select(known) == taught.masked_select(known)).sum()
        return 0.3 * aligned + 0.7 * said, float(right) / float(known.sum())

    def step(xs, lengths, ys):
        loss, accuracy = forward(xs, lengths, ys)
        (loss / 2).backward()
        counted["accumulated"] += 1
        if counted["accumulated"] != 2:
            return accuracy
        counted["accumulated"] = 0
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        return accuracy

    rng, batches = np.random.default_rng(0), []
    for n in (rows(i) for i in range(STEPS)):
        ys = torch.full((n, 4), -1)
        for row, length in zip(ys, rng.integers(2, 5, n).tolist(), strict=True):
            row[:length] = torch.randint(1, 11, (length,))
        batches.append((torch.randn(n, 14, 6), [14, *rng.integers(8, 15, n - 1).tolist()], ys))
    return Script(step, batches, [model])


def clone_module(module):
    """learn2learn's."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    for names in ("_parameters", "_buffers", "_modules"):
        setattr(clone, names, getattr(clone, names).copy())
    for key, parameter in module._parameters.items():
        clone._parameters[key] = None if parameter is None else parameter.clone()
    for key, child in module._modules.items():
        clone._modules[key] = clone_module(child)
    return clone


def update_module(module, updates):
    for key, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[key] = parameter + next(updates)
    for child in module._modules.values():
        update_module(child, updates)


@script(OPTIMIZERS)
def learn2learn_clones() -> Script:
    model = mlp(5, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(tasks):
        optimizer.zero_grad()
        error = accuracy = 0.0
        for x, y in tasks:
            learner = clone_module(model)
            adapting = torch.zeros(x.size(0), dtype=torch.bool)
            adapting[torch.arange(x.size(0) // 2) * 2] = True
            for _ in range(2):
                weights = list(learner.parameters())
                loss = F.cross_entropy(learner(x[adapting]), y[adapting])
                grads = torch.autograd.grad(loss, weights, create_graph=True)
                update_module(learner, iter([-0.1 * g for g in grads]))
            found = learner(x[~adapting])
            loss = F.cross_entropy(found, y[~adapting])
            loss.backward()
            error += loss.item()
            accuracy += (found.argmax(1) == y[~adapting]).float().mean().item()
        for p in model.parameters():
            p.grad.data.mul_(1.0 / len(tasks))
        optimizer.step()
        return error / len(tasks), accuracy / len(tasks)

    counts = [3 if i < STEPS - 1 else 2 for i in range(STEPS)]
    return Script(step, [([(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(n)],) for n in counts], [model])

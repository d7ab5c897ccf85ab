# mypy: ignore-errors
"""How many there are of each: boxes of an image, tokens that an expert drops, words of a text that is pooled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .script import STEPS, Script, mlp, rows, script, texts

LANGUAGE, VISION = "language models", "vision"


class SwitchFeedForward(nn.Module):
    """labml's: what is over an expert's capacity is dropped, at random."""

    def __init__(self, width=16, experts=4, factor=1.0):
        super().__init__()
        self.experts = nn.ModuleList([mlp(width, 32, width) for _ in range(experts)])
        self.factor, self.switch, self.softmax = factor, nn.Linear(width, experts), nn.Softmax(dim=-1)

    def forward(self, x):
        length, batch, width = x.shape
        x = x.reshape(-1, width)
        probabilities = self.softmax(self.switch(x))
        highest, routes = torch.max(probabilities, dim=-1)
        places = [torch.eq(routes, i).nonzero(as_tuple=True)[0] for i in range(len(self.experts))]
        found = x.new_zeros(x.shape)
        capacity = int(self.factor * len(x) / len(self.experts))
        counts = x.new_tensor([len(each) for each in places])
        dropped = []
        for i in range(len(self.experts)):
            if len(places[i]) <= capacity:
                continue
            places[i] = places[i][torch.randperm(len(places[i]))]
            dropped.append(places[i][capacity:])
            places[i] = places[i][:capacity]
        outputs = [self.experts[i](x[places[i], :]) for i in range(len(self.experts))]
        for i in range(len(self.experts)):
            found[places[i], :] = outputs[i]
        if dropped:
            dropped = torch.cat(dropped)
            found[dropped, :] = x[dropped, :]
        found = found * (highest / highest.detach()).view(-1, 1)
        return found.view(length, batch, width), counts, probabilities.sum(0), len(dropped)


@script(LANGUAGE)
def labml_switch_transformer() -> Script:
    embedding, head = nn.Embedding(40, 16), nn.Linear(16, 40)
    norms, layers = nn.ModuleList([nn.LayerNorm(16) for _ in range(2)]), nn.ModuleList([SwitchFeedForward()] * 2)
    model = nn.ModuleList([embedding, head, norms, layers])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x, y):
        h, every = embedding(x), []
        for norm, layer in zip(norms, layers, strict=True):
            added, *told = layer(norm(h))
            h = h + added
            every.append(told)
        counts, probabilities, dropped = zip(*every, strict=True)
        counts, probabilities = torch.stack(counts), torch.stack(probabilities)
        total = counts.sum(dim=-1, keepdim=True)
        balance = 4 * (counts / total * probabilities / total).sum()
        loss = F.cross_entropy(head(h).view(-1, 40), y.reshape(-1))
        log = loss.item(), [each / total[0].item() for each in dropped]
        (loss + 0.01 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return log

    return Script(step, texts(), [model], 2)


def overlaps(a, b):
    left, right = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    shared = (right - left).clamp(min=0).prod(2)
    sizes = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (a, b)]
    return shared / (sizes[0][:, None] + sizes[1] - shared)


@script(VISION)
def torchvision_like_detection() -> Script:
    """Each image has one box or more: a capture for each combination would be eight."""
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
    objectness, deltas = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)
    model = nn.ModuleList([trunk, objectness, deltas])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1).view(-1, 2) * 4
    anchors = torch.cat([grid, grid + 6], 1)

    def matched(boxes):
        best, which = overlaps(boxes, anchors).max(0)
        which[best < 0.2] = -1
        which[(best >= 0.2) & (best < 0.4)] = -2
        return which

    def step(images, targets):
        features = trunk(torch.stack(images))
        logits, moved = objectness(features).flatten(1), deltas(features).flatten(2).transpose(1, 2)
        classes, places = [], []
        for logit, delta, target in zip(logits, moved, targets, strict=True):
            match = matched(target["boxes"])
            hit, wanted = match >= 0, torch.zeros_like(logit)
            wanted[hit] = 1.0
            known, count = match != -2, max(1, hit.sum())
            classes.append(F.binary_cross_entropy_with_logits(logit[known], wanted[known], reduction="sum") / count)
            boxes = target["boxes"][match.clamp(min=0)][hit]
            places.append(F.smooth_l1_loss(delta[hit], boxes - anchors[hit], reduction="sum") / count)
        loss = sum(classes) / len(classes) + sum(places) / len(places)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def target():
        corner = torch.rand(int(torch.randint(1, 5, (1,))), 2) * 8
        return {"boxes": torch.cat([corner, corner + 2 + torch.rand(len(corner), 2) * 6], 1)}

    counts = [3 if i < STEPS - 1 else 2 for i in range(STEPS)]
    batches = [([torch.randn(3, 16, 16) for _ in range(n)], [target() for _ in range(n)]) for n in counts]
    return Script(step, batches, [model])


@script(LANGUAGE)
def text_cnn() -> Script:
    embedding, drop, head = nn.Embedding(40, 16), nn.Dropout(0.5), nn.Linear(24, 3)
    filters = nn.ModuleList([nn.Conv2d(1, 8, (size, 16)) for size in (2, 3, 4)])
    model = nn.ModuleList([embedding, filters, drop, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x, y):
        h = embedding(x).unsqueeze(1)
        found = [F.relu(each(h)).squeeze(3) for each in filters]
        found = [F.max_pool1d(each, each.size(2)).squeeze(2) for each in found]
        logits = head(drop(torch.cat(found, 1)))
        optimizer.zero_grad()
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.item(), 100.0 * (logits.max(1)[1] == y).sum() / len(y)

    batches = [(torch.randint(40, (rows(i), 6 + i * 5 % 7)), torch.randint(3, (rows(i),))) for i in range(STEPS)]
    return Script(step, batches, [model])

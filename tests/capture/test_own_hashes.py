"""Keys whose class has a ``__hash__`` of its own, and an identity for ``==``, in containers that the step makes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from moebius import capture, stats

LOG: list[str] = []
OUTSIDE = [0]
HASHES = {
    "state": lambda self: hash(("state", self.count)),
    "the object's and a tensor": lambda self: hash((id(self), self.total)),
    "items": lambda self: hash((1, *self.items)),
    "a global": lambda self: hash((self.count, OUTSIDE[0])),
    "super's": lambda self: object.__hash__(self),
    "logged": lambda self: LOG.append("hash") or 7,
    "raised": lambda self: [][0],
    "no number": lambda self: "seven",
}
STAYS = ("the object's and a tensor", "items", "super's")  # (a count that varies is a number of the graph)


def changed(key, other, change):
    made = {key}
    change(key)
    return key in made, len(made | {key})


USES = {
    "set": lambda key, other: (len({key, other, key}), key in {key}, key in {other}),
    "dict": lambda key, other: ({key: 2, other: 3}[key], {key: 1}.get(other, 5)),
    "grows": lambda key, other: grows(set(), key, other),
    "counts": lambda key, other: counts({}, key, other),
    "state changes between": lambda key, other: changed(key, other, lambda key: setattr(key, "count", key.count + 1)),
    "a list changes between": lambda key, other: changed(key, other, lambda key: key.items.append(3)),
    "a global changes between": lambda key, other: changed(key, other, lambda key: OUTSIDE.__setitem__(0, 9)),
    "changes before": lambda key, other: (setattr(key, "count", key.count + 1), len({key, other}), key in {key})[1:],
    "found": lambda key, other: (key in key.found, len(key.found | {key, other})),
    "stays": lambda key, other: key.kept.append({key, other}) or [key in kept for kept in key.kept],
}


def grows(made, key, other):
    for one in (key, other, key):
        made.add(one)
    made.discard(other)
    return len(made), key in made, other in made


def counts(made, key, other):
    for one in (key, other, key):
        made[one] = made.get(one, 0) + 1
    return list(made.values())


def program(own, use, wrap):
    class Key:
        def __init__(self, count):
            self.count, self.items, self.total = count, [2], torch.zeros(1)
            self.found, self.kept = set(), []
            if own not in ("raised", "no number"):
                self.found.add(self)

        __hash__ = HASHES[own]

    key, other = Key(3), Key(4)
    step = wrap(lambda x: (x + 1, USES[use](key, other)))
    found = []
    for call in range(3):
        try:
            found.append(step(torch.ones(2))[1])
        except Exception as error:
            found.append((type(error), str(error)))
        found.append((len(LOG), key.count, len(key.kept), list(key.items)))
        if call == 1:
            key.count += 5
    LOG.clear()
    OUTSIDE[0] = 0
    return found, step


@pytest.mark.share(20)
@pytest.mark.parametrize("own, use", [*itertools.product(HASHES, USES)])
def test_as_in_python(own, use):
    want, _ = program(own, use, lambda step: step)
    got, step = program(own, use, capture)
    assert got == want
    if own in STAYS and use in ("set", "dict", "grows", "counts", "changes before"):
        assert stats(step).breaks == 0


def test_a_metric_in_a_model_is_no_break():
    """As torchmetrics' are: hashed by the tensors that they keep, and asked by ``parameters()``."""

    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = torch.zeros(1)

        def __hash__(self):
            return hash((type(self).__name__, id(self), self.seen))

        def forward(self, x):
            self.seen = self.seen + x.detach().sum()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.metric = nn.Linear(3, 3), Metric()

        def forward(self, x):
            self.metric(y := self.layer(x))
            return y

    def train(wrap):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        losses = [run(torch.ones(2, 3) * (call + 1)) for call in range(4)]
        return [*losses, model.metric.seen, *(p.detach() for p in model.parameters())], run

    want, _ = train(lambda step: step)
    got, run = train(lambda step: capture(step, backend="eager"))
    assert all(map(torch.equal, got, want)) and stats(run).breaks == 0


@dataclasses.dataclass(frozen=True)
class Sized:
    rows: int
    device: str


def test_a_key_that_python_goes_on_with_is_not_pinned():
    """One break where the dict is asked; what stands around it is not captured again for each key that is made."""
    cache = {}

    def step(x):
        key = Sized(x.shape[0], str(x.device))
        if key not in cache:
            cache[key] = torch.arange(x.shape[0])
        return x * cache[key][:, None] + len(cache)

    run = capture(step, backend="eager")
    for rows in (4, 8, 6, 4, 9, 8, 6, 4, 9, 12, 8, 6):
        x = torch.ones(rows, 2)
        assert torch.equal(run(x), x * torch.arange(rows)[:, None] + len(cache))
    assert len(stats(run).recompiles) <= 6

"""``max`` and ``min`` of integers that tensors hold, and ints: a number of the graph where only that is asked for; a
branch on data where the program sees which of them it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moebius import capture, stats
from moebius.tensors.bounds import Bounds

# How the two are chosen between: x has rows, c holds two counts.
CHOICES = {
    "max with an int": lambda x, c: max(c[0] + 1, 2),
    "an int first": lambda x, c: max(2, c[0] + 1),
    "min with a size": lambda x, c: min(c[0] + 1, x.shape[1]),
    "max with a capacity": lambda x, c: max(c[0] + 1, max(int(x.shape[0] * 1.25 / 4), 1)),
    "of tensors alone": lambda x, c: max(c[0] + 1, c[1]),
    "of three": lambda x, c: max(c[0], 3, c[1]),
    "int32": lambda x, c: max(c[0].int() + 1, 2),
}


def one_hot(x, n):
    return F.one_hot(x.long() % 1, n).sum()


def one_hot_by_name(x, n):
    return F.one_hot(x.long() % 1, num_classes=n)[..., :2].float()


def arange(x, n):
    return torch.arange(n) * 2


def sliced(x, n):
    return x[:n] * 2


def whole(x, n):
    return int(n)


def shared(x, n):
    return x / n


def compared_with(x, n):
    return (n > x).sum()


NUMBERS = [one_hot, one_hot_by_name, arange, sliced, whole, shared, compared_with]


def kind(x, n):
    return type(n).__name__


def method(x, n):
    return n.item() if isinstance(n, torch.Tensor) else n


def given(x, n):
    return n


def beside_a_float(x, n):
    return n * 0.5


def beside_bytes(x, n):
    return x.to(torch.int8) * n


def in_place(x, n):
    n *= 2
    return n


def after_a_write(x, n):
    if isinstance(n, torch.Tensor):
        n += 1
    return x[:n]


SEEN = [kind, method, given, beside_a_float, beside_bytes, in_place, after_a_write]


def parts(found):
    return (type(found), found.dtype, found.shape, found.tolist()) if torch.is_tensor(found) else found


def compared(use, choose, rows=(8, 8, 8, 6, 5)):
    """As plain, with the counts afterwards. Returns what was captured."""

    def step(x, c):
        n = choose(x, c)
        return use(x, n)

    captured = capture(step, backend="eager")
    for number, (first, second) in zip(rows, ((0, 1), (6, 2), (1, 5), (3, 3), (7, 0)), strict=True):
        found = []
        for function in (captured, step):
            x, c = torch.arange(number * 6.0).view(number, 6), torch.tensor([first, second])
            found.append((parts(function(x, c)), c.tolist()))
        assert found[0] == found[1]
    return stats(captured)


@pytest.mark.share(15)
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("use", NUMBERS, ids=lambda f: f.__name__)
def test_a_number_whichever_it_is(use, choose):
    known = compared(use, choose)
    assert (known.breaks, known.misses) == (0, 2)  # two, as the rows change


@pytest.mark.share(13)
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("use", SEEN, ids=lambda f: f.__name__)
def test_as_plain_where_it_is_seen(use, choose):
    compared(use, choose)


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_a_write_in_between(choose):
    def step(x, c):
        count = c.clone()
        n = choose(x, count)
        count += 1
        return x[:n] if x.sum() else x

    captured = capture(step, backend="eager")
    for first, second in ((0, 1), (6, 2), (1, 5)):
        x, c = torch.ones(8, 6), torch.tensor([first, second])
        assert torch.equal(captured(x, c), step(x, c))


def test_a_capacity_whose_size_is_known_later():
    """Rows of four, four times: torch's sizes are told what they are by an operator behind the capacity."""

    def step(x, index):
        rows = x.shape[1]
        capacity = max(min(rows, int(rows * 1.25 / 4)), 4)
        return F.one_hot(index, max(index.max() + 1, capacity))[..., :capacity].sum(), capacity

    captured = capture(step, backend="eager")
    for batch in (4, 2, 3):
        x, index = torch.rand(batch, 16, 8), torch.randint(0, 9, (batch, 16))
        assert captured(x, index) == step(x, index)
    assert (stats(captured).breaks, stats(captured).misses) == (0, 2)


def test_too_few_classes_raise_as_torch_says():
    def step(index, c):
        return F.one_hot(index, max(c, 2))

    captured = capture(step, backend="eager")
    assert torch.equal(captured(torch.tensor([1]), torch.tensor(1)), torch.tensor([[0, 1]]))
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        captured(torch.tensor([3]), torch.tensor(1))


def test_switched_off(monkeypatch):
    monkeypatch.setattr(Bounds, "of", lambda self, function, values: None)
    assert compared(one_hot, CHOICES["max with an int"]).misses > 2

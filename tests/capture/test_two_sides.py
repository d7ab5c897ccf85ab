"""``if … else …`` on values: both sides in the graph, one capture whichever way the data goes, plain Python's bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.regions import branches


def set_by_both(x):
    if x.sum() > 0:
        y = x * 2
    else:
        y = x - 1
    return y + 1


def replaced_by_both(x):
    y = x
    if x.sum() > 0:
        y = y * 2
    else:
        y = y - 1
    return y + 1


def in_place(x):
    if x.sum() > 0:
        x.add_(1)
    else:
        x.mul_(3)
    return x + 1


def expression(x):
    return (x * 2 if x.sum() > 0 else x - 1) + 1


def three_ways(x):
    s = x.sum()
    if s > 1:
        y = x * 2
    elif s > -1:
        y = x - 1
    else:
        y = x.sin()
    return y + 1


def in_a_loop(x):
    out = torch.zeros_like(x)
    for i in range(3):
        if x[i] > 0:
            out[i] += x[i] * 2
        else:
            out[i] -= x[i]
    return out


def first_side_writes_the_condition(x):
    s = x.sum() > 0
    if s:
        s.zero_()
        y = x * 2
    else:
        y = x * 5
    return y


def one_sets_more(x):
    if x.sum() > 0:
        y = x * 2
        z = y + 1
        y = z - y
    else:
        y = x - 1
    return y + 1


def same_number(x):
    if x.sum() > 0:
        k = 2
        y = x + k
    else:
        k = 2
        y = x - k
    return y * k


def nested(x):
    y = x.clone()
    if x.sum() > 0:
        y = y * 2
        y = y + 1 if x[0] > 0 else y - 1
    else:
        y = y * 3
    return y


def changed(x):
    if x.sum() > 0:
        x.add_(1)
    else:
        x.mul_(3)


def returns_nothing(x):
    """What is called ends in each side (the compiler writes its return twice)."""
    y = x * 2
    changed(y)
    return y + 1


def gradients(x):
    w = torch.ones(6, requires_grad=True)
    if x.sum() > 0:
        y = (w * x).sum()
    else:
        y = (w * w * x).sum()
    y.backward()
    return w.grad


def of_a_number(x):
    n = x.sum().item()
    if n > 0:
        y = x * 2
    else:
        y = x * n
    return y


def list_of_both(x):
    parts = [x]
    for i in range(3):
        if x[i] > 0:
            parts.append(x[:2])
        else:
            parts.append(x[2:])
    return torch.cat(parts)


def other_shape(x):
    if x.sum() > 0:
        y = x[:2]
    else:
        y = x[:3]
    return y + 1


def other_numbers(x):
    n = 1 if x.sum() > 0 else 2
    return x * n


def other_dtype(x):
    y = x * 2 if x.sum() > 0 else (x > 0)
    return y.sum()


def set_by_one(x):
    if x.sum() > 0:
        y = x * 2
    else:
        z = x * 3
        x = z - 1
    return y if x[0] > 5 else x


def other_history(x):
    v, w = torch.ones(6, requires_grad=True), torch.ones(6, requires_grad=True)
    if x.sum() > 0:
        y = (w * x).sum()
    else:
        y = (v * v * x).sum()
    y.backward()
    return w.grad if w.grad is not None else v.grad * 7


def changes_a_list(x):
    log = []
    if x.sum() > 0:
        log.append(1)
    else:
        log.append(2)
    return x * log[0]


def two_conditions(x):
    if x.sum() > 0 and x[0] > 0:
        y = x * 2
    else:
        y = x - 1
    return y


def goes_on(x):
    total = x.sum()
    for i in range(4):
        if x[i] > 0:
            t = x[i]
        elif x[i] > -0.5:
            t = x[i] * 2
        else:
            continue
        total = total + t
    return total


def early(x):
    loss = (x * x).sum()
    if loss > 5:
        return loss * 2
    return loss + 1


def arms_return(x):
    s = x.sum()
    if s > 2:
        return x * 2
    elif s > 0:
        return x * 3
    return x.sin()


def an_argument_or_a_new_one(x):
    return x if x.sum() > 0 else x * 2


def calls_what_returns(x):
    def helper(y):
        if y.sum() > 0:
            return y * 2, None, {"a": y + 1, "b": [y, 3]}
        return y, None, {"a": y - 1, "b": [y * 2, 3]}

    (y, _, known), z = helper(x * 1), x * 1
    other = an_argument_or_a_new_one(z)
    other.add_(1)
    return y + known["a"] * known["b"][1] + z + other


def matches(x):
    match x.argmax().item():
        case 0:
            return x * 2
        case 1 | 2:
            y = x - 1
        case _:
            y = x + 5
    return y * y


def mixed(x):
    if (x.sum() > 0 or x[0] > 0) and not (x[1] > 0 and x[2] < 0):
        return x * 2
    return x - 3 if x[3] > 0 and x[4] > 0 or x[5] > 0 else x


def chained(x):
    y = x
    if -1 < x.sum() < 1:
        y = x * 2
    return y + 1


def of_one_of_two_numbers(x):
    """A float that only the running step knows, or a number that the graph computes of it."""
    loss = x.sum().item()
    y = x * 2 if loss else x
    if loss > 0 and not loss * 2 > 3:
        y = y - 1
    elif loss < -1 or loss != loss:
        y = y.sin()
    return y


def of_a_truth(x):
    positive = (x > 0).all().item()
    return x * 2 if positive else x - 1


def or_its_other(x):
    return (x.sum() > 0 or x[0] > 0) & (x[1] > 0 and x[2] > 0)


def one_of_three(x):
    total = (x.sum() > 1) * x[0] or (x[1] > 0) * x[1] or x[2]
    return x + total


def between(x):
    inside = -1 < x.sum() < 1
    return x * inside


RETURN = [early, arms_return, an_argument_or_a_new_one, calls_what_returns, matches, mixed, chained,
          of_one_of_two_numbers, of_a_truth, one_of_three, between]  # fmt: skip


def other_constants(x):
    if x.sum() > 0:
        return x, 1
    return x, 2


def true_or_false(x):
    if x.sum() > 0:
        return True
    return False


class Key:
    """Tells who looks at it."""

    def __init__(self, looks):
        self.looks = looks

    def __hash__(self):
        self.looks.append(1)
        return 7

    def __repr__(self):
        self.looks.append(10)
        return "key"


def keyed(x):
    looks = []
    key = Key(looks)

    def chosen(y):
        if y.sum() > 0:
            return {key: y * 2}
        return {key: y * 3}

    (value,) = chosen(x).values()
    return value, x * sum(looks)


def other_sign(x):
    def chosen(y):
        if y.sum() > 0:
            return y * 2, 0.0
        return y * 3, -0.0

    y, zero = chosen(x)
    return y / (zero + torch.zeros(())).abs(), torch.tensor(zero).signbit()


def a_large_number(x):
    def chosen(y):
        if y.sum() > 0:
            return y * 2, 10**5000
        return y * 3, 10**5000 + 1

    y, number = chosen(x)
    return y * (number % 7)


def one_tuple(x):
    pair = (x, x)
    return pair is (pair if x.sum() > 0 else (x, x))


ONE_GRAPH = RETURN + [
    set_by_both, replaced_by_both, in_place, expression, three_ways, in_a_loop, first_side_writes_the_condition,
    one_sets_more, same_number, nested, returns_nothing, gradients,
    two_conditions, goes_on, or_its_other,
]  # fmt: skip
OTHERS = [other_constants, true_or_false, keyed, other_sign, a_large_number, one_tuple, other_shape,
          other_numbers, other_dtype, set_by_one, other_history, changes_a_list, list_of_both,
          of_a_number]  # fmt: skip


def outcome(function: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    x = x.clone()
    try:
        return function(x), x
    except (UnboundLocalError, RuntimeError) as error:
        return type(error), x


@pytest.mark.share(20)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("function", ONE_GRAPH + OTHERS, ids=lambda f: f.__name__)
def test_both_ways(function, backend):
    captured = capture(function, backend=backend)
    for seed in range(12):
        x = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        (want, after), (got, ours) = outcome(function, x), outcome(captured, x)
        assert torch.equal(ours, after)
        got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(b, torch.Tensor) else a is b
    if function in ONE_GRAPH:
        counts = stats(captured)
        assert (counts.graphs, counts.misses, counts.breaks, counts.hits) == (1, 1, 0, 11)


# How a program keeps the first rows of many, by a condition on how many there are: capacity, in MoE.
def truncated_if(x, rows):
    if len(rows) > 2:
        rows = rows[:2]
    return x[rows] * 2


def truncated_or_not(x, rows):
    return x[rows[:2] if rows.numel() > 2 else rows]


def truncated_in_both(x, rows):
    if rows.shape[0] <= 2:
        kept = rows * 1
    else:
        kept = rows[: len(x) // 3]
    return x[kept] * len(kept)


def grown(x, rows):
    parts = x[rows]
    if len(rows) < 3:
        parts = torch.cat([parts, x.new_zeros(2)])
    return parts * 3


def of_two_tensors(x, rows):
    kept, left = (x[rows], rows[2:]) if len(rows) > 2 else (x[rows] * 2, rows[:0])
    return kept, left + 1


def of_a_condition_on_values(x, rows):
    y = x[:4].clone() if x.sum() > 0 else x * 3
    return y * y.shape[0], rows


def in_a_loop_over_experts(x, rows):
    out, left = torch.zeros_like(x), rows
    for e in range(3):
        mine = (rows % 3 == e).nonzero().squeeze(-1)
        if mine.numel() > 1:
            mine = mine[:1]
        if mine.numel() > 0:
            out.index_add_(0, rows[mine], x[rows[mine]] * (e + 1))
        left = torch.cat([left, mine]) if len(mine) else left
    return out, left


def rows_that_are_views(x, rows):
    y = x * 1
    part = y[:3] if x.sum() > 0 else y
    part.add_(1)
    return y, part


ROWS = [truncated_if, truncated_or_not, truncated_in_both, grown, of_two_tensors, of_a_condition_on_values]
ROWS += [in_a_loop_over_experts]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("function", [*ROWS, rows_that_are_views], ids=lambda f: f.__name__)
def test_sides_with_other_numbers_of_rows(function, backend):
    def step(x):
        return function(x, (x > 0).nonzero().squeeze(-1))

    captured = capture(step, backend=backend)
    for seed in range(24):
        ways = []
        for one in (captured, step):
            leaf = torch.randn(6 + seed % 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            given = one(leaf * 1)
            given = given if isinstance(given, tuple) else (given,)
            sum(value.sum() for value in given).backward()
            ways.append([*given, leaf.grad])
        for a, b in zip(*ways, strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
    if function in ROWS:
        counts = stats(captured)
        assert (counts.breaks, counts.hits >= 22) == (0, True), counts


class Counting(nn.Module):
    """The side that changes Python's objects keeps the branch out of the graph, and is run as often as it is taken."""

    def __init__(self):
        super().__init__()
        self.linear, self.waited = nn.Linear(6, 6), 0

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        else:
            self.waited += 1
        return y


def test_a_side_that_counts():
    torch.manual_seed(0)
    plain = Counting()
    model = copy.deepcopy(plain)
    captured = capture(model)
    for seed in range(8):
        x = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(captured(x), plain(x)) and model.waited == plain.waited


@pytest.mark.parametrize("function", RETURN, ids=lambda f: f.__name__)
def test_gradients_of_what_is_returned(function):
    captured = capture(function)
    for seed in range(8):
        x = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        ways = []
        for step in (captured, function):
            leaf = x.clone().requires_grad_()
            given = step(leaf * 1)
            given.sum().backward()
            ways.append(leaf.grad)
        assert torch.equal(*ways)
    assert (stats(captured).graphs, stats(captured).misses) == (1, 1)


def test_without_the_return_as_a_join_each_side_is_captured(monkeypatch):
    monkeypatch.setattr(branches, "constants", lambda program, inside: {(bool, min(inside))})
    captured = capture(early)
    captured(torch.ones(6)), captured(torch.zeros(6))
    assert [again.guard for again in stats(captured).recompiles] == ["branch on data"]

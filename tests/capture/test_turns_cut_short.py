"""Iterations and branches that end early have done what came before, and an iteration finds what an earlier one
left."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats

E = 4
BATCHES = [
    ([0, 1, 2, 3], [1, 0, 1, 0]),
    ([3, 3, 1, 0], [0, 1, 0, 0]),
    ([0, 2, 2, 1], [1, 0, 0, 1]),
    ([1, 1, 0, 0], [0, 0, 0, 0]),
]


def hits(index):
    return torch.nn.functional.one_hot(index, num_classes=E).sum(0).gt(0).nonzero()


def set_before_continue(x, index, flag):
    out = torch.zeros_like(x)
    for e in hits(index):
        out = out + x * e
        if flag[e] > 0:
            continue
        out = out * 2
    return out


def set_before_each_of_two(x, index, flag):
    out = torch.zeros_like(x)
    for e in hits(index):
        out = out + 1
        if flag[e] > 0:
            continue
        out = out * 2
        if x[e].sum() > 20:
            continue
        out = out * 3
    return out


def set_before_continue_of_a_range(x, index, flag):
    out = torch.zeros_like(x)
    for e in range(E):
        token = torch.where(index == e)[0]
        out = out * 2
        if token.numel() == 0:
            continue
        out = out.index_add(0, token, x[token] * flag[e])
    return out


def set_before_an_inner_branch(x, index, flag):
    out, other = torch.zeros_like(x), x * 1
    if flag.sum() > 0:
        out = out + 1
        if index.sum() > 4:
            out, other = out * 2, other + out
            if index[0] > 0:
                out = out - other
    return out, other


def appended_before_an_inner_branch(x, index, flag):
    out, parts = torch.zeros_like(x), []
    for i in range(E):
        if (index == i).sum() > 0:
            parts.append(x[index == i])
            if flag[i] > 0:
                out = out + i
    return out, torch.cat(parts)


def counted_behind_an_inner_branch(x, index, flag):
    out, start = torch.zeros_like(x), 0
    n = torch.where(index == 1)[0].shape[0]
    if n:
        if flag[0] > 0:
            out = out + x.sum()
            start += n
    return out, x[start:]


def set_in_some_iterations(x, index, flag):
    out = last = torch.zeros_like(x)
    for e in hits(index):
        if flag[e] > 0:
            last = x * (e + 1)
        out = out + last
    return out


def set_in_some_iterations_of_a_range(x, index, flag):
    out, last = torch.zeros_like(x), torch.zeros(3)
    for e in range(E):
        token = torch.where(index == e)[0]
        if flag[e]:
            last = x[0] * (e + 1)
        out.index_add_(0, token, x[token] + last)
    return out


def set_back_behind_a_branch(x, index, flag):
    a, b = x * 1, x * 2
    for e in hits(index):
        a, b = b, a
        a.add_(e)
        if flag[1] > 0:
            a, b = b, a
    return a, b


def number_set_back_behind_a_branch(x, index, flag):
    n, out = 1, x * 1
    if index[0] > 0:
        n = 2
        if flag[0] > 0:
            n = 1
    return out * n, flag


def set_for_the_next_iteration(x, index, flag):
    out, last = torch.zeros_like(x), x * 0
    for e in hits(index):
        out = out + last
        if flag[e] > 0:
            continue
        last = x * (e + 1)
    return out, last


def asks_for_gradients_behind_a_branch(x, index, flag, weight):
    y = x * 1
    if index.sum() > 4:
        y = y * weight
    z = y + 1
    return z.detach(), torch.tensor([z.requires_grad, z.is_leaf, (z + weight).requires_grad])


def asks_for_gradients_behind_a_loop(x, index, flag, weight):
    y = x * 1
    for e in (index - 2).relu().nonzero():
        y = y * weight * e
    return y.detach(), torch.tensor(y.requires_grad)


def asks_for_gradients_of_joined_rows(x, index, flag, weight):
    parts = []
    for i in range(E):
        if (index == i).sum() > 0:
            parts.append(x[index == i] * (weight if i == 2 else 1))
    y = torch.cat(parts)
    return y.detach(), torch.tensor(y.requires_grad)


def joins_rows_of_two_dtypes(x, index, flag, weight):
    parts = []
    for i in range(E):
        if (index == i).sum() > 0:
            parts.append(x[index == i].double() if i == 2 else x[index == i])
    y = torch.cat(parts)
    return y, torch.tensor((y + 1).dtype == torch.float64)


def writes_into_its_row(x, index, flag, weight):
    out, listed, factors = torch.zeros_like(x), hits(index), [1.0, 2.0, 3.0, 4.0]
    for e in listed:
        out = out + x * factors[e]
        e.mul_(2)
    return out, listed


def keeps_its_row(x, index, flag, weight):
    out, listed, factors = torch.zeros_like(x), hits(index), [1.0, 2.0, 3.0, 4.0]
    kept = torch.zeros(1, dtype=torch.long)
    for e in listed:
        out = out + x * factors[e]
        kept = e
    listed.add_(1)
    return out, kept


ONE_GRAPH = [
    set_before_continue,
    set_before_each_of_two,
    set_before_continue_of_a_range,
    set_before_an_inner_branch,
    appended_before_an_inner_branch,
    set_in_some_iterations,
    set_in_some_iterations_of_a_range,
    set_for_the_next_iteration,
    set_back_behind_a_branch,
]


@pytest.mark.parametrize("step", [*ONE_GRAPH, counted_behind_an_inner_branch, number_set_back_behind_a_branch])
def test_gives_what_plain_python_gives(step):
    captured = capture(step)
    for i, (index, flag) in enumerate(BATCHES):
        given = torch.arange(12.0).view(4, 3) + i + 1, torch.tensor(index), torch.tensor(flag)
        expected, found = step(*given), captured(*given)
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, found)), strict=True):
            assert torch.equal(a, b), f"batch {i}"
    if step in ONE_GRAPH:
        assert not stats(captured).breaks and stats(captured).graphs == 1


@pytest.mark.parametrize(
    "step",
    [
        asks_for_gradients_behind_a_branch,
        asks_for_gradients_behind_a_loop,
        asks_for_gradients_of_joined_rows,
        joins_rows_of_two_dtypes,
        writes_into_its_row,
        keeps_its_row,
    ],
)
def test_what_the_data_decides_is_not_taken_for_granted(step):
    captured, weight = capture(step), torch.nn.Parameter(torch.ones(3))
    for i, (index, flag) in enumerate([*BATCHES, ([0, 0, 0, 0], [1, 0, 0, 0]), ([2, 2, 2, 2], [0, 0, 1, 0])]):
        given = torch.arange(12.0).view(4, 3) + i + 1, torch.tensor(index), torch.tensor(flag), weight
        for a, b in zip(step(*given), captured(*given), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype, f"batch {i}"


def handles_in_a_iteration(x, index, flag):
    out = x * 1
    for e in hits(index):
        try:
            out = out + x[e + 2]
        except IndexError:
            out = out * 2
    return out, flag


def handles_in_a_iteration_of_a_range(x, index, flag):
    out = x * 1
    for e in range(E):
        token = torch.where(index == e)[0]
        try:
            out = out.index_add(0, token, x[token + 1] * flag[e])
        except IndexError:
            out = out * 2
    return out, flag


def handles_around_the_loop(x, index, flag):
    out = x * 1
    try:
        for e in hits(index):
            out = out + x[e + 2]
    except IndexError:
        out = out * 2
    return out, flag


def handles_in_a_function(x, index, flag):
    def iteration(out, e):
        try:
            return out + x[e + 2]
        except IndexError:
            return out * 2

    out = x * 1
    for e in hits(index):
        out = iteration(out, e)
    return out, flag


@pytest.mark.parametrize(
    "step", [handles_in_a_iteration, handles_in_a_iteration_of_a_range, handles_around_the_loop, handles_in_a_function]
)
def test_a_iteration_that_handles_what_fails_in_it(step):
    captured = capture(step)
    for i, (index, flag) in enumerate(BATCHES):
        given = torch.arange(12.0).view(4, 3) + i + 1, torch.tensor(index), torch.tensor(flag)
        for a, b in zip(step(*given), captured(*given), strict=True):
            assert torch.equal(a, b), f"batch {i}"

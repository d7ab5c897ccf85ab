"""Lists to which a step appends behind a branch on values: one graph where the items are joined or counted, and the
program's own answer, list and gradients in every case."""

# ruff: noqa: B007, F841, PERF401 (as users write)

from __future__ import annotations

import warnings

import pytest
import torch
from answers import same

from moebius import capture, stats
from moebius.regions import conditional_lists

ONE, OTHER = {}, {}


def one(function):
    ONE[function.__name__] = function
    return function


def other(function):
    OTHER[function.__name__] = function
    return function


@one
def joined(x, counts, ws):
    parts, start = [], 0
    for w, n in zip(ws, counts.tolist(), strict=True):
        end = start + n
        if n == 0:
            continue
        parts.append(x[start:end] * w)
        start = end
    return torch.cat(parts, dim=0) if len(parts) else x.new_empty(0)


@one
def asked_by_itself(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.numpy(), strict=True):
        if n:
            parts.append(x[:n] * w)
    if not parts:
        return x * 3
    return torch.cat(parts)


@one
def two_lists(x, counts, ws):
    parts, places, start = [], [], 0
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            parts.append(x[start : start + n] * w)
            places.append(torch.arange(start, start + n))
        start += n
    return torch.zeros_like(x).index_add(0, torch.cat(places), torch.cat(parts))


@one
def twice_in_a_iteration(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 1:
            parts.append(x[:n] * w)
            parts.append(x[n:] + w)
    return torch.cat(parts)


@one
def always_and_sometimes(x, counts, ws):
    parts = []
    parts.append(x)
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 1:
            parts.append(x[:n] * w)
        parts.append(x[:1])
    return torch.cat(parts)


@one
def on_a_tensor(x, counts, ws):
    parts = []
    for e, w in enumerate(ws):
        chosen = counts == e
        if chosen.any():
            parts.append(x[: len(counts)][chosen] * w)
    return torch.cat(parts) if parts else x * 0


@one
def two_names_of_one_list(x, counts, ws):
    parts = []
    others = parts
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 1:
            others.append(x[:n] * w)
    return torch.cat(parts) if others is parts and parts else x * 0


@one
def in_a_call(x, counts, ws):
    def add(to, rows):
        to.append(rows)

    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n == 0:
            continue
        add(parts, x[:n] * w)
    return torch.cat(parts)


@one
def in_a_dictionary(x, counts, ws):
    kept = {"parts": []}
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 1:
            kept["parts"].append(x[:n] * w)
    return torch.cat(kept["parts"]) if kept["parts"] else x * 0


@one
def returned(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 1:
            parts.append(x[:n] * w)
    return parts, len(parts)


@one
def at_a_count(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 1:
            parts.append(x[:n] * w)
    return x * len(parts)


@other
def walked(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 1:
            parts.append(x[:n] * w)
    for part in parts:
        x = x + part.sum()
    return x


@other
def stacked(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            parts.append((x[:n] * w).sum(0))
    return torch.stack(parts) if parts else x


@other
def numbers(x, counts, ws):
    hit, parts = [], []
    for e, n in enumerate(counts.tolist()):
        if n > 0:
            hit.append(e)
            parts.append(x[:n] * ws[e])
    return torch.cat(parts) * sum(hit), hit


@other
def an_item(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            parts.append(x[:n] * w)
    return parts[-1], parts[0]


@other
def read_in_a_later_iteration(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            parts.append(x[:n] * w + (parts[-1].sum() if parts else 0))
    return torch.cat(parts)


@other
def joined_in_a_later_iteration(x, counts, ws):
    parts = []
    parts.append(x[:1])
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            parts.append(x[:n] * w + torch.cat(parts).sum())
    return torch.cat(parts)


@other
def a_condition_that_is_overwritten(x, counts, ws):
    parts = []
    for e, w in enumerate(ws):
        if counts[e]:
            parts.append(x[:2] * w)
    counts.zero_()
    return torch.cat(parts) if parts else x


@other
def within_another(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            if x[0, 0] > 0:
                parts.append(x[:n] * w)
            parts.append(x[:1])
    return torch.cat(parts) if parts else x


@other
def skipped_again(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n == 0:
            continue
        if n == 1:
            continue
        parts.append(x[:n] * w)
    return torch.cat(parts) if parts else x


@other
def with_an_else(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 1:
            parts.append(x[:n] * w)
        else:
            parts.append(x[:1] - w)
    return torch.cat(parts)


@other
def put_first(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            parts.insert(0, x[:n] * w)
    return torch.cat(parts)


@other
def shortened(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            parts.append(x[:n] * w)
    parts.pop()
    return torch.cat(parts) if parts else x


@other
def in_a_comprehension(x, counts, ws):
    parts = [x[:n] * w for w, n in zip(ws, counts.tolist(), strict=True) if n > 0]
    return torch.cat(parts)


@other
def columns(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            parts.append(x[:, :n] * w)
    return torch.cat(parts, dim=1)


@other
def as_a_condition_of_a_branch(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            parts.append(x[:n] * w)
        if len(parts) == 2:
            x = x + 1
    return torch.cat(parts) + x[0]


@one
def with_locals_of_the_iteration(x, counts, ws):
    """What an iteration sets is not read again: it need not be there where the graph is left."""
    parts, start = [], 0
    for e, n in enumerate(counts.cpu().numpy()):
        end = start + n
        if n == 0:
            continue
        w = ws[e]
        rows = x[start:end]
        y = rows * w
        parts.append(y)
        start = end
    y = torch.cat(parts, dim=0) if len(parts) else x.new_empty(0)
    return y * 2


@other
def a_break_after_the_iterations(x, counts, ws):
    parts = []
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            y = x[:n] * w
            parts.append(y)
    y = torch.cat(parts) if parts else x
    y = y * float(y.sum().item() > 0)
    return y, parts


@other
def a_local_of_the_iteration_that_is_read(x, counts, ws):
    parts, y = [], x
    for w, n in zip(ws, counts.tolist(), strict=True):
        if n > 0:
            y = x[:n] * w
            parts.append(y)
    return y + (torch.cat(parts).sum() if parts else 0)


BATCHES = ((2, 1, 3), (0, 3, 3), (2, 0, 0), (0, 0, 0), (1, 1, 1), (0, 4, 2))


def outcome(function, x, counts):
    torch.manual_seed(1)
    ws = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    x, counts = x.clone().requires_grad_(), torch.tensor(counts)
    try:
        found = function(x, counts, ws)
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error), str(error), counts
    tensors = [f for f in (found if isinstance(found, list | tuple) else [found])]
    tensors = [t for f in tensors for t in (f if isinstance(f, list) else [f]) if isinstance(t, torch.Tensor)]
    sum((t * t).sum() for t in tensors if t.requires_grad).backward() if any(t.requires_grad for t in tensors) else None
    return found, x.grad, [w.grad for w in ws], counts


def compare(function, batches=BATCHES):
    captured = capture(function)
    for seed, batch in enumerate(batches):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        found, expected = outcome(captured, x, batch), outcome(function, x, batch)
        assert same(found, expected), (batch, found, expected)
    return captured


@pytest.mark.parametrize("name", ONE)
def test_one_graph(name):
    captured = compare(ONE[name], BATCHES[:3])
    assert stats(captured).graphs == 1 and not stats(captured).breaks


@pytest.mark.share(9)
@pytest.mark.parametrize("name", {**ONE, **OTHER})
def test_the_programs_own_answer(name):
    compare({**ONE, **OTHER}[name])


def branches_and_a_loop_on_values(x, flag, w):
    parts, u, t = [], x[0], flag[0].clone()
    v = x.sum(1)
    i = 0
    if flag[1] > 0:
        parts.append(x[:2] @ w)
    while t.item() > 0 and u[0] < 1:
        u = x[i]
        t, i = t - 1, i + 1
    if v.max() > u.min() and t > 0:
        parts.append(x[1:3] @ w)
    return torch.cat(parts) if parts else u


def test_a_graph_goes_the_way_of_the_attempt_that_found_its_break():
    """What a later attempt learns is no part of it: the graph would end elsewhere, with locals that are not set."""
    captured = capture(branches_and_a_loop_on_values)
    w = torch.eye(4)
    for flags in ([1, 1], [0, 1], [2, 0], [5, 1], [0, 0]):
        x, flag = torch.arange(24.0).reshape(6, 4) / 9, torch.tensor(flags)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert same(captured(x, flag, w), branches_and_a_loop_on_values(x, flag, w)), flags


def test_whether_an_item_is_there_is_looked_at(monkeypatch):
    """With every item taken for one that is there, a list that is returned has too many."""
    monkeypatch.setattr(conditional_lists, "present", lambda items, asked: list(items))
    with pytest.raises(AssertionError):
        compare(returned)

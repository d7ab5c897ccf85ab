"""Experts behind branches (lowering/experts/hoisted_conditionals.py), right and subtly wrong: ``if n == 0: continue`` …
``append``.

Equal to eager in float64 with every gradient, a missing one included. Not lowered where an iteration uses
what another made.
"""

from __future__ import annotations

import numpy
import pytest
import torch
from beside_eager import compare
from module_layers import Layer
from spellings import E, K
from table import SEEDS, tensors
from torch.nn.functional import silu

from moebius import capture, stats
from moebius.lowering.experts import blocks, hoisted_conditionals, rewrite

RIGHT, FOUND, WRONG = {}, {}, {}


def into(table):
    def add(function):
        table[function.__name__] = function
        return function

    return add


def routed(x, moe):
    weight, index = moe.route(x)
    counts = index.new_zeros((len(x), E)).scatter_(1, index, 1).sum(dim=0)
    order = index.view(-1).argsort()
    return weight, index, counts, order, x[order // K]


def unsorted(outs, order, weight):
    back = torch.empty_like(outs)
    back[order] = outs
    return (back.view(*weight.shape, -1).mul_(weight.unsqueeze(-1)).sum(dim=1)).to(outs.dtype)


@into(RIGHT)
def running_sum_of_an_array(x, moe):
    weight, _, counts, order, rows = routed(x, moe)
    ends, parts = counts.cpu().numpy().cumsum(0), []
    for i, end in enumerate(ends):
        start = 0 if i == 0 else ends[i - 1]
        if start == end:
            continue
        parts.append(moe.experts[i](rows[start:end]))
    return unsorted(torch.cat(parts), order, weight)


@into(RIGHT)
def on_rows_of_two_axes(x, moe):
    weight, index = moe.route(x)
    pairs = torch.stack((x, x * 0.5), 1)
    out = torch.zeros_like(pairs)
    for e in range(E):
        mask = index[:, 0] == e
        if mask.any():
            out[mask] = moe.experts[e](pairs[mask]) * weight[mask, 0][:, None, None]
    return out.sum(1)


@into(RIGHT)
def beside_experts_of_slots(x, moe):
    """Whose rows have several axes: what is written otherwise for these is settled first."""
    weight, index = moe.route(x)
    gates = x.new_zeros((len(x), E)).scatter(1, index, weight)
    slots = torch.einsum("te,td->ed", gates, x)[:, None, None].expand(-1, 1, 2, -1)
    return running_sum_of_an_array(x, moe) + torch.stack([m(s) for m, s in zip(moe.mlps, slots, strict=True)]).sum()


@into(RIGHT)
def with_biases(x, moe):
    weight, _, counts, order, rows = routed(x, moe)
    parts, start = [], 0
    for expert, n in zip(moe.mlps, counts.tolist(), strict=True):
        end = start + n
        if n == 0:
            continue
        parts.append(expert(rows[start:end]))
        start = end
    return unsorted(torch.cat(parts, dim=0) if len(parts) else rows.new_empty(0), order, weight)


@into(RIGHT)
def weights_of_one_tensor(x, moe):
    weight, _, counts, order, rows = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate(counts.numpy()):
        if n > 0:
            h = rows[start : start + n]
            parts.append((silu(h @ moe.w1[e]) * (h @ moe.w3[e])) @ moe.w2[e])
        start += n
    return unsorted(torch.cat(parts), order, weight)


@into(RIGHT)
def scaled_in_the_iteration(x, moe):
    weight, _, counts, order, rows = routed(x, moe)
    scale, parts, start = weight.view(-1)[order], [], 0
    for e, n in enumerate(counts.tolist()):
        end = start + n
        if n == 0:
            continue
        parts.append(moe.experts[e](rows[start:end]) * scale[start:end, None])
        start = end
    return torch.zeros_like(x).index_add_(0, order // K, torch.cat(parts))


@into(RIGHT)
def under_no_grad(x, moe):
    with torch.no_grad():
        weight, _, counts, order, rows = routed(x, moe)
        parts, start = [], 0
        for e, n in enumerate(counts.cpu().numpy()):
            end = start + n
            if n == 0:
                continue
            parts.append(moe.experts[e](rows[start:end]))
            start = end
        y = unsorted(torch.cat(parts), order, weight)
    return x * y


@into(RIGHT)
def off_by_one(x, moe):
    """Each expert gets one row of the next: another layer, of the same form."""
    _, _, counts, _, rows = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate(counts.tolist()):
        end = start + n
        if n == 0:
            continue
        parts.append(moe.experts[e](rows[start : end + 1]))
        start = end
    return torch.cat(parts).sum(0) * x


@into(RIGHT)
def skipped_where_it_has_rows(x, moe):
    """The condition is not that there are no rows."""
    _, _, counts, _, rows = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate(counts.tolist()):
        if n > 4:
            parts.append(moe.experts[e](rows[start : start + n]))
        start += n
    return (torch.cat(parts) if parts else x).sum(0) * x


@into(RIGHT)
def run_without_rows(x, moe):
    """An expert that runs on no rows gets gradients of zeros, and not none."""
    _, _, counts, _, rows = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate((counts - 3).tolist()):
        if n == 0:
            continue
        parts.append(moe.experts[e](rows[start : start + n]))
        start += n
    return (torch.cat(parts) if parts else x).sum(0) * x


@into(RIGHT)
def from_the_last_to_the_first(x, moe):
    weight, _, counts, order, rows = routed(x, moe)
    parts, end = [], len(rows)
    for e, n in reversed(list(enumerate(counts.tolist()))):
        if n == 0:
            continue
        parts.append(moe.experts[e](rows[end - n : end]))
        end = end - n
    return unsorted(torch.cat(parts[::-1]) if False else torch.cat(parts), order, weight)


@into(RIGHT)
def twice(x, moe):
    """Each part is there two times."""
    _, _, counts, _, rows = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate(counts.tolist()):
        if n == 0:
            continue
        y = moe.experts[e](rows[start : start + n])
        parts.append(y)
        parts.append(y * 2)
        start += n
    return torch.cat(parts).sum(0) * x


@into(RIGHT)
def looked_up_in_the_branch(x, moe):
    """Its index may be out of range where the branch is not taken: then it is of no rows."""
    _, _, counts, order, _ = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate(counts.tolist()):
        end = start + n
        if n == 0:
            continue
        parts.append(moe.experts[e](x[order[start:end] // K]))
        start = end
    return torch.cat(parts).sum(0) * x


@into(RIGHT)
def dropped_out(x, moe):
    _, _, counts, _, rows = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate(counts.tolist()):
        if n == 0:
            continue
        parts.append(torch.nn.functional.dropout(moe.experts[e](rows[start : start + n])))
        start += n
    return torch.cat(parts).sum(0) * x


@into(WRONG)
def counts_that_change(x, moe):
    """An iteration takes a row from the next one's count."""
    _, _, counts, _, rows = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate(counts.numpy()):
        if n == 0:
            continue
        parts.append(moe.experts[e](rows[start : start + n]))
        counts[(e + 1) % E] -= 1
        start += n
    return torch.cat(parts).sum(0) * x


@into(WRONG)
def rows_of_the_iteration_before(x, moe):
    _, _, counts, _, rows = routed(x, moe)
    parts, before, start = [], torch.zeros(x.shape[1], dtype=x.dtype), 0
    for e, n in enumerate(counts.tolist()):
        if n != 0:
            y = moe.experts[e](rows[start : start + n] + before)
            before = y.sum(0) * 0.1
            parts.append(y)
        start += n
    return torch.cat(parts).sum(0) * x


@into(RIGHT)
def scaled_by_the_iteration_before(x, moe):
    _, _, counts, _, rows = routed(x, moe)
    parts, before, start = [], torch.ones(x.shape[1], dtype=x.dtype), 0
    for e, n in enumerate(counts.tolist()):
        if n != 0:
            y = moe.experts[e](rows[start : start + n]) * before
            before = y.sum(0) * 0.1
            parts.append(y)
        start += n
    return torch.cat(parts).sum(0) * x


@into(WRONG)
def rows_that_are_written(x, moe):
    with torch.no_grad():
        _, _, counts, _, rows = routed(x, moe)
        parts, start = [], 0
        for e, n in enumerate(counts.tolist()):
            if n != 0:
                parts.append(moe.experts[e](rows[start : start + n]))
            rows[start + n : start + n + 1] *= 0.5
            start += n
        y = torch.cat(parts).sum(0)
    return y * x


@into(RIGHT)
def the_list_is_read(x, moe):
    _, _, counts, _, rows = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate(counts.tolist()):
        if n != 0:
            y = moe.experts[e](rows[start : start + n])
            parts.append(y + parts[-1].sum() if parts else y)
        start += n
    return torch.cat(parts).sum(0) * x


@into(WRONG)
def without_gradients_in_some_iterations(x, moe):
    _, _, counts, _, rows = routed(x, moe)
    parts, start = [], 0
    for e, n in enumerate(counts.tolist()):
        if n != 0:
            with torch.set_grad_enabled(e % 2 == 0):
                parts.append(moe.experts[e](rows[start : start + n]))
        start += n
    return torch.cat(parts).sum(0) * x


def behind_branches(rows_of, added=lambda y, out, token: y):
    """rows_of, added: of the sum so far, what an expert is given and what is added besides."""

    def layer(x, moe):
        weight, index = moe.route(x)
        out = x * 0.1
        for e in range(E):
            token, slot = torch.where(index == e)
            if token.numel() == 0:
                continue
            y = moe.experts[e](rows_of(x, out, token)) * weight[token, slot, None]
            out.index_add_(0, token, added(y, out, token))
        return out

    return layer


def of_x(x, out, token):
    return x[token]


# What an iteration adds may read the sum, as that is done where it was, iteration after iteration; what the experts
# read may not be it.
RIGHT["the_sum_is_read_beside_the_expert"] = behind_branches(of_x, lambda y, out, token: y + out[token])
RIGHT["a_copy_of_it_is"] = behind_branches(of_x, lambda y, out, token: y * out.clone()[token].sigmoid())
WRONG["rows_of_the_sum"] = behind_branches(lambda x, out, token: out[token])
WRONG["rows_of_a_view_of_it"] = behind_branches(lambda x, out, token: out.view(-1, out.shape[1])[token])
WRONG["rows_and_the_sum's"] = behind_branches(lambda x, out, token: x[token] + out[token])


def test_experts_on_the_sum_would_be_wrong(monkeypatch):
    assert not compare(WRONG["rows_of_the_sum"])[1]
    monkeypatch.setattr(blocks.Blocks, "check_written", lambda *_: None)
    with pytest.raises(AssertionError):
        compare(WRONG["rows_of_the_sum"])


@pytest.mark.parametrize("depends", [False, True])
def test_a_write_beside_what_a_branch_hands_on_is_kept(depends, monkeypatch):
    def layer(x, moe):
        _, _, counts, order, rows = routed(x, moe)
        out, last, start = torch.zeros_like(rows), torch.zeros((), dtype=x.dtype), 0
        for e, n in enumerate(counts.tolist()):
            if n != 0:
                y = moe.experts[e](rows[start : start + n])
                out[start : start + n] = y + last if depends else y
                last = y.sum()
            start += n
        return torch.zeros_like(x).index_add_(0, order // K, out) * last

    compare(layer)
    monkeypatch.setattr(hoisted_conditionals, "writes_into", lambda node: [])
    monkeypatch.setattr(hoisted_conditionals, "computes", lambda node: True)
    for module in (hoisted_conditionals, rewrite):  # (which reads what is written, too)
        monkeypatch.setattr(module, "all_are_read", lambda *_: None)
    with pytest.raises(AssertionError):
        compare(layer)


def vouched_for(holds, rows):
    """A layer whose branch alone vouches for what makes the expert's rows of its tokens, and of the next expert's."""

    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, other = (torch.where(index == (e + i) % E)[0] for i in range(2))
            if holds(len(token), len(other)):
                chosen = rows(token, other)
                out.index_add_(0, chosen, moe.experts[e](x[chosen]))
        return out + 0 * x

    return layer


FOUND["pieces"] = vouched_for(lambda n, m: n >= 3, lambda token, _: token.split([3, len(token) - 3])[0])
FOUND["in_pairs"] = vouched_for(lambda n, m: n % 2 == 0, lambda token, _: token.view(2, -1)[0])
FOUND["of_two"] = vouched_for(lambda n, m: n == m, lambda token, other: torch.where(token > other, token, other))
FOUND["compared"] = vouched_for(lambda n, m: n == m, lambda token, other: token[token > other])
FOUND["divided"] = vouched_for(lambda n, m: n > 0, lambda token, other: token[: len(other) // len(token)])
RIGHT["halves"] = vouched_for(lambda n, m: n > 0, lambda token, _: token[: len(token) // 2])
RIGHT["flattened"] = vouched_for(lambda n, m: n > 0, lambda token, _: token.view(-1))
RIGHT["later_ones"] = vouched_for(lambda n, m: n > m, lambda token, _: token[token > 3])


def prepared(prepare, put, spelled):
    """Experts behind branches that do something to each row before their projections."""

    def layer(x, moe):
        weight, index = moe.route(x)
        expert_of = index[:, 0]
        order = expert_of.argsort(stable=True)
        pieces = x[order].split(expert_of.bincount(minlength=E).tolist())
        parts, out = [], torch.zeros_like(x)
        for e, (norm, expert) in enumerate(zip(moe.norms, moe.mlps, strict=True)):
            token = torch.where(expert_of == e)[0]
            rows = pieces[e] if put == "cat" else x[token]
            if spelled == "continue" and len(rows) == 0:
                parts.append(rows)
                continue
            y = expert(prepare(rows, norm)) if spelled != "if" or len(rows) > 0 else rows
            parts.append(y)
            if put == "cat":
                continue
            if put == "added":
                out.index_add_(0, token, y)
            else:
                out[token] = y
        out = torch.cat(parts)[order.argsort()] if put == "cat" else out
        return out * weight[:, :1]

    return layer


PREPARED = {
    "root_mean_square": lambda rows, norm: norm(rows),
    "layer_norm": lambda rows, norm: torch.layer_norm(rows, rows.shape[1:], norm.weight),
    "activation": lambda rows, norm: silu(rows),
    "scaled": lambda rows, norm: rows * norm.weight,
    "halved": lambda rows, norm: silu(torch.rms_norm(rows, rows.shape[1:], norm.weight) * 0.5),
}


@pytest.mark.share(6)
@pytest.mark.parametrize("spelled", ["if", "continue"])
@pytest.mark.parametrize("put", ["cat", "added", "set"])
@pytest.mark.parametrize("name", PREPARED)
def test_rows_that_a_branch_prepares(name, put, spelled):
    assert compare(prepared(PREPARED[name], put, spelled)) == (1, True)


def test_rows_that_a_branch_prepares_are_rows_of_one_tensor(monkeypatch):
    layer = prepared(PREPARED["layer_norm"], "added", "continue")
    monkeypatch.setattr(blocks, "source_in_branch", lambda *_: None)
    assert compare(layer) == (1, False)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    graphs, lowered = compare(RIGHT[name])
    assert lowered
    may_be_empty = "skipped_where_it_has_rows", "run_without_rows", "the_list_is_read"  # the list
    assert graphs == 1 or name in may_be_empty


def test_without_asking_what_may_fail_it_does(monkeypatch):
    monkeypatch.setattr(hoisted_conditionals, "fails_for_some_sizes", lambda call: False)
    for name in ("pieces", "in_pairs", "of_two"):
        with pytest.raises(RuntimeError):
            compare(FOUND[name])


@pytest.mark.parametrize("name", FOUND)
def test_rows_are_found_by_a_branch_of_their_own(name, monkeypatch):
    """Where that is switched off, the experts are kept as branches."""
    assert compare(FOUND[name]) == (1, True)
    monkeypatch.setattr(hoisted_conditionals.Opening, "find", lambda *_: False)
    assert compare(FOUND[name]) == (1, False)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    assert not compare(WRONG[name])[1]


def test_experts_that_did_not_run_get_no_gradient(monkeypatch):
    monkeypatch.setattr(rewrite, "skip_unused", lambda *_: None)
    with pytest.raises(AssertionError):
        compare(RIGHT["with_biases"])


def test_numbers_of_an_array_are_numpys():
    assert type(torch.tensor([1]).numpy()[0]) is numpy.int64


def of_deepseek_moe(x, moe):
    """As many numbers as the highest expert that was chosen: that it is the last one is a branch on data."""
    weight, index = moe.route(x)
    flat, weights = index.view(-1), weight.view(-1, 1)
    y = torch.zeros_like(x)
    with torch.no_grad():
        idxs = flat.argsort()
        ends = flat.bincount().cpu().numpy().cumsum(0)
        tokens = idxs // K
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            token = tokens[start:end]
            rows = moe.experts[i](x[token])
            rows.mul_(weights[idxs[start:end]])
            y.scatter_reduce_(0, token.view(-1, 1).repeat(1, x.shape[-1]), rows, reduce="sum")
    return y * x


def test_a_bincount_of_unknown_length():
    layer = Layer().double()
    captured = capture(of_deepseek_moe)
    skewed = SEEDS[-1]  # a batch of which no token goes to the last expert
    for seed in (0, 1, skewed, 2, skewed, 0, skewed, 1, skewed, 2):
        x = tensors(seed)[0]
        torch.testing.assert_close(captured(x, layer), of_deepseek_moe(x, layer))
    captured = capture(of_deepseek_moe)
    captured(tensors(0)[0], layer)
    assert stats(captured).graphs == 1 and not stats(captured).breaks


def test_the_length_of_a_bincount_is_looked_at():
    """Of an index that topk did not give nobody knows how many bins there are."""

    def bins(x, index):
        parts = [x[:n].sum() for n in index.bincount().numpy()]
        return torch.stack(parts)

    captured = capture(bins)
    for index in ([0, 1, 1], [2, 2, 5], [0, 0, 0], [3, 1, 1]):
        x = torch.randn(6)
        assert torch.equal(captured(x, torch.tensor(index)), bins(x, torch.tensor(index)))

"""How many tokens an expert has, as layers ask for it: ``if n <= 0: continue``, ``mask.sum() > 0``, ``int(count)``,
numpy numbers out of a helper, slices between cumulated counts. Each beside what looks like it and is none of it."""

from __future__ import annotations

import pytest
import torch
from beside_eager import compare, regions_of
from module_layers import Layer
from spellings import D, E, K
from table import tensors

import moebius
from moebius import capture, explain, stats
from moebius.lowering import operators
from moebius.lowering.experts import rules_routing
from moebius.lowering.step import chosen
from moebius.tensors import counts
from moebius.torch_facts import torch_private
from moebius.torch_facts.torch_fakes import FakeWorld


def sorted_rows(x, moe):
    """(weight, the slots sorted by expert, the rows in this order, how many of each expert)."""
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    return weight, order, x[order // K], torch.bincount(index.flatten(), minlength=E)


def summed(rows, order, weight):
    """Rows in sorted order, back where their slots are, and weighted."""
    return (torch.empty_like(rows).index_copy(0, order, rows).view(*weight.shape, -1) * weight[..., None]).sum(1)


def in_a_helper(counted):
    return counted.cpu().numpy()


NUMBERS = [torch.Tensor.tolist, in_a_helper, lambda counted: [int(n) for n in counted.unbind()],
           lambda counted: [counted[e].item() for e in range(E)]]  # fmt: skip


def skips_at_most_none(x, moe, numbers=torch.Tensor.tolist):
    """FastMoE's experts without its kernels."""
    weight, order, rows, counted = sorted_rows(x, moe)
    outs, start = [], 0
    for e, n in enumerate(numbers(counted)):
        if n <= 0:
            continue
        outs.append(moe.mlps[e](rows[start : start + n]))
        start += n
    return summed(torch.cat(outs), order, weight)


def skips_below_one(x, moe, numbers=torch.Tensor.tolist):
    weight, order, rows, counted = sorted_rows(x, moe)
    outs, start = [], 0
    for e in range(E):
        n = numbers(counted)[e]
        if n < 1:
            continue
        outs.append(moe.mlps[e](rows[start : start + n]))
        start += n
    return summed(torch.cat(outs), order, weight)


def runs_above_none(x, moe, numbers=torch.Tensor.tolist):
    weight, order, rows, counted = sorted_rows(x, moe)
    outs, start = [], 0
    for e, n in enumerate(numbers(counted)):
        if 0 < n:
            outs.append(moe.mlps[e](rows[start : start + n]))
            start += n
    return summed(torch.cat(outs), order, weight)


def of_marks(x, moe):
    """DeepSeek's way to count: ones that are scattered into zeros."""
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    marks = index.new_zeros((len(x), E))
    marks.scatter_(1, index, 1)
    rows, outs, start = x[order // K], [], 0
    for e, n in enumerate(marks.sum(0).tolist()):
        if n <= 0:
            continue
        outs.append(moe.mlps[e](rows[start : start + n]))
        start += n
    return summed(torch.cat(outs), order, weight)


@pytest.mark.share(7)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("layer", [skips_at_most_none, skips_below_one, runs_above_none])
def test_counts_are_not_negative(layer, numbers):
    assert compare(lambda x, moe: layer(x, moe, numbers)) == (1, True)


def test_counts_of_marks():
    assert compare(of_marks) == (1, True)


@pytest.mark.parametrize("layer", [skips_at_most_none, of_marks])
def test_counts_that_nothing_is_known_of(monkeypatch, layer):
    """Where the slices begin is a number that branches choose then, and no plain sum of counts."""
    x, moe = tensors(0)[0], Layer().double()
    report = explain(layer, backend="eager")(x, moe)
    assert all(node.target is not chosen for graph in report.graphs for node in graph.gm.graph.nodes)
    monkeypatch.setattr(counts, "never_negative", lambda *_: False)
    moebius.reset()
    report = explain(layer, backend="eager")(x, moe)
    assert any(node.target is chosen for graph in report.graphs for node in graph.gm.graph.nodes)
    assert compare(layer)[0] == 1


def one_too_few(x, moe):
    """An expert with one token does not run, and the slices go on without it."""
    weight, order, rows, counted = sorted_rows(x, moe)
    out, start = torch.zeros_like(rows), 0
    for e, n in enumerate(counted.tolist()):
        if n <= 1:
            continue
        out[start : start + n] = moe.mlps[e](rows[start : start + n])
        start += n
    return summed(out, order, weight)


def counts_less_one(x, moe):
    """Numbers that are below zero where an expert has no token."""
    weight, order, rows, counted = sorted_rows(x, moe)
    out, start = torch.zeros_like(rows), 0
    for e, n in enumerate((counted - 1).tolist()):
        if n <= 0:
            continue
        out[start : start + n] = moe.mlps[e](rows[start : start + n])
        start += n
    return summed(out, order, weight)


def written_counts(x, moe):
    weight, order, rows, counted = sorted_rows(x, moe)
    counted[1] = -2
    out, start = torch.zeros_like(rows), 0
    for e, n in enumerate(counted.tolist()):
        if n <= 0:
            start += n
            continue
        out[start : start + n] = moe.mlps[e](rows[start : start + n])
        start += n
    return summed(out, order, weight)


def marks_below_zero(x, moe):
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    rows = x[order // K]
    marks = index.new_zeros((len(x), E)).scatter_(1, index, -1)
    out, start = torch.zeros_like(rows), len(rows)
    for e, n in enumerate(marks.sum(0).tolist()):
        if n >= 0:
            continue
        out[start + n : start] = moe.mlps[e](rows[start + n : start])
        start += n
    return summed(out, order, weight)


@pytest.mark.parametrize("layer", [one_too_few, counts_less_one, written_counts, marks_below_zero])
def test_other_numbers(layer):
    compare(layer)


@pytest.mark.parametrize("write", ["twice", "through a view", "of another number", "of ones", "by .data", "set data"])
def test_marks_that_are_written_again(write):
    """A number below zero takes the way that it takes in plain Python."""

    def step(x, index):
        marks = index.new_ones((4, E)) if write == "of ones" else index.new_zeros((4, E))
        marks.scatter_(1, index, -1 if write == "of another number" else 1)
        if write == "twice":
            marks.scatter_(1, index, -3)
        elif write == "through a view":
            marks[0].sub_(9)
        elif write == "by .data":
            marks.data.sub_(2)
        elif write == "set data":
            marks.data = torch.full_like(marks, -4)
        start = 10
        for n in marks.sum(0).tolist():
            if n <= 0:
                continue
            start += n
        return x * start

    captured = capture(step)
    for values in ([0, 1, 2, 3], [0, 0, 0, 1], [3, 3, 2, 2]):
        index = torch.tensor(values)[:, None]
        assert torch.equal(captured(torch.ones(2), index), step(torch.ones(2), index))


def test_what_is_certain_of_counts():
    """Only of numbers that are certainly not negative does ``n <= 0`` say what they are."""

    def step(x, numbers):
        start = 5
        for n in numbers.tolist():
            if n <= 0:
                continue
            start += n
        return x * start

    captured = capture(step)
    for values in ([1, 2], [0, 3], [-4, 3], [-1, -1]):
        assert torch.equal(captured(torch.ones(2), torch.tensor(values)), step(torch.ones(2), torch.tensor(values)))


def test_where_conditions_leave_numbers_equal():
    """``s + n`` is ``s`` where a count has ``n <= 0``, ``n < 1``, ``not n > 0``, and nowhere else."""
    world = FakeWorld()
    count, number, s = world.unknown_count(), world.unknown_number(), world.unknown_number()
    equal = torch_private.equal_where
    for condition, truth in ((count <= 0, True), (count < 1, True), (count > 0, False), (count >= 1, False),
                             (0 >= count, True), (count == 0, True), (count, False)):  # fmt: skip
        assert equal(s + count, s, condition, truth)
        assert not equal(s + count + 1, s, condition, truth) and not equal(s + 2 * count, s + 1, condition, truth)
    for condition, truth in ((count <= 1, True), (count < 2, True), (count >= 0, True), (count > 0, True),
                             (number <= 0, True), (count < 0, False), (count <= number, True)):  # fmt: skip
        assert not equal(s + count, s, condition, truth), condition
    assert not equal(s + number, s, number <= 0, True)


# ----------------------------------------------------------------------------------------------------------------------
# Masks that are counted
# ----------------------------------------------------------------------------------------------------------------------


def asked(x, moe, runs, mask_of=lambda index, e: index == e):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        mask = index == e
        if runs(mask_of(index, e)):
            token, slot = mask.nonzero(as_tuple=True)
            out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


SUMS = [
    lambda mask: mask.sum() > 0,
    lambda mask: mask.sum().item() > 0,
    lambda mask: int(mask.sum()) >= 1,
    lambda mask: mask.int().sum() != 0,
    lambda mask: mask.sum(dtype=torch.int32) > 0,
]
OTHER_SUMS = [
    lambda mask: mask.sum() > 1,
    lambda mask: mask.sum() < 3,
    lambda mask: mask.sum() == 0,
    lambda mask: mask.sum(dtype=torch.int8) > 0,
    lambda mask: (mask.sum(-1) > 1).any(),
    lambda mask: mask.float().sum() > 0.5,
]


@pytest.mark.parametrize("runs", SUMS)
def test_masks_that_are_counted(runs):
    assert compare(lambda x, moe: asked(x, moe, runs)) == (1, True)


@pytest.mark.parametrize("runs", OTHER_SUMS)
def test_masks_that_are_asked_for_something_else(runs):
    regions_of(lambda x, moe: asked(x, moe, runs), errors=(RuntimeError,))  # (where no expert runs)


@pytest.mark.parametrize("number", [lambda mask: mask.sum(), lambda mask: mask.sum().item()])
def test_iterations_without_tokens_end_early(number):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(moe.experts):
            mask = index == e
            if number(mask) == 0:
                continue
            token, slot = torch.where(mask)
            out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
        return out

    assert compare(layer) == (1, True)


@pytest.mark.parametrize("mask_of", [lambda index, e: index == (e + 1) % E, lambda index, e: index[:2] == e,
                                     lambda index, e: index != e])  # fmt: skip
def test_another_mask_is_counted(mask_of):
    """Each expert runs on the rows that it has where the branch is taken: not the operator on tokens."""
    _, regions = regions_of(lambda x, moe: asked(x, moe, lambda mask: mask.sum() > 0, mask_of))
    assert by_blocks(regions)


def by_blocks(regions):
    return all(region.lowered and "rows of its own" in region.idiom for region in regions)


def test_counting_switched_off(monkeypatch):
    monkeypatch.setattr(rules_routing, "RowCount", type("Nothing", (), {"__new__": lambda cls, selection: None}))
    assert by_blocks(regions_of(lambda x, moe: asked(x, moe, SUMS[0]))[1])


# ----------------------------------------------------------------------------------------------------------------------
# Slices between cumulated counts
# ----------------------------------------------------------------------------------------------------------------------


def between(x, moe, cut=slice, asks=lambda start, end: start == end, wide=lambda at: at.view(-1, 1).repeat(1, D)):
    """DeepSeek-MoE's inference, with gradients."""
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    ends = index.flatten().bincount(minlength=E).cpu().numpy().cumsum(0)
    tokens, out = order // K, torch.zeros_like(x)
    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if start == end if asks is None else asks(start, end):
            continue
        token = tokens[cut(start, end)]
        rows = moe.experts[e](x[token]) * weight.view(-1)[order[start:end]].unsqueeze(-1)
        out.scatter_add_(0, wide(token), rows)
    return out


def test_between_cumulated_counts():
    assert compare(lambda x, moe: between(x, moe, asks=None)) == (1, True)


@pytest.mark.share(1)
@pytest.mark.parametrize("asks", [lambda start, end: start + 1 == end, lambda start, end: end < 3])
def test_iterations_left_out_for_something_else(asks):
    regions_of(lambda x, moe: between(x, moe, asks=asks))


def test_positions_that_are_repeated_otherwise():
    """Each row is added twice, which the lookups and sums around the experts do."""

    def twice(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(moe.experts):
            token, slot = torch.where(index == e)
            rows = (expert(x[token]) * weight[token, slot, None]).repeat(2, 1)
            out.scatter_add_(0, token.view(-1, 1).repeat(2, D), rows)
        return out

    regions_of(twice)


def repeated(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        out.scatter_add_(0, token[:, None].repeat(1, D), expert(x[token]) * weight[token, slot, None])
    return out


def test_repeated_positions():
    graphs, (region,) = regions_of(repeated)
    assert (graphs, region.lowered, region.top_k) == (1, True, K)


def test_repeated_positions_switched_off(monkeypatch):
    monkeypatch.delitem(operators.METHODS, "repeat")
    _, (region,) = regions_of(repeated)
    assert region.top_k is None  # (the experts are one operator, on the rows as they are written)


# ----------------------------------------------------------------------------------------------------------------------
# Weights cut from behind, an index without its axis of one
# ----------------------------------------------------------------------------------------------------------------------


def cut(x, moe, cut):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    first, second = cut(moe.w1), cut(moe.w2)
    for e in range(E):
        token, slot = torch.where(index == e)
        h = torch.relu(x[token] @ first[e].reshape(D, -1))
        out.index_add_(0, token, h @ second[e].reshape(-1, D) * weight[token, slot, None])
    return out


@pytest.mark.parametrize("how", [lambda w: w.chunk(E, -3), lambda w: w.unbind(-3), lambda w: w.split(1, dim=-3)])
def test_weights_cut_from_behind(how):
    assert compare(lambda x, moe: cut(x, moe, how))[0] == 1


def test_weights_cut_along_another_axis():
    """Not the experts': each iteration has a part of all of them."""

    def pieces(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        first = moe.w1.chunk(E, -2)
        for e in range(E):
            token, slot = torch.where(index == e)
            h = torch.relu(x[token] @ first[e].reshape(-1, D).t())
            out.index_add_(0, token, h @ moe.w2[e] * weight[token, slot, None])
        return out

    regions_of(pieces)


def test_sorted_by_the_best_expert():
    """fairseq's BASE layer in one process: ``topk(1).indices.squeeze(1)``, a gate of each row, the inverse order."""

    def base(x, moe):
        with torch.no_grad():
            best = (x @ moe.gate.weight.t()).topk(1, dim=1).indices.squeeze(1)
        order = best.argsort(stable=True)
        rows, sizes = x[order], torch.bincount(best, minlength=E).tolist()
        alpha = torch.sigmoid((rows * moe.gate.weight[best[order]]).sum(-1, keepdim=True))
        parts = [moe.mlps[e](part) for e, part in enumerate(rows.split(sizes))]
        out = alpha * torch.cat(parts) + (1 - alpha) * rows
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return out[back]

    assert compare(base) == (1, True)


# ----------------------------------------------------------------------------------------------------------------------
# int() and float()
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: float(n.sum()),
        lambda x, n: (float(n[0]) / 2, str(float(n[1])), float(n[2]) // 2),
        lambda x, n: n * float(n[0]),
        lambda x, n: (int(n.sum()), int(n[0]) * 2),
        lambda x, n: torch.cat([part * i for i, part in enumerate(x.split([int(k) for k in n.unbind()]))]),
        lambda x, n: x[: int((n > 0).sum())],
        lambda x, n: {int(n[0]): 1},
        lambda x, n: int(n, 3),
        lambda x, n: int(x[0]),
        lambda x, n: float(n > 0),
    ],
)
def test_numbers_of_tensors(function):
    captured = capture(function)
    for numbers in ([1, 2, 3], [0, 5, 1], [2, 2, 2]):
        x, n = torch.arange(6.0), torch.tensor(numbers)
        found, plain = outcome(captured, x, n), outcome(function, x, n)
        assert repr(found) == repr(plain)


def outcome(function, *args):
    try:
        return function(*args)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)


def test_int_stays_in_the_graph():
    captured = capture(lambda x, n: x[: int(n.sum())] * 2)
    for numbers in ([1, 2], [3, 1], [0, 2]):
        captured(torch.arange(6.0), torch.tensor(numbers))
    assert stats(captured).graphs == 1

"""Experts whose rows go a roundabout way into the sum: chosen between, written into zeros, masked by a threshold.
However it is written they become one operator; what only looks like it stays as it was, and is equal."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
from beside_eager import by_gates_alone, compare, regions_of
from spellings import D, E, K

from moebius.lowering.experts import buffers, choices, zeros


def gates_of(x, moe):
    weight, index = moe.route(x)
    gates = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, index, weight)
    return weight, index, gates


def raised(x, rank):
    return x if rank == 2 else x.view(2, -1, D)


# ----------------------------------------------------------------------------------------------------------------------
# Chosen between
# ----------------------------------------------------------------------------------------------------------------------

CONDITIONS = {
    "unsqueezed": lambda index, e: (index[..., 0] == e).unsqueeze(-1),
    "indexed": lambda index, e: (index[..., 0] == e)[..., None],
    "kept": lambda index, e: index[..., :1] == e,
}
WEIGHTED = {
    "before": lambda condition, y, weight, out: torch.where(condition, y * weight[..., :1], out),
    "not": lambda condition, y, weight, out: torch.where(condition, y, out),
}


@pytest.mark.share(4)
@pytest.mark.parametrize(("rank", "condition", "weighted"), [*itertools.product((2, 3), CONDITIONS, WEIGHTED)])
def test_chosen_between(rank, condition, weighted):
    def function(x, moe):
        x = raised(x, rank)
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(moe.experts):
            out = WEIGHTED[weighted](CONDITIONS[condition](index, e), expert(x), weight, out)
        return (out * weight[..., :1]).reshape(-1, D)

    assert compare(function) == (1, True)


def chain(x, moe, condition, out=None, changes=None):
    weight, index = moe.route(x)
    index = index.clone()
    out = torch.zeros_like(x) if out is None else out
    for e, expert in enumerate(moe.experts):
        out = torch.where(condition(index, e), expert(x) * weight[:, :1], out)
        out = out if changes is None else changes(out, index)
    return out


def written(out, index):
    index.add_(1).remainder_(E)
    return out


SIMILAR = {
    "two conditions hold": lambda x, moe: chain(x, moe, lambda index, e: index[:, :1] == e // 2),
    "a comparison": lambda x, moe: chain(x, moe, lambda index, e: index[:, :1] >= e),
    "either slot": lambda x, moe: chain(x, moe, lambda index, e: index[:, e % 2, None] == e),
    "another view": lambda x, moe: chain(x, moe, lambda index, e: (index == e)[torch.arange(len(x)) - e, :1]),
    "on the tokens": lambda x, moe: chain(x, moe, lambda index, e: index[:, :1] == e, x),
    "zeros with a gradient": lambda x, moe: asked_of_zeros(x, moe),
    "read in between": lambda x, moe: chain(x, moe, CONDITIONS["kept"], changes=lambda out, _: out * 1.5),
    "written in between": lambda x, moe: chain(x, moe, lambda index, e: index[:, :1] == e, changes=written),
    "experts that overlap": lambda x, moe: overlapping(x, moe),
    "no routing index": lambda x, moe: chain(x, moe, lambda index, e: (x[:, :1] * 3).long() % 2 == e % 2),
}


def asked_of_zeros(x, moe):
    start = torch.zeros_like(x, requires_grad=True)
    out = chain(x, moe, lambda index, e: index[:, :1] == e * 2, start)
    (given,) = torch.autograd.grad(out.square().sum(), start, create_graph=True)
    return out + given


def overlapping(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        gate = (weight * (index == e)).sum(-1, keepdim=True)
        out = torch.where((index == e).any(-1, keepdim=True), expert(x) * gate, out)
    return out


@pytest.mark.parametrize("name", SIMILAR)
def test_what_only_looks_like_a_choice(name, monkeypatch):
    compare(SIMILAR[name])
    by_gates_alone(monkeypatch)
    _, lowered = compare(SIMILAR[name])
    assert not lowered


def test_each_question_of_a_choice_counts(monkeypatch):
    """Where conditions were taken for exclusive ones without a look, answers would differ."""
    monkeypatch.setattr(choices, "exclude_one_another", lambda links: True)
    with pytest.raises(AssertionError):
        compare(SIMILAR["experts that overlap"])


# ----------------------------------------------------------------------------------------------------------------------
# Written into zeros
# ----------------------------------------------------------------------------------------------------------------------


def by_mask(index, e):
    return (index == e).any(-1)


def by_place(index, e):
    places = torch.where(index == e)
    return places[0] if index.dim() == 2 else places[:2]


def by_nonzero(index, e):
    places = by_mask(index, e).nonzero(as_tuple=True)
    return places[0] if len(places) == 1 else places


def set_item(part, key, rows):
    part[key] = rows
    return part


def put(part, key, rows):
    return part.index_put(key if isinstance(key, tuple) else (key,), rows)


KEYS = {"mask": by_mask, "where": by_place, "nonzero": by_nonzero}
WRITES = {"item": set_item, "put": put}
SUMS = {
    "in place": lambda out, part: out.add_(part),
    "iadd": operator.iadd,
    "added": lambda out, part: out + part,
    "the other way round": lambda out, part: part + out,
}
GATES = {
    "of the sum": lambda y, key, gate: (y, gate),
    "of the rows": lambda y, key, gate: (y * gate[key], None),
}


@pytest.mark.share(8)
@pytest.mark.parametrize(
    ("rank", "key", "write", "add", "gated"), [*itertools.product((2, 3), KEYS, WRITES, SUMS, GATES)]
)
def test_written_into_zeros(rank, key, write, add, gated):
    if rank == 3 and key == "where":
        pytest.skip("a token's slots are no part of its position there")

    def function(x, moe):
        x = raised(x, rank)
        _, index, gates = gates_of(x, moe)
        out = torch.zeros_like(x)
        for e, expert in enumerate(moe.experts):
            at = KEYS[key](index, e)
            rows, gate = GATES[gated](expert(x[at]), at, gates[..., e : e + 1])
            part = WRITES[write](torch.zeros_like(x), at, rows)
            out = SUMS[add](out, part if gate is None else part * gate)
        return out.reshape(-1, D)

    assert compare(function) == (1, True)


def parts(x, moe, write, index=None, after=None, start=torch.zeros_like):
    weight, own, gates = gates_of(x, moe)
    index = own if index is None else index(own)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, _ = torch.where(index == e)
        part, rows = start(x), expert(x[token])
        write(part, token, rows)
        out = out + (part * gates[:, e : e + 1] if after is None else after(part, rows, out, token))
    return out


def without_history(part, token, rows):
    with torch.no_grad():
        part[token] = rows


def twice(part, token, rows):
    part[token] = rows
    part[token[:1]] = rows[:1] * 2


def lost(part, token, rows):
    part[token] = rows.detach() * 2


def doubled(part, rows, out, token):
    return part + part.relu()


def changed_rows(part, rows, out, token):
    rows.mul_(3)
    return part


def alike_twice(index):
    return torch.cat([index, index[:, :1]], 1)


ROUNDABOUT = {
    "a token twice": lambda x, moe: parts(x, moe, set_item, alike_twice),
    "without history": lambda x, moe: parts(x, moe, without_history),
    "written twice": lambda x, moe: parts(x, moe, twice),
    "detached": lambda x, moe: parts(x, moe, lost),
    "read twice": lambda x, moe: parts(x, moe, set_item, after=doubled),
    "rows changed afterwards": lambda x, moe: parts(x, moe, set_item, after=changed_rows),
    "one row for all": lambda x, moe: parts(x, moe, lambda part, token, rows: set_item(part, token, rows.sum(0))),
    "a number": lambda x, moe: parts(x, moe, lambda part, token, rows: set_item(part, token, 2.0)) + x,
    "ones": lambda x, moe: parts(x, moe, set_item, start=torch.ones_like),
    "a gate of features": lambda x, moe: parts(x, moe, set_item, after=lambda part, rows, out, token: part * x),
    "read of the sum": lambda x, moe: parts(x, moe, set_item, after=lambda part, _, out, __: part * out[:, :1].cos()),
}


@pytest.mark.parametrize("name", ROUNDABOUT)
def test_what_only_looks_like_rows_in_zeros(name):
    compare(ROUNDABOUT[name])


def test_each_question_of_a_part_counts(monkeypatch):
    """Where positions were taken for different ones without a look, a token that stands there twice would count so."""
    monkeypatch.setattr(buffers, "differ", lambda keys, rows: True)
    with pytest.raises(AssertionError):
        compare(ROUNDABOUT["a token twice"])


def selected(x, moe, mask_of, before=None, rows_of=lambda rows: rows):
    _, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        mask = mask_of(index, e, x)
        rows = expert(x.masked_select(mask).view(-1, D))
        mask = mask if before is None else before(mask)
        out = out.masked_scatter(mask, rows_of(rows))
    return out


def top1(index, e, x):
    return (index[:, 0] == e)[:, None].expand_as(x)


SELECTED = {
    "rows": (lambda x, moe: selected(x, moe, top1), True),
    "a column": (lambda x, moe: selected(x, moe, lambda index, e, x: (index[:, 0] == e).unsqueeze(1)), True),
    "experts that overlap": (lambda x, moe: selected(x, moe, lambda index, e, x: (index == e).any(-1)[:, None]), True),
    "other tokens": (lambda x, moe: selected(x, moe, top1, lambda mask: mask.flip(0)), None),
    "in another order": (lambda x, moe: selected(x, moe, top1, rows_of=lambda rows: rows.flip(0)), None),
    "half of the features": (
        lambda x, moe: selected(x, moe, lambda index, e, x: (x > 0) | (index[:, :1] == e) | (x < 9)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", SELECTED)
def test_masked_select_and_scatter(name):
    function, wanted = SELECTED[name]
    _, lowered = compare(function)
    assert wanted is None or lowered


@pytest.mark.parametrize("cut", [None, 3])
@pytest.mark.parametrize("numbers", [torch.arange, torch.randperm, lambda n: torch.arange(n) // 2])
def test_numbers_that_a_mask_selects(numbers, cut):
    def function(x, moe):
        _, index = moe.route(x)
        tokens, out = numbers(len(x)), torch.zeros_like(x)
        for e, expert in enumerate(moe.experts):
            token = tokens.masked_select((index == e).any(-1))[:cut]
            out = out.index_add(0, token, expert(x[token]))
        return out

    assert compare(function) == (1, True)


# ----------------------------------------------------------------------------------------------------------------------
# Masked by a threshold
# ----------------------------------------------------------------------------------------------------------------------


def kth(values):
    return values.topk(K, -1).values[..., -1:]


THRESHOLDS = {
    "product": lambda logits: logits.softmax(-1) * (logits >= kth(logits)),
    "cast": lambda logits: logits.softmax(-1) * (logits >= kth(logits)).to(logits.dtype),
    "where": lambda logits: torch.where(logits >= kth(logits), logits.sigmoid(), 0.0),
    "filled": lambda logits: logits.sigmoid().masked_fill(logits < kth(logits), 0.0),
    "filled with -inf": lambda logits: logits.masked_fill(logits < kth(logits), float("-inf")).softmax(-1),
    "divided": lambda logits: (p := logits.sigmoid() * (logits >= kth(logits))) / p.sum(-1, keepdim=True),
    "both": lambda logits: logits.softmax(-1) * ((logits >= kth(logits)) & (logits > -1)),
    "relu": lambda logits: logits.relu(),
    "nobody": lambda logits: logits.softmax(-1) * (logits > 1e6),
    "everybody": lambda logits: logits.softmax(-1) * (logits > -1e6),
}
DENSE = {
    "added up": lambda x, moe, gates: sum(gates[..., e : e + 1] * own(x) for e, own in enumerate(moe.experts)),
    "stacked": lambda x, moe, gates: (torch.stack([e(x) for e in moe.experts], -2) * gates[..., None]).sum(-2),
}


@pytest.mark.share(6)
@pytest.mark.parametrize(("rank", "threshold", "dense"), [*itertools.product((2, 3), THRESHOLDS, DENSE)])
def test_masked_by_a_threshold(rank, threshold, dense):
    def function(x, moe):
        x = raised(x, rank)
        return DENSE[dense](x, moe, THRESHOLDS[threshold](moe.gate(x))).reshape(-1, D)

    assert compare(function) == (1, True)


def test_as_many_experts_as_tie():
    """Where logits are equal, more experts than K have them."""

    def function(x, moe):
        logits = (moe.gate(x) * 0.3).round()
        return DENSE["added up"](x, moe, logits.detach().sigmoid() * (logits >= kth(logits)))

    assert compare(function, seeds=range(6)) == (1, True)


def written_mask(logits):
    mask = logits >= kth(logits)
    gates = logits.softmax(-1) * mask.to(logits.dtype)
    mask.logical_not_()
    return gates


OTHERS = {
    "not zero": lambda logits: logits.softmax(-1) * (logits >= kth(logits)) + 0.1,
    "a logarithm": lambda logits: logits.masked_fill(logits < kth(logits), -1e9).log_softmax(-1),
    "a low number": lambda logits: logits.masked_fill(logits < kth(logits), -2.0).softmax(-1),
    "whole tokens": lambda logits: logits.softmax(-1) * (logits[:, :1] > 0),
    "the other number": lambda logits: torch.where(logits >= kth(logits), 0.5, logits.sigmoid()),
    "written": written_mask,
}


@pytest.mark.parametrize("name", OTHERS)
def test_gates_that_are_not_zero_elsewhere(name, monkeypatch):
    def function(x, moe):
        return DENSE["added up"](x, moe, OTHERS[name](moe.gate(x)))

    assert compare(function) == (1, True)  # every token has every expert
    by_gates_alone(monkeypatch)
    assert compare(function) == (1, False)


def test_a_mask_counts(monkeypatch):
    """Were another mask taken, answers would differ."""
    plain = zeros.Zeros.elsewhere
    monkeypatch.setattr(
        zeros.Zeros, "elsewhere", lambda self, node, mask: mask if self.masks else plain(self, node, mask)
    )
    with pytest.raises(AssertionError):
        compare(lambda x, moe: DENSE["added up"](x, moe, THRESHOLDS["filled"](moe.gate(x))))


# ----------------------------------------------------------------------------------------------------------------------
# Counts, hits, and lookups within a sequence
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.int64, torch.uint8])
def test_a_count_that_wraps_around(dtype):
    """A count in 8 bits of 256 tokens is zero: the iteration is left out, and nothing may be added. (What the program
    asks is what decides, whatever that counts.)"""

    def function(x, moe):
        x = x[:1].expand(256, -1).reshape(2, 128, D)
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(moe.experts):
            mask = (index == e).any(-1)
            if (mask.sum() if dtype is None else mask.sum(dtype=dtype)) == 0:
                continue
            out[mask] += expert(x[mask]) * (weight * (index == e)).sum(-1)[mask].unsqueeze(-1)
        return (out + x).view(-1, D)

    assert compare(function, seeds=range(2))[1]


@pytest.mark.parametrize("cut", [slice(None), slice(1, None), slice(None, None, 2)])
def test_some_of_the_hits(cut):
    def function(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for row in torch.nn.functional.one_hot(index, E).sum((0, 1)).nonzero()[cut]:
            token, slot = torch.where(index == row[0])
            out.index_add_(0, token, torch.relu(x[token] @ moe.w1[row[0]]) @ moe.w2[row[0]] * weight[token, slot, None])
        return out

    _, lowered = compare(function)
    assert lowered is (cut == slice(None))


# ----------------------------------------------------------------------------------------------------------------------
# One expert for each token, looked up in a stack
# ----------------------------------------------------------------------------------------------------------------------

ONE = {
    "max": lambda logits: logits.max(-1).indices,
    "argmax": lambda logits: logits.argmax(-1),
    "topk": lambda logits: logits.topk(1, -1).indices.squeeze(-1),
}
LOOKED_UP = {
    "gather": lambda y, index: y.gather(1, index.view(-1, 1, 1).expand(-1, 1, D)).squeeze(1),
    "gather, unsqueezed": lambda y, index: y.gather(1, index[:, None].unsqueeze(-1).expand(-1, 1, D))[:, 0],
    "take_along_dim": lambda y, index: torch.take_along_dim(y, index[:, None, None], 1).squeeze(1),
    "by numbers": lambda y, index: y[torch.arange(len(y))[:, None], index.unsqueeze(1)].squeeze(1),
    "by numbers, without slots": lambda y, index: y[torch.arange(len(y)), index],
    "by numbers, experts first": lambda y, index: y.transpose(0, 1)[index, torch.arange(len(y))],
}


@pytest.mark.share(5)
@pytest.mark.parametrize(("one", "looked_up"), [*itertools.product(ONE, LOOKED_UP)])
def test_the_only_expert_of_a_token(one, looked_up):
    def function(x, moe):
        logits = moe.gate(x)
        y = torch.stack([expert(x) for expert in moe.experts], 1)
        return LOOKED_UP[looked_up](y, ONE[one](logits)) * logits.softmax(-1).amax(-1, keepdim=True)

    assert compare(function) == (1, True)


def swapped(index):
    index[:2] = (index[:2] + 1) % E
    return index


NOT_ONE = {
    "two, one taken": lambda y, x, moe: y.gather(1, moe.route(x)[1][..., None].expand(-1, -1, D))[:, 0],
    "numbers of its own": lambda y, x, moe: LOOKED_UP["gather"](y, (x[:, 0] > 0).long()),
    "of another token": lambda y, x, moe: LOOKED_UP["gather"](y, moe.gate(x).argmax(-1)[:1].expand(len(x))),
    "the largest of two": lambda y, x, moe: LOOKED_UP["gather"](
        y, torch.max(moe.gate(x).argmax(-1)[None].expand(2, -1), torch.arange(len(x)) % E)[1]
    ),
    "numbers of its own, without slots": lambda y, x, moe: y[torch.arange(len(y)), (x[:, 0] > 0).long()],
    "tokens in another order": lambda y, x, moe: y[torch.arange(len(y)).flip(0), moe.gate(x).argmax(-1)],
    "tokens and experts mixed up": lambda y, x, moe: y[:E][moe.gate(x[:E]).argmax(-1), torch.arange(E)],
    "written since": lambda y, x, moe: LOOKED_UP["by numbers, without slots"](y, swapped(moe.route(x)[1])[:, 0]),
    "features of several": lambda y, x, moe: y.gather(1, y.detach().argmax(1, keepdim=True)).squeeze(1),
}


@pytest.mark.parametrize("name", NOT_ONE)
def test_lookups_of_something_else(name):
    regions_of(lambda x, moe: NOT_ONE[name](torch.stack([expert(x) for expert in moe.experts], 1), x, moe))


@pytest.mark.filterwarnings("error:moebius could not lower")
def test_the_experts_of_one_token_for_several():
    def function(x, moe):
        _, index = moe.route(x)
        y = torch.stack([expert(x[:K]) for expert in moe.experts], 1)
        return y[torch.arange(K), index[0]]

    assert compare(function)[0] == 1

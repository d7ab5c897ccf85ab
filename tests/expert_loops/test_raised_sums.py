"""All experts on all tokens [batch, T, D], masked by a gate with as many axes: the sum on a matrix of these tokens,
right and subtly wrong."""

from __future__ import annotations

import pytest
import torch
from beside_eager import compare, regions_of
from spellings import D, E, K, N
from torch import nn
from torch.nn.functional import one_hot

from moebius.lowering.experts import combined, dense


def raised(x):
    """[2, T, D]"""
    return torch.stack([x, x.flip(0) * 0.7])


def gates_of(x, moe):
    """[2, T, E], zero for the experts that are not chosen."""
    weight, index = moe.gate(x).softmax(-1).topk(K)
    return torch.zeros_like(moe.gate(x)).scatter(-1, index, weight)


def by_scattered_gates(x, moe):
    x = raised(x)
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + expert(x) * gates[..., e].unsqueeze(-1)
    return out


def in_another_order(x, moe):
    """All experts first, and then the sum of them, the third first."""
    x = raised(x)
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    rows = [expert(x) for expert in moe.experts]
    for e in (2, 0, *range(3, E), 1):
        out = out + rows[e] * gates[..., e, None]
    return out


def in_place(x, moe):
    x = raised(x)
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.biased):
        out += gates[:, :, e : e + 1] * expert(x)
    return out


def of_the_best(x, moe):
    x = raised(x)
    logits = moe.gate(x)
    kept = torch.full_like(logits, float("-inf")).scatter(2, logits.topk(K, -1)[1], logits.topk(K, -1)[0])
    gates = kept.softmax(2)
    return sum(expert(x) * gates[..., e, None] for e, expert in enumerate(moe.mlps))


def by_one_hot(x, moe):
    x = raised(x)
    weight, index = moe.gate(x).softmax(-1).topk(K)
    gates = (one_hot(index, E) * weight[..., None]).sum(-2)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + expert(x) * gates.select(-1, e)[..., None]
    return out


def by_sums(x, moe):
    x = raised(x)
    weight, index = moe.gate(x).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + expert(x) * (weight * (index == e)).sum(-1, keepdim=True)
    return out


def by_masks(x, moe):
    x = raised(x)
    weight, index = moe.gate(x).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        gate = (weight * (index == e)).sum(-1)
        out = out + torch.where((index == e).any(-1, keepdim=True), expert(x) * gate.unsqueeze(2), 0)
    return out


def one_projection_a_batch(x, moe):
    """VitPose: a single projection for all tokens of an image."""
    x = raised(x)
    index = moe.gate(x.mean(1)).argmax(-1).view(-1, 1, 1)
    out = torch.zeros(*x.shape[:2], N, dtype=x.dtype)
    for e, expert in enumerate(moe.mlps):
        out = out + expert.net[0](x) * (index == e)
    return out


def an_expert_of_two_halves(x, moe):
    x = raised(x)
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.biased):
        left, right = (expert.w1(x) * 1.5).chunk(2, -1)
        h = torch.tanh(left) * right
        out = out + nn.functional.linear(h, expert.w2.weight[:, : N // 2]) * gates[..., e, None]
    return out


def stacked(x, moe):
    x = raised(x)
    return torch.einsum("bte,bted->btd", gates_of(x, moe), torch.stack([expert(x) for expert in moe.experts], 2))


def stacked_in_front(x, moe):
    x = raised(x)
    y = torch.stack([expert(x) for expert in moe.mlps])
    return (y * gates_of(x, moe).permute(2, 0, 1)[..., None]).sum(0)


def stacked_behind(x, moe):
    x = raised(x)
    y = torch.stack([expert(x) for expert in moe.biased], -1)
    return torch.matmul(y, gates_of(x, moe).unsqueeze(-1)).squeeze(-1)


def joined(x, moe):
    x = raised(x)
    y = torch.cat([expert(x).unsqueeze(-2) for expert in moe.experts], -2)
    return (gates_of(x, moe).unsqueeze(-2) @ y)[:, :, 0]


def picked(x, moe):
    x = raised(x)
    weight, index = moe.gate(x).softmax(-1).topk(K)
    y = torch.stack([expert(x) for expert in moe.experts], dim=2)
    return (y.gather(2, index[..., None].expand(-1, -1, -1, D)) * weight.unsqueeze(-1)).sum(2)


RIGHT = [stacked, stacked_in_front, stacked_behind, joined, picked, by_scattered_gates, in_place, of_the_best,
         by_one_hot, by_sums, by_masks, one_projection_a_batch, an_expert_of_two_halves]  # fmt: skip


def gates_of_another_token(x, moe):
    """Along the batch, not the tokens."""
    x = raised(x)
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + expert(x) * gates.flip(0)[..., e, None].roll(e, 1)
    return out


def dense_gates(x, moe):
    x = raised(x)
    gates, out = moe.gate(x).softmax(-1), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + expert(x) * gates[..., e, None]
    return out


def across_tokens(x, moe):
    """An expert that looks at all tokens of its batch."""
    x = raised(x)
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + expert(x - x.mean(1, keepdim=True) * (e + 1)) * gates[..., e, None]
    return out


def along_the_tokens(x, moe):
    """A sum over an axis of tokens, as long as the last."""
    x = torch.stack([x[:D], x[:D] * 0.5])
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + (expert(x) * x.sum(1, keepdim=True)).transpose(1, 2).transpose(1, 2) * gates[..., e, None]
    return out


def with_layers_one_after_another(x, moe):
    out = raised(x)
    index = moe.gate(out.mean(1)).argmax(-1).view(-1, 1, 1)
    for e, expert in enumerate(moe.experts):
        out = out + expert(out) * (index == e)
    return out


def the_tokens_change(x, moe):
    x = raised(x)
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + expert(x) * gates[..., e, None]
        x.data[1] *= 0.5
    return out


def the_gates_change(x, moe):
    x = raised(x)
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + expert(x) * gates[..., e, None]
        gates.data[0] *= 0.5
    return out


def a_vector_for_each_place(x, moe):
    """[T, D] beside [2, T, D]: of the token's place, which is the same in both batches."""
    x = raised(x)
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    places = torch.arange(x.shape[1] * D, dtype=x.dtype).view(-1, D) / 10
    for e, expert in enumerate(moe.experts):
        out = out + expert(x + places) * gates[..., e, None]
    return out


def read_between(x, moe):
    x = raised(x)
    gates, out, seen = gates_of(x, moe), torch.zeros_like(x), []
    for e, expert in enumerate(moe.experts):
        out = out + expert(x) * gates[..., e, None]
        seen.append(out.sum())
    return out + sum(seen)


def as_many_batches_as_tokens(x):
    return torch.stack([x[:3], x[3:6], x[6:9]])


def gates_turned(x, moe):
    x = as_many_batches_as_tokens(x)
    y = torch.stack([expert(x) for expert in moe.experts], 2)
    return torch.einsum("tbe,bted->btd", gates_of(x, moe), y)


def result_turned(x, moe):
    x = as_many_batches_as_tokens(x)
    y = torch.stack([expert(x) for expert in moe.experts], 2)
    return torch.einsum("bte,bted->tbd", gates_of(x, moe), y)


def summed_over_tokens(x, moe):
    x = torch.stack([x[:E], x[E : 2 * E]])
    y = torch.stack([expert(x) for expert in moe.experts], 2)
    return (y * gates_of(x, moe)[..., None]).sum(1)


def picked_along_the_batch(x, moe):
    x = torch.stack([x[:4], x[1:5], x[2:6], x[3:7]])
    weight, index = moe.gate(x).softmax(-1).topk(K)
    y = torch.stack([expert(x) for expert in moe.experts], dim=2)
    return (y.gather(0, index[..., None].expand(-1, -1, -1, D)) * weight.unsqueeze(-1)).sum(2)


def stacks_that_change(x, moe):
    x = raised(x)
    y = torch.stack([expert(x) for expert in moe.experts], 2)
    gates = gates_of(x, moe)
    y.data[0] *= 2.0
    return torch.einsum("bte,bted->btd", gates, y)


WRONG = [gates_turned, result_turned, summed_over_tokens, picked_along_the_batch, stacks_that_change,
         gates_of_another_token, dense_gates, across_tokens, along_the_tokens, with_layers_one_after_another,
         the_tokens_change, the_gates_change, a_vector_for_each_place, read_between]  # fmt: skip


@pytest.mark.share(7)
@pytest.mark.parametrize("function", RIGHT)
def test_right(function):
    assert compare(function) == (1, True)


def is_masked_sum(function):
    """Whether experts run on the tokens alone that chose them. (Else they may be an operator, each on all tokens.)"""
    graphs, regions = regions_of(function)
    assert graphs == 1
    return any(region.lowered and "masked by a gate" in region.idiom for region in regions)


@pytest.mark.share(7)
@pytest.mark.parametrize("function", WRONG)
def test_no_masked_sum(function):
    assert not is_masked_sum(function)


def test_dense_gates():
    """Each expert is of all tokens: one operator all the same."""
    assert compare(dense_gates) == (1, True)


def test_experts_that_are_added_in_another_order():
    assert not is_masked_sum(in_another_order)


@pytest.mark.parametrize("function", [by_scattered_gates, one_projection_a_batch, stacked])
def test_off(monkeypatch, function):
    assert is_masked_sum(function)
    monkeypatch.setattr(dense, "as_matrices", lambda base, parts, place, last: differ(place))
    assert not is_masked_sum(function)


@pytest.mark.parametrize(("name", "function"), [("is_summed", summed_over_tokens)])
def test_which_axis_is_summed(monkeypatch, name, function):
    monkeypatch.setattr(combined.Stack, name, lambda self, dim: True)
    with pytest.raises(AssertionError):
        compare(function)


def differ(place):
    raise dense.NoExperts("switched off", place)

"""Experts on all tokens as one batched product, where a gate makes the rows of other tokens zero: only the tokens that
chose an expert run, if the gate is certainly zero for the others and the expert makes zeros of zeros."""

from __future__ import annotations

import pytest
import torch
from test_batched import D, E, K, compare, route
from torch.nn.functional import gelu, silu

from moebius.lowering.experts import batched_iterations
from moebius.lowering.experts import zeros as zero_gates
from moebius.lowering.experts.batched_iterations import Batched


@pytest.fixture
def fewer(monkeypatch):
    """What said which rows are zero, once for each layer whose other rows alone run."""
    found, kept = [], Batched.rows_of_zeros

    def spy(self, result):
        gates = kept(self, result)
        found.extend([gates] if gates is not None else [])
        return gates

    monkeypatch.setattr(Batched, "rows_of_zeros", spy)
    return found


def experts(rows, w1, w3, w2):
    return torch.bmm(silu(torch.bmm(rows, w1)) * torch.bmm(rows, w3), w2)


def scattered(x, router):
    weight, index = route(x, router)
    return torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)


def zeros(x, router, w1, w3, w2):
    gates = scattered(x, router)
    return experts(x[None] * gates.T[..., None], w1, w3, w2).sum(0)


def llama4(x, router, w1, w3, w2):
    logits = x @ router.T
    best, index = torch.topk(logits, K, dim=1)
    scores = torch.full_like(logits, float("-inf")).scatter_(1, index, best)
    scores = torch.sigmoid(scores.float()).to(scores.dtype)
    rows = x.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)
    return experts(rows.view(E, -1, D), w1, w3, w2).view(-1, D).reshape(E, -1, D).sum(0)


def softmax(x, router, w1, w3, w2):
    logits = x @ router.T
    best, index = logits.topk(K, dim=-1)
    gates = torch.full_like(logits, float("-inf")).scatter(-1, index, best).softmax(-1)
    return torch.bmm(gelu(torch.bmm(gates.T.unsqueeze(-1) * x, w1)), w2).sum(0) + w3.sum()


def used_again(x, router, w1, w3, w2):
    """The gates and the rows are used elsewhere too."""
    gates = scattered(x, router)
    rows = x[None] * gates.T[..., None]
    return experts(rows, w1, w3, w2).sum(0) + rows.square().sum(0) + (gates * 3).sum()


def twice(x, router, w1, w3, w2):
    """An expert that a token has twice: scatter keeps one of the weights."""
    weight, index = route(x, router)
    index = torch.cat([index[:, :1], index[:, :1]], 1)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight[:, :1].expand(-1, 2))
    return experts(x[None] * gates.T[..., None], w1, w3, w2).sum(0)


@pytest.mark.parametrize("layer", [zeros, llama4, softmax, used_again, twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize("tokens", [4, 9])
def test_only_the_chosen_rows_run(layer, tokens, fewer):
    compare(layer, True, tokens=tokens)
    assert len(fewer) >= 1


def all_gates(x, router, w1, w3, w2):
    return experts(x[None] * (x @ router.T).relu().T[..., None], w1, w3, w2).sum(0)


def from_ones(x, router, w1, w3, w2):
    weight, index = route(x, router)
    gates = torch.ones(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    return experts(x[None] * gates.T[..., None], w1, w3, w2).sum(0)


def sigmoid_of_zeros(x, router, w1, w3, w2):
    return experts(x[None] * scattered(x, router).sigmoid().T[..., None], w1, w3, w2).sum(0)


def changed_after(x, router, w1, w3, w2):
    gates = scattered(x, router)
    gates[:, 0] = 0.25
    return experts(x[None] * gates.T[..., None], w1, w3, w2).sum(0)


def added_to_the_rows(x, router, w1, w3, w2):
    return experts(x[None] * scattered(x, router).T[..., None] + 1.0, w1, w3, w2).sum(0)


def sigmoid_experts(x, router, w1, w3, w2):
    rows = x[None] * scattered(x, router).T[..., None]
    return torch.bmm(torch.bmm(rows, w1).sigmoid(), w2).sum(0) + w3.sum()


def with_a_bias(x, router, w1, w3, w2):
    rows = x[None] * scattered(x, router).T[..., None]
    return torch.bmm(silu(torch.bmm(rows, w1) + w3[:, :1]), w2).sum(0)


NOT_ZERO = (all_gates, from_ones, sigmoid_of_zeros, changed_after, added_to_the_rows, sigmoid_experts,
            with_a_bias)  # fmt: skip


@pytest.mark.parametrize("layer", NOT_ZERO, ids=lambda f: f.__name__)
def test_all_rows_run_where_others_are_not_certainly_zero(layer, fewer):
    compare(layer, True)
    assert not fewer


@pytest.mark.parametrize(
    ("module", "name", "answer", "layer"),
    [
        (zero_gates, "number_of", lambda node: 0, from_ones),
        (batched_iterations, "zero_at_zero", lambda *given: True, sigmoid_experts),
    ],
    ids=["made of zeros", "zero at zero"],
)
def test_without_its_checks_it_would_be_wrong(module, name, answer, layer, monkeypatch):
    monkeypatch.setattr(module, name, answer)
    with pytest.raises(AssertionError):
        compare(layer, True)

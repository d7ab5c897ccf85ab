"""Branches on tensors made of constants alone are decided while tracing; all others are not."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from moebius import capture, explain, stats
from moebius.python import operators
from moebius.tensors import folding


def positions(x):
    """As transformers asks whether several sequences are packed into one."""
    ids = torch.arange(x.shape[1]).unsqueeze(0)
    changes = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    if (changes[:, -1] == 0).all():
        return x * 2
    return x * 3


def number_of_constants(x):
    return x * 2 if torch.full((x.shape[1],), 2.0).sum() > 5 else x * 3


def written_to(x):
    mask = torch.zeros(3)
    view = mask[1:]
    view.add_(x[0, :2])
    return x * 2 if mask.sum() > 1 else x * 3


def written_to_later(x):
    mask = torch.zeros(3)
    before = x * 2 if (mask == 0).all() else x * 3
    mask[0] = 1
    return before if (mask == 0).all() else before * 5


def from_the_input(x):
    return x * 2 if (x > 0).all() else x * 3


def random_numbers(x):
    return x * 2 if torch.rand(3).sum() > 1.5 else x * 3


FOLDED = (positions, number_of_constants)
OTHERS = (written_to, written_to_later, from_the_input, random_numbers)


def outcome(function, x):
    torch.manual_seed(int(x.sum() * 100))
    return function(x), torch.rand(1)


@pytest.mark.parametrize("function", FOLDED + OTHERS, ids=lambda f: f.__name__)
def test_answers(function):
    """Over sizes that go both ways at the branch, and numbers that do."""
    captured = capture(function)
    for size in (2, 4, 3, 2, 5, 2, 6):
        for shift in (-1.0, 0.0, 0.6):
            x = torch.rand(2, max(size, 3) if "written" in function.__name__ else size) + shift
            torch.testing.assert_close(outcome(captured, x), outcome(function, x), rtol=0, atol=0)


@pytest.mark.parametrize("function", FOLDED, ids=lambda f: f.__name__)
def test_one_graph_without_a_check(function):
    report = explain(function)(torch.ones(2, 4))
    (graph,) = report.graphs
    assert not report.breaks and "require_branch" not in graph.gm.code


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_what_varies_is_not_decided_while_tracing(function, monkeypatch):
    found = []
    real = operators.constant_truth
    for place in (operators, folding):
        monkeypatch.setattr(place, "constant_truth", lambda node: found.append(real(node)) or found[-1])
    captured = capture(function)
    for shift in (-1.0, 1.0):
        captured(torch.rand(2, 3) + shift)
    assert found and None in found


def test_with_the_check_for_writes_switched_off_the_answer_is_wrong(monkeypatch):
    monkeypatch.setattr(folding, "writes_into", lambda node: [])
    x = torch.ones(2, 3)
    assert not torch.equal(capture(written_to_later)(x), written_to_later(x))


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_mixtral_has_plain_pythons_gradients(precision):
    """To the bit: its masks are made as in plain Python, so attention takes the same path."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        experts_implementation="eager",
    )  # fmt: skip
    plain, ids = transformers.MixtralForCausalLM(config), torch.randint(0, 16, (2, 8))
    twin = copy.deepcopy(plain)

    def step(model, ids):
        with torch.autocast("cpu", dtype=precision) if precision else contextlib.nullcontext():
            return model(input_ids=ids, labels=ids).loss

    captured = capture(step, backend="eager")
    for _ in range(2):
        step(plain, ids).backward()
        captured(twin, ids).backward()
        for a, b in zip(plain.parameters(), twin.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)
    assert stats(captured).breaks == 0 and stats(captured).graphs == 1

"""Tensors that are made of numbers, or as many classes or rows, that differ from call to call: one capture.

Ways to make one × where the number comes from; operators that take whole numbers which in C are no symbols.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moebius import capture, stats

NUMBERS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "a size": lambda x, n: len(x),
    "of a size": lambda x, n: int(len(x) * 1.25) + 1,
    "an argument": lambda x, n: n,
    "found in the data": lambda x, n: len((x[:, 0] > 0).nonzero()) + 1,
    "an item": lambda x, n: (x[:, 0] > -9).sum().item(),
}
MADE: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "tensor": lambda x, n: torch.tensor([n, 2]),
    "as_tensor": lambda x, n: torch.as_tensor([[n], [2]], dtype=torch.float64),
    "LongTensor": lambda x, n: torch.LongTensor([n, 2]),
    "new_tensor": lambda x, n: x.new_tensor([n, 2]),
    "new_tensor of another type": lambda x, n: x.new_tensor([n, 2.5], dtype=torch.float64),
    "new_tensor of one": lambda x, n: x.long().new_tensor(n),
    "new": lambda x, n: x.new([n, 2]),
    "new of ints": lambda x, n: x.long().new((n, 2)),
    "new of sizes": lambda x, n: x.new(n, 2).fill_(3),
    "new of a size": lambda x, n: x.new(n).zero_(),
    "new of a Size": lambda x, n: x.new(x.size()).fill_(n),
    "new of nothing": lambda x, n: x.new(),
    "new_full": lambda x, n: x.new_full((2, 3), n),
    "full": lambda x, n: torch.full((n,), 2.0),
    "one_hot": lambda x, n: F.one_hot((x[:, 0] > 0).long(), n + 1),
    "one_hot by name": lambda x, n: F.one_hot((x[:, 0] > 0).long(), num_classes=n + 1).float().sum(0),
}


def noise(x: torch.Tensor, draw: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    y = torch.zeros_like(x)
    assert draw(y) is y
    return y


OPERATORS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "linspace": lambda x, n: torch.linspace(0, 1, n),
    "linspace by name": lambda x, n: torch.linspace(-1.0, 1.0, steps=n + 1, dtype=torch.float64),
    "tril_indices": lambda x, n: torch.tril_indices(n, n + 1),
    "triu_indices": lambda x, n: torch.triu_indices(n, n, offset=1),
    "unfold": lambda x, n: torch.cat([x] * 3).T.unfold(1, n - 4, 1),
    "unfold by steps": lambda x, n: torch.cat([x] * 3).unfold(0, 4, step=n),
    "diag_embed": lambda x, n: torch.diag_embed(x, offset=n),
    "diagonal": lambda x, n: (x @ x.T).diagonal(n - 5),
    "bucketize": lambda x, n: torch.bucketize(x, torch.linspace(-2, 2, n)),
    "normal_": lambda x, n: noise(x, lambda y: y.normal_(0, n)),
    "normal_ by name": lambda x, n: noise(x, lambda y: y.normal_(mean=n / 2, std=0.1 * n)),
    "uniform_": lambda x, n: noise(x, lambda y: y.uniform_(-n, n)),
    "random_": lambda x, n: noise(x, lambda y: y.random_(0, n)),
    "bernoulli_": lambda x, n: noise(x, lambda y: y.bernoulli_(1 / n)),
    "exponential_": lambda x, n: noise(x, lambda y: y.exponential_(n)),
    "geometric_": lambda x, n: noise(x, lambda y: y.geometric_(1 / n)),
    "trunc_normal_": lambda x, n: torch.nn.init.trunc_normal_(torch.zeros_like(x), std=1 / n),
    "kaiming": lambda x, n: torch.nn.init.uniform_(torch.empty_like(x), -(n**-0.5), n**-0.5),
}


def calls() -> list[tuple[torch.Tensor, int]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 3, generator=draw), 20 - rows) for rows in (8, 6, 10, 5, 7, 9)]


@pytest.mark.share(25)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize(("made", "number"), [*itertools.product(MADE, NUMBERS)], ids=lambda name: name)
def test_one_capture_for_all_numbers(made: str, number: str, backend: str) -> None:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        return MADE[made](x, NUMBERS[number](x, n))

    captured = capture(step, backend=backend)
    for x, n in calls():
        want, got = step(x, n), captured(x, n)
        assert torch.equal(want, got) and want.dtype is got.dtype and want.requires_grad == got.requires_grad
    counts = stats(captured)
    assert (counts.breaks, counts.misses <= 2) == (0, True), counts


@pytest.mark.share(16)
@pytest.mark.parametrize("number", ["a size", "an argument"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_that_take_whole_numbers(operator: str, number: str) -> None:
    def step(x: torch.Tensor, n: int) -> Any:
        y = OPERATORS[operator](x, NUMBERS[number](x, n))
        known = y.dtype, y.dim(), y.is_contiguous(), y.requires_grad
        (y * y + x.sum()).sum().backward()
        return y, known, y.shape, y.stride()

    captured = capture(step, backend="eager")
    for x, n in calls():
        ways = []
        for one in (step, captured):
            torch.manual_seed(0)
            leaf = x.clone().requires_grad_()
            ways.append([*one(leaf, n), leaf.grad])
        (y, *want, grad), (z, *got, ours) = ways
        assert torch.equal(y, z) and want == got and torch.equal(grad, ours)
    assert stats(captured).misses <= 4, stats(captured)  # (a diagonal above the main one, and below)


@pytest.mark.parametrize("steps", [-1, 0, 1])
def test_too_few_steps_are_what_they_are_in_plain_python(steps: int) -> None:
    def step(n: int) -> Any:
        try:
            return torch.linspace(0, 1, n)
        except RuntimeError as error:
            return torch.tensor(len(str(error)))

    captured = capture(step, backend="eager")
    for n in (7, 8, 9, steps):
        assert torch.equal(captured(n), step(n))


@pytest.mark.parametrize("classes", [-1, 0, 1, 2, 5])
def test_one_hot_of_too_few_classes_raises_as_in_plain_python(classes: int) -> None:
    def step(index: torch.Tensor, n: int) -> torch.Tensor:
        return F.one_hot(index, n)

    captured = capture(step, backend="eager")
    for n in (7, 8, 9, classes):
        index, outcomes = torch.tensor([0, 3, 1]), []
        for one in (step, captured):
            try:
                outcomes.append(one(index, n).tolist())
            except Exception as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]

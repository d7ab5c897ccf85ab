"""Lists of Python's ints that differ in each call, as indices: one graph, and plain Python's bits and errors."""

import random

import pytest
import torch

from moebius import capture, stats

INDICES = {
    "list": lambda a, b: a,
    "list_and_slice": lambda a, b: (a, slice(1, 3)),
    "slice_and_list": lambda a, b: (slice(None), a),
    "two_lists": lambda a, b: (a, b),
    "list_and_number": lambda a, b: (a, 1),
    "ellipsis": lambda a, b: (..., a),
    "new_axis": lambda a, b: (None, a),
    "made_in_the_step": lambda a, b: [p + q for p, q in zip(a, b, strict=True)],
    "part_of_it": lambda a, b: (a[:2], b[1:3]),
    "with_a_constant": lambda a, b: [0, *a],
    "below_zero": lambda a, b: [-1 - p for p in a],
}


def read(table, index):
    return table[index].sum() * 2


def write(table, index):
    made = table.clone()
    made[index] = 7.0
    return made


def add(table, index):
    made = table * 1
    made[index] += 0.5
    return made


def differentiate(table, index):
    weight = table.detach().requires_grad_()
    (weight[index] ** 2).sum().backward()
    return weight.grad


@pytest.mark.share(13)
@pytest.mark.parametrize("use", [read, write, add, differentiate])
@pytest.mark.parametrize("name", INDICES)
def test_one_graph_for_all_numbers(name, use):
    make, table = INDICES[name], torch.randn(6, 6)

    def step(table, a, b):
        return use(table, make(a, b))

    captured, draw = capture(step, backend="eager"), random.Random(0)
    for _ in range(12):
        a, b = ([draw.randrange(3) for _ in range(4)] for _ in range(2))
        assert torch.equal(captured(table, a, b), step(table, a, b))
    found = stats(captured)
    assert (found.breaks, found.misses) == (0, 2), found.recompiles


def test_a_list_that_reaches_too_far():
    def step(table, a):
        return table[a] + 1

    captured, table = capture(step, backend="eager"), torch.arange(6.0)
    for last in (1, 2, 3):
        assert torch.equal(captured(table, [0, last]), step(table, [0, last]))
    for far in (6, -7):
        with pytest.raises(IndexError) as wanted:
            step(table, [0, far])
        with pytest.raises(IndexError) as got:
            captured(table, [0, far])
        assert str(got.value) == str(wanted.value)


def test_truths_are_a_mask():
    """True and False in a list choose rows, they are no ints of the graph."""

    def step(table, a):
        return table[a].sum()

    captured, table = capture(step, backend="eager"), torch.arange(3.0)
    for mask in ([True, False, True], [False, False, True], [1, 0, 1], [2, 0, 1], [True, True, True]):
        assert torch.equal(captured(table, mask), step(table, mask))

"""Every spelling of an expert layer gives eager's output and gradients in float64, and becomes what it is said to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spellings import BROKEN
from table import EVERY, PUBLIC, SEEDS, Runner, tensors

from moebius import capture, stats


@pytest.mark.share(10)
@pytest.mark.parametrize("name", EVERY)
def test_spelling(name):
    runner = Runner(name)
    for seed in SEEDS:
        assert not runner.call(seed)
    outcome, why = runner.report()
    assert outcome == EVERY[name].outcome, why
    assert (stats(runner.captured).graphs == 1) == (outcome != BROKEN)


@pytest.mark.share(13)
@pytest.mark.parametrize("name", [name for name, spelling in EVERY.items() if spelling.outcome != BROKEN])
def test_spelling_as_it_is_written(name):
    """Without lowering the same bits come out."""
    runner = Runner(name, backend="eager")
    for seed in SEEDS[:2]:
        assert not runner.call(seed, exact=True)


def test_bins_of_an_index_that_was_written():
    """How many bins there are is certain for what topk gave, and for nothing that was written into since."""

    def count(x, shift, copies):
        index = x.topk(2, -1).indices
        for _ in range(copies):
            index = index.clone()
            index.add_(shift)
            index = index.reshape(-1).clone()
        return index.flatten().bincount(minlength=x.shape[1]).to(x.dtype) * 1.0

    for copies in (0, 1):
        captured = capture(count)
        for shift in (0, 1, 5):
            x = tensors(shift)[0]
            torch.testing.assert_close(captured(x, shift, copies), count(x, shift, copies))


@pytest.mark.parametrize("writes", [None, "best", "copied", "part"])
def test_bins_of_a_part_of_the_best(writes):
    """``top[:, :k]`` has the bounds of what topk gave, unless something was written into it, or into what it is of."""

    def count(x, shift):
        best = x.topk(3, -1).indices
        if writes == "best":
            best.add_(shift)
        copied = best.clone()
        if writes == "copied":
            copied.add_(shift)
        part = copied[:, :2]
        if writes == "part":
            part.add_(shift)
        return part.flatten().bincount(minlength=x.shape[1]).to(x.dtype) * 1.0

    captured = capture(count)
    for shift in (0, 1, 5):
        x = tensors(shift)[0]
        torch.testing.assert_close(captured(x, shift), count(x, shift))


def test_numbers_of_a_vector_stay_open():
    """What `tolist()` gives is not the list of the first call."""

    def pieces(x, counts):
        sizes = counts.tolist()
        first, *rest = x.split(sizes)
        return torch.cat([first * 2, *rest]), sizes

    captured = capture(pieces)
    for sizes in ([1, 9], [4, 6], [0, 10], [3, 7]):
        x, counts = torch.arange(10.0), torch.tensor(sizes)
        found, numbers = captured(x, counts)
        assert torch.equal(found, pieces(x, counts)[0]) and numbers == sizes
    assert stats(captured).graphs == 1

    def negative(x, counts):
        sizes = counts.tolist()
        return x * 2 if sizes[0] < 0 else x

    captured = capture(negative)
    for value in (1, -1, 0):
        x, counts = torch.ones(2), torch.tensor([value])
        assert torch.equal(captured(x, counts), negative(x, counts))


def test_the_documentation_lists_them():
    """docs/expert-loops.md has a row for each, and says of each what the tests above see."""
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "expert-loops.md").read_text().partition(PUBLIC)[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    listed = [(says, equal, becomes) for says, equal, _, becomes, *_ in rows]
    assert listed == [(spelling.says, "yes", spelling.outcome) for spelling in EVERY.values()]


def listed_twice(x, index):
    out = torch.zeros_like(x)
    both = list(map(torch.Tensor.tolist, [index.unique(), index.unique() + 1]))
    for _ in range(2):
        for numbers in both:
            for e in numbers:
                out = out + e
    return out


def list_that_is_kept(x, index):
    experts = index.unique().tolist()
    out = torch.zeros_like(x)
    for e in experts:
        out = out + e
    return out * len(experts)


def source_that_a_iteration_writes(x, index):
    hit = index.unique()
    out = torch.zeros_like(x)
    for e in hit.tolist():
        hit.mul_(2)
        out.add_(e)
    return out + hit.sum()


def sum_of_numbers(x, index):
    total = 0
    for e in index.unique().tolist():
        total += e
    return x * total


@pytest.mark.parametrize("function", [listed_twice, list_that_is_kept, source_that_a_iteration_writes, sum_of_numbers])
def test_a_list_of_numbers_stays_a_list(function):
    captured = capture(function)
    for values in ([0, 2, 2], [1, 3, 5], [4, 4, 4]):
        x, index = torch.ones(3), torch.tensor(values)
        assert torch.equal(captured(x, index), function(x, index))

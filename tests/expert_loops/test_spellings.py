"""Every spelling of an expert layer gives eager's output and gradients in float64, and becomes what it is said to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spellings import BROKEN, CAPTURED, LOWERED, SPELLINGS, D, E, N, T

from moebius import capture, stats
from moebius.api import captured_of, report_of


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((T, D), (E, D), (E, 2 * N, D), (E, D, N))
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


def compare(function, captured, seed):
    mine, plain = inputs(seed), inputs(seed)
    found, expected = captured(*mine), function(*plain)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for result in (found, expected):
        result.square().sum().backward()
    for a, b in zip(mine, plain, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def outcome(captured):
    report = report_of(captured_of(captured))
    if report.breaks:
        return BROKEN
    assert len(report.graphs) == 1
    regions = report.expert_regions
    return LOWERED if regions and all(region.lowered for region in regions) else CAPTURED


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    spelling = SPELLINGS[name]
    captured = capture(spelling.function)
    for seed in range(4):
        compare(spelling.function, captured, seed)
    assert outcome(captured) == spelling.outcome, report_of(captured_of(captured)).expert_regions


@pytest.mark.parametrize("name", [n for n, s in SPELLINGS.items() if s.outcome != BROKEN])
def test_spelling_as_it_is_written(name):
    """Without lowering the same bits come out."""
    captured = capture(SPELLINGS[name].function, backend="eager")
    for seed in range(2):
        mine, plain = inputs(seed), inputs(seed)
        assert torch.equal(captured(*mine), SPELLINGS[name].function(*plain))


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
            x = inputs(shift)[0]
            torch.testing.assert_close(captured(x, shift, copies), count(x, shift, copies))


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


def table():
    return [f"| {spelling.says} | {spelling.outcome} |" for spelling in SPELLINGS.values()]


def test_the_documentation_lists_them():
    """docs/expert-loops.md has this very table."""
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "expert-loops.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| ") and "becomes |" not in line] == table()


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


def source_that_a_turn_writes(x, index):
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


@pytest.mark.parametrize("function", [listed_twice, list_that_is_kept, source_that_a_turn_writes, sum_of_numbers])
def test_a_list_of_numbers_stays_a_list(function):
    captured = capture(function)
    for values in ([0, 2, 2], [1, 3, 5], [4, 4, 4]):
        x, index = torch.ones(3), torch.tensor(values)
        assert torch.equal(captured(x, index), function(x, index))

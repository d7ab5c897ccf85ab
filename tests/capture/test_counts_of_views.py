"""How many rows a mask picks is one number for the mask and for what views it as a whole: what a view of it picks meets
what it picks itself. Not where the mask was written in between, nor for another tensor."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, explain

D = 4


def both_ways(x, mask):
    whole = mask.clone()[None]
    flat = whole.view(-1)
    out = torch.zeros_like(x)[None]
    if flat.any():
        out[whole] += x[flat] * 2
    return out[0], x[whole[0]] + x[flat]


def turned(x, mask):
    whole = mask.clone().view(2, -1).t()  # in another order
    return x[whole.reshape(-1)], x[mask]


def written(x, mask):
    whole = mask.clone()
    before = x[whole.view(-1)]
    whole.view(1, -1).logical_not_()
    return before, x[whole[None][0]]


def written_by_data(x, mask):
    whole = mask.clone()
    before = x[whole]
    whole.data[0] = ~whole.data[0]
    return before, x[whole.view(-1)]


def as_other_type(x, mask):
    whole = mask.clone()
    before = x[whole]
    whole.view(torch.uint8).fill_(1)
    return before, x[whole.view(-1)], torch.unique(whole.view(1, -1)), torch.unique(mask)


def behind_a_branch(x, mask):
    total = x.sum()
    if mask.any():
        total = total + x[mask.view(-1, 1).view(-1)].sum()
    return total, x[mask]


PROGRAMS = [both_ways, turned, written, written_by_data, as_other_type, behind_a_branch]


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_in_eager(program, backend):
    captured, generator = capture(program, backend=backend), torch.Generator().manual_seed(1)
    for rows, share in ((6, 0.5), (6, 0.0), (8, 0.5), (4, 0.9), (10, 1.1), (6, 0.2)):
        x, mask = torch.randn(rows, D, generator=generator), torch.rand(rows, generator=generator) < share
        for ours, plain in zip(captured(x.clone(), mask.clone()), program(x.clone(), mask.clone()), strict=True):
            assert torch.equal(ours, plain)


def test_a_view_meets_its_mask_without_a_break():
    report = explain(both_ways)(torch.randn(6, D), torch.tensor([True, False, True, False, False, True]))
    assert len(report.graphs) == 1 and not report.breaks

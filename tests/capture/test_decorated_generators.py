"""Generators under ``@torch.no_grad()``: each step in the mode, the end with its value, what is sent and thrown in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moebius import capture, stats

WEIGHT = nn.Parameter(torch.ones(3))


@torch.no_grad()
def rows(x, n, log):
    try:
        for i in range(n):
            log.append((yield x * WEIGHT + i))
    finally:
        log.append("closed")
    return n


def gone_through(x, log):
    return [(row, row.requires_grad, torch.is_grad_enabled()) for row in rows(x, 2, log)], (x * WEIGHT).requires_grad


def sent_to(x, log):
    steps = rows(x, 1, log)
    first = next(steps)
    try:
        steps.send("sent")
    except StopIteration as end:
        return first, end.value


def closed(x, log):
    steps = rows(x, 3, log)
    first = next(steps)
    steps.close()
    return first, list(steps)


@torch.no_grad()
def both(x, log):
    found = yield from rows(x, 2, log)
    yield found


def delegated(x, log):
    return list(both(x, log))


def thrown_into(x, log):
    steps = rows(x, 2, log)
    next(steps)
    try:
        steps.throw(ValueError("thrown"))
    except ValueError as error:
        return x + 1, str(error)


STEPS = {gone_through: 0, sent_to: 0, closed: 0, delegated: 0, thrown_into: 1}  # -> graph breaks


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_they_do_what_plain_ones_do(step):
    captured = capture(step, backend="eager")
    for number in range(3):
        x, ours, plain = torch.full((2, 3), float(number)), [], []
        assert repr(captured(x, ours)) == repr(step(x, plain)) and ours == plain
    assert bool(stats(captured).breaks) == STEPS[step]

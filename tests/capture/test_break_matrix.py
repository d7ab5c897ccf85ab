"""A graph break in each construct of Python's, and in each construct inside another: plain Python's results and log.

Some of the pairs in each run of the tests; all 676 of them with ``make matrix``.
"""

from __future__ import annotations

import itertools
import os

import pytest
from break_programs import CONSTRUCTS, outcome, program

from moebius import capture, stats
from moebius.api import captured_of

PAIRS = list(itertools.product(CONSTRUCTS, repeat=2))
ROWS = (2, 2, 3)
# C code holds the iteration, or Python's own machinery for coroutines does: their frames run natively as a whole
NATIVE = {"map", "async"}


def check(*names):
    plain, captured = program(*names), capture(program(*names), backend="eager")
    for rows in ROWS:
        assert outcome(captured, rows) == outcome(plain, rows)
    return captured


@pytest.mark.share(12)
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_break_in_one_construct(name):
    captured = check(name)
    found = stats(captured)
    assert found.breaks and found.graphs >= 2
    breaks = [s.graph_break for member in captured_of(captured).family() for s in member.segments if s.graph_break]
    assert name in NATIVE or not any("whole frame" in b.detail for b in breaks)
    assert all(b.hint and b.line for b in breaks)


@pytest.mark.share(12)
@pytest.mark.parametrize("names", PAIRS if os.environ.get("MOEBIUS_MATRIX") else PAIRS[3::19], ids="-".join)
def test_a_break_in_two_constructs(names):
    check(*names)

"""Shared by the tests of the hook."""

import gc
import sys
import tracemalloc

import pytest

from moebius.hook import evaluator, forget_frames, is_hooked, set_frame_callback


@pytest.fixture
def growth():
    """growth(run, n): objects and memory blocks that n further runs of `run` leave behind, a few of them forgiven."""

    def measure(run, n):
        for _ in range(50):
            run()
        smallest = None
        for _ in range(3):  # another thread or a cache may allocate once; a leak does so each time
            gc.collect()
            before = sys.getallocatedblocks()
            for _ in range(n):
                run()
            gc.collect()
            grown = sys.getallocatedblocks() - before
            smallest = grown if smallest is None else min(smallest, grown)
        return 0 if smallest < max(20, n // 50) else smallest

    assert not tracemalloc.is_tracing()
    return measure


@pytest.fixture
def clean_frames():
    """No callback of capture's before the test, and none of the test's afterwards."""
    before = set_frame_callback(None)
    yield
    set_frame_callback(before)
    forget_frames()
    assert evaluator() == "default"
    assert not is_hooked()

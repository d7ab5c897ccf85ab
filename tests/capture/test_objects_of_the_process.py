"""``gc.get_objects`` gives all objects of the process, those of a trace too: the frame that asks runs natively."""

from __future__ import annotations

import gc
import warnings

import torch
from torch import nn

from moebius import capture, explain, stats


def counted():
    return sum(1 for each in gc.get_objects() if type(each) is nn.Bilinear)


def counts_in_the_step(x):
    y = x * 2
    return y + sum(1 for each in gc.get_objects() if type(each) is nn.Bilinear), len(gc.get_referrers(y))


def counts_in_a_function(x):
    y = x * 2 + counted()
    return y * 3, 0


def test_the_frame_runs_natively_without_a_warning():
    kept = []
    for step in (counts_in_the_step, counts_in_a_function):
        captured = capture(step)
        for i in range(4):
            kept.append(nn.Bilinear(1, 1, 1))
            x = torch.rand(3)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="moebius")
                got = captured(x)
            want = step(x)
            assert torch.equal(got[0], want[0]) and got[1] == want[1], (step.__name__, i)
        assert stats(captured).hits >= 3


def test_the_report_says_why():
    (found,) = explain(counts_in_the_step)(torch.rand(3)).breaks
    assert found.reason == "objects of the whole process" and "gc.get_objects" in found.detail

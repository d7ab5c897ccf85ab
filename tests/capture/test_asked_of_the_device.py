"""What a step asks of the device's state (transformers does, for its masks) is asked again at each call."""

import torch

from moebius import capture, stats
from moebius.torch_facts import torch_private

asked = torch._C._get_cudnn_benchmark  # stands for what only a build for the device has, and nobody can throw here


def branches(x):
    return x * 2 if asked() else x + 1


def masks(x):
    try:
        capturing = torch.cuda.is_current_stream_capturing()
    except Exception:
        capturing = False
    return x if capturing else x + 1


def test_another_answer_is_another_graph(monkeypatch):
    monkeypatch.setattr(torch_private, "ASKED", (asked,))
    before, x, captured = asked(), torch.ones(3), capture(branches)
    try:
        for state in (False, False, True, False, True):
            torch._C._set_cudnn_benchmark(state)
            assert torch.equal(captured(x), branches(x))
    finally:
        torch._C._set_cudnn_benchmark(before)
    assert (stats(captured).breaks, stats(captured).graphs, stats(captured).hits) == (0, 2, 3)


def test_whether_a_cuda_graph_is_recorded_is_no_break():
    captured = capture(masks, fullgraph=True)
    assert torch.equal(captured(torch.ones(3)), torch.full((3,), 2.0))

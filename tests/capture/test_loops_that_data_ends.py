"""``while`` loops whose end only the data knows: their iterations are captured one by one, not unrolled on a guess."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats
from moebius.trace import speculation


class Done(Exception):
    pass


def goes_on(left):
    return left.max() > 0


def asked_by_a_function(x, left):
    while goes_on(left):
        x = torch.tanh(x * 2 + torch.randn(3))  # what is drawn is not looked at ahead
        left = left - (x * 0).sum() - 1
    return x


def asked_after_the_first(x, left):
    finished = False
    while not finished:
        x = torch.tanh(x * 2 + 1)
        left = left - (x * 0).sum() - 1
        finished = bool(left.max() <= 0)
    return x


def left_by_break(x, left):
    tokens = []
    while True:
        x, left = torch.sin(x + 1), left - (x * 0).sum() - 1
        tokens.append(x)
        if left.max() <= 0:
            break
    return torch.stack(tokens)


def left_by_an_error(x, left):
    def look(left):
        if left.max() <= 0:
            raise Done

    try:
        while True:
            x, left = torch.sin(x + 1), left - (x * 0).sum() - 1
            look(left)
    except Done:
        return x


LOOPS = [asked_by_a_function, asked_after_the_first, left_by_break, left_by_an_error]


def trained(loop, captured=None):
    torch.manual_seed(0)
    return [(captured or loop)(torch.randn(3), torch.tensor([2.0, n])) for n in (12, 3, 30, 12, 7)]


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_as_plain(loop, backend):
    captured = capture(loop, backend=backend)
    for a, b in zip(trained(loop), trained(loop, captured), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if backend == "eager" else 1e-6)
    longest = max(len(list(g.gm.graph.nodes)) for s in [captured] for g in graphs(s))
    assert longest < 60  # of one iteration or a few


def graphs(captured):
    from moebius.api import captured_of, report_of

    return report_of(captured_of(captured)).graphs


def test_switched_off_a_loop_is_unrolled(monkeypatch):
    monkeypatch.setattr(speculation, "is_in_while", lambda frame, pc: False)
    monkeypatch.setattr(speculation, "MAX_EXITS", 24)
    with pytest.raises(AssertionError):
        test_as_plain(left_by_break, "eager")


def test_a_loop_over_layers_stays_one_graph():
    """Each layer asks its data the same question: there are as many as there are layers."""
    layers = [torch.nn.Linear(3, 3) for _ in range(speculation.MAX_UNTOLD * 3)]

    def step(x):
        for layer in layers:
            x = torch.tanh(layer(x))
            if torch.isinf(x).any().item():
                raise FloatingPointError(str(x))
        return x

    captured = capture(step)
    for _ in range(3):
        x = torch.randn(2, 3)
        torch.testing.assert_close(captured(x), step(x))
    assert stats(captured).graphs == 1 and not stats(captured).breaks

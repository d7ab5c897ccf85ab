"""``while`` loops whose end only the data knows: their iterations are captured one by one, not unrolled on a guess."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats
from moebius.trace import speculation
from moebius.trace.assumptions import Assumptions


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


def trained(loop, after_each=lambda: None):
    torch.manual_seed(0)
    results = []
    for n in (12, 3, 30, 12, 7):
        results.append(loop(torch.randn(3), torch.tensor([2.0, n])))
        after_each()
    return results


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_as_plain(loop, backend):
    captured, lengths = capture(loop, backend=backend), []
    found = trained(captured, lambda: lengths.extend(len(g.gm.graph.nodes) for g in graphs(captured)))
    for a, b in zip(trained(loop), found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if backend == "eager" else 1e-6)
    assert max(lengths) < 60  # of one iteration or a few


def graphs(captured):
    from moebius.api import captured_of, report_of

    return report_of(captured_of(captured)).graphs


def test_switched_off_a_loop_is_unrolled(monkeypatch):
    monkeypatch.setattr(speculation, "is_in_while", lambda frame, pc: False)
    monkeypatch.setattr(speculation, "MAX_EXITS", 24)
    with pytest.raises(AssertionError):
        test_as_plain(left_by_break, "eager")


def halved(x):
    while x.abs().max() > 1:
        x = x * 0.5
    return x


def halved_and_counted(x):
    n = 0
    while x.abs().max() > 1 and n < 10:
        x = x * 0.5
        n += 1
    return x, n


def halved_first(x):
    while True:
        x = x * 0.5
        if x.abs().max() < 1:
            break
    return x


def halved_until_returned(x):
    while True:
        x = x * 0.5
        if x.abs().max() < 1:
            return x.sin()


def settles(loop, halvings=(3, 1, 4, 0, 2, 5, 3, 0, 1, 4, 2, 5, 3, 1) * 2):
    """As plain, with gradients. Returns how often a branch on data had it captured again, and how often anything had in
    the second half of the calls."""
    captured, before = capture(loop, backend="eager"), 0
    for number, halving in enumerate(halvings):
        before = stats(captured).misses if number == len(halvings) // 2 else before
        found = []
        for function in (captured, loop):
            x = torch.full((3,), 1.5 * 2.0**halving / 2, requires_grad=True)
            result = function(x * 1.0)
            (result[0] if isinstance(result, tuple) else result).sum().backward()
            found.append((result, x.grad))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    known = stats(captured)
    assert known.hits > len(halvings) and known.breaks
    return sum(r.guard == "branch on data" for r in known.recompiles), known.misses - before


SETTLING = [halved, halved_and_counted, halved_first, halved_until_returned]


@pytest.mark.parametrize("loop", SETTLING, ids=lambda f: f.__name__)
def test_another_number_of_iterations_is_learnt_once(loop):
    again, late = settles(loop)
    assert again <= 1 and late == 0


def test_switched_off_each_number_of_iterations_is_learnt(monkeypatch):
    monkeypatch.setattr(speculation, "ends_while", lambda frame, pc: False)
    assert settles(halved)[0] > 1


def test_a_branch_is_known_by_its_text(monkeypatch):
    """The condition that is compiled twice, and what goes on after the graph break, are one branch."""
    original = speculation.span_of
    monkeypatch.setattr(speculation, "span_of", lambda code, offset: original(code, offset) and (id(code), offset))
    assert settles(halved)[0] > 1


def test_what_goes_on_after_a_break_knows_the_branch(monkeypatch):
    """Else each continuation learns it by a miss of its own."""
    learnt = Assumptions.learn_from

    def alone(self, above, code):
        kept = self.unpredictable
        learnt(self, above, code)
        self.unpredictable = kept

    def misses_of(loop):
        captured = capture(loop, backend="eager")
        for halving in (3, 1, 4, 0, 2, 5, 3, 0, 4, 1):
            captured(torch.full((3,), 1.5 * 2.0**halving / 2))
        return stats(captured).misses

    once = misses_of(halved)
    monkeypatch.setattr(Assumptions, "learn_from", alone)
    assert misses_of(halved) > once


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

"""A number that raises between operators that run as one (an optimizer's chain): what stands before it has been done,
what stands behind it has not. Kinds of steps × parameters × which of them raises."""

import math

import pytest
import torch

import moebius
from moebius.lowering import repeats


def divides(parameters, gradients, momenta, number):
    for i, (p, g, m) in enumerate(zip(parameters, gradients, momenta, strict=True)):
        m.mul_(0.9)
        m.add_(g, alpha=0.1)
        rate = 1.0 / (number - i)
        p.add_(m, alpha=-rate * 0.01)
        p.mul_(0.99)


def takes_a_root(parameters, gradients, momenta, number):
    for i, (p, g, m) in enumerate(zip(parameters, gradients, momenta, strict=True)):
        p.mul_(0.999)
        m.mul_(0.9).add_(g, alpha=0.1)
        update = m * math.sqrt(abs(number - i) - 0.5)
        p.add_(update, alpha=-0.01)
        p.mul_(0.99)


def in_two_loops(parameters, gradients, momenta, number):
    for g, m in zip(gradients, momenta, strict=True):
        m.mul_(0.9)
        m.add_(g)
    for i, (p, g, m) in enumerate(zip(parameters, gradients, momenta, strict=True)):
        p.mul_(1 / (number - i))
        p.add_(m)
        p.add_(g)


def calls(step, count, at, wrap):
    """The errors of six calls, of which two raise at that parameter, and what all tensors hold after each."""
    torch.manual_seed(0)
    tensors = [[torch.randn(40) for _ in range(count)] for _ in range(3)]
    run, found = wrap(torch.no_grad()(step)), []
    for number in (100.5, 101.5, 102.5, float(at), float(at), 200.5):
        try:
            run(*tensors, number)
        except (ZeroDivisionError, ValueError) as error:
            found.append(type(error).__name__)
        else:
            found.append("")
        found.append(torch.cat([tensor for several in tensors for tensor in several]))
    return found


def same(one, other):
    return all(torch.allclose(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


CASES = [(step, count, at) for step in (divides, takes_a_root, in_two_loops) for count in (1, 3, 8, 20)
         for at in sorted({0, count // 2, count - 1})]  # fmt: skip


@pytest.mark.share(6)
@pytest.mark.parametrize("step, count, at", CASES)
def test_as_in_plain_python(step, count, at):
    plain = calls(step, count, at, lambda step: step)
    assert len(set(plain[::2])) == 2 and same(calls(step, count, at, moebius.capture), plain)


def test_without_what_stands_before_it_is_lost(monkeypatch):
    monkeypatch.setattr(repeats, "run_nodes", lambda nodes, values: None)
    assert not same(calls(divides, 3, 1, moebius.capture), calls(divides, 3, 1, lambda step: step))

"""What a branch on a size has asked is certain in it: operators that ask for the size go on there."""

from __future__ import annotations

import pytest
import torch

import moebius
from moebius import capture, stats

STEP = """
def step(x, index, norm):
    out = torch.zeros_like(x)
    for e in range(3):
        token = torch.where(index == e)[0]
        n = token.numel()
        rows = x[token]
{body}
    return out
"""
CERTAIN = {
    "more than one": "if n > 1: rows = norm(rows)",
    "from two on": "if n >= 2: rows = norm(rows)",
    "the other way round": "if 1 < n: rows = norm(rows)",
    "not one or less": "if not n <= 1: rows = norm(rows)",
    "some, and not one": "if n != 0:\n    if n != 1: rows = norm(rows)",
    "some, nested": "if n:\n    if n - 1: rows = norm(rows)",
    "a number": "if n == 3: rows = norm(rows)",
    "of a sum": "if n + 3 > 4: rows = norm(rows)",
    "the other side": "if n < 2: rows = rows * 2\nelse: rows = norm(rows)",
    "past a continue": "if n <= 1: continue\nrows = norm(rows)",
    "a size of the rows": "if len(rows) > 1: rows = norm(rows)",
    "between two": "if 1 < n < 5: rows = norm(rows)",
}
OPEN = {
    "some": "if n > 0: rows = norm(rows)",
    "few": "if n < 5: rows = norm(rows)",
    "not one, none perhaps": "if n != 1: rows = norm(rows)",
    "past the branch": "if n > 1: rows = rows * 2\nrows = norm(rows)",
    "the same size in the next": "if n > 1: rows = rows * 2\nif n < 9: rows = norm(rows)",
    "the wrong side": "if n < 2: rows = norm(rows)\nelse: rows = rows * 2",
    "another size": "if len(torch.where(index != e)[0]) > 1: rows = norm(rows)",
}
BATCHES = ([0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 2, 2, 2])


def outcome(function, index, norm):
    torch.manual_seed(0)
    norm.zero_grad()
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    try:
        out = function(x, torch.tensor(index), norm)
    except ValueError as error:
        return str(error)
    out.square().sum().backward()
    return [out, x.grad, norm.weight.grad, *norm.buffers()]


def written(body, tmp_path):
    lines = "\n".join(" " * 8 + line for line in (body + "\nout.index_add_(0, token, rows)").splitlines())
    (tmp_path / "step.py").write_text(STEP.format(body=lines))
    namespace = {"torch": torch}
    exec(compile((tmp_path / "step.py").read_text(), str(tmp_path / "step.py"), "exec"), namespace)
    return namespace["step"]


def compared(body, tmp_path):
    """Whether it is one graph; results, gradients, buffers and errors are plain Python's."""
    moebius.reset()
    step = written(body, tmp_path)
    captured, norms = capture(step), [torch.nn.BatchNorm1d(4).double() for _ in range(2)]
    for index in BATCHES:
        ours, plain = outcome(captured, index, norms[0]), outcome(step, index, norms[1])
        assert type(ours) is type(plain), (ours, plain)
        if type(ours) is str:
            assert ours == plain
            continue
        for a, b in zip(ours, plain, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert stats(captured).graphs
    return not stats(captured).breaks


@pytest.mark.parametrize("name", CERTAIN)
def test_what_holds_in_a_branch(name, tmp_path):
    assert compared(CERTAIN[name], tmp_path)


@pytest.mark.parametrize("name", OPEN)
def test_what_does_not(name, tmp_path):
    assert not compared(OPEN[name], tmp_path)

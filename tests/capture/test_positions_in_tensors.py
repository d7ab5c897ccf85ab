"""Items read and written at positions that 0-dim tensors hold, alone and in an index: one graph."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats

KEYS = {
    "alone": lambda i, j, m: i,
    "two": lambda i, j, m: (i, j),
    "before a slice": lambda i, j, m: (i, slice(None)),
    "behind a slice": lambda i, j, m: (slice(1, None), i),
    "before a mask": lambda i, j, m: (i, m),
    "behind a mask": lambda i, j, m: (m, i),
    "around a mask": lambda i, j, m: (i, m, j),
    "behind None": lambda i, j, m: (None, i),
    "behind an ellipsis": lambda i, j, m: (..., i),
    "before a list": lambda i, j, m: (i, torch.tensor([0, 1])),
    "behind a number": lambda i, j, m: (1, i),
}
VALUES = {"number": 2.0, "tensor": torch.tensor(3.0)}


@pytest.mark.share(2)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", KEYS)
def test_reads_and_writes(key, value, backend):
    def step(x, i, j, mask):
        x = x * 1
        x[KEYS[key](i, j, mask)] = VALUES[value]
        return x, x[KEYS[key](i, j, mask)], (x * x).sum()

    captured = capture(step, backend=backend)
    given, mask = torch.randn(3, 3, 3), torch.tensor([True, False, True])
    for i, j in ((0, 1), (2, -1), (1, 2)):
        results = []
        for function in (step, captured):
            x = given.clone().requires_grad_()
            found = function(x, torch.tensor(i), torch.tensor(j), mask)
            found[2].backward()
            results.append((*found, x.grad))
        assert all(map(torch.equal, *results))
    assert stats(captured).graphs == 1 and not stats(captured).breaks
    errors = [pytest.raises(IndexError, f, given, torch.tensor(7), torch.tensor(7), mask) for f in (step, captured)]
    assert str(errors[0].value) == str(errors[1].value)

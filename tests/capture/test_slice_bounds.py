"""Integer tensors that bound a slice of a tensor: the running step reads them, with no graph break."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats
from moebius.python.containers import Containers

BOUNDS = {
    "cumulated": lambda c: (c.cumsum(0)[0], c.cumsum(0)[1]),
    "from behind": lambda c: (-c[0], None),
    "int32": lambda c: (c[0].int(), c[1].int() + 3),
    "one element": lambda c: (c[:1], c[1:2] + 4),
    "a number and a tensor": lambda c: (1, c[1]),
    "past the end": lambda c: (c[0] * 100, c[1] * 1000),
    "the wrong way round": lambda c: (c[1] + 3, c[0]),
}
# What torch refuses, or is a number in other ways, is as in plain Python; how it is captured is not asked.
OTHERS = {
    "a float": lambda c: (c[0].double(), None),
    "two elements": lambda c: (c, None),
    "a bool": lambda c: (c[0] > 1, c[1]),
    "a step": lambda c: (None, None, c[0]),
}


def rows(x, bounds):
    return x[slice(*bounds)] * 2


def columns(x, bounds):
    return x[..., slice(*bounds), None].sum(0)


def written(x, bounds):
    y = x.clone()
    y[slice(*bounds)] = 7.0
    return y


def added(x, bounds):
    y = x.clone()
    y[0, slice(*bounds)] += x[1, slice(*bounds)]
    return y


def size(x, bounds):
    return x * x[slice(*bounds)].shape[0]


USES = [rows, columns, written, added, size]


def compared(use, bounds):
    """As plain, with gradients and errors. Returns what was captured."""

    def step(x, c):
        return use(x, bounds(c))

    captured = capture(step, backend="eager")
    for first, second in ((1, 2), (2, 3), (0, 0), (3, 1)):
        found = []
        for function in (captured, step):
            x = torch.arange(64.0).view(8, 8).requires_grad_()
            try:
                result = function(x, torch.tensor([first, second]))
                result.sum().backward()
                found.append((result, x.grad))
            except (TypeError, ValueError, RuntimeError) as error:
                found.append((type(error), str(error)))
        if torch.is_tensor(found[1][0]):
            torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        else:
            assert found[0] == found[1]
    return stats(captured)


@pytest.mark.share(14)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
def test_no_graph_break(use, bounds):
    known = compared(use, bounds)
    assert (known.breaks, known.misses) == (0, 1)


@pytest.mark.share(9)
@pytest.mark.parametrize("bounds", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
def test_as_plain(use, bounds):
    compared(use, bounds)


def test_switched_off(monkeypatch):
    monkeypatch.setattr(Containers, "with_numbers", lambda self, key: key)
    assert compared(rows, BOUNDS["cumulated"]).breaks

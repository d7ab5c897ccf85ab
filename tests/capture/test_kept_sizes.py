"""A ``torch.Size`` from before the step is known by its items: where one varies, it is a number of the graph."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moebius import capture, stats

USES = {
    "item": lambda x, size: x * size[0],
    "made": lambda x, size: x.sum() + torch.ones(size).sum(0),
    "expanded": lambda x, size: x[:1, :1].expand(size),
    "counted": lambda x, size: x * size.numel() + len(size),
    "joined": lambda x, size: torch.zeros(size + (2,)) + x.sum(),
    "compared": lambda x, size: x + (size == x.shape) + (size != (3, 3)),
    "cut": lambda x, size: torch.ones(size[1:]) * x.sum(),
    "gone through": lambda x, size: x * sum(n for n in size),
    "given back": lambda x, size: (x + 1, size, type(size)),
    "kept": lambda x, size: (KEPT.append(size), x * KEPT.pop()[-1])[1],
    "written": lambda x, size: f"{size} {x.sum().item()}",
    "written as texts are": lambda x, size: "%s %r %s" % (size, size, tuple(size)) + f"{size!r:>30}",  # noqa: UP031
    "asked what it is": lambda x, size: x + isinstance(size, torch.Size) + hasattr(size, "numel"),
    "distribution": lambda x, size: torch.distributions.Normal(x.new_zeros(size), 1.0).log_prob(x.mean()).sum(),
    "key": lambda x, size: x * {torch.Size([3, 3]): 2, (4, 3): 3}.get(size, 5),
}
KEPT: list[torch.Size] = []
# Each other size asks another question, or is a key of its own.
AGAIN = ("compared", "key", "written", "written as texts are")
PLACES = ("argument", "attribute", "module", "dict", "cell", "list")
SIZES = [(3, 3), (4, 3), (5, 3), (2, 3), (7, 3), (2, 2, 3), (1, 3), (0, 3), (6, 3)]


def program(use, place, wrap):
    held, module, a_dict, a_list, cell = SimpleNamespace(size=None), torch.nn.Identity(), {}, [None], None
    reads = {
        "attribute": lambda: held.size,
        "module": lambda: module.size,
        "dict": lambda: a_dict["size"],
        "cell": lambda: cell,
        "list": lambda: a_list[0],
    }

    def step(x, size=None):
        return USES[use](x, size if place == "argument" else reads[place]())

    step, found = wrap(step), []
    for size in SIZES:
        held.size = module.size = a_dict["size"] = a_list[0] = cell = torch.Size(size)
        x = torch.ones(3, 3)
        try:
            result = step(x, cell) if place == "argument" else step(x)
        except RuntimeError as error:
            result = str(error)[:40]
        found.append(str(result))
    return found, step


@pytest.mark.share(23)
@pytest.mark.parametrize("use, place", [*itertools.product(USES, PLACES)])
def test_as_in_python(use, place):
    want, _ = program(use, place, lambda step: step)
    got, step = program(use, place, lambda step: capture(step, backend="eager"))
    assert got == want
    if use not in AGAIN:
        assert stats(step).misses <= 5 and stats(step).breaks == 0  # (two ranks, and sizes of 0 and of 1)


ASKED = {
    "numel": lambda x: x * x.shape.numel(),
    "numel of a part": lambda x: x.reshape(x.shape[:1].numel(), -1),
    "index": lambda x: x * x.shape.index(x.shape[0]),
    "index of what is not there": lambda x: x * x.shape.index(99),
    "count": lambda x: x * x.shape.count(3),
    "sorted": lambda x: x.new_ones(sorted(x.shape)),
    "sorted down": lambda x: x.new_ones(sorted([*x.shape, 2.5], reverse=True)[0]),
    "tensor": lambda x: x * torch.tensor(x.shape).prod(),
    "tensor of a type": lambda x: x * torch.as_tensor(x.shape, dtype=torch.float64).sum(),
    "numpy's product": lambda x: x * int(np.prod(x.shape)),
    "array": lambda x: x * torch.from_numpy(np.array(x.shape)).sum(),
    "array's product": lambda x: x * np.array(x.shape).prod(),
    "new": lambda x: x.new(x.shape).fill_(2),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_shapes_is_asked_of_the_graph(name):
    function = ASKED[name]
    captured = capture(function, backend="eager")
    for n in (4, 5, 6, 7, 8, 3, 11):
        x = torch.randn(n, 3)
        try:
            want = function(x)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                captured(x)
            continue
        assert torch.equal(captured(x), want) and captured(x).dtype is want.dtype
    assert "not there" in name or (stats(captured).misses <= 4 and stats(captured).breaks == 0)

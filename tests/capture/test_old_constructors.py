"""``torch.Tensor([2.0])`` and its like, the constructors that torch had first."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats
from moebius.python.construction import Construction

OLD = {
    "numbers": lambda x: torch.Tensor([1.5, 2, True]),
    "one whole number": lambda x: torch.Tensor([3]) * x,
    "a tuple is data": lambda x: torch.Tensor((2, 3)),
    "rows": lambda x: torch.Tensor([[1, 2], [3, 4.5]]) + torch.Tensor([(1, 2)]),
    "nothing in a list": lambda x: torch.Tensor([]),
    "nothing": lambda x: torch.Tensor(),
    "sizes": lambda x: torch.Tensor(2, 3).fill_(1),
    "one size": lambda x: torch.Tensor(3).zero_(),
    "sizes of a tensor": lambda x: torch.Tensor(x.shape[0], 2).fill_(x.shape[0]),
    "a size as a number": lambda x: torch.Tensor([x.shape[0], 7]),
    "large numbers": lambda x: torch.Tensor([2**53 + 1, 1e300, float("nan")]),
    "whole numbers of floats": lambda x: torch.LongTensor([1, 2]) + torch.IntTensor(2).zero_(),
    "other types": lambda x: (torch.DoubleTensor([1, 2]), torch.BoolTensor([1, 0]), torch.HalfTensor([1.1])),
    "gradients": lambda x: (x.requires_grad_() * torch.Tensor([2, 3])).sum().backward() or x.grad,
    # what stays as it is
    "a tensor": lambda x: torch.Tensor(x) * 2,
    "in a list that changes": lambda x: torch.Tensor([*NUMBERS, NUMBERS.append(1) or 0]),
    "a torch.Size is sizes": lambda x: torch.Tensor(x.shape).fill_(2),
    "numbers of tensors": lambda x: torch.Tensor([x.sum(), 2.0]),
    "numbers that only the graph knows": lambda x: torch.Tensor([x.sum().item(), 2.0]),
    "rows of other lengths": lambda x: torch.Tensor([[1], [2, 3]]),
    "words": lambda x: torch.Tensor(["a"]),
    "a dtype": lambda x: torch.Tensor([1], dtype=torch.float64),
    "complex numbers": lambda x: torch.Tensor([1j]),
    "floats for whole numbers": lambda x: torch.LongTensor([1.7]),
    "too large for its type": lambda x: torch.ByteTensor([300]),
    "a default device": lambda x: on_meta(),
}  # fmt: skip
IN_THE_GRAPH = [*OLD][: [*OLD].index("a tensor")]
NUMBERS: list[int] = []


def on_meta():
    with torch.device("meta"):
        return torch.Tensor([1, 2]).device.type, torch.Tensor(2).device.type


def outcomes(run, dtypes=(torch.float32, torch.float64)):
    NUMBERS[:] = []
    found = []
    for dtype in dtypes:
        torch.set_default_dtype(dtype)
        try:
            for size in (2, 2, 3):
                try:
                    given = run(torch.ones(size, 2, dtype=torch.float32))
                    told = [g if not isinstance(g, torch.Tensor) else (g.dtype, g.layout, g.tolist(), g.requires_grad)
                            for g in (given if isinstance(given, tuple) else (given,))]  # fmt: skip
                except Exception as error:
                    told = [f"{type(error).__name__}: {error}"]
                found.append(repr(told))
        finally:
            torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.share(12)
@pytest.mark.parametrize("name", OLD)
def test_what_the_constructors_give(name):
    step = capture(OLD[name], backend="eager")
    assert outcomes(step) == outcomes(OLD[name])
    if name in IN_THE_GRAPH:
        assert stats(step).graphs and not stats(step).breaks


def test_it_can_fail(monkeypatch):
    original = Construction.old_constructor
    monkeypatch.setattr(
        Construction, "old_constructor", lambda self, dtype, args: original(self, torch.float16, args)
    )
    assert outcomes(capture(OLD["numbers"], backend="eager")) != outcomes(OLD["numbers"])

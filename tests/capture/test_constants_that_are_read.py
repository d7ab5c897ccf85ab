"""Numbers that Python reads from tensors made of constants alone: as they are, whatever Python does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebius import capture, stats

MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # vectors of 1 and 2, in this or another type
    "arange": lambda x: torch.arange(1, x.dim()),
    "tensor": lambda x: torch.tensor([1, 2]),
    "linspace": lambda x: torch.linspace(1, 2, 2),
    "computed": lambda x: torch.cumsum(torch.ones(2, dtype=torch.long), 0).flip(0).flip(0),
    "bfloat16": lambda x: torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "written": lambda x: torch.zeros(2, dtype=torch.long).add_(torch.tensor([1, 2])),
    "a size": lambda x: torch.tensor([1, x.size(0) // x.size(0) + 1]),
}
READ: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "axes": lambda x, t: x.sum(t.long().tolist()),
    "branch": lambda x, t: sum(x * n for n in t.tolist() if n > 1),
    "item": lambda x, t: x * t[1].item(),
    "float": lambda x, t: x * float(t[0]) + (1 if float(t.sum()) == 3.0 else 2),
    "int": lambda x, t: [x, x + 1, x + 2][int(t.max())],
    "index": lambda x, t: (x, x + 1, x + 2)[t.long()[1]],
    "range": lambda x, t: x[:, list(range(int(t[1])))],
    "text": lambda x, t: (x * 1, f"{t.tolist()} {t[1].item():.3f}"),
    "loop": lambda x, t: [x[:, e] * e for e in t.long().tolist()],
}
VARY = ("written", "a size")  # as before


@pytest.mark.share(10)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("made", MADE)
def test_numbers_of_constants(made: str, read: str) -> None:
    def step(x: torch.Tensor) -> Any:
        return READ[read](x, MADE[made](x))

    captured = capture(step, backend="eager")
    for n in (4, 5, 6, 5):
        x = torch.randn(n, 3, 4)
        want, got = (torch.utils._pytree.tree_leaves(run(x)) for run in (step, captured))
        assert len(want) == len(got)
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert made in VARY or (stats(captured).breaks, stats(captured).graphs) == (0, 2)


def test_what_is_written_later_does_not_count() -> None:
    def step(x: torch.Tensor) -> Any:
        t = torch.zeros(2, dtype=torch.long)
        before = t.tolist()
        t += x.long()
        return before, t.tolist(), x * before[0]

    captured = capture(step, backend="eager")
    for n in range(4):
        assert captured(torch.full((2,), float(n)))[:2] == ([0, 0], [n, n])


def in_its_data(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t.data = x.clone()
    return t


def in_an_array(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t.numpy()[:] = x.numpy()
    return t


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "in place": lambda t, x: t.add_(x),
    "a method that is known": lambda t, x: t.masked_fill_(x > 4, 3.0),
    "by data": lambda t, x: t.data.copy_(x),
    "its data": in_its_data,
    "set": lambda t, x: t.set_(x.clone()),
    "a view": lambda t, x: t[1:].mul_(x[1:]),
    "out": lambda t, x: torch.add(x, x, out=t),
    "a list": lambda t, x: torch._foreach_add_([t], [x])[0],
    "an array": in_an_array,
    "a branch": lambda t, x: t.add_(1) if x.sum() > 9 else t,
    "without counting": lambda t, x: torch.inference_mode()(lambda: t.add_(x))(),
}
ASKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": torch.Tensor.tolist,
    "item": lambda t: t[0].item(),
    "branch": lambda t: 1 if t.sum() > 3 else 2,
    "of what it made": lambda t: (t * 2).sum().item(),
}


@pytest.mark.share(8)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_no_constant(write: str, asked: str) -> None:
    def step(x: torch.Tensor) -> Any:
        t = torch.ones(2)
        before = ASKED[asked](t), ASKED[asked](t * 2)
        WRITES[write](t, x)
        return before, ASKED[asked](t), ASKED[asked](t * 2)

    captured = capture(step, backend="eager")
    for n in (4, 6, 3, 4):
        assert captured(torch.full((2,), float(n))) == step(torch.full((2,), float(n)))

"""numpy code in a row, of what the graph made, was given or drew: one break, and the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moebius import capture, stats
from moebius.codegen import resume
from moebius.hook import ABSENT
from moebius.tensors.array_calls import ArrayCalls

PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {}  # how many breaks each may have


def breaks(count: int) -> Callable[[Any], Any]:
    def register(program: Any) -> Any:
        PROGRAMS[program.__name__] = (program, count)
        return program

    return register


@breaks(2)
def clipped_and_back(x, a):
    n = x.detach().cpu().numpy()
    m = n * 2 + 1
    m = np.clip(m, 0, 1)
    m = m[::-1].copy()
    m[0] = 0.5
    return torch.from_numpy(m) + x


@breaks(2)
def normalised(x, a):
    mean = a.mean()
    spread = a.std() + 1e-8
    b = (a - mean) / spread
    c = np.sqrt(np.abs(b)) * np.float64(3)
    return x * torch.from_numpy(c).float()


@breaks(3)
def averaged(x, a):
    losses = [(x * i).sum().item() for i in range(3)]
    mean = np.mean(losses)
    worst = np.max(losses) - mean
    both = np.array([mean, worst])
    return x + torch.as_tensor(both).float().sum()


@breaks(3)
def drawn(x, a):
    order = np.random.permutation(3)
    order = order[::-1]
    noise = np.random.randn(3)[order].copy()
    return x + torch.from_numpy(noise).float()


@breaks(2)
def in_a_handler(x, a):
    try:
        b = a * 2
        c = b.sum()
        d = b / c
        e = d.reshape(7, 7)
    except ValueError as error:
        return x + len(str(error))
    return x, e


@breaks(3)
def overwritten(x, a):
    b = a
    b = b * 2
    x = x + 1
    b = b + 1
    return x * torch.from_numpy(b).float()


def scaled(x, one, two, *rest):
    return x * float(one) + float(two) + len(rest)


@breaks(40)
def among_arguments(x, a):
    """Values of the statement's beginning, and the empty place of its call, stand on the stack meanwhile. (Floats of
    the frame are captured anew while they change.)"""
    y = scaled(x * 2, (b := a * 2).sum(), np.maximum(a.mean(), b.max()), b[0])
    return scaled(y, a.sum(), b[1] + b[2], b)


@breaks(9)
def in_a_loop(x, a):
    advantages, last = np.zeros_like(a), 0.0
    for t in reversed(range(len(a))):
        delta = a[t] + 0.9 * last
        last = delta * 0.5
        advantages[t] = last
    return x + torch.from_numpy(advantages).float()


class Buffer:
    def __init__(self):
        self.rows, self.at = np.arange(6.0), 1

    def draw(self):
        return dict(a=self.rows[self.at :].copy(), b=np.clip(self.rows, 1, 2)[:3])


BUFFER = Buffer()


@breaks(2)
def of_an_object(x, a):
    drawn = BUFFER.draw()
    return x + torch.as_tensor(drawn["b"]).float() + torch.as_tensor(drawn["a"]).sum()


@breaks(1)
def in_the_middle_of_a_call(x, a):
    losses = []
    losses.append(float(((x.detach().numpy() > 1) == (a > 2)).mean()))
    losses.append(x + losses[0])
    return losses[1]


@breaks(2)
def a_text_of_it(x, a):
    text = f"{a.mean():.3f} {np.max(a)} {a[0] + 1}"
    return x + len(text)


@breaks(3)
def branched_on(x, a):
    if a.mean() > 3:
        x = x * 2
    if float(a.sum()) > 1e9 or not np.all(a > 0):
        x = x - 1
    return x + 1


@breaks(2)
def taken_apart(x, a):
    low, middle, high = np.sort(a)
    rows, spread = a.shape[0], float(high - low)
    return x * rows + spread


@breaks(6)
def a_number_with_a_tensor(x, a):
    lam, n = a.mean() * np.float64(0.5), np.int64(1)
    return (x * lam).add_(lam).clamp(max=lam * 9)[n - 1 : n + 1] - lam


@breaks(3)
def as_bounds_and_index(x, a):
    order = np.argsort(a)
    first, last = order[0], order[-1]
    return x[first:].sum() + x[: last + 1].sum() + x[order]


def arguments(i: int, dtype: Any) -> tuple[Any, ...]:
    draw = np.random.RandomState(i)
    return torch.arange(3.0) + i, (draw.rand(3) * 9 + 1).astype(dtype)


@pytest.mark.share(16)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.int32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_plain(name: str, dtype: Any) -> None:
    program, count = PROGRAMS[name]
    captured = capture(program, backend="eager")
    for i in range(4):
        results = []
        for function in (captured, program):
            np.random.seed(i)
            results.append(function(*arguments(i, dtype)))
        assert str(results[0]) == str(results[1])
        assert torch.equal(torch.as_tensor(results[0]), torch.as_tensor(results[1]))
    assert stats(captured).breaks <= count
    assert stats(captured).hits


def test_switched_off_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def total() -> int:
        found = 0
        for program, _ in PROGRAMS.values():
            captured = capture(program, backend="eager")
            captured(*arguments(0, np.float64))
            found += stats(captured).breaks
        return found

    monkeypatch.setattr(ArrayCalls, "call", lambda *_: ABSENT)  # (what is in the graph is no break)
    together = total()
    monkeypatch.setattr(resume, "native_end", lambda frame: (frame.pc, 0))
    assert total() > together + 10

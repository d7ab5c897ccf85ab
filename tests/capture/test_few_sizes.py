"""Sizes that vary as keys of dicts, items of sets and arguments of cached functions: a capture for each, while they are
few; a graph break, which serves all, where more come."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.errors import MoebiusWarning

SCALES = {4: 1.0, 5: 2.0, 6: 3.0}


@functools.lru_cache
def positions(n: int, k: int = 1) -> tuple[int, ...]:
    return tuple(range(n * k))


@functools.lru_cache
def first_of(shape: Any) -> int:
    return len(shape) + shape[0]


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[Any, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (key := (x.shape[0], "mask")) not in self.masks:
            self.masks[key] = torch.arange(x.shape[0])[:, None, None] % 2
        return x * self.masks[key]


def seen_before(x: torch.Tensor) -> torch.Tensor:
    made: dict[Any, torch.Tensor] = {}
    for row in (x, x + 1, x[1:]):
        key = (type(row), row.shape[0], 1.0)
        if key not in made:
            made[key] = row.sum()
    return torch.stack(list(made.values()))


WAYS: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
    "a table": lambda: lambda x: x * SCALES[x.shape[0]],
    "get": lambda: lambda x: x * SCALES.get(x.shape[0] + 1, 0.5),
    "a display": lambda: lambda x: x * {(x.shape[0], x.shape[1]): 2.0}[tuple(x.shape[:2])],
    "setdefault": lambda: lambda x: x * {}.setdefault(x.numel(), 3.0),  # type: ignore[var-annotated]
    "hash": lambda: lambda x: x * (hash((x.shape[0], 1)) % 7),
    "cached": lambda: lambda x: x * sum(positions(x.shape[0])),
    "cached, by name": lambda: lambda x: x * sum(positions(k=2, n=x.shape[0])),
    "cached, a shape": lambda: lambda x: x * first_of(x.shape),
    "cached, a tuple": lambda: lambda x: x * first_of((x.shape[0], (x.shape[1], 2))),
    "module": Masked,
    "seen before": lambda: seen_before,
}


@pytest.mark.share(6)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("name", WAYS)
def test_values_of_sizes(name: str, backend: str) -> None:
    ways = []
    for is_captured in (False, True):
        way = WAYS[name]()

        def step(x: torch.Tensor, w: torch.Tensor, way: Any = way) -> torch.Tensor:
            y = way(x * w)
            (y.sum() * 2).backward()
            return y.detach() + 1

        run = capture(step, backend=backend) if is_captured else step
        draw, w = torch.Generator().manual_seed(0), torch.ones(3, 1, dtype=torch.double, requires_grad=True)
        results = [run(torch.randn(n, 3, 4, generator=draw, dtype=torch.double), w) for n in (4, 4, 5, 4, 5, 6, 4, 5)]
        ways.append([*results, w.grad])
    for a, b in zip(*ways, strict=True):
        assert torch.equal(a, b) if backend == "eager" else torch.allclose(a, b, 1e-12, 1e-12)
    counts = stats(run)
    assert counts.breaks == 0 and counts.misses <= 6, counts


@pytest.mark.parametrize("name", ["cached, a shape", "seen before", "a display"])
def test_more_sizes_than_it_pays_to_capture_for(name: str) -> None:
    step = WAYS[name]()
    captured = capture(lambda x: step(x) * 2, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", MoebiusWarning)
        for n in range(3, 26):
            x = torch.randn(n, 3, 4)
            assert torch.equal(captured(x), step(x) * 2)
    counts = stats(captured)
    assert counts.breaks and counts.entries < 14, counts


def test_numbers_that_are_no_sizes_are_no_keys() -> None:
    captured = capture(lambda x, i: x * {i: 2.0}[i], backend="eager")
    for i in range(3, 12):
        assert torch.equal(captured(torch.ones(2), i), torch.full((2,), 2.0))
    assert stats(captured).graphs <= 5

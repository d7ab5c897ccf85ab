"""Iterating over tensors that have as many rows as an input says: without a break, however Python does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.errors import MoebiusWarning


def appended(x: torch.Tensor) -> list[torch.Tensor]:
    out = []
    for a, b in zip(x, x + 1, strict=True):
        out.append(a.log_softmax(-1) * b)
    return out


def summed(x: torch.Tensor) -> Any:
    total = 0
    for row in x:
        total = total + row.sum()  # type: ignore[assignment]
    return total


def in_two_loops(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([a @ b.T for a in x for b in x])


def given_on(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from x


def by_next(x: torch.Tensor) -> Any:
    rows, total = iter(x), 0
    first = next(rows)
    for row in rows:
        total = total + row.sum()
    return first * total, len(list(rows))


def in_two_parts(x: torch.Tensor) -> list[torch.Tensor]:
    rows, seen = iter(x), 0
    for _ in rows:
        seen += 1
        if seen == 2:
            break
    return [row * seen for row in rows]


def written(x: torch.Tensor) -> torch.Tensor:
    y, seen = x.detach() * 1, []
    for row in y:
        seen.append(row.mul_(len(seen)))
    return x * y


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: [torch.logsumexp(row, dim=-1) for row in x],
    "dict": lambda x: {i: row * i for i, row in enumerate(x)},
    "generator": lambda x: torch.stack(list(row.sum() for row in x)),
    "list()": lambda x: torch.stack(list(x)),
    "[*x]": lambda x: torch.stack([*x]),
    "map": lambda x: tuple(map(torch.sum, x)),
    "reversed": lambda x: [row + 1 for row in reversed(x)],
    "numbers": lambda x: [row.sin() for row in x.sum((1, 2))],
    "unpacked": lambda x: (lambda first, *others: first + len(others))(*x),
    "yield from": lambda x: [row * 2 for row in given_on(x)],
    **{f.__name__: f for f in (appended, summed, in_two_loops, by_next, in_two_parts, written)},
}


@pytest.mark.share(10)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("name", WAYS)
def test_rows_of_an_input(name: str, backend: str) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        made = torch.utils._pytree.tree_leaves(WAYS[name](x * w))
        loss = sum(one.sum() for one in made if isinstance(one, torch.Tensor))
        loss.backward()
        return [one.detach() if isinstance(one, torch.Tensor) else one for one in made]

    captured, ways = capture(step, backend=backend), []
    for run in (step, captured):
        draw, w = torch.Generator().manual_seed(0), torch.ones(3, 1, dtype=torch.double, requires_grad=True)
        results = [run(torch.randn(n, 3, 4, generator=draw, dtype=torch.double), w) for n in (4, 4, 5, 4, 5, 3)]
        ways.append(torch.utils._pytree.tree_leaves([results, w.grad]))
    assert len(ways[0]) == len(ways[1])
    for a, b in zip(*ways, strict=True):
        same = backend == "eager" or not isinstance(a, torch.Tensor)
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)) if same else torch.allclose(a, b, 1e-12, 1e-12)
    counts = stats(captured)
    assert counts.breaks == 0 and counts.misses <= 4, counts


def test_more_sizes_than_it_pays_to_capture_for() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.logsumexp(row, dim=-1) for row in x * 2]).cos()

    captured = capture(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", MoebiusWarning)
        for n in range(3, 30):
            x = torch.randn(n, 3, 4)
            assert torch.equal(captured(x), step(x))
    counts = stats(captured)
    assert counts.breaks and counts.entries < 20, counts


def test_many_rows_are_a_break() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.cos() for row in x])

    captured = capture(step, backend="eager")
    for n in (200, 300):
        x = torch.randn(n, 2)
        assert torch.equal(captured(x), step(x))
    assert stats(captured).breaks

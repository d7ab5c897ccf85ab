"""Pooling over windows whose size is that of the input, or a number that varies: one capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moebius import capture, stats


def image(x: torch.Tensor) -> torch.Tensor:
    return x[:, None].expand(-1, 2, -1, -1).contiguous()


POOLS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "max of all": lambda x, n: F.max_pool1d(x, x.size(2)),
    "max of all, squeezed": lambda x, n: F.max_pool1d(x, kernel_size=x.shape[-1]).squeeze(2),
    "average of all": lambda x, n: F.avg_pool1d(x, x.size(2)),
    "average of an image": lambda x, n: F.avg_pool2d(image(x), (5, x.size(2))),
    "average by a list": lambda x, n: F.avg_pool2d(x.unsqueeze(1), list(x.shape[1:])),
    "max of both": lambda x, n: F.max_pool2d(x.unsqueeze(1), x.size()[1:]),
    "module": lambda x, n: torch.nn.AvgPool1d(x.size(2))(x),
    "windows that vary": lambda x, n: F.max_pool1d(x, n, stride=1),
    "steps that vary": lambda x, n: F.avg_pool1d(x, 2, n),
    "less than all": lambda x, n: F.max_pool1d(x, x.size(2) - 2, 1),
    "volume": lambda x, n: F.avg_pool3d(x[:, None, None], (1, 5, x.size(2))),
    "padded": lambda x, n: F.max_pool1d(x, n, 1, padding=1),
    "padded by half": lambda x, n: F.max_pool1d(x, n, 1, padding=n // 2),
    "padded average": lambda x, n: F.avg_pool1d(x, n, 1, n // 2),
    "an image, padded by half": lambda x, n: F.max_pool2d(
        image(x), (min(3, x.size(2)), n), (1, 1), (min(3, x.size(2)) // 2, n // 2)
    ),
    "at distances that vary": lambda x, n: F.max_pool1d(x, 2, 1, dilation=n),
    "all numbers vary": lambda x, n: F.max_pool2d(image(x), n, n - 1, padding=n // 2, dilation=max(1, n - 3)),
    # as in C
    "padded by more": lambda x, n: F.max_pool1d(x, n, 1, padding=n),
    "padded by less": lambda x, n: F.max_pool1d(x, n, 1, padding=n - 4),
    "rounded up": lambda x, n: F.avg_pool1d(x, n, ceil_mode=True),
    "columns": lambda x, n: F.max_pool1d(x.transpose(1, 2), n, 1),
    "with places": lambda x, n: F.max_pool1d(x, x.size(2), return_indices=True)[0],
    "too large": lambda x, n: F.max_pool1d(x, x.size(2) + n - 3),
    "none": lambda x, n: F.max_pool1d(x, n - 2),
}
ONE = [*POOLS][:17]


@pytest.mark.share(14)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("name", POOLS)
def test_pooling(name: str, backend: str) -> None:
    def step(x: torch.Tensor, w: torch.Tensor, n: int) -> Any:
        y = POOLS[name](x * w, n)
        y.sum().backward()
        return y.detach(), [*y.shape], [*y.stride()], y.is_contiguous()

    captured, ways = capture(step, backend=backend), []
    for run in (step, captured):
        draw, w, results = torch.Generator().manual_seed(0), torch.ones(5, 1, requires_grad=True), []
        for length, n in ((9, 3), (7, 4), (8, 2), (11, 5), (6, 3), (10, 4)):
            try:
                results.append(run(torch.randn(3, 5, length, generator=draw), w, n))
            except (RuntimeError, ValueError) as error:
                results.append(str(error))
        ways.append([*results, w.grad])
    flat = [torch.utils._pytree.tree_leaves(way) for way in ways]
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*flat, strict=True))
    counts = stats(captured)
    assert name not in ONE or (counts.breaks, counts.misses <= 3) == (0, True), counts


def test_a_gradient_of_a_gradient() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = F.avg_pool1d(x**3, x.size(2)).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)[0]

    captured = capture(step, backend="eager")
    for length in (4, 5, 6, 7):
        x = torch.randn(2, 3, length, requires_grad=True)
        assert torch.equal(captured(x), step(x))

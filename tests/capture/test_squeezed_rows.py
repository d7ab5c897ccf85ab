"""Rows that the data chooses, squeezed: with one row there is an axis less, and Python is told so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebius import capture, stats

Tensor = torch.Tensor
ASKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dim": lambda x, m: (x[m].squeeze(0).dim(), x[m].squeeze(0).sum()),
    "ndim": lambda x, m: (torch.squeeze(x[m], 0) * 2).ndim,
    "shape": lambda x, m: (x[m].squeeze().sum(), len(x[m].squeeze().shape)),
    "size": lambda x, m: (x[m].squeeze(0).size(0), x[m].squeeze(0).size(-1)),
    "size of all": lambda x, m: x[m].squeeze(0).size(),
    "stride": lambda x, m: x[m].squeeze((0, 1)).stride(),
    "len": lambda x, m: len(x[m][:, :2].squeeze(0)),
    "iter": lambda x, m: [row.sum() for row in x[m].squeeze(0).relu()][:1],
    "in place": lambda x, m: (x[m].squeeze_(0) * 2).dim(),
    "of an index": lambda x, m: x[torch.nonzero(m).squeeze()].dim(),
    "of what both make": lambda x, m: (x[m].squeeze(0) + x.sum(0)).shape,
}
ASKS_NOTHING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an index": lambda x, m: x[torch.nonzero(m).squeeze()].sum(0),
    "a known axis": lambda x, m: (torch.nonzero(m).squeeze(-1).dim(), x[m].unsqueeze(0).squeeze(0).sum()),
    "numbers": lambda x, m: (x[m].squeeze(0).numel(), x[m].squeeze().sum()),
    "dtype": lambda x, m: (x[m].squeeze(0).dtype, x[m].squeeze(0) + 1),
}


def outcome(step: Callable[..., Any], *args: Tensor) -> str:
    try:
        return str(step(*args))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def compared(step: Callable[..., Any], backend: str) -> Any:
    captured = capture(step, backend=backend)
    torch.manual_seed(0)
    for chosen in (3, 2, 1, 3, 1, 0, 2, 1):
        x_TD, mask_T = torch.randn(3, 4), torch.arange(3) < chosen
        assert outcome(captured, x_TD, mask_T) == outcome(step, x_TD, mask_T), chosen
    return stats(captured)


@pytest.mark.share(10)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("asks", ASKS)
def test_what_depends_on_one_row_is_a_graph_break(asks: str, backend: str) -> None:
    assert compared(ASKS[asks], backend).breaks > 0


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("asks", ASKS_NOTHING)
def test_what_does_not_is_none(asks: str, backend: str) -> None:
    counts = compared(ASKS_NOTHING[asks], backend)
    assert (counts.breaks, counts.hits) == (0, 7)

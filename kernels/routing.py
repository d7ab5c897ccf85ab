"""From a routing table to rows grouped by expert: sorted once, on the device, without a host synchronisation."""
from __future__ import annotations

import torch
from torch import Tensor

from moebius.kernels.native import panel_work

INT16_EXPERTS = 32767


def sort_rows(index_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots in order of their expert.

    index_TK: integer [T, K]. Returns

    - order_S: int32 [T*K]; sorted row r is slot ``order_S[r]``, which is token ``order_S[r] // K``. The sort is
      stable, so that results are the same bits run for run. Sentinel slots (index outside [0, E)) come last.
    - offsets: int32 [E+1]; expert e has rows ``offsets[e]:offsets[e+1]``; ``offsets[E]`` is the number of real rows.
    """
    ids = index_TK.reshape(-1)
    if sorted_in_c := panel_work.sort_rows(ids, num_experts):
        return sorted_in_c
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    ids = ids.to(torch.int16 if num_experts < INT16_EXPERTS else torch.int32)
    ids_sorted, order_S = torch.sort(ids, stable=True)
    bounds = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    offsets = torch.searchsorted(ids_sorted, bounds, out_int32=True)
    return order_S.to(torch.int32), offsets


def invert(order_S: Tensor) -> Tensor:
    """inverse[slot] = sorted row; int32 [S]."""
    rows = torch.arange(order_S.shape[0], dtype=torch.int32, device=order_S.device)
    return torch.empty_like(order_S).scatter_(0, order_S.long(), rows)


def ids_from_counts(counts_E: Tensor, num_rows: int) -> Tensor:
    """Expert id per row for rows that lie in expert order: int64 [num_rows]; rows past the counts' sum get E
    (sentinel)."""
    ends = counts_E.cumsum(0)
    rows = torch.arange(num_rows, dtype=ends.dtype, device=counts_E.device)
    return torch.searchsorted(ends, rows, right=True)

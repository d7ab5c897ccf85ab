"""Token rounding: fewer slots, so that experts fill whole tiles of a grouped GEMM. It changes what is computed.

After Guo et al. 2025, "SonicMoE" (arXiv:2512.14080), section on tile-aware routing, which rounds to the nearest
multiple; here counts are only rounded down, so that no token gets an expert that its router did not choose.
"""
from __future__ import annotations

import torch
from torch import Tensor

from moebius.kernels.errors import ExpertsInputError


def round_tokens(index_TK: Tensor, weight_TK: Tensor | None, num_experts: int, tile: int = 128) -> Tensor:
    """The routing table with every expert's slots rounded down to a multiple of ``tile``: [T, K], index_TK's dtype.

    An expert that has more slots than whole tiles loses those with the smallest weights, of equal weights (or without
    weights) the last ones: their index becomes -1, so they contribute nothing and get zero gradients. An expert with
    less than one tile keeps all. Weights are left alone: renormalise them yourself if your router does. A weight that
    is not a number counts as the largest. No host synchronisation; the same bits run for run.
    """
    if not isinstance(tile, int) or isinstance(tile, bool) or tile < 1:
        raise ExpertsInputError(f"token_rounding={tile!r} is not a positive number of rows")
    if index_TK.dtype == torch.uint8:
        raise ExpertsInputError("token_rounding marks slots with -1; index_TK is uint8, cast it to a signed type")
    ids = index_TK.reshape(-1).long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    by_weight = torch.arange(ids.shape[0], device=ids.device)
    if weight_TK is not None:
        by_weight = torch.sort(weight_TK.detach().reshape(-1), descending=True, stable=True).indices
    sorted_ids, at = torch.sort(ids[by_weight], stable=True)
    slots = by_weight[at]  # expert by expert, the heaviest first
    first = torch.searchsorted(sorted_ids, torch.arange(num_experts + 2, device=ids.device))
    counts = first.diff()
    kept = torch.where(counts < tile, counts, counts // tile * tile)
    rank = torch.arange(ids.shape[0], device=ids.device) - first[sorted_ids]
    over = (rank >= kept[sorted_ids]) & (sorted_ids < num_experts)
    dropped = torch.empty_like(slots, dtype=torch.bool).scatter_(0, slots, over)
    return index_TK.masked_fill(dropped.view(index_TK.shape), -1)

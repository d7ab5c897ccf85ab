"""Token rounding: fewer or more slots, so that experts fill whole tiles of a grouped GEMM. It changes what is computed.

After Guo et al. 2025, "SonicMoE" (arXiv:2512.14080), section on tile-aware routing. round_tokens works on a routing
table and only drops slots; round_routing works on the router's scores and can also add the experts that a token ranked
next.
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
    check_tile(tile)
    if index_TK.dtype == torch.uint8:
        raise ExpertsInputError("token_rounding marks slots with -1; index_TK is uint8, cast it to a signed type")
    ids = index_TK.reshape(-1).long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    rank, counts = rank_slots(ids, None if weight_TK is None else weight_TK.detach().reshape(-1), num_experts)
    kept = torch.where(counts < tile, counts, counts // tile * tile)
    dropped = (rank >= kept[ids]) & (ids < num_experts)
    return index_TK.masked_fill(dropped.view(index_TK.shape), -1)


def check_tile(tile: object) -> None:
    if not isinstance(tile, int) or isinstance(tile, bool) or tile < 1:
        raise ExpertsInputError(f"token_rounding={tile!r} is not a positive number of rows")


def rank_slots(ids: Tensor, weight_S: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """(each slot's place among its expert's, the heaviest first, of equal ones the first; slots an expert [E + 1]).

    ids: int64 [S], num_experts for a slot of none.
    """
    by_weight = torch.arange(ids.shape[0], dtype=torch.int64, device=ids.device)
    if weight_S is not None:
        by_weight = torch.sort(weight_S, descending=True, stable=True).indices
    sorted_ids, at = torch.sort(ids[by_weight], stable=True)
    slots = by_weight[at]  # expert by expert, the heaviest first
    first = torch.searchsorted(sorted_ids, torch.arange(num_experts + 2, dtype=torch.int64, device=ids.device))
    rank = torch.arange(ids.shape[0], dtype=torch.int64, device=ids.device) - first[sorted_ids]
    return torch.empty_like(rank).scatter_(0, slots, rank), first.diff()


def round_routing(scores_TE: Tensor, top_k: int, tile: int = 128, to: str = "nearest", spare: int = 1
                  ) -> tuple[Tensor, Tensor]:
    """A routing table from a router's scores, every expert's slots a multiple of ``tile``: (index, weight), int64 and
    scores' dtype, [T, K + spare].

    to: "down" drops the slots with the smallest scores; "up" adds tokens, those with the largest scores among the ones
    that ranked this expert in the ``spare`` places after their top K; "nearest" does what changes fewer slots. Where
    too few tokens are to be had, "up" leaves the expert with its own and "nearest" rounds it down; an expert with less
    than one tile never loses a slot. A slot that is not used is -1, with weight 0. Weights are the scores themselves:
    renormalise them, as your router does, after this. Gradients go to the scores. No host synchronisation.
    """
    check_tile(tile)
    if not isinstance(scores_TE, Tensor) or scores_TE.dim() != 2 or not scores_TE.dtype.is_floating_point:
        raise ExpertsInputError("scores_TE is a floating point tensor [tokens, E]")
    num_experts = scores_TE.shape[1]
    if to not in ("down", "up", "nearest"):
        raise ExpertsInputError(f"to={to!r} is not known; one of down, up, nearest")
    spare = 0 if to == "down" else spare
    if not 0 <= top_k <= num_experts or not 0 <= spare <= num_experts - top_k:
        raise ExpertsInputError(f"top_k={top_k!r} and spare={spare!r} of {num_experts} experts: together at most that")
    weight, index = scores_TE.topk(top_k + spare)
    own, more = index[:, :top_k].reshape(-1), index[:, top_k:].reshape(-1)
    detached = weight.detach()
    rank, counts = rank_slots(own, detached[:, :top_k].reshape(-1), num_experts)
    rank_more, offered = rank_slots(more, detached[:, top_k:].reshape(-1), num_experts)
    lack = -counts % tile
    fills = offered >= lack
    if to == "up":
        added, kept = torch.where(fills, lack, 0), counts
    else:
        rise = fills & (lack <= counts % tile) if to == "nearest" else torch.zeros_like(fills)
        added = torch.where(rise, lack, 0)
        kept = torch.where(rise | (counts < tile), counts, counts // tile * tile)
    tokens = scores_TE.shape[0]
    used = torch.cat([(rank < kept[own]).view(tokens, top_k), (rank_more < added[more]).view(tokens, spare)], 1)
    return index.masked_fill(~used, -1), weight.masked_fill(~used, 0)

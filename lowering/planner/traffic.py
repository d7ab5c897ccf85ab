"""Bytes that expert parallelism sends, and which experts a rank has. Torch's own step counts its bytes with the same
formulas, and tests hold the two together (lowering/distribution)."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb

HEADER_BYTES = 16  # what a rank tells each other rank before an exchange: a number, and where it is


def chunk_span(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Rows [low, high) of an axis of ``length`` that ``rank`` keeps: torch.chunk's split, as DTensor's Shard has it."""
    step = -(-length // ranks)
    return min(rank * step, length), min((rank + 1) * step, length)


@cache
def expected_destinations(ranks: int, num_experts: int, top_k: int, groups: int = 1, limit: int = 1) -> float:
    """Distinct ranks that a token is expected to go to under uniform routing to top_k different experts, which lie in
    ``limit`` of so many groups: each set of groups is as likely as any other, and so is each set of K experts of those.
    (A router that ranks groups by their best experts spreads a token a little more evenly over its groups than that.)

    Of one group P · (1 − C(E − E/P, K) / C(E, K)); each rank's own number of experts is used where P does not divide E.
    """
    size = num_experts // groups
    inside, found = limit * size, 0.0
    for rank in range(ranks):
        low, high = chunk_span(num_experts, ranks, rank)
        owned = [max(0, min(high, (g + 1) * size) - max(low, g * size)) for g in range(groups)]
        missed = 0.0
        if max(owned) == min(owned):
            missed = comb(inside - limit * owned[0], top_k) / comb(inside, top_k)
        else:
            for chosen in combinations(owned, limit):
                missed += comb(inside - sum(chosen), top_k) / comb(inside, top_k)
            missed /= comb(groups, limit)
        found += 1.0 - missed
    return found


@dataclass(frozen=True)
class RegionShape:
    """One expert region: T tokens of one rank, K slots a token, E experts, D model width.

    item_bytes, weight_bytes: of one number of x, of one routing weight. index_bytes: of one routing
    index. weighted: whether routing weights travel (an operator may have none).
    """

    tokens: int
    top_k: int
    num_experts: int
    width: int
    item_bytes: int
    weight_bytes: int
    index_bytes: int = 8
    weighted: bool = True


@dataclass(frozen=True)
class Bytes:
    """Bytes that one rank sends to other ranks in one forward and backward of a region (its own rows stay at home)."""

    header: float
    dispatch: float
    combine: float

    @property
    def total(self) -> float:
        return self.header + self.dispatch + self.combine

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.header + other.header, self.dispatch + other.dispatch, self.combine + other.combine)


def bytes_for(shape: RegionShape, ranks: int, sent: float, received: float, headers: int = 1) -> Bytes:
    """What a rank sends that dispatches ``sent`` rows to other ranks and is given ``received``. headers: forward's, and
    backward's own where that is in another graph than forward, or in none.

    Forward: x, indices and weights out, results back. Backward, its mirror: the output's gradient out, the gradients of
    x and of weights back.
    """
    row = shape.width * shape.item_bytes
    weights = shape.top_k * shape.weight_bytes if shape.weighted else 0
    return Bytes(
        header=headers * (ranks - 1) * HEADER_BYTES,
        dispatch=sent * (row + weights + shape.top_k * shape.index_bytes) + sent * row,
        combine=received * row + received * (row + weights),
    )


def expected_bytes(shape: RegionShape, ranks: int) -> Bytes:
    """:func:`bytes_for` an average rank under uniform routing."""
    if ranks == 1:
        return Bytes(0.0, 0.0, 0.0)
    remote = shape.tokens * expected_destinations(ranks, shape.num_experts, shape.top_k) * (ranks - 1) / ranks
    return bytes_for(shape, ranks, remote, remote)


def reduced_bytes(size: int, ranks: int) -> int:
    """What a rank sends, in a ring of ranks, to take the sum of ``size`` bytes over all: 2 · size · (P − 1) / P."""
    return 2 * size * (ranks - 1) // ranks

"""Which experts stand on which rank, by how many slots each of them had: busy experts get replicas, and ranks are
filled so that the busiest has as little as can be. Ranks of one node are next to one another."""
from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from moebius.lowering.planner.errors import PlannerError
from moebius.lowering.planner.traffic import chunk_span


@dataclass(frozen=True)
class Placement:
    """places: of each rank, the experts that stand there, each at most once. An expert on several ranks has replicas,
    and its slots go to them in equal parts."""

    experts: int
    places: tuple[tuple[int, ...], ...]

    def copies(self) -> list[int]:
        """Ranks that each expert stands on."""
        found = [0] * self.experts
        for place in self.places:
            for e in place:
                found[e] += 1
        return found

    def parts(self, nodes: int) -> list[dict[int, float]]:
        """Of each node, where the ranks stand in so many: the part of an expert's slots that goes there."""
        copies, per_node = self.copies(), len(self.places) // nodes
        found: list[dict[int, float]] = [{} for _ in range(nodes)]
        for rank, place in enumerate(self.places):
            for e in place:
                part = found[rank // per_node]
                part[e] = part.get(e, 0.0) + 1 / copies[e]
        return found

    def loads(self, slots: Sequence[float]) -> list[float]:
        """Slots of each rank, where experts have so many."""
        copies = self.copies()
        return [sum(slots[e] / copies[e] for e in place) for place in self.places]

    def arrivals(self, before: Placement) -> int:
        """Experts that the rank that gets most has not had before."""
        return max(len(set(now) - set(then)) for now, then in zip(self.places, before.places, strict=True))

    def imbalance(self, slots: Sequence[float]) -> float:
        """Slots of the busiest rank over the mean."""
        loads = self.loads(slots)
        return max(loads) * len(loads) / sum(loads)


def in_order(experts: int, ranks: int) -> Placement:
    """Equal parts in the order of their numbers, without replicas: how a step places them today."""
    return Placement(experts, tuple(tuple(range(*chunk_span(experts, ranks, rank))) for rank in range(ranks)))


def by_load(slots: Sequence[float], ranks: int, replicas: int = 0, nodes: int = 1, groups: int = 1) -> Placement:
    """Where experts with so many slots stand: each rank has as many as in order, and ``replicas`` more.

    nodes: ranks stand in so many. groups: the experts of one of so many groups stay on one node, where groups divide
    over nodes (a token's experts lie in few groups, and so on few nodes). Raises PlannerError where it cannot be.
    """
    experts, room = len(slots), -(-len(slots) // ranks) + replicas
    if replicas < 0 or room > experts:
        raise PlannerError(f"{replicas} replicas a rank: at least 0, and no rank has more than the {experts} experts")
    if groups == 1 or groups % nodes or experts % groups or ranks % nodes:
        packed = Placement(experts, _fill(slots, range(experts), ranks, room))
        return min(packed, in_order(experts, ranks), key=lambda placement: placement.imbalance(slots))
    size = experts // groups
    whole = [sum(slots[g * size:(g + 1) * size]) for g in range(groups)]
    found: list[tuple[int, ...]] = []
    for node in _pack([(whole[g], g) for g in range(groups)], nodes, groups // nodes):
        mine = [e for g in sorted(node) for e in range(g * size, (g + 1) * size)]
        found += _fill(slots, mine, ranks // nodes, room)
    return Placement(experts, tuple(found))


def _fill(slots: Sequence[float], experts: Sequence[int], ranks: int, room: int) -> tuple[tuple[int, ...], ...]:
    """These experts on so many ranks: each further copy goes to the expert whose copies have most."""
    copies = dict.fromkeys(experts, 1)
    waiting = [(-slots[e], e) for e in experts]
    heapq.heapify(waiting)
    for _ in range(ranks * room - len(experts)):
        while waiting and copies[waiting[0][1]] == ranks:
            heapq.heappop(waiting)
        if not waiting or not waiting[0][0]:
            break
        e = waiting[0][1]
        copies[e] += 1
        heapq.heapreplace(waiting, (-slots[e] / copies[e], e))
    each = [(slots[e] / n, e) for e, n in copies.items() for _ in range(n)]
    return tuple(tuple(sorted(place)) for place in _pack(each, ranks, room))


def _pack(loads: Sequence[tuple[float, int]], ranks: int, room: int) -> list[list[int]]:
    """(load, number) pairs on ranks, a number at most once on each: the largest first, where there is least."""
    where: list[set[int]] = [set() for _ in range(ranks)]
    open_ = [(0.0, rank) for rank in range(ranks)]  # a heap: slots of those with room
    for load, number in sorted(loads, key=lambda pair: (-pair[0], pair[1])):
        taken: list[tuple[float, int]] = []
        while open_ and number in where[open_[0][1]]:
            taken.append(heapq.heappop(open_))
        if open_:  # (else: a copy that only the ranks of the others have room for, and is left out)
            held, rank = heapq.heappop(open_)
            where[rank].add(number)
            if len(where[rank]) < room:
                heapq.heappush(open_, (held + load, rank))
        for pair in taken:
            heapq.heappush(open_, pair)
    return [list(place) for place in where]

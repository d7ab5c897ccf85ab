"""Seconds of collectives: what a start costs plus bytes over bandwidth (the alpha-beta model), by the slowest link.

Ranks of a node reach one another over its own links, ranks of other nodes over one network card for each rank. Both
carry at once.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from moebius.lowering.planner.hardware import Cluster
from moebius.lowering.planner.plans import Candidate

BUCKET = 1 << 25  # bytes of gradients that travel together (lowering/distribution/reduce.py)


@dataclass(frozen=True)
class Group:
    """The ranks of one collective: how many, and how many of them on each node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node


def expert_group(cluster: Cluster, plan: Candidate) -> Group:
    """Those that share the experts: next to one another."""
    return _spread(plan.expert, 1, cluster)


def data_group(cluster: Cluster, plan: Candidate) -> Group:
    """Those that have the same experts: ``plan.expert`` ranks apart."""
    return _spread(plan.data, plan.expert, cluster)


def all_ranks(cluster: Cluster) -> Group:
    return Group(cluster.ranks, cluster.per_node)


def _spread(ranks: int, apart: int, cluster: Cluster) -> Group:
    here = max(1, min(ranks, cluster.per_node // apart if cluster.per_node % apart == 0 else 1))
    return Group(ranks, here if ranks % here == 0 else 1)


def ring_rate(cluster: Cluster, group: Group) -> float:
    """Bytes/s that each rank of a ring sends: there are as many rings as the group has network cards on a node."""
    device = cluster.device
    near, far = device.near_rate * device.reached.near, device.far_rate * device.reached.far
    if group.nodes == 1:
        return near
    return far if group.per_node == 1 else min(near, far * group.per_node)


def start(cluster: Cluster, group: Group) -> float:
    """Seconds of a collective of the group that has nothing to send: once through a tree, there and back."""
    reached = cluster.device.reached
    return (reached.near_start if group.nodes == 1 else reached.far_start) * max(1.0, log2(group.ranks) / 3)


def all_reduce(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds, in buckets."""
    if group.ranks == 1 or not size:
        return 0.0
    sent = 2 * size * (group.ranks - 1) / group.ranks
    return ceil(size / BUCKET) * 2 * start(cluster, group) + sent / ring_rate(cluster, group)


def gather(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds of an all-gather, or of a reduce-scatter, of ``size`` bytes as they are when whole."""
    if group.ranks == 1 or not size:
        return 0.0
    return start(cluster, group) + size * (group.ranks - 1) / group.ranks / ring_rate(cluster, group)


def all_to_all(cluster: Cluster, group: Group, near: float, far: float) -> float:
    """Seconds in which the busiest rank sends so many bytes to ranks of its own node, and of others."""
    if group.ranks == 1:
        return 0.0
    device, reached = cluster.device, cluster.device.reached
    first = reached.near_start if group.nodes == 1 else reached.far_start
    first += reached.peer_start * (group.ranks - 1)
    return first + max(near / (device.near_rate * reached.near), far / (device.far_rate * reached.far))


@dataclass(frozen=True)
class Rows:
    """Rows that a rank sends in one exchange of its tokens: to ranks of its node, to other nodes; and those it has."""

    near: float
    far: float
    here: float  # received, its own among them


def rows(cluster: Cluster, plan: Candidate, reached_ranks: float, reached_nodes: float, top_k: int,
         tokens: float) -> Rows:
    """Of ``tokens`` tokens. reached_ranks, reached_nodes: distinct ranks, nodes, that a token is expected to go to."""
    group = expert_group(cluster, plan)
    copies = top_k if plan.level == "slot" else reached_ranks
    own, same = 1 / group.ranks, (group.per_node - 1) / group.ranks
    if plan.level == "node" and group.nodes > 1:
        far = reached_nodes * (group.nodes - 1) / group.nodes
        on = reached_ranks * (1 - 1 / group.per_node)  # and on from the rank that took it, over the node's own links
        return Rows(tokens * on, tokens * far, tokens * reached_ranks)
    return Rows(tokens * copies * same, tokens * copies * (1 - own - same), tokens * copies)

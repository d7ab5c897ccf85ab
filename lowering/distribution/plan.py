"""Where experts live and what a step is expected to send: the plan, and the arithmetic behind its numbers."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import comb, prod
from typing import Any

from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.meeting import HEADER_BYTES

EXPERT_AXES = ("ep", "expert", "experts", "expert_parallel")  # names of a mesh axis that "auto" takes for experts
DATA_AXES = ("dp", "data", "data_parallel", "batch", "replicate", "dp_replicate")  # axes with a replica at each place


def chunk_span(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Rows [low, high) of an axis of ``length`` that ``rank`` keeps: torch.chunk's split, as DTensor's Shard has it."""
    step = -(-length // ranks)
    return min(rank * step, length), min((rank + 1) * step, length)


def expected_destinations(ranks: int, num_experts: int, top_k: int) -> float:
    """Distinct ranks that a token is expected to go to under uniform routing to top_k different experts.

    P · (1 − C(E − E/P, K) / C(E, K)); each rank's own number of experts is used where P does not divide E.
    """
    reached = 0.0
    for rank in range(ranks):
        low, high = chunk_span(num_experts, ranks, rank)
        reached += 1.0 - comb(num_experts - (high - low), top_k) / comb(num_experts, top_k)
    return reached


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


def bytes_for(shape: RegionShape, ranks: int, sent: float, received: float) -> Bytes:
    """What a rank sends that dispatches ``sent`` rows to other ranks and is given ``received``.

    Forward: x, indices and weights out, results back. Backward, its mirror: the output's gradient out, the gradients of
    x and of weights back.
    """
    row = shape.width * shape.item_bytes
    weights = shape.top_k * shape.weight_bytes if shape.weighted else 0
    return Bytes(
        header=2 * (ranks - 1) * HEADER_BYTES,
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


@dataclass
class Plan:
    """How the experts of one model are spread over a mesh.

    axis: the mesh axis, by name or number, over which expert parameters are split by their first axis.
    parameters: the split parameters, as their sources read in the captured graph, with (experts in all, on a rank).
    regions: the shapes of the expert regions, as far as they are known (sizes that vary from call to call are not).
    data_ranks: over so many ranks, beside those that share the experts, gradients of experts are averaged too.
    """

    axis: str | int = 0
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    regions: list[RegionShape] = field(default_factory=list)
    ranks: int = 1  # set from the mesh
    data_ranks: int = 1  # likewise

    def axis_index(self, mesh: Any) -> int:
        """The number of the plan's axis in this mesh. Raises DistributionError where it has no such axis."""
        names = mesh.mesh_dim_names or ()
        if isinstance(self.axis, str):
            if self.axis not in names:
                raise DistributionError(f"the plan's mesh axis {self.axis!r} is not in the mesh, with axes {names}")
            return names.index(self.axis)
        if not 0 <= self.axis < mesh.ndim:
            raise DistributionError(f"the plan's mesh axis {self.axis} is not in the mesh, which has {mesh.ndim} axes")
        return self.axis

    def expected(self) -> Bytes:
        """Bytes that a rank is expected to send in one forward and backward, all known regions together; gradients
        not counted."""
        total = Bytes(0.0, 0.0, 0.0)
        for shape in self.regions:
            total += expected_bytes(shape, self.ranks)
        return total

    def __str__(self) -> str:
        lines = [
            f"expert parallel over {self.ranks} ranks (mesh axis {self.axis!r}), each with its own part of the batch;"
            f" gradients are averaged over {self.ranks * self.data_ranks} ranks"
        ]
        for source, (experts, here) in self.parameters.items():
            idle = self.ranks - -(-experts // here)
            none = f", none on the last {idle} ranks" if idle else ""
            lines.append(f"  {source}: {experts} experts, at most {here} on a rank{none}")
        expected = self.expected()
        lines.append(
            f"  {len(self.regions)} expert regions of known size; forward and backward, a rank sends about"
            f" {expected.total / 1e6:.3f} MB under uniform routing: dispatch {expected.dispatch / 1e6:.3f},"
            f" combine {expected.combine / 1e6:.3f}"
        )
        return "\n".join(lines)


def resolve_plan(plan: Any, mesh: Any) -> Plan:
    """The plan that ``plan=`` asks for on this mesh: "auto", or a Plan, whose ranks are set from the mesh."""
    if plan == "auto":
        plan = Plan(axis=choose_axis(mesh))
    elif not isinstance(plan, Plan):
        raise DistributionError(f"plan={plan!r} is neither 'auto' nor a moebius.lowering.distribution.Plan")
    axis = plan.axis_index(mesh)
    others = data_axes(mesh, axis)
    data_ranks = prod(mesh.size(i) for i in others)
    return replace(plan, ranks=mesh.size(axis), data_ranks=data_ranks, parameters={}, regions=[])


def data_axes(mesh: Any, axis: int) -> list[int]:
    """The axes beside the experts' over which ranks differ in their data alone. Raises DistributionError for any other:
    what its ranks are to do with a parameter or a batch is not known."""
    names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
    others = [i for i in range(mesh.ndim) if i != axis and mesh.size(i) > 1]
    unknown = [f"{names[i]!r} ({mesh.size(i)} ranks)" for i in others if names[i] not in DATA_AXES]
    if unknown:
        raise DistributionError(
            f"the mesh has {', '.join(unknown)} beside {names[axis]!r}; only axes with data of their own are known "
            f"there, called {', '.join(DATA_AXES)}. Rename it if that is what it is, or pass mesh[{names[axis]!r}]"
        )
    return others


def choose_axis(mesh: Any) -> str | int:
    """The mesh axis that "auto" takes: the one that is named for experts, or the only one."""
    names = mesh.mesh_dim_names or ()
    for name in EXPERT_AXES:
        if name in names:
            return name
    if mesh.ndim == 1:
        return names[0] if names else 0
    raise DistributionError(
        f"the mesh has {mesh.ndim} axes and none is called 'ep'; name one 'ep' or pass plan=Plan(axis=...)"
    )

"""Where experts live and what a step is expected to send: the plan (its arithmetic is planner/traffic.py's)."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.planner.traffic import Bytes, RegionShape, expected_bytes

EXPERT_AXES = ("ep", "expert", "experts", "expert_parallel")  # names of a mesh axis that "auto" takes for experts
DATA_AXES = ("dp", "data", "data_parallel", "batch", "replicate", "dp_replicate")  # axes with a replica at each place


@dataclass
class Plan:
    """How the experts of one model are spread over a mesh.

    axis: the mesh axis, by name or number, over which expert parameters are split by their first axis.
    parameters: the split parameters, as their sources read in the captured graph, with (experts in all, on a rank).
    regions: the shapes of the expert regions, as far as they are known (sizes that vary from call to call are not).
    data_ranks: over so many ranks, beside those that share the experts, gradients of experts are averaged too.
    chunks: rows travel in so many, the exchange of one while another's experts compute (overlap.py); 1: nothing
    overlaps. ``moebius plan`` prints how many pay. The same on all ranks.
    """

    axis: str | int = 0
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    regions: list[RegionShape] = field(default_factory=list)
    ranks: int = 1  # set from the mesh
    data_ranks: int = 1  # likewise
    chunks: int = 1

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
            + f"; rows in {self.chunks} chunks" * (self.chunks > 1)
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
    if not isinstance(mesh, DeviceMesh):
        raise DistributionError(f"mesh={mesh!r:.60} is no DeviceMesh; torch.distributed's init_device_mesh makes one")
    if not isinstance(plan, Plan):
        if plan != "auto":
            raise DistributionError(f"plan={plan!r} is neither 'auto' nor a moebius.lowering.distribution.Plan")
        plan = Plan(axis=choose_axis(mesh))
    if type(plan.chunks) is not int or plan.chunks < 1:
        raise DistributionError(f"the plan's chunks={plan.chunks!r}: use a number of 1 or more")
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
        known = ", ".join(repr(names[i]) for i in range(mesh.ndim) if i == axis or names[i] in DATA_AXES)
        raise DistributionError(
            f"the mesh has {', '.join(unknown)} beside {names[axis]!r}; only axes with data of their own are known "
            f"there, called {', '.join(DATA_AXES)}. Rename it if that is what it is, or pass mesh[{known}]"
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

"""Puts experts on the ranks of a mesh: each experts operator becomes its expert-parallel form (distribution/)."""

from __future__ import annotations

from moebius.lowering.contract import Contract, Work

CONTRACT = Contract(
    name="placement",
    needs="a well-formed graph",
    promises="a well-formed graph of the same meaning on every rank; without a mesh, the same graph",
    run=lambda work: place_experts(work),
    wanted=lambda work: work.options.mesh is not None,
)


def place_experts(work: Work) -> None:
    """Hand the graph to distribution; lowered regions say over how many ranks they run."""
    from moebius.lowering import distribution  # torch.distributed is loaded only where a mesh is given

    work.gm = distribution.place(work.gm, work.options)
    ranks = work.gm.meta["plan"].ranks
    for region in work.regions:
        if region.lowered and ranks > 1 and (region.file, region.line) not in work.gm.meta["chosen"]:
            region.kernel = f"{region.kernel}, expert parallel over {ranks} ranks"

"""Lets exchanges of experts' rows run beside products: layers on ranks in chunks (distribution/overlap.py)."""

from __future__ import annotations

from torch import fx

from moebius.lowering.contract import Contract, Work, well_formed

CONTRACT = Contract(
    name="overlap",
    needs="a well-formed graph, in which a layer of experts on ranks is a dispatch, one operator, and a combine",
    promises="a well-formed graph of the same meaning, in which rows travel in the plan's number of chunks: the "
    "exchange of each is begun before the products of the one before, and what needs no results comes before the wait "
    "for them; exchanges stand in one order, the same on all ranks, as many for a rank without rows",
    promise=(well_formed, lambda gm: fault(gm)),
    run=lambda work: write_chunks(work),
    wanted=lambda work: chunks_of(work) > 1,
)


def chunks_of(work: Work) -> int:
    """Into how many the plan divides rows; 1 where there is none."""
    plan = work.gm.meta.get("plan")
    return 1 if plan is None else plan.chunks


def write_chunks(work: Work) -> None:
    """Into each layer, where there are ranks to send rows to."""
    from moebius.lowering.distribution import overlap  # torch.distributed is loaded only where a mesh is given

    overlap.write_chunks(work.gm, chunks_of(work))


def fault(gm: fx.GraphModule) -> str | None:
    """What is wrong with the pipelines of a graph."""
    from moebius.lowering.distribution import overlap

    return overlap.fault(gm)

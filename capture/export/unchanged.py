"""Whether what a capture took from its world is still so: a file holds the graph that the latest call ran.

Between that call and the export a model may have been put into evaluation mode, a parameter frozen, a number set: the
next captured call would see that, and run another graph.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ExportError
from ..guards.recorder import Fact
from ..hook import GuardProgram
from .residual import ResidualReader
from .world import Frozen, World

OF_NO_SLOT = ("dict", "class", "instance", "static_tensor", "function", "answers")


def refuse_changed(world: World, residual: ResidualReader) -> None:
    """ExportError if something that no argument leads to, and that the step does not set, has changed."""
    kept: list[tuple[Fact, tuple[Any, ...]]] = []
    for fact in world.guards.facts:
        check = about_world(world, residual, fact.check)
        if check is not None:
            kept.append((fact, check))
    checks = [check for _, check in kept]
    index = GuardProgram(0, (), slots_of(world, checks), checks).explain((), {})
    if index is not None:
        record = kept[index][0].record
        raise ExportError(
            f"{record.file}:{record.line}: the step relies on {record.source} {record.check}, not so any more: it "
            "was changed after the latest call. Call the step once more, then export it"
        )


def about_world(world: World, residual: ResidualReader, check: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The part of a check that is about the capture's world and not about what the step itself sets, if any."""
    kind, *rest = check
    if kind == "dict":
        the_dict, entries, keys = rest
        others = {key for owner, key in residual.written if owner == id(the_dict)}
        # what an optimizer has for a parameter that had no gradient yet is taken out of it between calls
        others |= {key for key in entries if isinstance(key, torch.Tensor) and key not in the_dict}
        return kind, the_dict, {k: v for k, v in entries.items() if k not in others}, None if others else keys
    if kind in OF_NO_SLOT:
        return check
    found = [world.slot(position) for position in parts_of(kind, rest)[0]]
    return check if all(isinstance(f, Frozen) and is_left(residual, f) for f in found) else None


def slots_of(world: World, checks: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The slots that the checks look into, the arguments that are the same at each call in their places; the others
    lead to nothing."""
    slots: list[tuple[Any, ...]] = [("const", None)] * len(world.guards.slots)
    pending = [p for kind, *rest in checks if kind not in OF_NO_SLOT for p in parts_of(kind, rest)[0]]
    while pending:
        position = pending.pop()
        slot = world.guards.slots[position]
        if slot[0] == "arg":
            slots[position] = ("const", world.bound[slot[1]])
            continue
        slots[position] = slot
        if slot[0] not in ("const", "weak"):
            pending += [slot[1], *slot[3:]]
    return slots


def parts_of(kind: str, rest: list[Any]) -> tuple[list[int], list[Any]]:
    """The slots that a check looks into, and its operands."""
    if kind == "python":
        return rest[1:], rest[:1]
    n_slots = {"distinct": len(rest), "same": 2}.get(kind, 1)
    return rest[:n_slots], rest[n_slots:]


def is_left(residual: ResidualReader, found: Frozen) -> bool:
    """Whether the step sets nothing on the way to it. (Gradients are guarded where the file is loaded.)"""
    return not any(place in residual.written or place[1] == "grad" for place in found.places)

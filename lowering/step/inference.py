"""``torch.inference_mode`` in a step: the operators between two marks run as the body of one node, in that mode.

An exception in the body leaves the mode, as it does in Python. While a step is captured, and while experts are lowered,
they are operators like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from moebius.lowering.contract import Contract, well_formed
from moebius.lowering.graph import code_of
from moebius.lowering.step.checkpoint import Marks, marked, outline_call, stretches, unpaired

CONTRACT = Contract(
    name="inference mode",
    needs="a well-formed graph in which inference mode is left before it is entered again",
    promises="a well-formed graph of the same meaning, without marks of inference mode",
    need=(well_formed, lambda gm: unpaired(gm.graph, MARKS, "inference modes")),
    promise=(well_formed, lambda gm: f"{marks[0]} is left" if (marks := marks_of(gm.graph)) else None),
    run=lambda work: outline_modes(work.gm),
    wanted=lambda work: bool(marks_of(work.gm.graph)),
)


def begin_inference() -> None:
    """Stands where inference mode is entered; does nothing."""


def end_inference() -> None:
    """Stands where it is left; does nothing."""


MARKS: Marks = (begin_inference, end_inference)


def in_inference_mode(body: fx.GraphModule, given: Sequence[Any], captures: Sequence[Any]) -> tuple[Any, ...]:
    """``body(*given, *captures)`` in inference mode."""
    with torch.inference_mode():
        return cast(tuple[Any, ...], code_of(body)(*given, *captures))


def marks_of(graph: fx.Graph) -> list[fx.Node]:
    """Where the mode is entered and left."""
    return marked(graph, MARKS)


def outline_modes(gm: fx.GraphModule) -> None:
    """What stands between two marks becomes the body of one ``in_inference_mode`` node."""
    for count, begin, inside, _ in stretches(gm, MARKS):
        outline_call(gm, inside, begin, f"inference_{count // 2}", in_inference_mode)


for _name in ("in_inference_mode", "begin_inference", "end_inference"):
    fx.wrap(_name)

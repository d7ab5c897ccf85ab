"""Packed sequences on fakes: torch's own fake of ``_pack_padded_sequence`` has as many rows as steps, and counts of the
data's dtype (torch 2.11 to 2.15), where the operator gives a row for each token, and integers; that of
``_pad_packed_sequence`` asks for the first count, and fails where only the running step knows it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.operators import read_call

from ..torch_facts import torch_private
from ..values.expert_numbers import unwritten
from ..values.weak_ids import WeakIds

SEQUENCES = WeakIds()  # counts (of rows at each step) -> how many sequences were packed


def like_packed(
    padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, and how many there are at each step, as many as the first (longest) sequence has."""
    rows = padded.flatten(0, 1).index_select(0, torch.repeat_interleave(lengths))
    counts = torch.repeat_interleave(lengths[:1])
    SEQUENCES[counts] = padded.shape[0 if batch_first else 1]
    return rows, counts


def like_padded(
    rows: torch.Tensor, counts: torch.Tensor, batch_first: bool, value: Any, steps: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences, steps first in memory, and their lengths, as many as there are rows at the first step."""
    sequences = SEQUENCES.get(counts)
    if sequences is None:
        sequences = torch.repeat_interleave(counts[:1]).shape[0]
    padded = rows[counts.new_zeros((steps, sequences), device=rows.device)]
    return padded.transpose(0, 1) if batch_first else padded, counts.new_empty((sequences,))


def sequences_of(node: fx.Node) -> Any:
    """How many sequences were packed, for a node that gives the count of rows at the first step; None for others: a
    layer makes its states for that many, and a classifier compares what they give with labels."""
    call = read_call(node)
    if call is None or call.name not in ("select", "getitem") or not unwritten(node) or not unwritten(call["input"]):
        return None
    counts = call["input"].meta["val"]
    first = all(type(index) is int and index == 0 for index in node.args[1:]) and not node.kwargs
    return SEQUENCES.get(counts) if first else None


def like_padded_rows(
    rows: Sequence[torch.Tensor], batch_first: bool = False, value: Any = 0.0, side: str = "right"
) -> torch.Tensor:
    """``pad_sequence`` of rows of several lengths: as long as the longest, whichever that is."""
    longest = functools.reduce(torch.sym_max, [one.shape[0] for one in rows])
    index = torch.zeros((longest,), dtype=torch.int64, device=rows[0].device)
    return torch.stack([one[index] for one in rows], 0 if batch_first else 1)


def like(function: Any, args: tuple) -> Callable[..., Any] | None:
    """What gives the operator's result on fakes, where torch's own fake does not, or asks which sequence is longest."""
    if function is torch_private.PAD_ROWS and is_kind(args[0], list | tuple) and args[0]:
        fakes: list[Any] = [getattr(one, "fake", None) for one in args[0]]
        first = fakes[0]
        alike = all(is_kind(f, torch.Tensor) and f.dim() and f.dtype is first.dtype for f in fakes)
        alike = alike and all(type(n) is int for f in fakes for n in f.shape[1:])
        fits = alike and len({f.shape[1:] for f in fakes}) == 1
        return like_padded_rows if fits and any(torch_private.is_symbolic(f.shape[0]) for f in fakes) else None
    return OPERATORS.get(function)


OPERATORS: dict[Any, Callable[..., Any]]
OPERATORS = {torch_private.PACK_PADDED: like_packed, torch_private.PAD_PACKED: like_padded}

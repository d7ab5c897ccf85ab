"""Packed sequences on fakes: torch's own fake of ``_pack_padded_sequence`` has as many rows as steps, and counts of the
data's dtype (torch 2.11 to 2.15), where the operator gives a row for each token, and integers; that of
``_pad_packed_sequence`` asks for the first count, and fails where only the running step knows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from moebius.lowering.operators import read_call

from ..torch_facts import torch_private
from ..values.expert_numbers import unwritten

SEQUENCES = WeakIdKeyDictionary()  # counts (of rows at each step) -> how many sequences were packed


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
    sequences = SEQUENCES[counts] if counts in SEQUENCES else torch.repeat_interleave(counts[:1]).shape[0]
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
    return SEQUENCES[counts] if first and counts in SEQUENCES else None


OPERATORS: dict[Any, Callable[..., Any]]
OPERATORS = {torch_private.PACK_PADDED: like_packed, torch_private.PAD_PACKED: like_padded}

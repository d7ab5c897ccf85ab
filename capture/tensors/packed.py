"""Packed sequences on fakes: torch's own fake of ``_pack_padded_sequence`` has as many rows as steps, and counts of the
data's dtype (torch 2.11 to 2.15), where the operator gives a row for each token, and integers."""

from __future__ import annotations

import torch

from ..torch_facts import torch_private

OPERATORS = frozenset({torch_private.PACK_PADDED})


def like_packed(
    padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, and how many there are at each step, as many as the first (longest) sequence has."""
    rows = torch.repeat_interleave(lengths)
    return padded.flatten(0, 1).index_select(0, rows), torch.repeat_interleave(lengths[:1])

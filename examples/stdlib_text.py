"""Text that every machine has: the source code of the Python that runs this file, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch


def batches(batch: int, length: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, the tokens that follow them), both int64 [batch, length] with values below 256."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator).tolist()
        rows = torch.stack([text[start : start + length + 1] for start in starts]).long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

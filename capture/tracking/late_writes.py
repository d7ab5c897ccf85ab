"""Writes into a dict at a key that only the running step knows: ``log[self.step] = loss``, ``log[f"loss/{n}"] = …``.

They are replayed in their order, after what was written under keys that tracing knows. Nobody can say any more which
other key the entry is, so a read of that dict later in the step is a graph break.
"""

from __future__ import annotations

from typing import Any

import torch

from .records import DICTS, Record
from .values import Break, RuntimeNumber


class LateWrites:
    """Part of ``Objects``."""

    owners: dict[int, Record]

    def writes_late(self, record: Record, key: Any) -> bool:
        """Whether ``record[key] = …`` waits for the running step. (Attributes and globals have names.)"""
        if record.late:
            return True
        unknown = type(key) is torch.SymInt or (isinstance(key, RuntimeNumber) and key.kind is str)
        return unknown and type(record.obj) in DICTS and id(record) not in self.owners

    def write_late(self, record: Record, key: Any, value: Any) -> None:
        record.late = [*(record.late or ()), (key, value)]

    def refuse_late(self, record: Record) -> None:
        """A graph break if the dict holds an entry whose key nobody knows."""
        if record.late:
            key = record.late[0][0]
            name = key if type(key) is torch.SymInt else "a text that the graph makes"
            raise Break(
                "dict read after a write at a number",
                f"{record.source.name} is read after the step wrote an entry at {name}",
                "read it before that write, or after the step",
            )

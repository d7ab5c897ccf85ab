"""Opcode handlers by family. A handler does stack and control work and calls one domain method per semantic operation."""
from __future__ import annotations

from . import calls, classes, containers, control, coroutines, exceptions, generators, intrinsics, match, names, operators, stack

__all__ = [
    "calls", "classes", "containers", "control", "coroutines", "exceptions", "generators", "intrinsics", "match",
    "names", "operators", "stack",
]  # fmt: skip

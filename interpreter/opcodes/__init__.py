"""Opcode handlers by family. A handler does stack and control work, and one domain method a semantic operation."""
from __future__ import annotations

from . import (
    calls,
    classes,
    containers,
    control,
    coroutines,
    exceptions,
    generators,
    intrinsics,
    match,
    names,
    operators,
    stack,
)

__all__ = [
    "calls", "classes", "containers", "control", "coroutines", "exceptions", "generators", "intrinsics", "match",
    "names", "operators", "stack",
]  # fmt: skip

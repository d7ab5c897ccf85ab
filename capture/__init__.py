"""moebius: captures whole MoE training steps from plain Python bytecode.

The front door: what users import. Names are resolved on first use, so that ``import moebius.interpreter`` imports no torch.
"""
from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

# public name -> module that defines it
EXPORTS = {
    "capture": "moebius.api",
    "explain": "moebius.api",
    "stats": "moebius.api",
    "reset": "moebius.api",
    "disable": "moebius.api",
    "mark_dynamic": "moebius.api",
    "MoebiusError": "moebius.errors",
    "GraphBreakError": "moebius.errors",
}
__all__ = [*EXPORTS, "__version__"]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        value = getattr(import_module(EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS})

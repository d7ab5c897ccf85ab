"""moebius: captures whole MoE training steps from plain Python bytecode.

The front door: what users import. Names are resolved on first use: ``import moebius.interpreter`` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers; at run time names are resolved below
    from .api import capture as capture
    from .api import disable as disable
    from .api import explain as explain
    from .api import mark_dynamic as mark_dynamic
    from .api import reset as reset
    from .api import stats as stats
    from .errors import ExportError as ExportError
    from .errors import GraphBreakError as GraphBreakError
    from .errors import GuardError as GuardError
    from .errors import LoadError as LoadError
    from .errors import MoebiusError as MoebiusError
    from .errors import NotCapturableError as NotCapturableError
    from .errors import OptionError as OptionError
    from .export.load import load as load

__version__ = "0.1.0"

# public name -> module that defines it
EXPORTS = {
    "capture": "moebius.api",
    "explain": "moebius.api",
    "stats": "moebius.api",
    "reset": "moebius.api",
    "disable": "moebius.api",
    "mark_dynamic": "moebius.api",
    "load": "moebius.export.load",
    "MoebiusError": "moebius.errors",
    "ExportError": "moebius.errors",
    "GuardError": "moebius.errors",
    "LoadError": "moebius.errors",
    "GraphBreakError": "moebius.errors",
    "NotCapturableError": "moebius.errors",
    "OptionError": "moebius.errors",
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

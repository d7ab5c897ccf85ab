"""moebius: captures whole MoE training steps from plain Python bytecode.

The front door: what users import. Names are resolved on first use: ``import moebius.interpreter`` imports no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from .versions import __version__

if TYPE_CHECKING:  # for type checkers; at run time names are resolved below
    from moebius.lowering.distribution import weigh_by_tokens as weigh_by_tokens

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
    from .errors import MoebiusWarning as MoebiusWarning
    from .errors import NotCapturableError as NotCapturableError
    from .errors import OptionError as OptionError
    from .errors import StateChangedError as StateChangedError
    from .export.load import load as load

# public name -> module that defines it
EXPORTS = {
    "capture": "moebius.api",
    "explain": "moebius.api",
    "stats": "moebius.api",
    "reset": "moebius.api",
    "disable": "moebius.api",
    "mark_dynamic": "moebius.api",
    "load": "moebius.export.load",
    "weigh_by_tokens": "moebius.lowering.distribution",
    "MoebiusError": "moebius.errors",
    "MoebiusWarning": "moebius.errors",
    "ExportError": "moebius.errors",
    "GuardError": "moebius.errors",
    "LoadError": "moebius.errors",
    "GraphBreakError": "moebius.errors",
    "NotCapturableError": "moebius.errors",
    "OptionError": "moebius.errors",
    "StateChangedError": "moebius.errors",
}
__all__ = [*EXPORTS, "__version__"]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        try:
            value = getattr(import_module(EXPORTS[name]), name)
        except Exception as error:  # (a torch that lacks a name may fail in any way)
            text = lacking()
            if text is None and not isinstance(error, AttributeError):
                raise
            from .errors import UnsupportedVersionError
            from .versions import works_on

            # (of an AttributeError an import statement says no more than that the name was not found)
            text = text or f"moebius cannot be imported: AttributeError: {error}. {works_on()}"
            raise UnsupportedVersionError(text) from error
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def lacking() -> str | None:
    """What this torch lacks, in one sentence, if that is why an import failed."""
    from .torch_facts.torch_names import missing
    from .versions import lacks

    try:
        import torch

        return lacks(names, torch.__version__) if (names := missing()) else None
    except Exception:  # no torch, or one that does not import: the first error says so
        return None


if folder := os.environ.get("MOEBIUS_DEBUGGER"):  # of ``moebius debug``
    import_module("moebius.lowering.debugger.rank").start(folder)


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS})

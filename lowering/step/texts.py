"""Text that only the running step knows, ``f"loss {loss.item():.4f}"``, and where it goes: nodes of the step.

A printed line stays where it stood, between the operators before and after it. Every argument is a flat operand, so
that fx sees which nodes a text is made of.
"""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Callable
from typing import Any

written = builtins.print  # Python's own, whatever a program that writes on one rank alone puts in its place
CONVERSIONS: dict[str, Callable[[Any], str]] = {"s": str, "r": repr, "a": ascii}


def formatted(value: Any, conversion: str, spec: str) -> str:
    """``f"{value!conversion:spec}"``."""
    return format(CONVERSIONS[conversion](value) if conversion else value, spec)


def joined(*parts: str) -> str:
    """An f-string's parts, or ``a + b``."""
    return "".join(parts)


def percent(text: str, *values: Any) -> str:
    """``text % values``."""
    return text % values


def warner(category: type[Warning], namespace: dict[str, Any], file: str, line: int) -> Callable[[str], None]:
    """``warnings.warn`` at a place of the user's program: the same entry in the registry of those shown once."""

    def warn(message: str) -> None:
        registry = namespace.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, file, line, namespace.get("__name__", "<string>"), registry)

    return warn


def log_line(logger: logging.Logger, level: int, file: str, line: int, function: str) -> Callable[..., None]:
    """``logger.log(level, message, *values)`` at a place of the user's program, where the level is on."""

    def log(message: str, *values: Any) -> None:
        logger.handle(logger.makeRecord(logger.name, level, file, line, message, values, None, function))

    return log


def say(file: Any, sep: str | None, end: str | None, flush: bool, *values: Any) -> None:
    """``print(*values)``, to a file, or to whatever ``sys.stdout`` is now."""
    written(*values, sep=sep, end=end, file=file, flush=flush)


def write(file: Any, text: str) -> None:
    """``file.write(text)``."""
    file.write(text)


def flush(file: Any) -> None:
    """``file.flush()``."""
    file.flush()

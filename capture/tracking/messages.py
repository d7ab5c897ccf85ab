"""What a step tells people: warnings as nodes of the graph, and log lines that nobody asked for as nothing."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moebius.lowering.step import texts

from ..hidden import MARK
from .texts import is_stream
from .values import Break

if TYPE_CHECKING:
    from .domain import TrackingDomain

AFTER = "it runs natively; the graph goes on after it"


class Messages:
    """Warnings and log lines of one trace."""

    def __init__(self, domain: TrackingDomain):
        self.domain = domain
        self.objects, self.tensors = domain.objects, domain.tensors
        methods = {
            "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR,
            "critical": logging.CRITICAL,
        }  # fmt: skip
        self.functions: dict[Any, Callable[..., Any]] = {
            getattr(logging.Logger, name): functools.partial(self.log, name, level) for name, level in methods.items()
        }
        self.functions[logging.Logger.isEnabledFor] = self.is_enabled

    # ------------------------------------------------------------------------------------------------------------------
    # Logging
    # ------------------------------------------------------------------------------------------------------------------

    def log(self, name: str, level: int, logger: Any, message: Any, *args: Any, **options: Any) -> None:
        """``logger.debug(message, …)``: nothing, where the level is off."""
        if self.is_enabled(logger, level):
            raise Break("function outside of the graph", f"logging.Logger.{name}", AFTER)

    def is_enabled(self, logger: Any, level: Any) -> bool:
        """``logger.isEnabledFor(level)``, asked again by a guard."""
        record = self.objects.record_of(logger)
        if record is None or not record.source.static or type(level) is not int:
            raise Break("function outside of the graph", "logging.Logger.isEnabledFor", AFTER)
        if type(logger).isEnabledFor is not logging.Logger.isEnabledFor:
            raise Break("function outside of the graph", f"{type(logger).__name__}.isEnabledFor", AFTER)
        self.objects.note("logging")
        enabled = logger.isEnabledFor(level)
        asked = functools.partial(logger.isEnabledFor, level)
        name = logging.getLevelName(level)
        self.objects.guards.answers(record.source.name, f"{name} is {'on' if enabled else 'off'}", (asked, enabled))
        return enabled

    # ------------------------------------------------------------------------------------------------------------------
    # Warnings
    # ------------------------------------------------------------------------------------------------------------------

    def warn(self, message: Any, category: Any = None, stacklevel: Any = 1, source: Any = None, **rest: Any) -> None:
        """``warnings.warn`` of a text, as a node at its place between the operators."""
        writer = self.tensors.writer
        if not self.tensors.whole_step or writer.scope.parent is not None or writer.recomputed:
            raise Break("warnings.warn", "in a loop over experts, a checkpointed call or for a foreign backend", AFTER)
        plain = isinstance(category, type | None) and type(stacklevel) is int and source is None and not rest
        if not (type(message) is str or self.tensors.texts.is_text(message)) or not plain:
            raise Break("warnings.warn", "of something that is no text", AFTER)
        if category is not None and not issubclass(category, Warning):
            raise Break("warnings.warn", "of a category that is none", AFTER)
        for known in (vars(warnings), warnings.filters):
            record = self.objects.records.get(id(known))
            if record is not None and record.changed:
                raise Break("warnings.warn", "after the step changed which warnings are shown", AFTER)
        if not are_shown_plainly():
            raise Break("warnings.warn", "warnings are shown by code that is not known", AFTER)
        self.tensors.guards.holds("warnings", "are shown by Python's own code", are_shown_plainly)
        self.objects.note("warning")
        frame = self.frame_of(stacklevel)
        line = frame.line or frame.code.co_firstlineno
        place = texts.warner(category or UserWarning, frame.globals, frame.code.co_filename, line)
        node = self.tensors.writer.node("call_function", place, (message,), {})
        node.meta["val"] = None

    def frame_of(self, stacklevel: int) -> Any:
        """The frame that a warning is said to come from (``setup_context`` in Python/_warnings.c)."""
        frame = self.domain.machine.frame
        for _ in range(stacklevel - 1):
            frame = None if frame is None else frame.back
        if frame is None or stacklevel < 1 or passed_over(frame.code.co_filename):
            raise Break("warnings.warn", f"of a caller outside of the step (stacklevel={stacklevel})", AFTER)
        return frame


def passed_over(file: str) -> bool:
    """Whether warnings pass over a frame: the import system's, and ours."""
    return "importlib" in file and "_bootstrap" in file or MARK in file


def are_shown_plainly() -> bool:
    """Whether showing a warning runs no code of the user's."""
    return getattr(warnings.showwarning, "__module__", "") == "warnings" and (
        sys.stderr is None or is_stream(sys.stderr)
    )

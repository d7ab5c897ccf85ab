"""What a step tells people: warnings and log lines as nodes of the graph, log lines that nobody asked for as nothing.

A log line is a node where all that it runs is Python's own: the loggers, the handlers of the standard library that
write to a stream or a file, and their formatters. A handler of the user's could do anything, and is a graph break.
"""

from __future__ import annotations

import functools
import itertools
import logging
import logging.handlers
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moebius.interpreter import is_kind, opened
from moebius.lowering.step import texts
from moebius.lowering.step.filters import recorders

from ..bytecode.hidden_frames import MARK
from ..heap.records import raw_dict
from ..tensors.graphs import ELSEWHERE
from ..values.numbers import Number
from ..values.values import ATOMS, Break
from .parts import Parts
from .texts import is_stream

AFTER = "it runs natively; the graph goes on after it"


class Messages:
    """Warnings and log lines of one trace."""

    def __init__(self, domain: Parts):
        self.domain = domain
        self.objects, self.tensors, self.writer = domain.objects, domain.tensors, domain.tensors.writer
        self.heap, self.guards, self.texts = self.objects.heap, self.objects.guards, self.tensors.texts
        self.class_dicts = self.objects.class_dicts
        self.recorded = bool(recorders())  # before the step enters any block
        methods = {
            "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR,
            "critical": logging.CRITICAL,
        }  # fmt: skip
        self.functions: dict[Any, Callable[..., Any]] = {
            getattr(logging.Logger, name): functools.partial(self.log, name, level) for name, level in methods.items()
        }
        self.functions[logging.Logger.log] = self.log_at
        self.functions[logging.Logger.isEnabledFor] = self.is_enabled

    # ------------------------------------------------------------------------------------------------------------------
    # Logging
    # ------------------------------------------------------------------------------------------------------------------

    def log(self, name: str, level: int, logger: Any, message: Any, *args: Any, **options: Any) -> None:
        """``logger.info(message, …)``: a node at its place between the operators; nothing, where the level is off."""
        if not self.is_enabled(logger, level):
            return
        what = f"logging.Logger.{name}"
        writer = self.tensors.writer
        if not (self.tensors.whole_step and writer.runs_at_most_once):
            raise Break(what, ELSEWHERE, AFTER)
        if options:
            raise Break(what, f"with {', '.join(options)}", AFTER)
        if not self.is_message(message, args):
            raise Break(what, "of values that are not plain", "log numbers, strings and tensors, by %s")
        if not is_logged_plainly(logger):
            raise Break(what, "a handler, filter or formatter is not Python's own", AFTER)
        asked = functools.partial(is_logged_plainly, logger)
        self.guards.holds(self.objects.need(logger).source.name, "logs by Python's own handlers", asked)
        own = logging.info.__code__.co_filename
        frame = next((one for one in opened(self.domain.frame) if one.code.co_filename != own), None)
        if frame is None or passed_over(frame.code.co_filename):
            raise Break(what, "of a caller outside of the step", AFTER)
        code = frame.code
        place = texts.log_line(logger, level, code.co_filename, frame.line or code.co_firstlineno, code.co_name)
        writer.call(place, message, *writer.with_sizes(args))

    def log_at(self, logger: Any, level: Any, message: Any, *args: Any, **options: Any) -> None:
        """``logger.log(level, message, …)``."""
        self.log("log", level, logger, message, *args, **options)

    def is_message(self, message: Any, args: tuple[Any, ...]) -> bool:
        """Whether ``message % args`` is a text that no code of the user's takes part in, and that can be made."""
        parts = self.texts
        if not args:
            return type(message) is str or parts.is_text(message)
        known = [type(v) in ATOMS or parts.is_part(v) or is_kind(v, Number) for v in args]
        if type(message) is not str or not all(known):
            return False
        words = [v.representative if is_kind(v, Number) else "" if parts.is_part(v) else v for v in args]
        words = [2 if type(v) is torch.SymInt else word for v, word in zip(args, words, strict=True)]
        try:
            message % tuple(words)  # (a tensor by %s; a line that cannot be made is an error message with a traceback)
        except (TypeError, ValueError):
            return False
        return True

    def is_enabled(self, logger: Any, level: Any) -> bool:
        """``logger.isEnabledFor(level)``, asked again by a guard."""
        record = self.objects.record_of(logger)
        if record is None or not record.source.static or type(level) is not int:
            raise Break("function outside of the graph", "logging.Logger.isEnabledFor", AFTER)
        if type(logger).isEnabledFor is not logging.Logger.isEnabledFor:
            raise Break("function outside of the graph", f"{type(logger).__name__}.isEnabledFor", AFTER)
        held = [self.objects.record_of(part) for part in (vars(sys), *read_by_logging(logger))]
        held += [own for cls, own in self.class_dicts.items() if cls.__module__.startswith("logging")]
        if any(one is not None and one.changed for one in held):
            raise Break("logging.Logger", "is used after the step changed how lines are logged", AFTER)
        self.heap.note("logging")
        enabled = logger.isEnabledFor(level)
        asked = functools.partial(logger.isEnabledFor, level)
        name = logging.getLevelName(level)
        self.guards.answers(record.source.name, f"{name} is {'on' if enabled else 'off'}", (asked, enabled))
        return enabled

    # ------------------------------------------------------------------------------------------------------------------
    # Warnings
    # ------------------------------------------------------------------------------------------------------------------

    def warn(self, message: Any, category: Any = None, stacklevel: Any = 1, source: Any = None, **rest: Any) -> None:
        """``warnings.warn`` of a text."""
        plain = is_kind(category, type | None) and type(stacklevel) is int and source is None and not rest
        if not (type(message) is str or self.texts.is_text(message)) or not plain:
            raise Break("warnings.warn", "of something that is no text", AFTER)
        if category is not None and not issubclass(category, Warning):
            raise Break("warnings.warn", "of a category that is none", AFTER)
        frame = self.frame_of(stacklevel)
        line = frame.line or frame.code.co_firstlineno
        self.say(message, category or UserWarning, frame.globals, frame.code.co_filename, line)

    def say(self, text: Any, category: type[Warning], namespace: dict[str, Any], file: str, line: int) -> None:
        """A warning as a node at its place between the operators."""
        if not self.tensors.runs_once:
            raise Break("warnings.warn", ELSEWHERE, AFTER)
        for known in (vars(warnings), warnings.filters):
            record = self.objects.record_of(known)
            if record is not None and record.changed:
                raise Break("warnings.warn", "after the step changed which warnings are shown", AFTER)
        if not are_shown_plainly():
            raise Break("warnings.warn", "warnings are shown by code that is not known", AFTER)
        self.guards.holds("warnings", "are shown by Python's own code", are_shown_plainly)
        kept = f"are {'' if self.recorded else 'not '}kept in a list"
        self.guards.holds("warnings", kept, functools.partial(are_recorded, self.recorded))
        self.heap.note("warning")
        self.writer.call(texts.warner(category, namespace, file, line), text)

    def frame_of(self, stacklevel: int) -> Any:
        """The frame that a warning is said to come from (``setup_context`` in Python/_warnings.c)."""
        frame = next(itertools.islice(opened(self.domain.frame), max(stacklevel - 1, 0), None), None)
        if frame is None or stacklevel < 1 or passed_over(frame.code.co_filename):
            raise Break("warnings.warn", f"of a caller outside of the step (stacklevel={stacklevel})", AFTER)
        return frame


def passed_over(file: str) -> bool:
    """Whether warnings pass over a frame: the import system's, and ours."""
    return "importlib" in file and "_bootstrap" in file or MARK in file


def up_from(logger: logging.Logger, to_the_root: bool = False) -> list[logging.Logger]:
    """The loggers whose handlers get the lines of this one; to_the_root: those that it may have its level from."""
    found, current = [], logger
    while current is not None:
        found.append(current)
        current = current.parent if current.propagate or to_the_root else None  # type: ignore[assignment]
    return found


def read_by_logging(logger: logging.Logger) -> Iterator[Any]:
    """The dicts and lists that logging a line may read."""
    yield vars(logging)
    handlers = [logging.lastResort]
    for one in up_from(logger, to_the_root=True):
        yield from (vars(one), one.handlers, one.filters, getattr(one, "_cache", None))
        handlers += one.handlers
    yield vars(logger.manager)
    for handler in handlers:
        formatter = getattr(handler, "formatter", None)
        yield from (getattr(handler, "filters", None), *map(raw_dict, (handler, formatter)))
        yield raw_dict(getattr(formatter, "_style", None))


def is_logged_plainly(logger: logging.Logger) -> bool:
    """Whether logging a line runs no code of the user's (``Logger._log`` in Lib/logging/__init__.py)."""
    loggers = up_from(logger)
    if logging.getLogRecordFactory() is not logging.LogRecord or logger.filters:
        return False
    if any(type(one) not in LOGGERS or not METHODS.isdisjoint(vars(one)) for one in loggers):
        return False
    handlers: list[logging.Handler | None] = [handler for one in loggers for handler in one.handlers]
    return all(map(is_plain_handler, handlers or [logging.lastResort]))


def is_plain_handler(handler: logging.Handler | None) -> bool:
    if handler is None:
        return True
    formatter = handler.formatter
    if type(handler) not in HANDLERS or handler.filters or not METHODS.isdisjoint(vars(handler)):
        return False
    if formatter is not None:
        clock = vars(formatter).get("converter", time.localtime)
        if type(formatter) is not logging.Formatter or clock not in (time.localtime, time.gmtime):
            return False
    if getattr(handler, "namer", None) is not None or getattr(handler, "rotator", None) is not None:
        return False
    stream = getattr(handler, "stream", None)
    return stream is None or is_stream(stream)


LOGGERS = frozenset((logging.Logger, logging.RootLogger))
HANDLERS = frozenset(
    (
        logging.StreamHandler,
        logging.FileHandler,
        logging.NullHandler,
        type(logging.lastResort),
        logging.handlers.RotatingFileHandler,
        logging.handlers.TimedRotatingFileHandler,
        logging.handlers.WatchedFileHandler,
    )
)
# What decides how a line is logged, if an object has one of its own
METHODS = frozenset(
    ("_log", "acquire", "callHandlers", "emit", "filter", "findCaller", "format", "handle", "handleError", "makeRecord",
     "release")
)  # fmt: skip


def are_recorded(then: bool) -> bool:
    """A guard: warnings are kept in a list, or not, as when the step was captured."""
    return bool(recorders()) is then


def are_shown_plainly() -> bool:
    """Whether showing a warning runs no code of the user's, and one list of filters decides in the whole process."""
    if getattr(sys.flags, "context_aware_warnings", False) or warnings.showwarning is not SHOWN_BY_PYTHON:
        return False
    return sys.stderr is None or is_stream(sys.stderr)


# What a block that records puts back (CPython 3.6 on); 3.14 has it in another module.
SHOWN_BY_PYTHON = warnings._showwarning_orig  # type: ignore[attr-defined]

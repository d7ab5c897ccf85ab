"""What capture does, as lines of ``logging``: ``moebius.breaks``, ``guards``, ``recompiles``, ``graphs``, ``experts``.

``MOEBIUS_LOGS=breaks,recompiles`` shows those lines on stderr. Without it they are off, so that a program whose own
logging shows lines of level INFO prints what it printed; ``logging.getLogger("moebius").setLevel("INFO")`` sends them
there.
"""

from __future__ import annotations

import logging
import os
import sys
import types
import warnings

from ..bytecode.user_code import is_library
from ..errors import MoebiusWarning
from ..guards.sources import as_written
from ..trace.segment import Segment
from .recompiles import shown

NAMES = ("breaks", "guards", "recompiles", "graphs", "experts")
OURS = logging.getLogger("moebius")
LOGGERS = {name: logging.getLogger(f"moebius.{name}") for name in NAMES}


def switch_on(wanted: str) -> None:
    """Show the lines of these loggers, named with commas between them; "all" is each of them."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    names = [*NAMES] if names == ["all"] else names
    if unknown := [name for name in names if name not in LOGGERS]:
        known = ", ".join(NAMES)
        text = f"MOEBIUS_LOGS: there is no {', '.join(unknown)}; there are {known}, and all"
        warnings.warn(text, MoebiusWarning, stacklevel=2)
    for name in names:
        if name in LOGGERS:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            LOGGERS[name].addHandler(handler)
            LOGGERS[name].setLevel(logging.INFO)
            LOGGERS[name].propagate = False


def warn(text: str) -> None:
    """A warning of ours at the user's line: that of the innermost frame outside of libraries and capture."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    assert frame is not None
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    where = frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<unknown>")
    warnings.warn_explicit(text, MoebiusWarning, *where, registry)


def log_capture(captured: types.FunctionType, segment: Segment) -> None:
    """What a new capture of a function is."""
    function, graph, stopped = captured.__qualname__, segment.captured, segment.graph_break
    if graph is not None and LOGGERS["graphs"].isEnabledFor(logging.INFO):
        count = graph.operations
        LOGGERS["graphs"].info("%s: %d operation%s from %s:%d, %.3g s", function, count, "s" * (count != 1),
                               graph.file, graph.line, segment.seconds)  # fmt: skip
    if stopped is not None:
        LOGGERS["breaks"].info("%s: [%s] %s:%d: %s: %s; %s", function, stopped.code, stopped.file, stopped.line,
                               stopped.reason, stopped.detail, stopped.hint)  # fmt: skip
    for region in segment.regions:
        became = f"one operator ({region.kernel})" if region.lowered else f"a loop: {region.refusal}"
        LOGGERS["experts"].info("%s: %s:%d: %s", function, region.file, region.line, became)
    if LOGGERS["guards"].isEnabledFor(logging.INFO):
        for guard in shown(segment.guards, captured.__code__):
            LOGGERS["guards"].info("%s: %s (%s:%d)", function, as_written(f"{guard.source} {guard.check}"), guard.file,
                                   guard.line)  # fmt: skip


def log_recompile(function: str, change: str, file: str, line: int, hint: str) -> None:
    """Why it is captured again."""
    LOGGERS["recompiles"].info("%s: %s (%s:%d); %s", function, change, file, line, hint)


if OURS.level == logging.NOTSET:
    OURS.setLevel(logging.WARNING)
switch_on(os.environ.get("MOEBIUS_LOGS", ""))

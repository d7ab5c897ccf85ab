"""Tracebacks of exceptions that are raised and handled while tracing: the user's frames, and none of capture's."""

from __future__ import annotations

from types import TracebackType

from moebius.interpreter.tracebacks import GET_TRACEBACK, SET_TRACEBACK, places_of


def leave_out_ours(error: BaseException) -> None:
    """Take the entries of capture's own frames out of the exception's traceback."""
    entries, place = [], GET_TRACEBACK(error)
    while place is not None:
        if not str(place.tb_frame.f_globals.get("__name__", "")).startswith("moebius."):
            entries.append(place)
        place = place.tb_next
    found: TracebackType | None = None
    for entry in reversed(entries):
        if entry.tb_next is not found:
            entry = TracebackType(found, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        found = entry
    SET_TRACEBACK(error, found)


def kept(error: BaseException) -> TracebackType | None:
    """The exception's traceback as a constant, which holds nothing of the trace."""
    leave_out_ours(error)
    return places_of(GET_TRACEBACK(error))

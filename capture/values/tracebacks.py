"""Tracebacks of exceptions that are raised and handled while tracing: the user's frames, and none of capture's."""

from __future__ import annotations

from types import TracebackType

from moebius.interpreter.tracebacks import GET_TRACEBACK, SET_TRACEBACK, entries_of, linked, places_of


def leave_out_ours(error: BaseException) -> None:
    """Take the entries of capture's own frames out of the exception's traceback."""
    entries = entries_of(GET_TRACEBACK(error))
    SET_TRACEBACK(error, linked([entry for entry in entries if not module_of(entry).startswith("moebius.")]))


def module_of(entry: TracebackType) -> str:
    """The name of the module whose code runs there."""
    return str(entry.tb_frame.f_globals.get("__name__", ""))


def kept(error: BaseException) -> TracebackType | None:
    """The exception's traceback as a constant, which holds nothing of the trace."""
    leave_out_ours(error)
    return places_of(GET_TRACEBACK(error))

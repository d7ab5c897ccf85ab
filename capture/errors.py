"""What moebius raises. Each error names the file and the line where it has them, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report.records import GraphBreak


class MoebiusError(Exception):
    """Base of every error that moebius itself raises."""


class MoebiusWarning(UserWarning):
    """Category of what capture warns of, for ``warnings.filterwarnings`` (idle ranks and damaged tile shapes, which are
    told below capture, are a UserWarning). Where a filter makes it an error, the call that it is about raises it: where
    the call begins, or where it goes on after a graph break."""


class OptionError(MoebiusError, ValueError):
    """An option of ``capture`` or ``explain`` that does not exist, or a value it cannot take."""


class NotCapturableError(MoebiusError, TypeError):
    """``capture`` was given something that cannot be called, or that cannot be captured at all."""


class UnsupportedVersionError(MoebiusError, ImportError):
    """This Python or this torch is not one that moebius was checked on."""


class GraphBreakError(MoebiusError):
    """``fullgraph=True``, and a graph break was needed. ``graph_break`` is the record of it."""

    def __init__(self, graph_break: GraphBreak):
        self.graph_break = graph_break
        b, line = graph_break, graph_break.excerpt
        shown = "" if line is None else f"    {line.text}\n    {line.underline}\n"
        super().__init__(
            f"{b.file}:{b.line} in {b.function}: [{b.code}] {b.reason}: {b.detail} [{b.instruction}]\n{shown}"
            f"  hint: {b.hint}\n  fullgraph=True asks for one graph; without it the graph breaks here and goes on."
        )


class MeshError(MoebiusError):
    """``mesh=`` was given, and what the function trains cannot be trained by several ranks together."""


class ExportError(MoebiusError):
    """This capture cannot be written to a file; the text says what stands against it and what to do."""


class LoadError(MoebiusError):
    """This file is no exported step, or it is damaged, or it needs what this torch does not have. Nothing of it ran."""


class GuardError(MoebiusError):
    """A loaded step was called with what it was not captured for. ``guard`` is the text of the guard that failed."""

    def __init__(self, guard: str, found: str):
        self.guard, self.found = guard, found
        super().__init__(
            f"the loaded step cannot run this call: {guard}; found {found}\n"
            "  hint: capture and export the step again for such calls; nothing has run and no state has changed"
        )


class StateChangedError(MoebiusError, RuntimeError):
    """A backward that the caller of a captured function ran: what it reads (an attribute, a method, a switch of
    torch's) was changed since the call. No gradient was computed of it. From the next call on its function runs
    natively."""


class CaptureInternalError(MoebiusError):
    """moebius itself failed while capturing. The call was run natively instead."""

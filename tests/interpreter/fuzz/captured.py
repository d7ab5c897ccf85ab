"""The same programs through @capture: `main` is captured, what it calls is traced into.

Compared are the result, the exception with its chain and the lines of its traceback, the printed output and the log.
Left out, since capture does not promise them: columns; how many entries of one function stand in a row (a resume
function has its own); when objects die (a graph, a guard or a resume function may hold them longer); and whether an
unbound variable is a local or a free one (in a resume function a cell is a free variable).
"""

from __future__ import annotations

import re
import traceback

import moebius
import torch

from .compare import Outcome, TooLong, compiled, cpu_limit, native_outcome, outcome

CAPTURED_SECONDS = 120.0  # of CPU time: tracing and compiling included
NAMES = {"tensor": torch.tensor}
ENTRY = r"'?<*\w+>?[: ](?:\d+|None)(?: \d+ \d+>')?(?: columns (?:\([^)]*\)|None))?"
ENTRIES = re.compile(rf"\[({ENTRY}(?:, {ENTRY})*)\]")
PLACE = re.compile(r"(<?\w+>?)[: ](\d+|None)(?: \d+ \d+>')?(?: columns (?:\([^)]*\)|None))?")
UNBOUND = re.compile(
    r"\('(?:UnboundLocalError|NameError)', '\(\"cannot access (?:local|free) variable \\?'(\w+)\\?' where .*?"
    r"\", ?\)', \[.*?\], None, (?:None|'\w+'),"
)


def drive_captured(code, namespace):  # type: ignore[no-untyped-def]
    exec(code, namespace)
    return moebius.capture(namespace["main"])()


def lines_only(entries: re.Match[str]) -> str:
    """One entry for each run of entries of the same function: the line of the innermost."""
    kept: list[list[str]] = []
    for name, line in PLACE.findall(entries[1]):
        if kept and kept[-1][0] == name:
            if line != "None":
                kept[-1][1] = line
        else:
            kept.append([name, line])
    return "[" + ", ".join(f"{name}:{line}" for name, line in kept) + "]"


def comparable(found: Outcome) -> Outcome:
    def text(entry: str) -> str:
        return ENTRIES.sub(lines_only, UNBOUND.sub(r"unbound \1", entry))

    found = found.without_deaths()
    return Outcome(found.result, found.error and text(found.error), [text(entry) for entry in found.log], found.printed)


def difference_captured(source: str, native: Outcome | None = None) -> str | None:
    """'' where the program does the same plain and captured, None where it says nothing, else what differs."""
    code = compiled(source)
    if native is None:
        native = native_outcome(code, NAMES)
    if native is None:
        return None
    try:
        with cpu_limit(CAPTURED_SECONDS):
            captured = outcome(drive_captured, code, NAMES)
    except TooLong:
        return "the captured program does not end"
    except BaseException as error:  # no program's own: those are in the outcome
        return "capture fails: " + "".join(traceback.format_exception(error)[-4:])
    finally:
        moebius.reset()
    if captured.error is not None and "MoebiusError" in captured.error:
        return f"capture fails: {captured.error}"
    return comparable(native).difference(comparable(captured)).replace("interpreted", "captured")

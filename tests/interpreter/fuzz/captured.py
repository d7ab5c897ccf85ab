"""The same programs through @capture: `main` is captured, what it calls is traced into.

Compared are the result, the exception with its chain, the printed output and the log.
Left out, since capture does not promise them: tracebacks (an exception that a graph break outlives shows the `def` of
its function, and what was inlined has no entry); when objects die (a graph, a guard or a resume function may hold them
longer); whether an unbound variable is a local or a free one (in a resume function a cell is a free variable); and the
names that a resume function has for half-built expressions, where locals() shows them.
"""

from __future__ import annotations

import re
import sys
import traceback

import torch

import moebius

from .compare import Outcome, TooLong, compiled, native_outcome, outcome

# frames: some loops with graph breaks in them go on in a frame of their own each iteration (docs/fuzzing.md)
ROOM = 4000
CAPTURED_SECONDS = 120.0  # of CPU time: tracing and compiling included
NAMES = {"tensor": torch.tensor}
ENTRY = r"'<*[\w ]+>?'|'?<*[\w ]+>?[: ](?:\d+|None)(?: \d+ \d+>')?(?: columns (?:\([^)]*\)|None))?"
ENTRIES = re.compile(rf"\[(?:{ENTRY})(?:, (?:{ENTRY}))*\]")
# what Guard logs of a traceback: the line where it is left
EXIT_LINE = re.compile(r"^(exit:.*), (?:\d+|None)\)$", re.DOTALL)
# On 3.13 a comprehension over a variable that inner functions share makes an unset one a NameError behind a break
# (docs/soundness.md): `bytecode` does not read that code back. Before, it is told apart.
UNBOUND = re.compile(
    r"(?:UnboundLocalError|NameError)(\W.{,9})cannot access (?:local|free) variable (\\*)'(\w+)\\*' "
    r"where it is not associated with a value(?: in enclosing scope)?"
)
UNBOUND_NAME = re.compile(r"(unbound (\w+).{,20}\[\], (?:None|\[\]), )(?:None|'\2')")
# a tensor's hash is its address: with one in it, a set has another order each time
TENSOR_SETS = re.compile(r"\{([^{}:]*tensor\([^{}:]*)\}")


def drive_captured(program, namespace):  # type: ignore[no-untyped-def]
    for code in program:
        exec(code, namespace)
    return moebius.capture(namespace["main"])()


def as_one(entry: str) -> str:
    """The two errors for a variable that is not set, as one."""
    plain = UNBOUND_NAME.sub(r"\1'\2'", UNBOUND.sub(r"UnboundError\1unbound \3", entry))
    return re.sub("'(UnboundLocalError|NameError)'", "'UnboundError'", plain) if "UnboundError" in plain else plain


def comparable(found: Outcome) -> Outcome:
    def text(entry: str) -> str:
        entry = EXIT_LINE.sub(r"\1)", ENTRIES.sub("[]", entry))
        entry = TENSOR_SETS.sub(lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", entry)
        return entry if sys.version_info < (3, 13) else as_one(entry)

    found = found.without_deaths()
    return Outcome(found.result, found.error and text(found.error), [text(entry) for entry in found.log], found.printed)


def difference_captured(source: str, native: Outcome | None = None) -> str | None:
    """'' where the program does the same plain and captured, None where it says nothing, else what differs."""
    program = compiled(source, shared=False)
    if native is None:
        native = native_outcome(program, NAMES)
    if native is None:
        return None
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, ROOM))
    try:
        captured = outcome(drive_captured, program, CAPTURED_SECONDS, NAMES)
    except TooLong:
        return "the captured program does not end"
    except BaseException as error:  # no program's own: those are in the outcome
        return "capture fails: " + "".join(traceback.format_exception(error)[-4:])
    finally:
        sys.setrecursionlimit(limit)
        moebius.reset()
    if captured.error is not None and "MoebiusError" in captured.error:
        return f"capture fails: {captured.error}"
    return comparable(native).difference(comparable(captured)).replace("interpreted", "captured")

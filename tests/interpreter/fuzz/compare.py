"""The oracle: what a program did, as plain data, natively and interpreted.

Compared are the result, the exception (type, arguments, notes, name, cause, context, suppression, a group's members and
the traceback's functions, lines and columns), the printed output, and the log of all effects in order.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import re
import signal
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from .prelude import ALWAYS, ORDER, PIECES, split

PROGRAM = "<program>"
NATIVE_SECONDS = 2.0  # of CPU time. A program takes a few milliseconds; one that takes longer says nothing
INTERPRETED_SECONDS = 60.0


class TooLong(BaseException):
    """The program did not end within its CPU time."""


@dataclass
class Outcome:
    """What a program did; two are equal where the program did the same."""

    result: Any
    error: Any
    log: list[str]
    printed: str
    keeps_exceptions: bool = False

    def without_deaths(self) -> Outcome:
        """An exception that outlives its handler keeps the frames of its traceback alive, and their variables. In an

        interpreted traceback those are the variables of the frames that ended with it, not of the one that caught it:
        there, when an object dies is not compared.
        """
        log = [entry for entry in self.log if not entry.startswith(("del ", "finalized"))]
        return Outcome(self.result, self.error, log, self.printed)

    def difference(self, other: Outcome) -> str:
        """The first thing in which `other` differs from self, or ''."""
        if other.log != self.log and self.keeps_exceptions:
            return self.without_deaths().difference(other.without_deaths())
        for number, (ours, theirs) in enumerate(zip(self.log, other.log, strict=False)):
            if ours != theirs:
                return f"log entry {number}\n  native:      {ours}\n  interpreted: {theirs}"
        if len(self.log) != len(other.log):
            longer = self.log if len(self.log) > len(other.log) else other.log
            which = "native" if longer is self.log else "interpreted"
            return f"only {which} logs {longer[min(len(self.log), len(other.log))]}"
        for part in ("result", "error", "printed"):
            if getattr(self, part) != getattr(other, part):
                return f"{part}\n  native:      {getattr(self, part)}\n  interpreted: {getattr(other, part)}"
        return ""


# Where 3.11 has fused a load with the instruction before it, an unbound variable is reported at that instruction.
superinstructions = sys.version_info < (3, 12)


def describe(error: Any, seen: tuple[int, ...] = ()) -> Any:
    """An exception as data. Generated programs call this as well, so it is plain Python that an interpreter runs."""
    if not isinstance(error, BaseException) or id(error) in seen:
        return None if error is None else "seen"
    seen = (*seen, id(error))
    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == "<program>":
            places.append(f"<{code.co_name} {trace.tb_lineno} {trace.tb_lasti} {code.co_firstlineno}>")
        trace = trace.tb_next
    if superinstructions and isinstance(error, UnboundLocalError):
        places = [place.split(" ")[0].strip("<") for place in places]
    group = [describe(inner, seen) for inner in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    return (
        type(error).__name__,
        repr(error.args),
        places,
        getattr(error, "__notes__", None),
        getattr(error, "name", None) if isinstance(error, (NameError, AttributeError, ImportError)) else None,
        error.__suppress_context__,
        describe(error.__cause__, seen),
        describe(error.__context__, seen),
        group,
    )


Program = tuple[CodeType, ...]  # the pieces of the prelude that it uses, then its own code


def drive(program: Program, namespace: dict[str, Any]) -> Any:
    """Run a program: its module body, then its main()."""
    for code in program:
        exec(code, namespace)
    return namespace["main"]()


# Objects hash by their address: with one in it, a set has another order each time.
ADDRESSED_SET = re.compile(r"\{([^{}:]* at 0x[0-9a-f]+>[^{}:]*)\}")


def steady(text: str) -> str:
    text = ADDRESSED_SET.sub(lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", text)
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """TooLong after so much CPU time of this process, or where it waits for something six times as long.

    A program may swallow a TooLong (an `__exit__` that does, a `__del__`): another comes every half second, and one at
    the end in any case. Only the main thread may use it.
    """
    active, expired = True, False

    def stop(number: int, frame: Any) -> None:
        nonlocal expired
        if active:
            expired = True
            raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop), signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.5)
    signal.setitimer(signal.ITIMER_REAL, 6 * seconds, 0.5)
    try:
        yield
    finally:
        active = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGVTALRM, before[0])
        signal.signal(signal.SIGALRM, before[1])
        if expired:
            raise TooLong from None


def outcome(
    run: Callable[[Program, dict[str, Any]], Any],
    program: Program,
    seconds: float,
    names: dict[str, Any] | None = None,
) -> Outcome:
    """Run `run(program, namespace)`, which drives the program; what it did. `names`: more that it may use.

    Raises TooLong where the program takes more than `seconds` of CPU time.
    """
    log: list[Any] = []
    namespace: dict[str, Any] = {"__name__": "program", "log": log, "describe": describe, **(names or {})}
    printed, warned = io.StringIO(), io.StringIO()
    result, error = None, None
    collects = gc.isenabled()
    gc.disable()  # when a cycle is collected is not the program's doing
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(warned), quiet_unraisable(log):
            try:
                with cpu_limit(seconds):
                    result = steady(repr(run(program, namespace)))
            except TooLong:
                raise
            except BaseException as raised:
                if type(raised).__name__ in ("InterpreterError", "KeyboardInterrupt"):
                    raise
                try:
                    error = steady(repr(describe(raised)))
                except Exception as failed:  # the program's own __repr__ of what it raised with
                    error = f"{type(raised).__name__}, whose description raises {type(failed).__name__}"
            entries = [steady(str(entry)) for entry in log]  # before the namespace dies, whose order is not defined
    finally:
        if collects:
            gc.enable()
    functions: dict[tuple[str, int], list[CodeType]] = {}

    def place(found: re.Match[str]) -> str:
        name, line, offset, first = found[1], int(found[2]), int(found[3]), int(found[4])
        if not functions:
            functions.update(functions_of(program))
        codes = functions.get((name, first), [])
        if len(codes) == 1 and 0 <= offset // 2 < len(codes[0].co_code) // 2:  # a resume function is longer
            return f"{name}:{line} columns {next(itertools.islice(codes[0].co_positions(), offset // 2, None))}"
        return f"{name}:{line}"

    positioned = [PLACE.sub(place, entry) for entry in entries]
    return Outcome(result, error and PLACE.sub(place, error), positioned, steady(printed.getvalue()))


PLACE = re.compile(r"'<(<?\w+>?) (\d+) (-?\d+) (\d+)>'")


def functions_of(program: Program) -> dict[tuple[str, int], list[CodeType]]:
    """(function's name, first line) -> its code objects: from them, an offset's line and columns.

    Offsets themselves say too much: whether one points at a call or at its inline cache is CPython's own affair.
    """
    found: dict[tuple[str, int], list[CodeType]] = {}
    *pieces, own = program
    pending = [own, *(const for piece in pieces for const in piece.co_consts if isinstance(const, CodeType))]
    while pending:
        inner = pending.pop()
        found.setdefault((inner.co_name, inner.co_firstlineno), []).append(inner)
        pending += [const for const in inner.co_consts if isinstance(const, CodeType)]
    return found


@contextlib.contextmanager
def quiet_unraisable(log: list[Any]) -> Iterator[None]:
    """Exceptions out of __del__ and of closing generators go to the log, not to the screen."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: log.append(f"unraisable {unraisable.exc_type.__name__}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # coroutines that were never awaited, and syntax that looks wrong
            yield
    finally:
        sys.unraisablehook = before


def compiled(source: str, shared: bool = True) -> Program:
    """The program's code. With `shared`, a piece of the prelude is the same code object in all programs that use it.

    A line of the program's own is where it stands in `source`; the pieces have lines of their own, far below.
    """
    names, own = split(source) if shared else ([], source)
    return *(piece_code(name) for name in names), code_of(own, source.count("\n") - own.count("\n"))


@functools.cache
def piece_code(name: str) -> CodeType:
    return code_of(PIECES[name], 10_000 + 200 * ORDER.index(name)) if name else code_of(ALWAYS, 9_000)


def code_of(text: str, lines_above: int) -> CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile("\n" * lines_above + text, PROGRAM, "exec", dont_inherit=True)


def native_outcome(program: Program, names: dict[str, Any] | None = None) -> Outcome | None:
    """What the program does natively; None where it took too long or went to the recursion limit."""
    try:
        found = outcome(drive, program, NATIVE_SECONDS, names)
    except TooLong:
        return None
    deep = "RecursionError" in str(found.error) or any("RecursionError" in entry for entry in found.log)
    return None if deep else found


def interpreted_outcome(program: Program, checks: bool = True, seconds: float = INTERPRETED_SECONDS) -> Outcome:
    """What the program does interpreted, with each step's stack effect checked. Raises InterpreterError and TooLong."""
    from moebius.interpreter import interpret
    from moebius.interpreter.machine import CHECKS

    before, CHECKS.on = CHECKS.on, checks
    try:
        return outcome(interpret(drive), program, seconds)
    finally:
        CHECKS.on = before


def checked(source: str) -> bool:
    """Whether the program runs with each step's stack effect checked. That is another loop of the machine: half do."""
    return bool(zlib.crc32(source.encode()) & 1)


def difference(
    source: str, native: Outcome | None = None, checks: bool | None = None, seconds: float = INTERPRETED_SECONDS
) -> str | None:
    """'' where the program does the same both ways, None where it says nothing, else what differs."""
    program = compiled(source)
    if checks is None:
        checks = checked(source)
    if native is None:
        native = native_outcome(program)
    if native is None:
        return None
    try:
        interpreted = interpreted_outcome(program, checks, seconds)
    except TooLong:
        return "the interpreted program does not end"
    except BaseException as error:
        if type(error).__name__ != "InterpreterError":
            raise
        return f"InterpreterError: {error}"
    native.keeps_exceptions = KEPT.search(source) is not None
    found = native.difference(interpreted)
    return None if found and depends_on_depth(program, native) else found


def depends_on_depth(program: Program, native: Outcome) -> bool:
    """Whether the program goes to the recursion limit and catches that: natively it does other things with another."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 100)
    try:
        other = native_outcome(program)
    finally:
        sys.setrecursionlimit(limit)
    return other is not None and native.difference(other) != ""


KEPT = re.compile(r"(except.* as (?!error)|\w+ = error\b|error\.__)")

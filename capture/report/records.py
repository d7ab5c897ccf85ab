"""The records that a report is made of. Capture writes them; the report, ``stats`` and the command line read them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..bytecode.expressions import Excerpt
from ..guards.sources import as_written
from .codes import FAKE_RAISES, UNRAISED, code_of

if TYPE_CHECKING:
    from .edits import Edit

FAKES = "a fake of torch"  # whose word it was that the step raises
# How an instruction or a line ran, from best to weakest: a graph stands for it, Python ran it for a call that the graph
# makes, Python ran it.
WAYS = ("captured", "opaque", "native")
OWNER = re.compile(r"what the graph break left|L\['[^']+'\]|G\([\w.]+\)(\['\w+'\])?|[\w.]+(?![\w.(])")
LIBRARY = re.compile(r"G\((moebius|torch)\b|builtins|sys\.modules|torch\b|moebius\b")
CODE = "code and defaults unchanged"
LIBRARIES = "torch and Python's builtins"


@dataclass
class GraphBreak:
    """One place where capture had to stop a graph and let Python run natively.

    reason: short, stable name of the kind of break. detail: what exactly was met there. hint: what the user can do.
    file, line, function: the user's innermost line. instruction: opcode name and argument.
    stack: the user's call stack, outermost first, as (file, line, function). cost_us: what the native part takes in a
    call, in microseconds: the median of its newest runs without a report. Where there were none, what it took in the
    call that is reported; None before it ran. excerpt: the user's line with the expression in it, where the source is
    known. origins: of the variables in that expression, where their values come from.
    """

    reason: str
    detail: str
    hint: str
    file: str
    line: int
    function: str
    instruction: str
    stack: tuple[tuple[str, int, str], ...] = ()
    cost_us: float | None = None
    excerpt: Excerpt | None = None
    origins: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """"MB012": the kind of break, for good; ``moebius help MB012`` says what it means and what to change."""
        return code_of(self.reason).name

    @property
    def edit(self) -> Edit | None:
        """The user's line as it could be, without the break and with the same results; None where none is known."""
        from .edits import edit_of  # (which imports torch)

        return edit_of(self.reason, self.detail, self.excerpt)

    def did_not_come(self, by: str) -> None:
        """Python has raised nothing here: the exception was an error of capture's own, or of torch's fakes."""
        if self.reason == "exception":
            own, self.detail = by != FAKES, f"Python raises nothing where {by} told that {self.detail}"
            self.reason = UNRAISED if own else FAKE_RAISES
            self.hint = "a bug of moebius, which changes no result: please report it" if own else "it runs natively"


def counted(breaks: list[GraphBreak]) -> list[tuple[GraphBreak, int]]:
    """Breaks of one cause (the same thing at the same line: in each iteration of a loop, or at each layer) as one that
    has the sum of their costs, and how many they are; the dearest first. What runs natively after one that stands in a
    call holds what runs after the same one there."""
    alike: dict[tuple[str, str, str, int], list[GraphBreak]] = {}
    for item in breaks:
        alike.setdefault((item.reason, item.detail, item.file, item.line), []).append(item)
    found = []
    for items in alike.values():
        stacks = {item.stack for item in items}
        outer = [one for one in stacks if any(one[-len(inner) :] == inner for inner in stacks - {one, ()})]
        costs = [item.cost_us for item in items if item.cost_us is not None and item.stack not in outer]
        found.append((replace(items[0], cost_us=sum(costs) if costs else None), len(items)))
    return sorted(found, key=lambda each: -(each[0].cost_us or 0.0))


@dataclass
class Guard:
    """One fact that a captured graph relies on.

    source: how the checked object is reached, e.g. ``L['model'].config.num_experts``. check: the fact in words.
    file, line: the user's line that relied on it. cost_ns: measured time of one check in nanoseconds, its share
    of a call: they sum to what all checks of a call take.
    """

    source: str
    check: str
    file: str
    line: int
    cost_ns: float | None = None

    @property
    def owner(self) -> str:
        """What it is reported with: an argument, a global, an optimizer's state, the libraries."""
        if self.check == CODE:
            return "the code of functions that it calls"
        if LIBRARY.match(self.source):
            return LIBRARIES
        found = OWNER.match(self.source)
        path = found is not None and self.source[found.end() :][:1] in ("", ".", "[")
        name = found.group() if found is not None and path else self.source  # (an expression, or several, is one owner)
        return f"{name} state" if self.source.startswith((f"{name}.state[", f"{name}.state.")) else name


@dataclass
class Recompile:
    """Why a call was captured again: the guard that failed, what it expected, what it met; the user's line that read
    it.

    hint: what one can do. entries: of each older capture, newest first, the first guard that failed. Where there are
    several, ``guard`` is that of the capture that fitted best. call: which of the calls it was, from 1.
    """

    guard: str
    old: str
    new: str
    file: str
    line: int
    hint: str = ""
    entries: tuple[str, ...] = ()
    call: int = 0

    @property
    def change(self) -> str:
        """``it % 4 == 0 was False, is True (it is 4)``, as the user's program names it."""
        if self.guard == "graph break" and self.new == "none":
            return f"the graph break ({self.old}) was not met again"
        if self.guard == "branch on data":
            return f"{self.guard}: the capture {self.old}, the data {self.new}"
        return as_written(f"{self.guard} was {self.old}, is {self.new}")


@dataclass
class Difference:
    """A captured call that differed from plain Python in shadow mode (``capture(..., verify=n)``).

    what: the first difference, captured against plain. node: the first operator of the captured graph whose result
    differs, with its line, or why none can be named. call: which of the verified function's calls it was, from 1.
    """

    what: str
    node: str
    call: int


@dataclass
class Stats:
    """What one captured callable did so far (``moebius.stats``)."""

    entries: int = 0
    hits: int = 0
    misses: int = 0
    graphs: int = 0
    breaks: int = 0
    recompiles: list[Recompile] = field(default_factory=list)
    cold_seconds: float = 0.0
    verified: int = 0
    differences: list[Difference] = field(default_factory=list)

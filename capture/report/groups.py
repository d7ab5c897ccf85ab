"""A report's guards by what they look at, and its breaks by their cause: the most expensive first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .model import Findings
from .records import Guard

OWNER = re.compile(r"what the graph break left|L\['[^']+'\]|G\([\w.]+\)(\['\w+'\])?|[\w.]+(?![\w.(])")
LOCAL = re.compile(r"^L\['([^']+)'\]")
LIBRARY = re.compile(r"G\((moebius|torch)\b|builtins|sys\.modules|torch\b|moebius\b")
CODE = "code and defaults unchanged"
LIBRARIES = "torch and Python's builtins"


@dataclass
class GuardGroup:
    """The guards of one owner: an argument, a global, an optimizer's state, the libraries."""

    owner: str
    guards: list[Guard] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)  # of those that a call passes, where they were timed

    @property
    def cost_ns(self) -> float | None:
        """What they cost a call; None where none was timed."""
        return sum(self.costs) if self.costs else None


def owner_of(guard: Guard) -> str:
    """What a guard is reported with."""
    source = guard.source
    if guard.check == CODE:
        return "the code of functions that it calls"
    if LIBRARY.match(source):
        return LIBRARIES
    found = OWNER.match(source)
    path = found is not None and source[found.end() :][:1] in ("", ".", "[")
    name = found.group() if found is not None and path else source  # (an expression, or several places, is one owner)
    return f"{name} state" if source.startswith((f"{name}.state[", f"{name}.state.")) else name


def guard_groups(report: Findings) -> list[GuardGroup]:
    """The most expensive first, then the largest."""
    made: dict[str, GuardGroup] = {}
    passed = set(map(id, report.of_a_call(report.guards)))
    for guard in report.guards:
        owner = LOCAL.sub(r"\1", owner_of(guard))  # (a break leaves the same value by its expression)
        group = made.setdefault(owner, GuardGroup(owner))
        group.guards.append(guard)
        if guard.cost_ns is not None and id(guard) in passed:
            group.costs.append(guard.cost_ns)
    return sorted(made.values(), key=lambda group: (-(group.cost_ns or 0.0), -len(group.guards)))

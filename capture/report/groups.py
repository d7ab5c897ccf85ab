"""A report's guards by what they look at, and its breaks by their cause: the most expensive first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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

    @property
    def cost_ns(self) -> float | None:
        """What all of them cost a call; None where none was timed."""
        costs = [guard.cost_ns for guard in self.guards if guard.cost_ns is not None]
        return sum(costs) if costs else None


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


def guard_groups(guards: list[Guard]) -> list[GuardGroup]:
    """The most expensive first, then the largest."""
    made: dict[str, GuardGroup] = {}
    for guard in guards:
        owner = LOCAL.sub(r"\1", owner_of(guard))  # (a break leaves the same value by its expression)
        made.setdefault(owner, GuardGroup(owner)).guards.append(guard)
    return sorted(made.values(), key=lambda group: (-(group.cost_ns or 0.0), -len(group.guards)))

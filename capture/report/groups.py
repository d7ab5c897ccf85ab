"""A report's guards by what they look at, and its breaks by their cause: the most expensive first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .model import Findings
from .records import Guard

LOCAL = re.compile(r"^L\['([^']+)'\]")


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


def guard_groups(report: Findings) -> list[GuardGroup]:
    """The most expensive first, then the largest."""
    made: dict[str, GuardGroup] = {}
    passed = set(map(id, report.of_a_call(report.guards)))
    for guard in report.guards:
        owner = LOCAL.sub(r"\1", guard.owner)  # (a break leaves the same value by its expression)
        group = made.setdefault(owner, GuardGroup(owner))
        group.guards.append(guard)
        if guard.cost_ns is not None and id(guard) in passed:
            group.costs.append(guard.cost_ns)
    return sorted(made.values(), key=lambda group: (-(group.cost_ns or 0.0), -len(group.guards)))

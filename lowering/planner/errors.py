"""The one error of the planner."""
from __future__ import annotations


class PlannerError(ValueError):
    """What was asked for cannot be planned; the text says what to ask instead."""

"""One capture as it went, line by line: what ``moebius explain --step`` walks through."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..guards.recorder import Fact

MOST_LINES = 100_000  # of one capture, about 200 MB


@dataclass
class Moment:
    """The capture at the beginning of a line of the user's.

    parent: which moment the caller's line is, None in the captured function itself. values: of the frame's variables,
    in words. guards, operators: how many the capture had by then.
    """

    file: str
    line: int
    function: str
    parent: int | None
    values: dict[str, str]
    guards: int
    operators: int


@dataclass
class Recording:
    """The attempt that became a capture; others, which taught it something, are left out.

    guards: in the order in which they were met. operators: of each node of the graph which one it was, and its text;
    some were not needed and are not there. outcome: how the attempt ended.
    differs: what ``verify=`` found, the last time: the number of the first operator that gave something else than plain
    Python did, and a text.
    """

    function: str
    file: str
    line: int
    moments: list[Moment] = field(default_factory=list)
    guards: list[Fact] = field(default_factory=list)
    operators: list[tuple[int, str]] = field(default_factory=list)
    outcome: str = ""
    is_cut: bool = False  # it had more than MOST_LINES
    differs: tuple[int, str] | None = None

    def of_operator(self, number: int) -> int:
        """The moment whose line added an operator."""
        return max((at for at, moment in enumerate(self.moments) if moment.operators < number), default=0)

    def depth(self, at: int) -> int:
        """How many callers the frame at a moment has."""
        parent, found = self.moments[at].parent, 0
        while parent is not None:
            parent, found = self.moments[parent].parent, found + 1
        return found

"""Looks for programs that differ, with hypothesis, and shrinks what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .choices import DrawnChoices
from .compare import difference
from .grammar import generate
from .grammar.program import FAMILIES


@st.composite
def programs(draw: Any, size: int = 80, families: tuple[str, ...] = FAMILIES) -> str:
    return generate(DrawnChoices(draw, st.integers), size=size, families=families)


class Differs(Exception):
    """A program does one thing natively and another interpreted. Its arguments: the source, what differs."""


@dataclass
class Found:
    """What a search saw. `said_nothing` counts programs that took too long natively."""

    ran: int = 0
    said_nothing: int = 0
    differing: list[tuple[str, str]] = field(default_factory=list)


def search(
    number: int,
    count: int,
    shrink: bool = True,
    check: Callable[[str], str | None] = difference,
    each: Callable[[], None] | None = None,
    strategy: Any = None,
) -> Found:
    """Generate `count` programs from the seed `number`; stops at the first that differs, shrunk."""
    found = Found()
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(programs() if strategy is None else strategy)
    def run(source: str) -> None:
        text = check(source)
        found.ran += 1
        found.said_nothing += text is None
        if each is not None:
            each()
        if text:
            raise Differs(source, text)

    try:
        run()
    except Differs as error:
        found.differing.append((error.args[0], error.args[1]))
    return found

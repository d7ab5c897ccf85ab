"""Captured programs become what they became before: graphs, guards, residual code. The code's seed chooses a share.

Where a change is meant to change them: ``make golden ARGS=--keep``, and say in the commit what changed.
"""

from __future__ import annotations

import random

import golden
import pytest
from golden_texts import SECTIONS
from seeds import seed_of_the_code

SHARE = 24
FIRST, LINES = golden.kept()
PROGRAMS = golden.programs() if FIRST == golden.versions() else {}
QUICK = [name for name in LINES if name.startswith("spelling")]


@pytest.mark.share(3)
@pytest.mark.parametrize("name", random.Random(seed_of_the_code()).sample(QUICK, SHARE))
def test_nothing_changed(name: str) -> None:
    if not PROGRAMS:
        pytest.skip(f"kept for {FIRST}, this is {golden.versions()}")
    differs = golden.differing(LINES[name], golden.line_of(name, golden.texts(PROGRAMS[name])))
    assert not differs, f"{name}: {', '.join(differs)}; `make golden ARGS=--keep` where that is meant"


def test_each_program_has_a_line() -> None:
    if not PROGRAMS:
        pytest.skip(f"kept for {FIRST}, this is {golden.versions()}")
    assert list(PROGRAMS) == list(LINES)


def test_a_change_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One guard less, one operator more, an effect left out."""
    if not PROGRAMS:
        pytest.skip(f"kept for {FIRST}, this is {golden.versions()}")
    name = "spelling rows_of_nonzero"
    found = golden.texts(PROGRAMS[name])
    for section in SECTIONS:
        *before, last = found[section].rstrip().splitlines()
        assert golden.differing(LINES[name], golden.line_of(name, {**found, section: "\n".join(before)})) == [section]

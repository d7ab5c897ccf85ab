"""Each file of programs/ is a family of programs, divided by lines of "# ---"; each runs natively and interpreted.

Those of programs/logged use the fuzzer's helpers (note, caught, …) and are compared as its programs are.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fuzz.compare import compiled, difference, native_outcome
from fuzz.prelude import ALWAYS

FOLDER = Path(__file__).parent / "programs"


def programs(folder: Path) -> list[Any]:
    found = []
    for path in sorted(folder.glob("*.txt")):
        needed = (3, int(path.stem.rpartition("_")[2])) if path.stem.rpartition("_")[2].isdigit() else (3, 11)
        if sys.version_info < needed:
            continue
        for number, source in enumerate(path.read_text().split("# ---\n")):
            title = source.partition("\n")[0].removeprefix("# ").replace(" ", "_")
            found.append(pytest.param(source, id=f"{path.stem}-{number}-{title}"))
    return found


@pytest.mark.parametrize("source", programs(FOLDER))
def test_interpreted_as_native(same: Any, source: str) -> None:
    same(source)


@pytest.mark.parametrize("source", programs(FOLDER / "logged"))
def test_logged_as_native(source: str) -> None:
    source += ALWAYS
    native = native_outcome(compiled(source))
    assert native is not None and native.error is None and native.log
    for checks in (False, True):
        assert difference(source, native, checks) == ""

"""Each file of programs/ is a family of programs, divided by lines of "# ---"; each runs natively and interpreted."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "programs"


def programs() -> list[Any]:
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        needed = (3, int(path.stem.rpartition("_")[2])) if path.stem.rpartition("_")[2].isdigit() else (3, 11)
        if sys.version_info < needed:
            continue
        for number, source in enumerate(path.read_text().split("# ---\n")):
            title = source.partition("\n")[0].removeprefix("# ").replace(" ", "_")
            found.append(pytest.param(source, id=f"{path.stem}-{number}-{title}"))
    return found


@pytest.mark.parametrize("source", programs())
def test_interpreted_as_native(same: Any, source: str) -> None:
    same(source)

"""The seed of this checkout: tests that try something fresh take it from here, hypothesis' ones too.

It is a digest of the sources. So each change of the code is tested with programs that no earlier one saw, and two runs
over one checkout try the same ones: what passed before a merge passes in CI. `MOEBIUS_SEED=7` gives another seed.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("capture", "interpreter", "lowering", "kernels", "tests")
SUFFIXES = {".py", ".c", ".h"}


@cache
def seed_of_the_code() -> int:
    """Below 2**30."""
    given = os.environ.get("MOEBIUS_SEED")
    if given is not None:
        return int(given)
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*"), key=lambda p: p.relative_to(ROOT).as_posix()):
            if path.suffix in SUFFIXES:
                digest.update(path.relative_to(ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:4], "little") >> 2


Case = TypeVar("Case")


def some(cases: Sequence[Case], count: int, of: str) -> list[Case]:
    """A share of the cases of a test named ``of``: other ones for other code, the same ones in each run over it."""
    return random.Random(f"{seed_of_the_code()} {of}").sample(cases, min(count, len(cases)))


def examples(many: int) -> int:
    """How many generated programs a test tries: so many in a run with --whole, and a quarter otherwise."""
    return many if "MOEBIUS_WHOLE" in os.environ else max(5, many // 4)

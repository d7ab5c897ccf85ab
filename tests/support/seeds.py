"""The seed of this checkout: tests that try something fresh take it from here, hypothesis' ones too.

It is a digest of the sources. So each change of the code is tested with programs that no earlier one saw, and two runs
over one checkout try the same ones: what passed before a merge passes in CI. `MOEBIUS_SEED=7` gives another seed.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

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

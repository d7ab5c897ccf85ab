"""Which version of the code a measurement is of."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit that is checked out, marked where files that git knows differ from it."""
    command = ["git", "describe", "--always", "--dirty=, changed", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"

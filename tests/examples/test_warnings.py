"""What keeps the examples free of warnings of ours does see one."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch
from moebius import capture
from moebius.cache import captured
captured.Captured.attempt = None  # an error of ours in the first capture
capture(lambda x: x * 2)(torch.ones(2))
"""


def test_a_warning_of_ours_is_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "moebius could not capture" in done.stderr, done.stderr

"""A program's own factory of log records is called for the program's lines alone, whatever torch logs of a trace."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging
import torch
from moebius import capture, stats

asked = []
make = logging.getLogRecordFactory()

def factory(*args, **kwargs):
    asked.append(args[0])
    return make(*args, **kwargs)

logging.setLogRecordFactory(factory)
step = capture(lambda x, i: x * i)
for i in range(6):
    step(torch.ones(3), i + 5)
    step(torch.ones(3 + i), 2)
assert stats(step).hits, stats(step)
print(asked)
"""


def test_a_factory_is_not_asked_for_torchs_trace():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

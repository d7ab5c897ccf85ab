"""A fuzz run goes on after a batch that does not end, grows without end or kills its process."""

from __future__ import annotations

import itertools
import os
from typing import Any

from fuzz.workers import Limits, run_tasks


def act(task: str) -> Any:
    if task == "loops in C":
        return sum(itertools.repeat(1))
    if task == "grows":
        held = bytearray(200 << 20)
        held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
        return sum(itertools.repeat(len(held)))
    if task == "dies":
        os._exit(3)
    return task.upper()


def test_what_becomes_of_tasks() -> None:
    tasks = ["first", "loops in C", "dies", "second", "grows", "third"]
    ended = {one.task: (one.result, one.reason) for one in run_tasks(act, tasks, 2, Limits(4.0, 150 << 20))}
    assert ended == {
        "first": ("FIRST", ""),
        "second": ("SECOND", ""),
        "third": ("THIRD", ""),
        "dies": (None, "died with exit code 3"),
        "loops in C": (None, "took more than 4 s of CPU time"),
        "grows": (None, "grew beyond 150 MiB"),
    }

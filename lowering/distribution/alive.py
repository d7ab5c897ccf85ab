"""Which processes of a group of ranks are stopped or gone: the system says so of those on this machine.

Ranks tell one another, through the group's store, which process they are. A rank that waits for another one looks at
its process. That is no guess from how long it takes: a rank that is slow is waited for.
"""
from __future__ import annotations

import os
from pathlib import Path

STATES = {"T": "is stopped", "Z": "has ended", "X": "has ended"}  # of a process, in /proc
START = 19  # which field after the process's name says when it began


def this_process() -> str:
    """Its machine, number and start. Empty where the system does not say."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
        return f"{machine} {os.getpid()} {_fields(os.getpid())[START]}"
    except OSError:
        return ""


def condition(process: str) -> str:
    """What is wrong with a process that ``this_process`` names: "is stopped", "has ended", or nothing that is known."""
    machine, _, rest = process.partition(" ")
    here, _, _ = this_process().partition(" ")
    if not rest or machine != here:
        return ""
    number, start = rest.split()
    try:
        fields = _fields(int(number))
    except OSError:
        return "has ended"
    return STATES.get(fields[0], "") if fields[START] == start else "has ended"


def _fields(number: int) -> list[str]:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()

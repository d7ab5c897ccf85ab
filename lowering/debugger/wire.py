"""Messages between a terminal and the ranks, over one Unix socket for each rank in a folder of their user's alone."""
from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

VARIABLE = "MOEBIUS_DEBUGGER"  # in the environment of a job's processes: the folder
JOB = "job.json"  # in the folder: where the ranks stop from the beginning; the terminal that they end with


class DebuggerError(ValueError):
    """What was asked for cannot be done; the text says what to do instead."""


class Link:
    """One connection, which several threads may send over. A message is a JSON object."""

    def __init__(self, connection: Connection):
        self.connection, self.lock = connection, threading.Lock()

    def send(self, **message: Any) -> None:
        """Nothing, where the other side is gone."""
        with self.lock, contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(message).encode())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Messages, until the other side is gone."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                yield json.loads(self.connection.recv_bytes())


def private_folder(name: str) -> Path:
    """The folder, made where it is missing. Raises DebuggerError where others could open it: who reaches a debugger
    runs code in its process."""
    path = Path(name)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise DebuggerError(f"{name} has to be a folder that you alone can open: chmod 700 {name}")
    return path


def address(folder: Path, rank: int) -> str:
    return str(folder / f"rank-{rank}")


def ranks_in(folder: Path) -> list[int]:
    """The ranks that have a socket there."""
    return sorted(int(path.name[5:]) for path in folder.glob("rank-*"))


def read_job(folder: Path) -> dict[str, Any]:
    """at: "FILE:LINE" or "FILE:LINE, CONDITION", each; terminal: the process that the job ends with, or "". """
    try:
        job: dict[str, Any] = json.loads((folder / JOB).read_text())
    except OSError:
        return {"at": [], "terminal": ""}
    return job


def write_job(folder: Path, at: list[str], terminal: str) -> None:
    made = folder / f"{JOB}.new"  # (a rank that reads at this moment has the one or the other)
    made.write_text(json.dumps({"at": at, "terminal": terminal}))
    made.replace(folder / JOB)


def parse_place(text: str) -> tuple[str, int, str | None]:
    """File, line and condition of "FILE:LINE, CONDITION"."""
    place, _, condition = text.partition(",")
    file, _, line = place.strip().rpartition(":")
    if not file or not line.isdigit():
        raise DebuggerError(f"a place is FILE:LINE, or FILE:LINE, CONDITION; and not {text!r}")
    return file, int(line), condition.strip() or None

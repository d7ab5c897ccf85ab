"""``moebius debug``: real ranks (gloo, this machine's loopback), one terminal, driven as from a pipe or a keyboard."""
from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moebius.lowering.debugger.command import checked, run
from moebius.lowering.debugger.wire import DebuggerError, private_folder

BOUND = 180  # seconds that a test waits for anything
SCRIPT = '''\
import os, sys, time
from datetime import timedelta

import torch
import torch.distributed as dist

import moebius

rank = int(os.environ["RANK"])
store = dist.FileStore(os.environ["STORE"], 2)
store.set(f"rank {rank} is here", "")  # (one may be long in coming; the group's timeout is short)
store.wait(["rank 0 is here", "rank 1 is here"])
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=12))
time.sleep(1.5)

def scaled(x):
    y = x * 2
    return y.sum()

@moebius.capture
def step(x):
    total = scaled(x)
    total = total + 1
    dist.all_reduce(total)
    return total

def main(how):
    goes_on = True
    if how == "alone" and rank == 0:
        breakpoint()
    print(f"rank {rank} begins", flush=True)
    while how == "waits" and goes_on:
        time.sleep(0.01)
    for i in range(3):
        if how == "fails" and rank == 1 and i == 1:
            torch.linspace(0, 1, "a bad batch")
        x = torch.full((2,), float(rank + 1))
        result = step(x)
    if how == "never" and rank == 5:
        print("nobody comes here")
    print(f"rank {rank} is done: {result.item()}, {moebius.stats(step).entries} captures", flush=True)

main(sys.argv[1])
dist.destroy_process_group()
'''
LAUNCHER = '''\
import os, subprocess, sys

ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"})
         for rank in range(2)]
codes = [rank.wait() for rank in ranks]
sys.exit(max(codes))
'''


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


SUM, ADD, REDUCE, NOBODY = map(line_of, ("return y.sum()", "total + 1", "dist.all_reduce", "nobody comes here"))


def hears_the_keyboard() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # (a shell's job in the background ignores it, and all below)


class Session:
    """A process, what is typed into it, and what it says. keyboard: a terminal of its own, else pipes."""

    def __init__(self, command: list[str], folder: Path, keyboard: bool = False, **more: str):
        paths = os.pathsep.join(filter(None, sys.path))
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths, "TERM": "dumb",
               "STORE": str(folder / "store")}  # fmt: skip
        if keyboard:
            self.master, given = pty.openpty()
        self.process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **own, **more}, stdin=given if keyboard else subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=hears_the_keyboard,
        )  # fmt: skip
        self.keyboard, self.said, self.read = keyboard, "", 0
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        while part := os.read(self.process.stdout.fileno(), 4096):
            self.said += part.decode()

    def until(self, pattern: str) -> str:
        """What it says from here to where this pattern ends."""
        end = time.monotonic() + BOUND
        while (found := re.compile(pattern, re.DOTALL).search(self.said, self.read)) is None:
            assert time.monotonic() < end and (self.listener.is_alive() or found), f"no {pattern!r} in {self.said}"
            time.sleep(0.02)
        text, self.read = self.said[self.read : found.end()], found.end()
        return text

    def type(self, line: str, then: str = r"\(rank \d of 2\) ") -> str:
        """What it says to a line, up to the next prompt."""
        data = line.encode() + b"\n"
        if self.keyboard:
            os.write(self.master, data)
        else:
            assert self.process.stdin is not None
            self.process.stdin.write(data)
            self.process.stdin.flush()
        return self.until(then)

    def end(self) -> int:
        status = self.process.wait(BOUND)
        self.listener.join(BOUND)
        return status


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "launch.py").write_text(LAUNCHER)
    sessions: list[Session] = []

    def begin(options: list[str] | None, how: str = "", **more: Any) -> Session:
        """A terminal, with a job where it says how; without options, the job alone."""
        job = [sys.executable, "launch.py", "train.py", how] if how else []
        command = [] if options is None else [sys.executable, "-m", "moebius", "debug", *options]
        sessions.append(Session([*command, *job], tmp_path, **more))
        return sessions[-1]

    yield begin
    for session in sessions:
        session.process.kill()
        session.end()
    end = time.monotonic() + 20
    while (left := processes_in(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert not left, "ranks outlive their terminal"


def processes_in(folder: Path) -> list[int]:
    """Processes that work in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(path / "cwd") == str(folder):
                found.append(int(path.name))
    return found


def test_all_ranks_stop_at_a_line(start: Any) -> None:
    """The user's frames and locals, of any rank; steps on one and on all; the job's breakpoints; the end."""
    terminal = start(["--at", f"train.py:{SUM}", "--rank", "1"], "plain")
    assert f"all 2 ranks stand at train.py:{SUM} in scaled" in terminal.until(r"\(rank 1 of 2\) ")
    assert "tensor([4., 4.])" in terminal.type("p y")
    assert re.findall(r"\(\d+\)(\S+)\(\)", terminal.type("w")) == ["<module>", "main", "step", "scaled"]
    assert "total = scaled(x)" in terminal.type("up")
    assert "return y.sum()" in terminal.type("rank 0") and "tensor([2., 2.])" in terminal.type("p y")
    assert "total = scaled(x)" in terminal.type("rank 1") and "return y.sum()" in terminal.type("down")
    values = terminal.type("all p y.tolist()")
    assert "rank 0: [2.0, 2.0]" in values and "rank 1: [4.0, 4.0]" in values
    assert "all 2 ranks: 3" in terminal.type("all p 1 + 2")
    assert "y = Tensor [2] float32" in terminal.type("locals")
    assert "which each rank has: tensor(2.)" in terminal.type("expert 1 y")
    assert "IndexError" in terminal.type("expert 9 y")
    assert f"train.py:{REDUCE}, float(x[0]) > 0, on all ranks" in terminal.type(f"b {REDUCE}, float(x[0]) > 0")
    assert f"train.py:{SUM}, on all ranks" in terminal.type(f"clear {SUM}")
    assert f"all 2 ranks stand at train.py:{REDUCE} in step" in terminal.type("c")
    alone = terminal.type("n")  # a collective, in which this rank waits for the other one
    assert f"rank 0 stands at train.py:{REDUCE} in step" in alone and "-> dist.all_reduce(total)" in alone
    assert f"rank 1 runs, at train.py:{REDUCE} in step" in alone
    assert f"({REDUCE + 1})step()" in terminal.type("n")
    here = f"stands at train.py:{REDUCE + 1} in step"
    assert f"> rank 0 {here}\n  rank 1 {here}" in terminal.type("ranks")
    assert "all 2 ranks:\n--Return--" in terminal.type("all n")
    assert f"all 2 ranks stand at train.py:{REDUCE} in step" in terminal.type("c")
    assert "on all ranks" in terminal.type(f"clear {REDUCE}")
    said = terminal.type("c", "has ended")
    assert terminal.end() == 0
    assert "rank 0 is done: 14.0, 0 captures" in said and "rank 1 is done: 14.0, 0 captures" in said


def test_a_rank_that_stops_alone_is_waited_for(start: Any) -> None:
    """For longer than the timeout of the group that the others wait in. A line that nobody reaches stops nobody."""
    terminal = start(["--rank", "0", "--at", f"train.py:{NOBODY}"], "alone")
    said = terminal.until(r"\(rank 0 of 2\) ")
    assert "rank 0 stands" in said and f"rank 1 runs, at train.py:{REDUCE} in step" in said
    time.sleep(16)
    assert terminal.type("p how").strip().startswith("'alone'")
    assert "done" in terminal.type("c", "has ended")
    assert terminal.end() == 0


def test_an_exception_is_looked_at_where_it_was_raised(start: Any, tmp_path: Path) -> None:
    terminal = start(["--rank", "1"], "fails")
    assert "rank 1 ends with TypeError: linspace" in terminal.until(r"\(rank 1 of 2\) ")
    assert terminal.type("p i").startswith("1")
    assert len(processes_in(tmp_path)) >= 4
    terminal.process.kill()  # (the job ends with it: the fixture waits for that)


def test_the_keyboard_stops_a_job_that_runs(start: Any) -> None:
    terminal = start(["--rank", "1"], "waits", keyboard=True)
    terminal.until("begins.*begins")
    terminal.process.send_signal(signal.SIGINT)
    stopped = terminal.until(r"\(rank 1 of 2\) ")
    assert "all 2 ranks stand" in stopped or stopped.count("stands at train.py") == 2
    assert terminal.type("p goes_on").startswith("True")
    terminal.type("q", "")
    assert terminal.end() == 0 and "is done" not in terminal.said


def test_a_terminal_comes_and_goes(start: Any, tmp_path: Path) -> None:
    """A job of one's own launcher, attached to; detached from, it goes on to its end."""
    folder = tmp_path / "ranks"
    job = start(None, "alone", MOEBIUS_DEBUGGER=str(folder))
    assert f"moebius debug --attach {folder}" in job.until(r"rank 0 stands at \S+ ?\S+ \S+ \S+ \S+\n")
    terminal = start(["--attach", str(folder)])
    assert "rank 0 stands" in terminal.until(r"\(rank 0 of 2\) ")
    assert "'alone'" in terminal.type("p how")
    terminal.type("detach", "comes back to it")
    assert terminal.end() == 0 and job.end() == 0
    assert "rank 0 is done" in job.said and "rank 1 is done" in job.said


def test_places_are_checked_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = 1\n\n# nothing\ndef f():\n    return (\n        x,\n    )\n")
    assert checked(f"{script}:1", []) == f"{script}:1"
    assert checked("train.py:5, x > 0", ["torchrun", str(script)]) == f"{script}:5, x > 0"
    for place, said in {f"{script}:3": "1 and 4 has", f"{script}:70": "has no code", "nowhere.py:1": "there is no file",
                        "train.py": "a place is FILE:LINE"}.items():  # fmt: skip
        with pytest.raises(DebuggerError, match=said):
            checked(place, [])
    for words, said in {(): "needs a command", ("--attach", "x", "y.py"): "needs a command", ("y.py",): "no file y.py",
                        ("--attach", str(tmp_path / "none")): "no rank of a job"}.items():  # fmt: skip
        with pytest.raises(DebuggerError, match=said):
            run(words)


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(DebuggerError, match="you alone can open"):
        private_folder(str(tmp_path / "open"))
    assert private_folder(str(tmp_path / "made")).stat().st_mode & 0o777 == 0o700

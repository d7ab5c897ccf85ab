"""The terminal of ``moebius debug``: one prompt, any rank.

What is typed goes to the rank that is looked at, or, after ``all``, to each; breakpoints and ``c`` are the job's.
"""
from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, TextIO

from moebius.lowering.debugger.wire import Link, address, parse_place, ranks_in, write_job

PATIENCE = 2.0  # seconds for which ranks are waited for while others stand
ANSWER = 3.0  # seconds until a rank has said where it is
HELP = """\
  ranks              where each rank is
  rank N             look at rank N: its frame, its variables
  n, s, r, w, u, d, l, p, pp, ! ...   pdb's commands, on that rank (help COMMAND says more)
  all COMMAND        on all ranks that stand: all n, all p loss.item()
  c                  all ranks go on, to the next breakpoint
  b [FILE:]LINE[, CONDITION]   all ranks stop there; clear [FILE:]LINE takes it out; b lists them
  pause              ranks that run stop at their next line (Ctrl-C, too)
  locals             the frame's variables, with what of each tensor is on this rank
  full EXPRESSION    a tensor that lives on the ranks, as a whole
  expert E EXPRESSION   row E of experts' weights, on the rank that has it
  detach             all go on without a debugger; moebius debug --attach comes back
  q                  end the job"""


@dataclass
class Remote:
    """A rank, as the terminal knows it. said: what it has written since it was last read. heard: when it last spoke."""

    rank: int
    link: Link
    stands: dict[str, Any] | None = None
    where: dict[str, Any] | None = None
    said: list[str] = field(default_factory=list)
    done: str | None = None
    gone: bool = False

    def take(self) -> str:
        text, self.said = "".join(self.said), []
        return text


class Terminal:
    """job: what this terminal has started, or None where it attaches. first: the rank to look at."""

    def __init__(self, folder: Path, job: subprocess.Popen[bytes] | None, at: Iterable[str], first: int | None):
        self.folder, self.job, self.at, self.rank = folder, job, [*at], first
        self.given: TextIO | None = None if sys.stdin.isatty() else sys.stdin
        self.remotes: dict[int, Remote] = {}
        self.events: queue.Queue[tuple[Remote, dict[str, Any]]] = queue.Queue()
        self.of, self.detached = 1, False

    # ---- the ranks ----

    def look_for_ranks(self) -> None:
        """Connect to the ranks that have come."""
        for rank in ranks_in(self.folder):
            if rank not in self.remotes or self.remotes[rank].gone:
                with contextlib.suppress(OSError):
                    self.meet(Remote(rank, Link(Client(address(self.folder, rank), "AF_UNIX"))))

    def meet(self, remote: Remote) -> None:
        self.remotes[remote.rank] = remote

        def listen() -> None:
            for message in remote.link:
                self.events.put((remote, message))
            self.events.put((remote, {"gone": True}))

        threading.Thread(target=listen, daemon=True).start()

    def hear(self, wait: float = 0.0) -> bool:
        """Take in what ranks have said; whether one has."""
        with contextlib.suppress(queue.Empty):
            remote, message = self.events.get(timeout=wait) if wait else self.events.get_nowait()
            match message:
                case {"ranks": of}:
                    self.of = of
                    for place in self.at:
                        remote.link.send(at=place)
                case {"text": text}:
                    remote.said.append(text)
                case {"stands": place}:
                    remote.stands = place
                case {"where": place}:
                    remote.where = place
                case {"done": words}:
                    remote.done = words
                case {"gone": _}:
                    remote.gone, remote.stands = True, None
            return True
        return False

    def alive(self) -> list[Remote]:
        return [one for _, one in sorted(self.remotes.items()) if not one.gone]

    def standing(self) -> list[Remote]:
        return [one for one in self.alive() if one.stands is not None]

    def is_over(self) -> bool:
        if self.alive():
            return False
        return self.job is None or self.job.poll() is not None

    def settle(self) -> None:
        """Until all ranks stand, some do and the others take long, or the job is over."""
        self.look_for_ranks()
        since = None
        while not self.is_over():
            if self.hear(0.1):
                continue
            self.look_for_ranks()
            if not (standing := self.standing()):
                since = None
            elif len(standing) == self.of:
                return
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                return
        while self.hear():
            pass

    def ask_where(self, remotes: list[Remote]) -> None:
        for one in remotes:
            one.where = None
            one.link.send(where=True)
        self.until(lambda: all(one.where is not None or one.gone for one in remotes))

    def until(self, holds: Callable[[], bool]) -> None:
        """Take in what is said until something holds, for a bounded time."""
        end = time.monotonic() + ANSWER
        while not holds() and time.monotonic() < end:
            self.hear(0.05)

    # ---- what it says ----

    def say(self, text: str) -> None:
        if text:
            print(text.rstrip("\n"), flush=True)

    def say_ranks(self, everything: bool) -> None:
        """Where each rank is. Not everything: a line, where all stand at one place."""
        alive, standing = self.alive(), self.standing()
        places = {words(one.stands) for one in standing if one.stands is not None}
        if not everything and len(places) == 1 and len(standing) == self.of:
            if self.of > 1:
                self.say(f"all {self.of} ranks stand at {places.pop()}")
            return
        self.ask_where([one for one in alive if one.stands is None])
        for rank in range(self.of):
            one = self.remotes.get(rank)
            if one is None:
                text = "has not come to `import moebius` yet"
            elif one.gone:
                text = "has ended"
            elif one.stands is not None:
                text = f"stands at {words(one.stands)}"
            else:
                text = f"runs, at {words(one.where)}" if one.where and one.where["line"] else "runs"
            self.say(f"{'>' if rank == self.rank and everything else ' '} rank {rank} {text}")
        if 0 < len(standing) < len(alive) and not everything:
            self.say("  What runs may wait for those that stand: `c` lets all go on, `all n` steps all that stand.")

    def show(self) -> None:
        """What has changed, after ranks went on."""
        if not (standing := self.standing()):
            return
        turns = self.rank not in [one.rank for one in standing]
        if turns:
            self.rank = standing[0].rank
        self.say_ranks(False)
        text = self.remotes[self.rank or 0].take()
        if turns and not text:  # (it has said so before)
            self.one("here")
        self.say(text)

    # ---- what is typed ----

    def run(self) -> int:
        """Until the job has ended, or the terminal is left. Returns the status of the job."""
        while True:
            try:
                self.settle()
            except KeyboardInterrupt:
                self.pause()
                continue
            if self.is_over():
                for one in self.remotes.values():
                    self.say(one.take())
                return self.ended()
            self.show()
            try:
                if self.prompt():
                    return 0
            except KeyboardInterrupt:
                print()

    def ended(self) -> int:
        status = 0 if self.job is None else self.job.wait()
        if not self.remotes:
            self.say("moebius: no rank was there to be reached; the script has to import moebius")
        self.say(f"moebius: the job has ended{'' if self.job is None else f', with status {status}'}")
        return status if status >= 0 else 128 - status

    def prompt(self) -> bool:
        """Take commands until ranks go on (False), or the terminal is left (True)."""
        while True:
            while self.hear():
                pass
            if not self.standing():
                return False
            line = self.read()
            before = {one.rank for one in self.standing()}
            word, _, rest = (line or "q").strip().partition(" ")
            if word in ("q", "quit", "exit", "EOF"):
                return self.leave(line is None)
            if word == "detach":
                return self.detach()
            if self.command(word, rest.strip(), line or ""):
                return False
            if before and not self.standing():
                return False

    def read(self) -> str | None:
        """A line, None at the end."""
        prompt = f"(rank {self.rank} of {self.of}) "
        if self.given is None:
            try:
                return input(prompt)
            except EOFError:
                return None
        print(prompt, end="", flush=True)
        return self.given.readline() or None

    def command(self, word: str, rest: str, line: str) -> bool:
        """One command. Returns whether ranks go on for it."""
        if word == "ranks":
            self.say_ranks(True)
        elif word == "rank":
            self.turn_to(rest)
        elif word in ("h", "help", "?") and not rest:
            self.say(HELP)
        elif word in ("c", "cont", "continue"):
            self.send(self.standing(), "c")
            return True
        elif word == "pause":
            self.pause()
            return True
        elif word in ("b", "break", "clear", "cl") and is_place(rest):
            self.breakpoint("clear" if word in ("clear", "cl") else "at", rest)
        elif word == "all" and rest:
            return self.everywhere(self.standing(), rest)
        elif word == "expert":
            return self.everywhere(self.standing(), line.strip(), "no rank has this expert")
        elif word == "full":
            if len(self.standing()) < self.of:
                self.say("not all ranks stand, and all are needed for it (`ranks`)")
            else:
                self.send(self.standing(), line.strip())
                self.until_answered(self.standing())
                self.show_current()
        elif line.strip():
            return self.one(line.strip())
        return False

    def turn_to(self, rest: str) -> None:
        remote = self.remotes.get(int(rest)) if rest.isdigit() else None
        if remote is None or remote.gone:
            self.say(f"rank needs the number of a rank that is there, of 0 to {self.of - 1} (`ranks`)")
        elif remote.stands is None:
            self.ask_where([remote])
            self.say(f"rank {remote.rank} runs, at {words(remote.where)}: `pause` stops it at its next line")
        else:
            self.rank = remote.rank
            self.one("here")

    def one(self, command: str) -> bool:
        """A command of pdb's, on the rank that is looked at."""
        remote = self.remotes[self.rank or 0]
        self.send([remote], command)
        self.until_answered([remote])
        if remote.stands is None:
            return True
        self.show_current()
        return False

    def everywhere(self, remotes: list[Remote], command: str, otherwise: str = "") -> bool:
        self.send(remotes, command)
        self.until_answered(remotes)
        texts = {one.rank: one.take() for one in remotes}
        said = {rank: text.rstrip("\n") for rank, text in texts.items() if text.strip()}
        same = len(said) == self.of > 1 and len({*said.values()}) == 1
        for name, text in {f"all {self.of} ranks": said[remotes[0].rank]}.items() if same else said.items():
            name = name if same else f"rank {name}"
            self.say(f"{name}: {text}" if "\n" not in text else f"{name}:\n{text}")
        if not said:
            self.say(otherwise)
        return any(one.stands is None for one in remotes)

    def send(self, remotes: list[Remote], command: str) -> None:
        for one in remotes:
            one.stands = None
            one.said = []
            one.link.send(do=command)

    def until_answered(self, remotes: list[Remote]) -> None:
        end = time.monotonic() + PATIENCE
        while any(one.stands is None and not one.gone for one in remotes) and time.monotonic() < end:
            self.hear(0.05)

    def show_current(self) -> None:
        self.say(self.remotes[self.rank or 0].take())

    def breakpoint(self, kind: str, rest: str) -> None:
        """A breakpoint of the job: on all ranks, those that run too."""
        remote = self.remotes[self.rank or 0]
        place, comma, condition = rest.partition(",")
        file, _, line = place.strip().rpartition(":")
        here = (remote.stands or {"file": ""})["file"]
        full = here if not file or os.path.basename(here) == file else os.path.abspath(file)
        place = f"{full}:{line}{comma}{condition}"
        alive = self.alive()
        for one in alive:
            one.done = None
            one.link.send(**{kind: place})
        self.until(lambda: all(one.done is not None or one.gone for one in alive))
        refused = {one.done for one in alive if one.done}
        others = [each for each in self.at if parse_place(each)[:2] != parse_place(place)[:2]]
        self.at = [*others, place] if kind == "at" and not refused else others
        said = f"{'stops' if kind == 'at' else 'stops no more'} at {place}, on all ranks"
        self.say("; ".join(sorted(refused)) or said)

    def pause(self) -> None:
        for one in self.alive():
            if one.stands is None:
                one.link.send(pause=True)

    def detach(self) -> bool:
        """All go on; the job no longer ends with this terminal."""
        write_job(self.folder, [], "")
        for one in self.alive():
            one.link.send(detach=True)
        self.detached = True
        self.say(f"moebius: the job goes on; moebius debug --attach {self.folder} comes back to it")
        return True

    def leave(self, at_the_end: bool) -> bool:
        """q, or the end of the input: a job that was started here ends."""
        if self.job is None and at_the_end:
            self.say("\nmoebius: ranks stay where they are")
            return True
        for one in self.alive():
            one.link.send(quit=True)
        return True


def is_place(text: str) -> bool:
    """Whether it is [FILE:]LINE, with or without a condition: what else pdb takes (a function) is its own matter."""
    return text.partition(",")[0].strip().rpartition(":")[2].isdigit()


def words(place: dict[str, Any] | None) -> str:
    if place is None:
        return "a place that it does not say: its thread runs nothing of Python's"
    return f"{os.path.basename(place['file'])}:{place['line']} in {place['function']}"

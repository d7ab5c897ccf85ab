"""Where each rank is while none goes on: one rank in a meeting here, another one in a collective of the program's own.

Either would wait for the other until the group's timeout. A thread of each rank looks once a second where the rank's
own thread is. While ranks compute, that is all it does. A rank that stands in a collective for PATIENCE seconds says so
in the store; where all ranks have, and say so again when they are asked, the first rank compares how many collectives
each has begun in each group. Two that differ will never meet: what each of them is at is told to all. That is no guess
from how long it takes: while one rank computes, loads data or is in the middle of a transfer, all are waited for.
"""
from __future__ import annotations

import atexit
import contextlib
import dis
import inspect
import json
import linecache
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from moebius.lowering.distribution.torch_private import begun_collectives, default_store

TICK = 1.0  # how often a thread looks, in seconds
PATIENCE = 2.0  # how long a rank stands in one collective until it says so
LOOKS = 3  # how often a rank in a meeting lets those in other collectives hear first what no rank can go on for
COMPUTES = 0.1  # seconds of the processor's time that a thread takes between two looks where it does not just wait


class Here:
    """What the rank's own thread waits in. ours: a collective of this project. meeting: where, if it is a meeting: no
    rank is long in one that all have come to; a transfer may take its time."""

    ours = False
    meeting = ""


def key(name: object) -> str:
    return f"moebius/standing/{name}"


COUNT, QUESTION = key("count"), key("question")
NEW_GROUP = inspect.unwrap(dist.new_group).__code__
MAKING = "groups that are made"  # by all ranks together, as if that were a collective of a group


class Watch(threading.Thread):
    """Looks at one thread of this rank. ours: how many collectives this project has begun, by name of their group.
    verdict: why no rank can go on, while none can."""

    def __init__(self, ours: Callable[[], Mapping[str, int]]):
        super().__init__(name="moebius: where ranks stand", daemon=True)
        self.group, self.store, self.ours = dist.group.WORLD, default_store().clone(), ours
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.follow()
        self.verdict = ""
        self.before: Any = None
        self.since, self.busy = 0.0, 0.0
        self.told, self.tellings, self.answered, self.looks = False, 0, -1, 0
        self.asked: tuple[int, list[int]] = 0, []
        self.ending = threading.Event()

    def follow(self) -> None:
        """Look at the thread that calls this."""
        self.thread, self.clock = threading.get_ident(), time.pthread_getcpuclockid(threading.get_ident())

    def run(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone with its process, or the thread is
            while not self.ending.wait(TICK) and dist.group.WORLD is self.group:
                self.look()

    def stop(self) -> None:
        self.ending.set()
        self.join(2 * TICK)

    def look(self) -> None:
        busy, self.busy = self.busy, time.clock_gettime(self.clock)
        words, here = "", None
        if self.busy - busy < COMPUTES:
            frame = sys._current_frames().get(self.thread)
            words = (Here.meeting and f"at {Here.meeting}") if Here.ours else foreign(frame)
            if words and frame is not None:
                begun = {**begun_collectives(), MAKING: ([*range(self.ranks)], int(makes_a_group(frame)))}
                here = id(frame), frame.f_lasti, words, begun
        if here is None or here != self.before:
            self.go_on()
            self.before, self.since = here, time.monotonic()
        elif time.monotonic() - self.since >= PATIENCE:
            self.stand(words, Here.ours, here[-1])

    def go_on(self) -> None:
        self.verdict, self.looks = "", 0
        if self.told:
            self.told = False
            self.store.add(COUNT, -1)

    def stand(self, words: str, meeting: bool, begun: Mapping[str, tuple[list[int], int]]) -> None:
        question = self.store.add(QUESTION, 0)
        if not self.told or question != self.answered:
            ours = self.ours()
            groups = {name: (ranks, ours.get(name, 0), count) for name, (ranks, count) in begun.items()}
            self.tellings, self.answered = self.tellings + (not self.told), question
            self.store.set(key(self.rank), json.dumps([question, self.tellings, words, meeting, groups]))
        if not self.told:
            self.told = True
            self.store.add(COUNT, 1)
        elif self.rank == 0:
            self.judge(question)
        if not self.verdict and self.store.check([key(f"verdict {question}")]):
            others, _, verdict = self.store.get(key(f"verdict {question}")).decode().partition(" ")
            heard, self.looks = key(f"heard {question}"), self.looks + 1
            if not meeting:  # it cannot be called back; what it waits in fails when the others end
                sys.stderr.write(f"moebius: rank {self.rank} waits for ranks that will not come: {verdict}\n")
                self.store.add(heard, 1)
            elif self.store.add(heard, 0) < int(others) and self.looks < LOOKS:  # before those have said so
                return
            self.verdict = verdict

    def judge(self, question: int) -> None:
        """Ask all ranks whether they still stand where they say; where they do, tell them if some will never meet."""
        if self.store.add(COUNT, 0) != self.ranks:
            return
        told = [json.loads(self.store.get(key(rank))) for rank in range(self.ranks)]
        stamps = [tellings for _, tellings, *_ in told]
        if self.asked != (question, stamps):
            self.asked = self.store.add(QUESTION, 1), stamps
        elif all(answered == question for answered, *_ in told):
            if any(meeting for *_, meeting, _ in told) and never_meet([groups for *_, groups in told]):
                places = "; ".join(f"rank {rank} is {words}" for rank, (_, _, words, *_) in enumerate(told))
                others = sum(not meeting for *_, meeting, _ in told)
                self.store.set(key(f"verdict {question}"), f"{others} {places}")


def never_meet(told: list[dict[str, tuple[list[int], int, int]]]) -> bool:
    """Whether two ranks have begun other numbers of collectives in a group that both are in. told: by rank, by group,
    the group's ranks, the collectives of ours, and all. A group that a rank does not know is one that others make."""
    for groups in told:
        for name, (members, ours, count) in groups.items():
            for member in members:
                other = told[member].get(name)
                if other is None or (ours, count) != tuple(other[1:]):
                    return True
    return False


def foreign(frame: types.FrameType | None) -> str:
    """The line of the program's own from which a thread is in a collective; empty where it is in none."""
    waits = False
    while frame is not None and _module(frame).partition(".")[0] == "torch":
        waits = waits or _module(frame).startswith("torch.distributed")
        frame = frame.f_back
    if frame is None or not (waits or (_called(frame) == "wait" and not _module(frame).startswith("moebius."))):
        return ""
    return f"in a collective at {line_of(frame)}"


def line_of(frame: types.FrameType) -> str:
    """Of the program: its file, number and text."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(file)}:{line}, {linecache.getline(file, line).strip()}"


def own_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost one of the program's own code, from this one outwards."""
    while frame is not None and (_module(frame).partition(".")[0] in ("torch", "moebius") or not is_file(frame)):
        frame = frame.f_back
    return frame


def is_file(frame: types.FrameType) -> bool:
    return not frame.f_code.co_filename.startswith("<")


def makes_a_group(frame: types.FrameType | None) -> bool:
    """Whether a thread waits in ``new_group`` for all ranks: torch counts no collective while it connects them."""
    while frame is not None:
        if frame.f_code is NEW_GROUP:
            return not frame.f_locals["use_local_synchronization"]
        frame = frame.f_back
    return False


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _called(frame: types.FrameType) -> str:
    """The method that a frame's current instruction calls, as it seems: the last attribute looked up."""
    before = [found for found in dis.get_instructions(frame.f_code) if found.offset <= frame.f_lasti]
    return next((str(found.argval) for found in before[::-1] if found.opname in ("LOAD_METHOD", "LOAD_ATTR")), "")


WATCHES: list[Watch] = []


def watch(ours: Callable[[], Mapping[str, int]]) -> None:
    """Watch over the thread that calls this."""
    if not WATCHES or WATCHES[0].group is not dist.group.WORLD or not WATCHES[0].is_alive():
        WATCHES[:] = [Watch(ours)]
        WATCHES[0].start()
        atexit.register(WATCHES[0].stop)
    elif WATCHES[0].thread != threading.get_ident():
        WATCHES[0].follow()

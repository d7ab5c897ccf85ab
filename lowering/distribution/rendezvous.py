"""Where the ranks of a group meet before they exchange anything: each says where it is, and waits for a bounded time.

All meetings have one form on the wire, two numbers to each other rank, so that two different ones are told apart on
every rank; the ranks then tell one another, through the group's store, where each of them is. A rank that fails in a
captured call says so there, and the others, which wait for it, raise what it said; so they do where its process is
stopped or gone.
"""
from __future__ import annotations

import contextlib
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moebius.lowering.distribution.alive import condition, this_process
from moebius.lowering.distribution.channels import PURPOSES, Channel, traffic
from moebius.lowering.distribution.errors import DistributionError, RanksDisagreeError
from moebius.lowering.distribution.standing import WATCHES, Here, line_of, own_frame, watch
from moebius.lowering.distribution.torch_private import (
    LocalTensor,
    by_rank,
    default_store,
    never_destroy,
    simulated_ranks,
)
from moebius.lowering.planner.traffic import HEADER_BYTES
from moebius.lowering.step.optimizer_steps import TAKEN

NUMBER = re.compile(r"\bparameter (\d+)")
SLICE = timedelta(seconds=1)  # how often a rank that waits asks whether another one has failed
TELLING = timedelta(seconds=4)  # how long ranks that do not agree wait for one another's words
RULE = (
    "With mesh=..., every rank has to run the same program, as often, each on its own part of the batch, which may be "
    "empty. A loop over the experts that a batch hits, where it is not captured, needs a token on each rank: a rank "
    "without one reads no experts, and does not come to where they are gathered; capture it with mesh=..., too"
)


class Call:
    """The call of a captured function that runs: its name, how many there were of it, its mesh, and why it was captured
    again."""

    name, number = "", 0
    mesh: Any = None
    again: Callable[[], str] = str


def at(place: str, steps: int) -> str:
    """Where this rank is, in words that are the same on all ranks that are there. steps: of optimizers, before."""
    call = f", in call {Call.number} of {Call.name}" if Call.name else ""
    return f"{place}{call}" + (f", after {steps} optimizer step{'s' if steps > 1 else ''}" if steps else "")


def header(group: ProcessGroup, numbers_P: Tensor, place: str, backward: int = 0, owed: int = 0) -> Tensor:
    """[P, 2], what this rank is to send to each: a number (numbers_P), and where it is.

    backward: a digest of what backward will do (backward.py), 0 where that is not known. Where it is the same on all
    ranks, they promise it. owed: how many such promises are open where a rank comes here.
    """
    where = at(place, TAKEN[group.name])
    group.come_to(where, owed)
    return torch.stack([numbers_P, torch.full_like(numbers_P, zlib.crc32(where.encode()) | backward << 32)], 1)


def compare(group: ProcessGroup, received: Tensor, place: str, backward: int = 0) -> tuple[Tensor, bool]:
    """[P], on the CPU: the number that each rank has sent in its header; whether the digests were all the same.

    Raises RanksDisagreeError, on every rank, where they have come to different places, or where one has failed.
    """
    where = at(place, TAKEN[group.name])
    received = received.cpu()
    apart = received[:, 1] ^ (zlib.crc32(where.encode()) | backward << 32)
    alike = not bool(apart.any())
    if not alike and bool((apart & 0xFFFFFFFF).any()):
        raise group.apart(group.tell(group.with_names(where) + Call.again() + line_of_the_program(where)))
    return received[:, 0], alike


def line_of_the_program(place: str) -> str:
    """Where the program's own code is, in words to put behind a place that has no line."""
    frame = None if ".py:" in place else own_frame(sys._getframe())
    return "" if frame is None else f", at {line_of(frame)}"


def headers(group: ProcessGroup, numbers_P: Tensor, place: str, backward: int = 0, owed: int = 0) -> Tensor:
    """[P], on the CPU: the number that each rank has for this one; numbers_P: this one's for each. Collective."""
    sent = header(group, numbers_P, place, backward, owed)
    received = torch.empty_like(sent)
    group.meet(group.begin(received, sent, [1] * group.size(), [1] * group.size()))
    for _ in by_rank(sent):
        traffic.add("header", HEADER_BYTES * (group.size() - 1))
    return compare(group, received, place, backward)[0]


def exchange_words(keys: list[str], rank: int, words: str) -> list[str]:
    """Through the store, a key for each rank: what each says, this one's words among them."""
    store = default_store()
    store.set(keys[rank], words)
    told = []
    for key in keys:
        try:
            store.wait([key], TELLING)
            told.append(store.get(key).decode())
        except RuntimeError:
            told.append("a place that it does not tell")
    return told


class ProcessGroup:
    """The ranks that share the experts of a layer, over torch.distributed. name: the same on all of them. meetings: how
    many there were, the same on all of them too. processes: of its ranks, as far as they have told, each asked for
    once. visits: of each place that backward undoes. promised: the visits whose backward comes without a meeting, as
    all ranks have the same graph for it, and has not come yet; idle: those of them of which none comes, as no rank had
    a row. names: of parameters, by the number that stands in places, for messages. pending: exchanges that were begun
    and not waited for. half: rows went out, and their results have not come back. left: where this rank failed then,
    and others may wait for it."""

    half, pending, left = False, 0, ""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.meetings, self.announced, self.place = group, 0, False, "the first meeting"
        self.name = str(group.group_name)
        self.processes: dict[int, str] = {}
        self.visits: Counter[str] = Counter()
        self.promised: dict[tuple[str, int], str] = {}
        self.idle: list[tuple[str, int]] = []
        self.names: dict[int, str] = {}
        self.begun = 0  # so many collectives

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def open_channels(self, name: str) -> None:
        """For functional collectives that have this name for the group."""
        for purpose in PURPOSES:
            Channel(self, purpose, name)

    def begin(self, received: Tensor, sent: Tensor, back: list[int], out: list[int]) -> Any:
        """Rows of ``sent`` to each rank, ``out`` of them; into ``received``, ``back`` of them from each."""
        self.begun += 1
        return dist.all_to_all_single(received, sent, back, out, group=self.group, async_op=True)

    def all_reduce(self, tensor: Tensor, how: Any) -> None:
        self.begun += 1
        self.wait(dist.all_reduce(tensor, how, group=self.group, async_op=True))

    def copy_from_first(self, tensor: Tensor) -> None:
        self.begun += 1
        first = dist.get_global_rank(self.group, 0)
        self.wait(dist.broadcast(tensor, first, group=self.group, async_op=True))

    def wait(self, work: Any) -> None:
        """For a collective of the group, as long as no rank of it has failed, is stopped or gone."""
        if dist.get_backend(self.group) != "gloo":  # its ranks wait on the device
            work.wait()
            return
        if self.rank() not in self.processes:
            self.processes[self.rank()] = this_process()
            default_store().set(self.key(f"process/{self.rank()}"), self.processes[self.rank()])
        before: list[str] = []
        Here.ours = True
        try:
            while True:
                try:
                    work.wait(SLICE)
                    return
                except RuntimeError as error:
                    if "timed out!" not in str(error):
                        words = self.why_it_failed() or f"a rank has gone ({error})"
                        raise told_to_others(f"{words}; {self.waited()}") from error
                lost = self.lost()
                gone = [one for one in lost if one in before]  # (a process may stop for a moment)
                if WATCHES and (words := WATCHES[0].verdict):
                    raise RanksDisagreeError(f"the ranks have come to different places: {words}. {RULE}")
                if words := self.failed() or "; ".join(gone):
                    raise told_to_others(f"{words}; {self.waited()}")
                before = lost
        finally:
            Here.ours = False
            if not work.is_completed():
                never_destroy(self.group)

    def waited(self) -> str:
        return f"this rank, {dist.get_rank()}, waited for it at {self.place}"

    def why_it_failed(self) -> str:
        """What other ranks say, or the system says of them, once a connection is closed: it may take a moment."""
        end = time.monotonic() + TELLING.total_seconds()
        while not (words := self.failed() or "; ".join(self.lost())) and time.monotonic() < end:
            time.sleep(0.1)
        return words

    def lost(self) -> list[str]:
        """Ranks that can do nothing any more, in words."""
        for rank in range(self.size()):
            if rank not in self.processes and (told := self.read(f"process/{rank}")):
                self.processes[rank] = told
        found = [(rank, condition(process)) for rank, process in sorted(self.processes.items())]
        return [f"the process of rank {dist.get_global_rank(self.group, rank)} {what}" for rank, what in found if what]

    def come_to(self, place: str, owed: int) -> None:
        """Before a meeting. owed: how many exchanges of backward a rank that comes here has promised."""
        if len(self.promised) != owed:
            for kept in self.idle:
                self.promised.pop(kept, None)
            self.idle.clear()
        if self.left or (self.promised and len(self.promised) != owed):
            self.ask_before_sending(place)
        elif self.announced:
            self.announce("")  # (an error that the program caught)
        self.place = place

    def meet(self, work: Any) -> None:
        """Wait for what begins a meeting: no longer than this rank must."""
        self.meetings += 1
        Here.meeting = self.place
        try:
            self.wait(work)
        finally:
            Here.meeting = ""

    def redeem(self, place: str, visit: int) -> bool:
        """Whether backward of what was begun there, at that visit, comes now without a meeting, as was promised."""
        place = self.promised.pop((place, visit), "")
        self.place = f"backward of {place}" if place else self.place
        return bool(place)

    def ask_before_sending(self, place: str) -> None:
        """This rank left an exchange that others may wait in (an exception that was caught?), and comes to another one.
        Nothing is sent before all ranks have said the same."""
        self.left = self.left or f"backward of {next(iter(self.promised.values()))}"
        self.promised.clear()
        words = f"{place}, without {self.left}, after {self.begun} collectives"
        self.announce(f"rank {dist.get_rank()} came to {words}")
        if set(told := self.tell(words, "left/")) != {words}:
            raise self.apart(told)
        self.half, self.pending, self.left = False, 0, ""
        self.announce("")

    def apart(self, told: list[str]) -> RanksDisagreeError:
        """told: by each rank, of its place."""
        ranks = dist.get_process_group_ranks(self.group)
        places = "; ".join(f"rank {rank} is at {words}" for rank, words in zip(ranks, told, strict=True))
        error = RanksDisagreeError(f"the ranks have come to different places: {places}. {RULE}")
        error.raised_by_all_of = self.name
        tell_failure(error)
        return error

    def with_names(self, place: str) -> str:
        """A place, with this rank's names of the parameters in it."""
        def named(found: re.Match[str]) -> str:
            name = self.names.get(int(found[1]))
            return f"{found[0]} ({name})" if name else found[0]

        return NUMBER.sub(named, place)

    def tell(self, words: str, kind: str = "") -> list[str]:
        """What each rank says, this one's words among them."""
        keys = [self.key(f"{kind}{self.meetings}/{rank}") for rank in range(self.size())]
        return exchange_words(keys, self.rank(), words)

    def leave(self) -> None:
        """An error ends what this rank is in."""
        if self.half:
            self.left = f"the rest of {self.place}"
        if self.pending:
            never_destroy(self.group)

    def announce(self, words: str) -> None:
        """Tell the ranks of the group that this one has failed, or, without words, that it goes on all the same."""
        if words:
            self.leave()
        if words or self.announced:
            default_store().set(self.key("failed"), f"{self.meetings} {words}")
        self.announced = bool(words)

    def failed(self) -> str:
        """What a rank has said that failed, and has not come to a meeting since then."""
        count, _, words = (self.read("failed") or "-1 ").partition(" ")
        return words.strip() if int(count) >= self.meetings - 1 else ""

    def read(self, name: str) -> str:
        """What a rank has written; empty where none has, or where the store is gone with its process."""
        key, store = self.key(name), default_store()
        try:
            return str(store.get(key).decode()) if store.check([key]) else ""
        except RuntimeError:
            return ""

    def key(self, name: str) -> str:
        return f"moebius/{self.group.group_name}/{name}"


class FakeGroup(ProcessGroup):
    """A Group over torch's fake one. Its other ranks do not exist, and are taken to have what this one has; or, under
    LocalTensorMode, they all do, and torch has what each sends."""

    def begin(self, received: Tensor, sent: Tensor, back: list[int], out: list[int]) -> Any:
        return super().begin(received, sent, back, out) if self.has_all(sent) else received.copy_(sent)

    def all_reduce(self, tensor: Tensor, how: Any) -> None:
        if self.has_all(tensor):
            super().all_reduce(tensor, how)
        elif how == dist.ReduceOp.SUM:
            tensor.mul_(self.size())

    def copy_from_first(self, tensor: Tensor) -> None:
        if self.has_all(tensor):
            super().copy_from_first(tensor)

    def has_all(self, tensor: Tensor) -> bool:
        """Whether a tensor is of all ranks. Raises DistributionError where they are simulated, and it is of one."""
        if simulated_ranks() is not None and not isinstance(tensor, LocalTensor):
            raise DistributionError(
                "a collective of simulated ranks (LocalTensorMode) was given an ordinary tensor; make the model, its "
                "optimizer and what the step reads within the mode"
            )
        return isinstance(tensor, LocalTensor)

    def wait(self, work: Any) -> None:
        if not isinstance(work, Tensor):
            work.wait()

    def tell(self, words: str, kind: str = "") -> list[str]:
        return [words] * self.size()

    def announce(self, words: str) -> None:
        pass


GROUPS: dict[str, ProcessGroup] = {}


def group_of(group: dist.ProcessGroup) -> ProcessGroup:
    """The one ProcessGroup of a group of torch's, which counts its meetings."""
    known = GROUPS.get(group.group_name)
    if known is None or known.group is not group:
        kind = FakeGroup if dist.get_backend(group) == "fake" else ProcessGroup
        known = GROUPS[group.group_name] = kind(group)
    return known


def watch_ranks(mesh: Any) -> None:
    """From now on ranks tell where this thread of theirs is, when none goes on, and what fails."""
    groups = [group_of(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    if mesh.size() > 1 and all(dist.get_backend(group.group) == "gloo" for group in groups):
        watch(lambda: {name: group.begun for name, group in GROUPS.items()})


def told_to_others(words: str) -> RanksDisagreeError:
    """To be raised: in a captured call or outside of one, in which nobody else would tell the others."""
    error = RanksDisagreeError(words)
    tell_failure(error)
    return error


def tell_failure(error: BaseException, where: str = "") -> None:
    """To all ranks that wait for this one, whatever group they do so in. Who raises the same error need not hear of
    it: where all catch it and one is late in the next meeting, the others would believe that it has failed."""
    ours = [one for one in (error, error.__cause__) if isinstance(one, DistributionError)]
    told = str(error)[: None if ours else 300]
    know = {one.raised_by_all_of for one in ours}
    for group in GROUPS.values():
        if group.name in know:
            group.leave()
        else:
            group.announce(f"rank {dist.get_rank()} raised {type(error).__name__}: {told}{where}")


@contextlib.contextmanager
def calling(mesh: Any, name: str, number: int, again: Callable[[], str]) -> Iterator[None]:
    """While a captured function runs, for the number-th time. What fails in it is told to the other ranks. again: why
    it was captured more than once, as words to put behind others."""
    before = Call.name, Call.number, Call.again, Call.mesh
    Call.name, Call.number, Call.again, Call.mesh = name, number, staticmethod(again), mesh
    for group in GROUPS.values():
        group.announce("")
    if WATCHES:
        watch_ranks(mesh)
    try:
        yield
    except BaseException as error:
        tell_failure(error, f", in call {number} of {name}")
        raise
    finally:
        Call.name, Call.number, Call.again, Call.mesh = before

"""Many ranks in one process: the exchange operators under torch's LocalTensorMode.

LocalTensorMode runs one program for all ranks, each tensor holding every rank's value; it runs ordinary operators rank
by rank. An exchange operator is opaque to it, and its ranks need one another: here each rank's call runs on a thread
of its own, with the operator's own code, and only the collectives are replaced, by a meeting of the threads.
"""
from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from moebius.lowering.distribution import exchange, expert_parallel, weighing
from moebius.lowering.distribution.torch_private import (
    LocalTensor,
    LocalTensorMode,
    collective_groups,
    enabled_ranks,
    local_sizes,
    local_tensor,
    parameters_of,
    tree_map,
)

OPERATORS = (
    exchange.route, exchange.send_rows, exchange.return_rows, exchange.own_experts, exchange.pad_experts,
    exchange.reached_experts, expert_parallel.own_slots,
)


class Meeting:
    """Where the threads of all ranks leave what they send."""

    def __init__(self, ranks: int):
        self.barrier = threading.Barrier(ranks)
        self.left: dict[int, Any] = {}

    def exchange(self, rank: int, value: Any) -> dict[int, Any]:
        """What every rank left, by rank. Each takes what it needs before it comes to the next exchange."""
        self.left[rank] = value
        self.barrier.wait()
        everything = dict(self.left)
        self.barrier.wait()
        return everything


class SimulatedGroup:
    """An exchange.Group among threads."""

    name, half = "simulated ranks", False

    def __init__(self, rank: int, ranks: int, meeting: Meeting):
        self.me, self.ranks, self.meeting, self.meetings = rank, ranks, meeting, 0

    def rank(self) -> int:
        return self.me

    def size(self) -> int:
        return self.ranks

    def all_to_all(self, received: Tensor, sent: Tensor, back: list[int], out: list[int]) -> None:
        pieces = self.meeting.exchange(self.me, sent.split(out))
        mine = [pieces[source][self.me] for source in range(self.ranks)]
        assert [len(piece) for piece in mine] == back
        torch.cat(mine, out=received)

    def meet(self, received: Tensor, sent: Tensor, place: str, owed: int) -> None:
        self.all_to_all(received, sent, [1] * self.ranks, [1] * self.ranks)

    def promise(self) -> None:
        pass  # a group lives for one operator: backward meets again

    def redeem(self, meeting: int) -> bool:
        return False

    def tell(self, words: str) -> list[str]:
        told = self.meeting.exchange(self.me, words)
        return [told[rank] for rank in range(self.ranks)]


def of_rank(value: Any, rank: int) -> Any:
    """What one rank has of a value: of a tensor, or of a size that is another one on each."""
    if isinstance(value, LocalTensor):
        return local_tensor(value, rank)
    return local_sizes(value).get(rank, value) if isinstance(value, torch.SymInt) else value


def run_ranks(mode: Any, operator: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One operator for all ranks of the mode. What fails on a rank is raised here."""
    if enabled_ranks() is None:  # fakes, of one rank
        return operator(*args, **kwargs)
    name = {**dict(zip(parameters_of(operator), args, strict=False)), **kwargs}["group_name"]
    results: dict[int, Any] = {}
    failures: list[BaseException] = []

    def run(group: SimulatedGroup, rank: int) -> None:
        exchange.simulated.group = group
        try:
            own = tree_map(lambda v: of_rank(v, rank), (args, kwargs))
            with torch.no_grad():
                results[rank] = operator(*own[0], **own[1])
        except BaseException as failure:
            if not isinstance(failure, threading.BrokenBarrierError):
                failures.append(failure)
            group.meeting.barrier.abort()

    threads = []
    for members in groups_like(exchange.find_group(name)):
        meeting = Meeting(len(members))
        for place, rank in enumerate(members):
            group = SimulatedGroup(place, len(members), meeting)
            threads.append(threading.Thread(target=run, args=(group, rank)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    first, *_ = results.values()
    if isinstance(first, tuple | list):
        return type(first)(LocalTensor({r: result[i] for r, result in results.items()}) for i in range(len(first)))
    return LocalTensor(results)


def groups_like(group: Any) -> list[list[int]]:
    """The ranks of a group of one rank, and of the groups of other ranks along the same axis of a mesh."""
    ranks, offsets, _ = collective_groups(group.group)
    return [[offset + rank for rank in ranks] for offset in offsets]


def share_of_tokens(mode: Any, operator: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Its own code, on tensors of all ranks: it exchanges nothing but headers."""
    if enabled_ranks() is None:
        return operator(*args, **kwargs)
    with LocalTensorMode(mode.ranks):  # (entered twice, one would be off afterwards)
        return weighing.share(*args, **kwargs)


for each in OPERATORS:
    each.register_torch_dispatch(LocalTensorMode, run_ranks)
weighing.share_of_tokens.register_torch_dispatch(LocalTensorMode, share_of_tokens)

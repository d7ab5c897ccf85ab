"""Many ranks in one process: the exchange's operators under torch's LocalTensorMode.

LocalTensorMode runs one program for all ranks, each tensor holding every rank's value; it runs ordinary operators rank
by rank, and has functional collectives. Here is what it does with operators of our own, which are opaque to it.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moebius.lowering.distribution import exchange, weighing
from moebius.lowering.distribution.channels import CHANNELS, traffic
from moebius.lowering.distribution.errors import RanksDisagreeError
from moebius.lowering.distribution.torch_private import (
    LocalTensor,
    LocalTensorMode,
    all_to_all_single,
    by_rank,
    collective_groups,
    enabled_ranks,
    local_sizes,
    local_tensor,
    parameters_of,
    tree_map,
)


def of_rank(value: Any, rank: int) -> Any:
    """What one rank has of a value: of a tensor, or of a size that is another one on each."""
    if isinstance(value, LocalTensor):
        return local_tensor(value, rank)
    return local_sizes(value).get(rank, value) if isinstance(value, torch.SymInt) else value


def for_each(mode: Any, operator: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator that meets nobody, rank by rank."""
    if enabled_ranks() is None:  # fakes, of one rank
        return operator(*args, **kwargs)
    name = {**dict(zip(parameters_of(operator), args, strict=False)), **kwargs}["group_name"]
    results: dict[int, Any] = {}
    try:
        for members in groups_like(exchange.find_group(name)):
            for exchange.simulated.rank, rank in enumerate(members):
                own = tree_map(functools.partial(of_rank, rank=rank), (args, kwargs))
                with torch.no_grad():
                    results[rank] = operator(*own[0], **own[1])
    finally:
        del exchange.simulated.rank
    return LocalTensor(results)


def for_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that exchanges nothing but headers: its own code, on tensors of all ranks."""
    def run(mode: Any, operator: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if enabled_ranks() is None:
            return operator(*args, **kwargs)
        with LocalTensorMode(mode.ranks):  # (entered twice, one would be off afterwards)
            return function(*args, **kwargs)

    return run


def begin_meeting(numbers_P: Any, group_name: str, place: str, sizes: list[Any], *rest: int) -> Any:
    ranks = range(len(by_rank(numbers_P)))
    places = {place % tuple(of_rank(size, rank) for size in sizes) for rank in ranks}
    if len(places) > 1:
        raise RanksDisagreeError(f"the ranks have come to different places: {'; '.join(sorted(places))}")
    return exchange.begin_meeting(numbers_P, group_name, place, sizes, *rest)


def end_meeting(received: Any, sent: Any, group_name: str, *where: Any) -> Any:
    told = exchange.end_meeting(received, sent, group_name, *where)
    for members in groups_like(exchange.find_group(group_name)):
        for own, rank in enumerate(members):
            local_tensor(told, rank)[-1] = own
    return told


def exchange_rows(mode: Any, operator: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch's own, which does not come to a Channel: over the group that this stands for, and counted."""
    if (channel := CHANNELS.get(args[-1])) is not None and enabled_ranks() is not None:
        sent, back, out, _ = args
        args = sent, back, out, channel.group.group.group_name
        for members in groups_like(channel.group):
            for own, rank in enumerate(members):
                counts = [of_rank(count, rank) for count in out]
                traffic.add_rows(channel.purpose, of_rank(sent, rank), counts, own)
    return mode.__torch_dispatch__(operator, types, args, kwargs)


def groups_like(group: Any) -> list[list[int]]:
    """The ranks of a group of one rank, and of the groups of other ranks along the same axis of a mesh."""
    ranks, offsets, *_ = collective_groups(group.group)  # (before 2.15 with a third one)
    return [[offset + rank for rank in ranks] for offset in offsets]


exchange.own_experts.register_torch_dispatch(LocalTensorMode, for_each)
exchange.pad_experts.register_torch_dispatch(LocalTensorMode, for_each)
exchange.begun.register_torch_dispatch(LocalTensorMode, for_all(begin_meeting))
exchange.ended.register_torch_dispatch(LocalTensorMode, for_all(end_meeting))
exchange.after.register_torch_dispatch(LocalTensorMode, for_all(lambda value, meeting: value.clone()))
weighing.share_of_tokens.register_torch_dispatch(LocalTensorMode, for_all(weighing.share))
torch.library.register_torch_dispatch(all_to_all_single, LocalTensorMode, exchange_rows)

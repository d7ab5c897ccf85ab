"""The collectives of expert parallelism, as torch operators: who sends which token where, rows out, rows back.

Functional, opaque operators with fake and autograd registration, so that they trace with unbacked sizes under any
backend. ``send_rows`` and ``return_rows`` are each other's backward, and so are ``own_experts`` and ``pad_experts``.
Each rank has tokens of its own, as many as it likes or none. Only plain collectives that gloo has: one even exchange
of counts, and uneven ``all_to_all_single``; all that a token takes along travels in one of them.

Letters: T this rank's tokens, P ranks, S rows that this rank sends (one for each of its tokens and each rank that has
an expert of it: a token with two experts on one rank travels once), U rows that it receives.
"""
from __future__ import annotations

import functools
import threading
import zlib
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.packing import pack, row_bytes, unpack
from moebius.lowering.distribution.rendezvous import Group, group_of, headers
from moebius.lowering.planner.traffic import HEADER_BYTES, chunk_span

_GROUPS: dict[str, Group] = {}
simulated = threading.local()  # .group: the Group of the simulated rank that this thread runs (simulate.py)


def remember_group(group: dist.ProcessGroup) -> str:
    """The name under which the operators find this process group (operators take no objects)."""
    _GROUPS[group.group_name] = group_of(group)
    return group.group_name


def remember_axis(mesh: Any, axis: int) -> str:
    """The same of a mesh's axis. All ranks of the mesh have the same name for it, whichever of its groups is theirs, so
    that their graphs are the same text."""
    name = axis_name(mesh, axis)
    group = _GROUPS[name] = group_of(mesh.get_group(axis))
    group.name = name
    return name


@functools.cache
def axis_name(mesh: Any, axis: int) -> str:
    """What the ranks of a mesh call one of its axes."""
    dim = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
    ranks = zlib.crc32(repr(mesh.mesh.tolist()).encode())
    return f"{dim} of {'x'.join(map(str, mesh.mesh.shape))} ranks {ranks:08x}"


def find_group(name: str) -> Group:
    """The group of that name, seen from this rank."""
    group = getattr(simulated, "group", None) or _GROUPS.get(name)
    if group is None:
        raise DistributionError(f"no process group {name!r} is known here; capture again in this process")
    return group


@dataclass
class Traffic:
    """Bytes that this rank sent to other ranks since :meth:`reset`, by purpose, and how many collectives that took.

    reduce: of gradients, as a ring of ranks sends them: each all-reduce of n bytes over P ranks is 2 n (P − 1) / P.
    """

    header: int = 0
    dispatch: int = 0
    combine: int = 0
    reduce: int = 0
    collectives: int = 0
    lock: ClassVar[threading.Lock] = threading.Lock()

    def add(self, purpose: str, sent: int) -> None:
        """One more collective, which sent so many bytes to other ranks."""
        with self.lock:
            setattr(self, purpose, getattr(self, purpose) + sent)
            self.collectives += 1

    @property
    def total(self) -> int:
        return self.header + self.dispatch + self.combine + self.reduce

    def reset(self) -> None:
        for item in fields(self):
            setattr(self, item.name, 0)


traffic = Traffic()


@torch.library.custom_op("moebius::route", mutates_args=())
def route(
    index_TK: Tensor, num_experts: int, group_name: str, place: str = "experts", backward: int = 0, owed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows this rank sends and receives. Collective.

    place: which layer this is. Raises RanksDisagreeError, on every rank, where the ranks have come to different ones.
    backward, owed: as in :func:`meeting.headers`.

    Returns rows_S (positions in T, by destination, then by token), source_U (the rank each received row comes from) and
    splits_3P (on the CPU: rows sent to each rank, rows received from each, and the number of this meeting, the same on
    all ranks, by which backward knows which exchange it undoes). An index outside [0, E) goes nowhere.
    """
    group = find_group(group_name)
    ranks = group.size()
    tokens, top_k = index_TK.shape
    valid = (index_TK >= 0) & (index_TK < num_experts)
    owner = torch.where(valid, index_TK, 0).long() // -(-num_experts // ranks)
    wanted = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=index_TK.device)
    wanted.scatter_(1, torch.where(valid, owner, ranks), True)  # column `ranks` takes the slots that go nowhere
    wanted = wanted[:, :ranks]
    rows_S = wanted.t().nonzero()[:, 1]

    out_P = wanted.sum(0)
    back_P = headers(group, out_P, f"{place} ({num_experts} experts, top {top_k})", backward, owed)
    traffic.add("header", (ranks - 1) * HEADER_BYTES)
    splits_3P = torch.stack([out_P.cpu(), back_P, torch.full_like(back_P, group.meetings)])
    source_U = torch.repeat_interleave(torch.arange(ranks), splits_3P[1]).to(index_TK.device)
    return rows_S, source_U, splits_3P


@route.register_fake
def _(
    index_TK: Tensor, num_experts: int, group_name: str, place: str = "experts", backward: int = 0, owed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    return (
        index_TK.new_empty((context.new_dynamic_size(),), dtype=torch.int64),
        index_TK.new_empty((context.new_dynamic_size(),), dtype=torch.int64),
        torch.empty((3, find_group(group_name).size()), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("moebius::reached_experts", mutates_args=())
def reached_experts(index: Tensor, num_experts: int, group_name: str) -> Tensor:
    """[experts]: the numbers of those that a token of any rank goes to. Collective.

    Raises RanksDisagreeError, on every rank, where the ranks have come to different places.
    """
    group = find_group(group_name)
    headers(group, torch.zeros(group.size(), dtype=torch.int64, device=index.device), f"which of {num_experts} experts")
    flat = index.reshape(-1).long()
    hit = torch.zeros(num_experts, dtype=torch.uint8, device=index.device)
    hit[flat[(flat >= 0) & (flat < num_experts)]] = 1
    sent = hit.repeat(group.size(), 1)
    received = torch.empty_like(sent)
    group.all_to_all(received, sent, [1] * group.size(), [1] * group.size())
    traffic.add("header", HEADER_BYTES * (group.size() - 1))
    traffic.add("header", num_experts * (group.size() - 1))
    return received.any(0).nonzero()[:, 0]


@reached_experts.register_fake
def _(index: Tensor, num_experts: int, group_name: str) -> Tensor:
    return index.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int64)


@torch.library.custom_op("moebius::send_rows", mutates_args=())
def send_rows(
    tensors: list[Tensor], rows_S: Tensor, source_U: Tensor, splits_3P: Tensor, group_name: str, place: str
) -> list[Tensor]:
    """Rows of these tensors, [T, ...] each, to the ranks that asked for them, in one exchange: what arrived here,
    [U, ...] each. Collective. place: where this is, if the ranks are to compare that first, and have not promised it.
    (No default: torch leaves out arguments that equal one, and then backward of lists does not fit.)"""
    group = find_group(group_name)
    if place and not group.redeem(number := int(splits_3P[2, 0])):
        headers(group, splits_3P[0].to(rows_S.device), f"{place}, which was exchange {number}")
        traffic.add("header", (group.size() - 1) * HEADER_BYTES)
    sent = pack(tensors, rows_S)
    out, back, _ = splits_3P.tolist()
    received = sent.new_empty((source_U.shape[0], *sent.shape[1:]))
    group.half = True
    group.all_to_all(received, sent, back, out)
    traffic.add("dispatch", row_bytes(sent) * (sum(out) - out[group.rank()]))
    del sent
    return unpack(received, tensors)


@send_rows.register_fake
def _(
    tensors: list[Tensor], rows_S: Tensor, source_U: Tensor, splits_3P: Tensor, group_name: str, place: str
) -> list[Tensor]:
    return [tensor.new_empty((source_U.shape[0], *tensor.shape[1:])) for tensor in tensors]


@torch.library.custom_op("moebius::return_rows", mutates_args=())
def return_rows(
    tensors: list[Tensor], rows_S: Tensor, source_U: Tensor, splits_3P: Tensor, tokens: int, group_name: str,
    place: str,
) -> list[Tensor]:
    """Rows like the received ones, [U, ...] each, to where those came from, in one exchange; summed for each of this
    rank's tokens: [T, ...] each. Collective. place: where this is, as ranks compare it where backward comes here."""
    group = find_group(group_name)
    out, back, _ = splits_3P.tolist()
    sent = pack(tensors)
    arrived = sent.new_empty((rows_S.shape[0], *sent.shape[1:]))
    group.all_to_all(arrived, sent, out, back)
    group.half = False
    traffic.add("combine", row_bytes(sent) * (sum(back) - back[group.rank()]))
    del sent
    return [_sum_rows(rows, rows_S, tokens) for rows in unpack(arrived, tensors)]


@return_rows.register_fake
def _(
    tensors: list[Tensor], rows_S: Tensor, source_U: Tensor, splits_3P: Tensor, tokens: int, group_name: str,
    place: str,
) -> list[Tensor]:
    return [tensor.new_empty((tokens, *tensor.shape[1:])) for tensor in tensors]


def _sum_rows(t_S: Tensor, rows_S: Tensor, tokens: int) -> Tensor:
    wide = torch.float32 if t_S.dtype in (torch.bfloat16, torch.float16) else t_S.dtype
    sum_T = torch.zeros((tokens, *t_S.shape[1:]), dtype=wide, device=t_S.device)
    return sum_T.index_add_(0, rows_S, t_S.to(wide)).to(t_S.dtype)


@torch.library.custom_op("moebius::own_experts", mutates_args=())
def own_experts(w_E: Tensor, group_name: str) -> Tensor:
    """This rank's experts of a whole tensor that is equal on all ranks: rows ``chunk_span(E, P, rank)`` of [E, ...]."""
    group = find_group(group_name)
    low, high = chunk_span(w_E.shape[0], group.size(), group.rank())
    return w_E[low:high].clone()


@own_experts.register_fake
def _(w_E: Tensor, group_name: str) -> Tensor:
    group = find_group(group_name)
    low, high = chunk_span(w_E.shape[0], group.size(), group.rank())
    return w_E.new_empty((high - low, *w_E.shape[1:]))


@torch.library.custom_op("moebius::pad_experts", mutates_args=())
def pad_experts(w_L: Tensor, num_experts: int, group_name: str) -> Tensor:
    """[E, ...]: this rank's rows at their places, zeros for the experts of other ranks."""
    group = find_group(group_name)
    low, high = chunk_span(num_experts, group.size(), group.rank())
    whole = w_L.new_zeros((num_experts, *w_L.shape[1:]))
    whole[low:high] = w_L
    return whole


@pad_experts.register_fake
def _(w_L: Tensor, num_experts: int, group_name: str) -> Tensor:
    return w_L.new_empty((num_experts, *w_L.shape[1:]))


# ----------------------------------------------------------------------------------------------------------------------
# Backward
# ----------------------------------------------------------------------------------------------------------------------


def _save_send(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, rows_S, source_U, splits_3P, group_name, _ = inputs
    ctx.save_for_backward(rows_S, source_U, splits_3P)
    ctx.tokens, ctx.group_name = tensors[0].shape[0], group_name


def _differentiate_send(ctx: Any, grads_U: list[Tensor]) -> tuple:
    wanted = ctx.needs_input_grad[0]
    held = [grad_U for grad_U, wants in zip(grads_U, wanted, strict=True) if wants]
    back = iter(return_rows(held, *ctx.saved_tensors, ctx.tokens, ctx.group_name, ""))
    return [next(back) if wants else None for wants in wanted], None, None, None, None, None


def _save_return(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    _, rows_S, source_U, splits_3P, _, group_name, place = inputs
    ctx.save_for_backward(rows_S, source_U, splits_3P)
    ctx.group_name, ctx.place = group_name, place


def _differentiate_return(ctx: Any, grads_T: list[Tensor]) -> tuple:
    place = f"backward of {ctx.place}"  # the first exchange of a layer's backward
    return send_rows(grads_T, *ctx.saved_tensors, ctx.group_name, place), None, None, None, None, None, None


def _save_own(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.num_experts, ctx.group_name = inputs[0].shape[0], inputs[1]


def _differentiate_own(ctx: Any, grad_L: Tensor) -> tuple:
    # What this rank has to say of the whole weight; gradients of whole parameters are averaged over the ranks (reduce).
    return pad_experts(grad_L, ctx.num_experts, ctx.group_name), None


def _save_pad(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.group_name = inputs[2]


def _differentiate_pad(ctx: Any, grad_E: Tensor) -> tuple:
    return own_experts(grad_E, ctx.group_name), None, None


send_rows.register_autograd(_differentiate_send, setup_context=_save_send)
return_rows.register_autograd(_differentiate_return, setup_context=_save_return)
own_experts.register_autograd(_differentiate_own, setup_context=_save_own)
pad_experts.register_autograd(_differentiate_pad, setup_context=_save_pad)

"""The collectives of expert parallelism: who sends which token where, rows out, rows back, with their backward.

Exchanges of data are torch's functional collectives on plain tensors, with sizes that the data decides: any backend
traces them, and their backward, as ordinary nodes. The name that such a node has for its group stands for a Channel:
whoever runs the node, its bytes are counted, and it waits for no rank that is lost (rendezvous.py). Operators of our
own are the headers, in which ranks compare where they are, and what takes this rank's part of something whole.

Each rank has tokens of its own, as many as it likes or none. Only plain collectives that gloo has: one even exchange
of counts, and uneven ``all_to_all_single``; all that a token takes along travels in one of them.

Letters: T this rank's tokens, P ranks, S rows that this rank sends (one for each of its tokens and each rank that has
an expert of it: a token with two experts on one rank travels once), U rows that it receives.
"""
from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moebius.lowering.distribution.channels import channel_name
from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.packing import pack, unpack
from moebius.lowering.distribution.rendezvous import ProcessGroup, compare, group_of, header, headers
from moebius.lowering.distribution.torch_private import all_to_all_single, runs_at_once, same_on_all, wait_tensor
from moebius.lowering.planner.traffic import chunk_span

HAS_ROWS = 1 << 40  # beside the number of rows in a header: its rank has some
_GROUPS: dict[str, ProcessGroup] = {}
_JOINED: dict[str, Any] = {}  # by name, groups of all ranks of a mesh: torch's own when it was made; the device
simulated = threading.local()  # .rank: in the group of the simulated rank for which an operator runs (simulate.py)


def remember_group(group: dist.ProcessGroup, name: str = "") -> str:
    """The name under which the operators find this process group (operators take no objects)."""
    name = name or str(group.group_name)
    if (found := group_of(group)) is not _GROUPS.get(name):
        _GROUPS[name] = found
        found.open_channels(name)
    return name


def remember_axis(mesh: Any, axis: int) -> str:
    """The same of a mesh's axis. All ranks of the mesh have the same name for it, whichever of its groups is theirs, so
    that their graphs are the same text."""
    name = remember_group(mesh.get_group(axis), axis_name(mesh, axis))
    _GROUPS[name].name = name
    return name


@functools.cache
def axis_name(mesh: Any, axis: int | None) -> str:
    """What the ranks of a mesh call one of its axes; None: all of them together."""
    dim = "all" if axis is None else mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
    ranks = zlib.crc32(repr(mesh.mesh.tolist()).encode())
    return f"{dim} of {'x'.join(map(str, mesh.mesh.shape))} ranks {ranks:08x}"


def join_all(mesh: Any) -> None:
    """Let all ranks of a mesh of several axes be a group too. Collective, on all of them."""
    several, backend = sum(size > 1 for size in mesh.mesh.shape) > 1, dist.get_backend(mesh.get_group(0))
    name, world = axis_name(mesh, None), dist.group.WORLD
    if several and backend != "fake" and _JOINED.get(name) != (world, mesh.device_type):
        ranks = mesh.mesh.flatten().tolist()
        remember_group(dist.new_group(ranks, backend=backend, use_local_synchronization=True), name)
        _GROUPS[name].name, _JOINED[name] = name, (world, mesh.device_type)


def group_of_all(mesh: Any) -> tuple[str, ...]:
    """The name of that group, where there is one."""
    name = axis_name(mesh, None)
    return (name,) if name in _JOINED else ()


def before_weights_change(groups: Sequence[str]) -> None:
    """All ranks of a mesh meet at once, before any of them writes weights: over one axis after the other, some would
    not miss a rank that fails between two. Collective where one of these is such a group."""
    for name in filter(_JOINED.__contains__, groups):
        group, (_, device) = find_group(name), _JOINED[name]
        headers(group, torch.zeros(group.size(), dtype=torch.int64, device=device), "the step of an optimizer")


def find_group(name: str) -> ProcessGroup:
    """The group of that name."""
    if name not in _GROUPS:
        raise DistributionError(f"no process group {name!r} is known here; capture again in this process")
    return _GROUPS[name]


def _own_span(num_experts: int, group_name: str) -> tuple[int, int]:
    group = find_group(group_name)
    return chunk_span(num_experts, group.size(), getattr(simulated, "rank", group.rank()))


# ----------------------------------------------------------------------------------------------------------------------
# Headers
# ----------------------------------------------------------------------------------------------------------------------


def begin_meeting(
    numbers_P: Tensor, group_name: str, place: str, sizes: list[int], backward: int = 0, owed: int = 0
) -> Tensor:
    """[P, 2]: the header for each rank (:func:`rendezvous.header`). place, sizes: where this is, in words and numbers
    that are the same on all ranks."""
    return header(find_group(group_name), numbers_P, place % tuple(sizes), backward, owed)


def end_meeting(
    received: Tensor, sent: Tensor, group_name: str, place: str, sizes: list[int], backward: int = 0
) -> Tensor:
    """[2 P + 2] on the CPU: the numbers that this rank has sent to each, and got from each, how often it was here (so
    backward knows what it undoes), and this rank. Raises RanksDisagreeError, on every rank, where the ranks have come
    to different places."""
    group = find_group(group_name)
    back_P, alike = compare(group, received, place % tuple(sizes), backward)
    group.visits[place] += 1
    if backward and alike:
        group.promised[place, group.visits[place]] = group.place
    here = torch.tensor([group.visits[place], group.rank()], dtype=torch.int64, device="cpu")
    return torch.cat([sent.cpu()[:, 0], back_P, here])


begun = torch.library.custom_op("moebius::begin_meeting", begin_meeting, mutates_args=())
ended = torch.library.custom_op("moebius::end_meeting", end_meeting, mutates_args=())


@begun.register_fake
def _(
    numbers_P: Tensor, group_name: str, place: str, sizes: list[int], backward: int = 0, owed: int = 0
) -> Tensor:
    return numbers_P.new_empty((numbers_P.shape[0], 2))


@ended.register_fake
def _(
    received: Tensor, sent: Tensor, group_name: str, place: str, sizes: list[int], backward: int = 0
) -> Tensor:
    return torch.empty(2 * sent.shape[0] + 2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("moebius::after", mutates_args=())
def after(value: Tensor, meeting: Tensor) -> Tensor:
    """The value, once a meeting has ended: what is computed of it comes later, whatever a backend does."""
    return value.clone()


@after.register_fake
def _(value: Tensor, meeting: Tensor) -> Tensor:
    return torch.empty_like(value)


def meet(
    numbers_P: Tensor, group_name: str, place: str, sizes: list[int], backward: int = 0, owed: int = 0
) -> Tensor:
    """The two, with the exchange between them; as operators only for whoever traces them, which takes longer.
    Collective."""
    begin, end = (begin_meeting, end_meeting) if runs_at_once(numbers_P) else (begun, ended)
    sent = begin(numbers_P, group_name, place, sizes, backward, owed)
    ones = [1] * numbers_P.shape[0]
    told: Tensor = end(exchange(sent, ones, ones, "header", group_name), sent, group_name, place, sizes, backward)
    return told


# ----------------------------------------------------------------------------------------------------------------------
# Rows
# ----------------------------------------------------------------------------------------------------------------------


def owner_of(index: Tensor, num_experts: int, ranks: int) -> Tensor:
    """The rank of each expert that is named; -1 where an index is outside [0, E): it goes nowhere."""
    return torch.where((index >= 0) & (index < num_experts), index // -(-num_experts // ranks), -1)


class Ticket(NamedTuple):
    """What a way back knows of the way there. tokens: of this rank. sent, received: rows to and from each rank, of
    which ``own`` is this one. visit: of the place. backward: its digest (backward.py). ran: if a rank has a row."""

    group_name: str
    place: str
    sizes: list[Any]
    tokens: Any
    sent: list[Any]
    received: list[Any]
    visit: Any
    own: Any
    backward: int
    ran: bool


def exchange(sent: Tensor, out: list[Any], back: list[Any], purpose: str, group_name: str) -> Tensor:
    """Rows to each rank, ``out`` of them; what arrived, ``back`` from each. Collective."""
    received: Tensor = wait_tensor(all_to_all_single(sent, back, out, channel_name(purpose, group_name)))
    return received


class Send(torch.autograd.Function):
    """Rows of tensors, [T, ...] each, to the ranks that they are for, in one exchange: what arrived, [U, ...] each."""

    @staticmethod
    def forward(ctx: Any, ticket: Ticket, again: bool, rows_S: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows_S)
        ctx.ticket = ticket
        if again:
            rows_S = meet_again(ticket, rows_S)
        packed = pack(tensors, rows_S)
        packed = exchange(packed, ticket.sent, ticket.received, "dispatch", ticket.group_name)
        arrived = unpack(packed, tensors)
        ctx.mark_non_differentiable(*(tensor for tensor in arrived if not tensor.is_floating_point()))
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *grads_U: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[-len(grads_U) :]
        held = [grad_U for grad_U, wants in zip(grads_U, wanted, strict=True) if wants]
        back = iter(Return.apply(ctx.ticket, *ctx.saved_tensors, *held))
        return None, None, None, *(next(back) if wants else None for wants in wanted)


class Return(torch.autograd.Function):
    """Rows like the received ones, [U, ...] each, to where those came from, in one exchange; summed for each of this
    rank's tokens: [T, ...] each."""

    @staticmethod
    def forward(ctx: Any, ticket: Ticket, rows_S: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows_S)
        ctx.ticket = ticket
        arrived = exchange(pack(tensors), ticket.received, ticket.sent, "combine", ticket.group_name)
        return tuple(sum_rows(rows, rows_S, ticket.tokens) for rows in unpack(arrived, tensors))

    @staticmethod
    def backward(ctx: Any, *grads_T: Tensor) -> tuple[Any, ...]:
        return None, None, *Send.apply(ctx.ticket, True, *ctx.saved_tensors, *grads_T)  # a layer's first in backward


def meet_again(ticket: Ticket, rows_S: Tensor) -> Tensor:
    """Before backward's first exchange, if it was not promised to come without: the ranks compare where they are."""
    if ticket.backward and find_group(ticket.group_name).redeem(ticket.place, same_on_all(ticket.visit)):
        return rows_S
    place = f"backward of {ticket.place}, which was exchange %s"
    nothing_P = rows_S.new_zeros(len(ticket.sent))
    return after(rows_S, meet(nothing_P, ticket.group_name, place, [*ticket.sizes, ticket.visit]))


def zeros_to_add(t_S: Tensor, tokens: Any) -> Tensor:
    """[tokens, ...]: where rows like these are to be added up, in float32 where their own dtype is narrower."""
    wide = torch.float32 if t_S.dtype in (torch.bfloat16, torch.float16) else t_S.dtype
    return torch.zeros((tokens, *t_S.shape[1:]), dtype=wide, device=t_S.device)


def sum_rows(t_S: Tensor, rows_S: Tensor, tokens: Any) -> Tensor:
    """[tokens, ...]: the sum of each token's rows."""
    sum_T = zeros_to_add(t_S, tokens)
    return sum_T.index_add(0, rows_S, t_S.to(sum_T.dtype)).to(t_S.dtype)


def route(
    index_TK: Tensor, num_experts: int, group_name: str, place: str, form: str, backward: int, owed: int,
    skips: bool = False, chunks: int = 1,
) -> tuple[Tensor, Ticket]:
    """Which rows this rank sends: rows_S (positions in T, by chunk, then by destination, then by token), and how many
    go where. Collective. form: of the rows. place, backward, owed: as in :func:`begin_meeting`. skips: without any row
    nothing runs in the user's program: the header says so (not while it is traced). chunks: of those for each rank,
    every so-manieth row is in the same chunk (in_flight.py)."""
    ranks, (tokens, top_k) = find_group(group_name).size(), index_TK.shape
    wanted = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=index_TK.device)
    wanted = wanted.scatter(1, owner_of(index_TK, num_experts, ranks).long() + 1, True)  # (column 0: nowhere)
    wanted = wanted.narrow(1, 1, ranks)
    to_S, rows_S = wanted.t().nonzero().unbind(1)
    if chunks > 1:
        sent_P = wanted.sum(0)
        place_S = torch.ones_like(to_S).cumsum(0) - 1 - (sent_P.cumsum(0) - sent_P).index_select(0, to_S)
        rows_S = rows_S.index_select(0, torch.sort(place_S % chunks, stable=True)[1])
        form = f"{form} in {chunks} chunks"
    where = f"{place.replace('%', '%%')}, rows of {form} (%s experts, top %s)"
    sizes = [num_experts, top_k]
    counts_P, asks = wanted.sum(0), skips and type(index_TK) is Tensor
    told = meet(counts_P | counts_P.any() * HAS_ROWS if asks else counts_P, group_name, where, sizes, backward, owed)
    ran = not asks or bool((told >= HAS_ROWS).any())
    *counts, visit, own = (told % HAS_ROWS if asks else told).tolist()
    ticket = Ticket(group_name, where, sizes, tokens, counts[:ranks], counts[ranks:], visit, own, backward, ran)
    torch._check(rows_S.shape[0] == sum(ticket.sent))
    return rows_S, ticket


def where_any_ran(out_TD: Tensor, ticket: Ticket) -> Tensor:
    """The result; without history, on all ranks, where none had a row: then what it is computed of gets no gradient
    rather than zeros, and no backward comes."""
    if ticket.ran:
        return out_TD
    find_group(ticket.group_name).idle.append((ticket.place, ticket.visit))  # nobody redeems a promise of backward
    return out_TD.detach()


def reached_experts(index: Tensor, num_experts: int, group_name: str) -> Tensor:
    """[experts]: the numbers of those that a token of any rank goes to. Collective.

    Raises RanksDisagreeError, on every rank, where the ranks have come to different places.
    """
    ranks, flat = find_group(group_name).size(), index.reshape(-1)
    named = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts).long()
    named = after(named, meet(named.new_zeros(ranks), group_name, "which of %s experts", [num_experts]))
    hit = torch.zeros(num_experts + 1, dtype=torch.uint8, device=index.device).index_fill(0, named, 1)
    sent = hit.narrow(0, 0, num_experts).repeat(ranks, 1)
    return exchange(sent, [1] * ranks, [1] * ranks, "header", group_name).any(0).nonzero().select(1, 0)


# ----------------------------------------------------------------------------------------------------------------------
# This rank's experts of whole weights
# ----------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("moebius::own_experts", mutates_args=())
def own_experts(w_E: Tensor, group_name: str) -> Tensor:
    """This rank's experts of a whole tensor that is equal on all ranks: rows ``chunk_span(E, P, rank)`` of [E, ...]."""
    low, high = _own_span(w_E.shape[0], group_name)
    return w_E[low:high].clone()


@own_experts.register_fake
def _(w_E: Tensor, group_name: str) -> Tensor:
    low, high = _own_span(w_E.shape[0], group_name)
    return w_E.new_empty((high - low, *w_E.shape[1:]))


@torch.library.custom_op("moebius::pad_experts", mutates_args=())
def pad_experts(w_L: Tensor, num_experts: int, group_name: str) -> Tensor:
    """[E, ...]: this rank's rows at their places, zeros for the experts of other ranks."""
    low, high = _own_span(num_experts, group_name)
    whole = w_L.new_zeros((num_experts, *w_L.shape[1:]))
    whole[low:high] = w_L
    return whole


@pad_experts.register_fake
def _(w_L: Tensor, num_experts: int, group_name: str) -> Tensor:
    return w_L.new_empty((num_experts, *w_L.shape[1:]))


def _save_own(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.num_experts, ctx.group_name = inputs[0].shape[0], inputs[1]


def _differentiate_own(ctx: Any, grad_L: Tensor) -> tuple:
    # What this rank has to say of the whole weight; gradients of whole parameters are averaged over the ranks (reduce).
    return pad_experts(grad_L, ctx.num_experts, ctx.group_name), None


def _save_pad(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.group_name = inputs[2]


def _differentiate_pad(ctx: Any, grad_E: Tensor) -> tuple:
    return own_experts(grad_E, ctx.group_name), None, None


own_experts.register_autograd(_differentiate_own, setup_context=_save_own)
pad_experts.register_autograd(_differentiate_pad, setup_context=_save_pad)

"""The collectives of expert parallelism, as torch operators: who sends which token where, rows out, rows back.

Functional, opaque operators with fake and autograd registration, so that they trace with unbacked sizes under any
backend. ``send_rows`` and ``return_rows`` are each other's backward, and so are ``own_experts`` and ``gather_experts``.
The tokens are the same on every rank (T rows, replicated); rank r serves rows ``chunk_span(T, P, r)`` of them. Only
plain collectives that gloo has: one even exchange of counts, uneven ``all_to_all_single``, and ``all_gather`` of equal,
padded pieces.

Letters: T tokens, P ranks, S rows that this rank sends (one for each of its tokens and each rank that has an expert of
it: a token with two experts on one rank travels once), U rows that it receives.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moebius.lowering.distribution.errors import DistributionError, RanksDisagreeError
from moebius.lowering.distribution.plan import chunk_span


class Group(Protocol):
    """The ranks that share the experts of a layer, seen from one of them."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def all_to_all(self, received: Tensor, sent: Tensor, back: list[int], out: list[int]) -> None:
        """Rows of ``sent`` to each rank, ``out`` of them; into ``received``, ``back`` of them from each."""

    def all_gather(self, whole: Tensor, piece: Tensor) -> None:
        """Equal pieces of all ranks, in order of rank."""


class ProcessGroup:
    """A Group over torch.distributed."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def all_to_all(self, received: Tensor, sent: Tensor, back: list[int], out: list[int]) -> None:
        dist.all_to_all_single(received, sent, back, out, group=self.group)

    def all_gather(self, whole: Tensor, piece: Tensor) -> None:
        # torch 2.13 renames the collective and warns about the old name; earlier versions have the old one only.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, piece, group=self.group)


_GROUPS: dict[str, Group] = {}
simulated = threading.local()  # .group: the Group of the simulated rank that this thread runs (simulate.py)


def remember_group(group: dist.ProcessGroup) -> str:
    """The name under which the operators find this process group (operators take no objects)."""
    _GROUPS[group.group_name] = ProcessGroup(group)
    return group.group_name


def find_group(name: str) -> Group:
    """The group of that name, seen from this rank."""
    group = getattr(simulated, "group", None) or _GROUPS.get(name)
    if group is None:
        raise DistributionError(f"no process group {name!r} is known here; capture again in this process")
    return group


@dataclass
class Traffic:
    """Bytes that this rank sent to other ranks since :meth:`reset`, by purpose, and how many collectives that took."""

    header: int = 0
    dispatch: int = 0
    combine: int = 0
    gather: int = 0
    collectives: int = 0
    lock: ClassVar[threading.Lock] = threading.Lock()

    def add(self, purpose: str, sent: int) -> None:
        """One more collective, which sent so many bytes to other ranks."""
        with self.lock:
            setattr(self, purpose, getattr(self, purpose) + sent)
            self.collectives += 1

    @property
    def total(self) -> int:
        return self.header + self.dispatch + self.combine + self.gather

    def reset(self) -> None:
        for item in fields(self):
            setattr(self, item.name, 0)


traffic = Traffic()


def _fingerprint(index_TK: Tensor, num_experts: int) -> Tensor:
    """A 64-bit checksum (0-d, wrapping) of a routing, its order, and the number of experts."""
    flat = index_TK.reshape(-1).long()
    mixed = (flat + 1) * (torch.arange(flat.numel(), device=flat.device) * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1D)
    return (mixed ^ (mixed >> 29)).sum() + num_experts


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes of an element


@torch.library.custom_op("moebius::checksums", mutates_args=())
def checksums(inputs_N: list[Tensor]) -> Tensor:
    """[N], int64, on the first input's device: of each input's bits, their order, and its shape."""
    return torch.stack([_checksum(t).to(inputs_N[0].device) for t in inputs_N])


@checksums.register_fake
def _(inputs_N: list[Tensor]) -> Tensor:
    return inputs_N[0].new_empty((len(inputs_N),), dtype=torch.int64)


def _checksum(t: Tensor) -> Tensor:
    bits = t.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(BITS[t.element_size()])
    shape = sum((axis + 1) * 1_000_003 * size for axis, size in enumerate(t.shape))
    return _fingerprint(bits, shape)


@torch.library.custom_op("moebius::route", mutates_args=())
def route(
    index_TK: Tensor, num_experts: int, group_name: str, inputs_N: Tensor | None = None, names: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows this rank sends and receives. Collective; raises RanksDisagreeError (on every rank) unless all agree.

    inputs_N: checksums of what else must be equal on all ranks; they travel in the same exchange. names: of these, one
    a line.

    Returns rows_S (positions in T, by destination, then by token), source_U (the rank each received row comes from) and
    splits_2P (on the CPU: rows sent to each rank, rows received from each). An index outside [0, E) goes nowhere.
    """
    group = find_group(group_name)
    ranks, me = group.size(), group.rank()
    tokens = index_TK.shape[0]
    low, high = chunk_span(tokens, ranks, me)
    mine = index_TK[low:high]
    valid = (mine >= 0) & (mine < num_experts)
    owner = torch.where(valid, mine, 0).long() // -(-num_experts // ranks)
    wanted = torch.zeros(high - low, ranks + 1, dtype=torch.bool, device=mine.device)
    wanted.scatter_(1, torch.where(valid, owner, ranks), True)  # column `ranks` takes the slots that go nowhere
    wanted = wanted[:, :ranks]
    rows_S = wanted.t().nonzero()[:, 1] + low

    width = 3 if inputs_N is None else 3 + inputs_N.shape[0]
    sent = torch.empty(ranks, width, dtype=torch.int64, device=mine.device)
    sent[:, 0], sent[:, 1], sent[:, 2] = wanted.sum(0), tokens, _fingerprint(index_TK, num_experts)
    if inputs_N is not None:
        sent[:, 3:] = inputs_N
    received = torch.empty_like(sent)
    group.all_to_all(received, sent, [1] * ranks, [1] * ranks)
    traffic.add("header", (ranks - 1) * width * sent.element_size())
    table = torch.stack([sent, received]).cpu()
    if not torch.equal(table[0, :, 1:], table[1, :, 1:]):
        raise RanksDisagreeError(disagreement(table, me, tokens, names.splitlines()))
    splits_2P = table[:, :, 0].contiguous()
    source_U = torch.repeat_interleave(torch.arange(ranks), splits_2P[1]).to(mine.device)
    return rows_S, source_U, splits_2P


def disagreement(table: Tensor, me: int, tokens: int, names: list[str]) -> str:
    """Which ranks have something else than this one, and what. table: [2, P, …] as sent and as received."""
    differs = (table[0, :, 1:] != table[1, :, 1:]).cpu()
    others = differs.any(1).nonzero()[:, 0].tolist()
    what = [name for name, column in zip(names, differs.any(0)[2:].tolist(), strict=False) if column]
    found = f"other values in {', '.join(what)}" if what else "different tokens or routings"
    return (
        f"rank {me} ({tokens} tokens) and ranks {others} ({table[1, others, 1].tolist()} tokens) have {found}; "
        f"with mesh=..., pass the same batch on every rank, and seed every rank alike where the model draws random "
        f"numbers"
    )


@route.register_fake
def _(
    index_TK: Tensor, num_experts: int, group_name: str, inputs_N: Tensor | None = None, names: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    return (
        index_TK.new_empty((context.new_dynamic_size(),), dtype=torch.int64),
        index_TK.new_empty((context.new_dynamic_size(),), dtype=torch.int64),
        torch.empty((2, find_group(group_name).size()), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("moebius::send_rows", mutates_args=())
def send_rows(t_T: Tensor, rows_S: Tensor, source_U: Tensor, splits_2P: Tensor, group_name: str) -> Tensor:
    """Rows of t_T [T, ...] to the ranks that asked for them: what arrived here, [U, ...]. Collective."""
    group = find_group(group_name)
    sent = t_T.index_select(0, rows_S)
    out, back = splits_2P.tolist()
    received = t_T.new_empty((source_U.shape[0], *t_T.shape[1:]))
    group.all_to_all(received, sent, back, out)
    traffic.add("dispatch", _row_bytes(sent) * (sum(out) - out[group.rank()]))
    return received


@send_rows.register_fake
def _(t_T: Tensor, rows_S: Tensor, source_U: Tensor, splits_2P: Tensor, group_name: str) -> Tensor:
    return t_T.new_empty((source_U.shape[0], *t_T.shape[1:]))


@torch.library.custom_op("moebius::return_rows", mutates_args=())
def return_rows(
    t_U: Tensor, rows_S: Tensor, source_U: Tensor, splits_2P: Tensor, tokens: int, group_name: str
) -> Tensor:
    """Received rows back to where they came from, summed for each token: [T, ...], equal on all ranks. Collective."""
    group = find_group(group_name)
    ranks, me = group.size(), group.rank()
    out, back = splits_2P.tolist()
    arrived = t_U.new_empty((rows_S.shape[0], *t_U.shape[1:]))
    t_U = t_U.contiguous()
    group.all_to_all(arrived, t_U, out, back)
    traffic.add("combine", _row_bytes(t_U) * (sum(back) - back[me]))
    low, high = chunk_span(tokens, ranks, me)
    step = -(-tokens // ranks)
    wide = torch.float32 if t_U.dtype in (torch.bfloat16, torch.float16) else t_U.dtype
    mine = torch.zeros((step, *t_U.shape[1:]), dtype=wide, device=t_U.device)
    mine.index_add_(0, rows_S - low, arrived.to(wide))
    whole = _all_gather(mine.to(t_U.dtype), group)
    traffic.add("gather", _row_bytes(t_U) * (high - low) * (ranks - 1))
    return whole[:tokens] if whole.shape[0] == tokens else whole[:tokens].clone()


@return_rows.register_fake
def _(
    t_U: Tensor, rows_S: Tensor, source_U: Tensor, splits_2P: Tensor, tokens: int, group_name: str
) -> Tensor:
    return t_U.new_empty((tokens, *t_U.shape[1:]))


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


@torch.library.custom_op("moebius::gather_experts", mutates_args=())
def gather_experts(w_L: Tensor, num_experts: int, group_name: str) -> Tensor:
    """The whole of a tensor whose experts live on the ranks: [E, ...], equal on all ranks. Collective."""
    group = find_group(group_name)
    step = -(-num_experts // group.size())
    mine = w_L.new_zeros((step, *w_L.shape[1:]))
    mine[: w_L.shape[0]] = w_L
    whole = _all_gather(mine, group)
    traffic.add("gather", _row_bytes(w_L) * w_L.shape[0] * (group.size() - 1))
    return whole[:num_experts].clone()


@gather_experts.register_fake
def _(w_L: Tensor, num_experts: int, group_name: str) -> Tensor:
    return w_L.new_empty((num_experts, *w_L.shape[1:]))


def _all_gather(piece: Tensor, group: Group) -> Tensor:
    whole = piece.new_empty((piece.shape[0] * group.size(), *piece.shape[1:]))
    group.all_gather(whole, piece.contiguous())
    return whole


def _row_bytes(tensor: Tensor) -> int:
    count = tensor.element_size()
    for size in tensor.shape[1:]:
        count *= size
    return count


# ----------------------------------------------------------------------------------------------------------------------
# Backward
# ----------------------------------------------------------------------------------------------------------------------


def _save_send(ctx: Any, inputs: tuple, output: Tensor) -> None:
    t_T, rows_S, source_U, splits_2P, group_name = inputs
    ctx.save_for_backward(rows_S, source_U, splits_2P)
    ctx.tokens, ctx.group_name = t_T.shape[0], group_name


def _differentiate_send(ctx: Any, grad_U: Tensor) -> tuple:
    return return_rows(grad_U, *ctx.saved_tensors, ctx.tokens, ctx.group_name), None, None, None, None


def _save_return(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, rows_S, source_U, splits_2P, _, group_name = inputs
    ctx.save_for_backward(rows_S, source_U, splits_2P)
    ctx.group_name = group_name


def _differentiate_return(ctx: Any, grad_T: Tensor) -> tuple:
    return send_rows(grad_T, *ctx.saved_tensors, ctx.group_name), None, None, None, None, None


def _save_own(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.num_experts, ctx.group_name = inputs[0].shape[0], inputs[1]


def _differentiate_own(ctx: Any, grad_L: Tensor) -> tuple:
    return gather_experts(grad_L, ctx.num_experts, ctx.group_name), None


def _save_gather(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.group_name = inputs[2]


def _differentiate_gather(ctx: Any, grad_E: Tensor) -> tuple:
    return own_experts(grad_E, ctx.group_name), None, None


send_rows.register_autograd(_differentiate_send, setup_context=_save_send)
return_rows.register_autograd(_differentiate_return, setup_context=_save_return)
own_experts.register_autograd(_differentiate_own, setup_context=_save_own)
gather_experts.register_autograd(_differentiate_gather, setup_context=_save_gather)

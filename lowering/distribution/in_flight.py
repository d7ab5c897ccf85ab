"""Rows of a layer in chunks, so that exchanges run while experts compute; and their gradients, in the same way back.

Each exchange is begun in one function and waited for in another: what stands between them runs meanwhile. Autograd
runs a function's backward the earlier the later its forward was. So where forward begins the exchange of chunk i + 1
before the experts of chunk i, backward does so with chunk i before those of chunk i + 1: the same pipeline, mirrored.

A chunk has every N-th row of those for each rank: that rank knows how many come from how many there are in all (no
header of their own), all ranks have N exchanges, and chunks are even for each pair of ranks, whatever the routing.

Letters as in exchange.py; N chunks.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moebius.lowering.distribution import exchange
from moebius.lowering.distribution.channels import channel_name
from moebius.lowering.distribution.packing import pack, unpack
from moebius.lowering.distribution.torch_private import all_to_all_single, wait_tensor


class Chunked:
    """Of one layer: the ticket of its rows; into how many chunks they are divided; tensors like those that go out, and
    which of them have gradients. coming: of each chunk, the buffer in which rows arrive, and what leads autograd from
    its arrival to its start. gradients: of the backward pass that runs, buffers in which gradients arrive here, by what
    they are of and the chunk; a buffer is not to be looked at before it was waited for, so autograd does not get it."""

    def __init__(self, ticket: exchange.Ticket, chunks: int, num_experts: int, tensors: Sequence[Tensor]):
        self.ticket, self.chunks, self.num_experts = ticket, chunks, num_experts
        self.like = [tensor.new_empty((0, *tensor.shape[1:])) for tensor in tensors]
        self.wanted = [tensor.requires_grad for tensor in tensors]
        self.coming: list[tuple[Tensor, Tensor]] = []
        self.gradients: dict[tuple[str, int], Tensor] = {}

    def part(self, counts: list[Any], chunk: int) -> list[Any]:
        """Of so many rows to or from each rank, those of a chunk."""
        return [(count + self.chunks - 1 - chunk) // self.chunks for count in counts]

    def rows_of(self, rows_S: Tensor) -> list[Tensor]:
        """Positions in T of each chunk's rows."""
        found, low = [], 0
        for chunk in range(self.chunks):
            length = sum(self.part(self.ticket.sent, chunk))
            torch._check(low + length <= rows_S.shape[0])
            found.append(rows_S.narrow(0, low, length))
            low += length
        return found

    def begin(self, packed: Tensor, chunk: int, home: bool) -> Tensor:
        """Start an exchange of a chunk, to the experts' ranks or home: the buffer in which it arrives. Collective."""
        out, back = (self.part(counts, chunk) for counts in (self.ticket.sent, self.ticket.received))
        if home:
            out, back = back, out
        name = channel_name("combine" if home else "dispatch", self.ticket.group_name)
        started: Tensor = all_to_all_single(packed, back, out, name)
        return started

    def sum_rows(self, buffers: Sequence[Tensor], like: Sequence[Tensor], rows_S: Tensor) -> list[Tensor]:
        """Wait for a buffer of each chunk with rows like those that this rank has sent: their sum for each token."""
        sums = [exchange.zeros_to_add(one, self.ticket.tokens) for one in like]
        for buffer, rows in zip(buffers, self.rows_of(rows_S), strict=True):
            for sum_T, part in zip(sums, unpack(wait_tensor(buffer), like), strict=True):
                sum_T.index_add_(0, rows, part.to(sum_T.dtype))
        return [sum_T.to(one.dtype) for sum_T, one in zip(sums, like, strict=True)]

    def wanted_of(self, items: Sequence[Tensor]) -> list[Tensor]:
        return [item for item, wants in zip(items, self.wanted, strict=True) if wants]


class StartDispatch(torch.autograd.Function):
    """Rows of tensors, [T, ...] each, begin their way: N buffers, and N scalars that lead autograd back here."""

    @staticmethod
    def forward(ctx: Any, layer: Chunked, rows_S: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows_S)
        ctx.layer = layer
        parts = enumerate(layer.rows_of(rows_S))
        buffers = [layer.begin(pack(tensors, rows), chunk, home=False) for chunk, rows in parts]
        ctx.mark_non_differentiable(*buffers)
        return *buffers, *(tensors[0].new_zeros(()) for _ in buffers)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        layer = ctx.layer
        buffers = [layer.gradients.pop(("tokens", chunk)) for chunk in range(layer.chunks)]
        sums = iter(layer.sum_rows(buffers, layer.wanted_of(layer.like), *ctx.saved_tensors))
        return None, None, *(next(sums) if wants else None for wants in layer.wanted)


class WaitDispatch(torch.autograd.Function):
    """What arrived of a chunk, [U, ...] each."""

    @staticmethod
    def forward(ctx: Any, layer: Chunked, chunk: int, buffer: Tensor, lead: Tensor) -> tuple[Tensor, ...]:
        ctx.layer, ctx.chunk = layer, chunk
        arrived = unpack(wait_tensor(buffer), layer.like)
        ctx.mark_non_differentiable(*(tensor for tensor in arrived if not tensor.is_floating_point()))
        return tuple(arrived)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads_U: Tensor) -> tuple[Any, ...]:
        layer = ctx.layer
        held = layer.wanted_of(grads_U)
        layer.gradients["tokens", ctx.chunk] = layer.begin(pack(held), ctx.chunk, home=True)
        return None, None, None, held[0].new_zeros(())


class StartCombine(torch.autograd.Function):
    """Rows like the received ones of a chunk begin their way home: a buffer, and a scalar that leads autograd here."""

    @staticmethod
    def forward(ctx: Any, layer: Chunked, chunk: int, y_UD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.chunk = layer, chunk
        buffer = layer.begin(pack([y_UD]), chunk, home=True)
        ctx.mark_non_differentiable(buffer)
        return buffer, y_UD.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, wait_tensor(ctx.layer.gradients.pop(("results", ctx.chunk)))


class WaitCombine(torch.autograd.Function):
    """What came home of all chunks, summed for each of this rank's tokens: [T, D]."""

    @staticmethod
    def forward(ctx: Any, layer: Chunked, rows_S: Tensor, *coming: Tensor) -> Tensor:
        ctx.save_for_backward(rows_S)
        ctx.layer = layer
        buffers = coming[: layer.chunks]
        return layer.sum_rows(buffers, buffers[:1], rows_S)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        layer = ctx.layer
        parts = layer.rows_of(exchange.meet_again(layer.ticket, *ctx.saved_tensors))
        for chunk in reversed(range(layer.chunks)):  # (in the order in which autograd comes to their experts)
            layer.gradients["results", chunk] = layer.begin(pack([grad_TD], parts[chunk]), chunk, home=False)
        return None, None, *(None for _ in parts), *(grad_TD.new_zeros(()) for _ in parts)

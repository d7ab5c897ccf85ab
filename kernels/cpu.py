"""The CPU form: the library's GEMMs on slices, and all else done on blocks of rows small enough to stay in the cache.

Rows are sorted once. A block is at most BLOCK_ROWS rows of one expert; its gathered tokens, activations and products
live in scratch that the next block reuses, so that nothing of size T*K x D is ever made. Routing weights scale A (N
wide) rather than the expert's output (D wide).
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moebius.kernels.activations import Activation, activate, activate_backward, find_activation
from moebius.kernels.contract import Gradients, Needs, Options, Weights, accumulate_dtype
from moebius.kernels.reference import row_weight

BLOCK_ROWS = 1024


class Block(NamedTuple):
    """Sorted rows start:stop, all of one expert; first: no earlier block has this expert."""

    expert: int
    start: int
    stop: int
    first: bool


def blocks(offsets: Tensor) -> Iterator[Block]:
    """The experts' rows in blocks, in sorted order. offsets: int32 [E+1] on the CPU."""
    bounds = offsets.tolist()
    for expert, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        for start in range(low, high, BLOCK_ROWS):
            yield Block(expert, start, min(start + BLOCK_ROWS, high), start == low)


class Scratch:
    """Buffers of one call, made on first use at the largest block's size and handed out as slices."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self.like, self.rows = like, rows
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised [rows, width] slice of the buffer called name."""
        buffer = self.buffers.get(name)
        if buffer is None:
            buffer = self.buffers[name] = self.like.new_empty((self.rows, width), dtype=dtype or self.like.dtype)
        return buffer[:rows]

    def gather(self, name: str, source: Tensor, token: Tensor) -> Tensor:
        """source[token] in the buffer called name."""
        return torch.index_select(source, 0, token, out=self.take(name, token.shape[0], source.shape[1]))


def largest_block(offsets: Tensor) -> int:
    """Rows of the largest block."""
    counts = offsets.diff()
    return min(BLOCK_ROWS, int(counts.max())) if counts.numel() else 0


def project_up(rows: Tensor, weights: Weights, expert: int, out: Tensor) -> Tensor:
    """H of one block: rows [n, D] -> out [n, M]."""
    matrix = weights.gate_up_EMD[expert].T
    if weights.gate_up_bias_EM is None:
        return torch.mm(rows, matrix, out=out)
    return torch.addmm(weights.gate_up_bias_EM[expert], rows, matrix, out=out)


def add_rows(total_TD: Tensor, token: Tensor, rows: Tensor, scratch: Scratch) -> None:
    """total[token] += rows, in total's (wider) dtype."""
    if rows.dtype != total_TD.dtype:
        rows = scratch.take("wide", rows.shape[0], rows.shape[1], total_TD.dtype).copy_(rows)
    total_TD.index_add_(0, token, rows)


def forward(x_TD: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor, weight_TK: Tensor | None, top_k: int,
            options: Options) -> tuple[Tensor, Tensor]:
    """As reference.forward."""
    activation = find_activation(options.activation)
    exact = accumulate_dtype(x_TD.dtype)
    token_S = order_S // max(top_k, 1)
    scale_S = row_weight(weight_TK, order_S, exact)
    keep = options.save == "default"
    width, width_h = x_TD.shape[1], weights.gate_up_EMD.shape[1]
    h_SM = x_TD.new_empty(order_S.shape[0] if keep else 0, width_h)
    h_SM[int(offsets[-1]):].zero_()
    out_TD = torch.zeros(x_TD.shape, dtype=exact, device=x_TD.device)
    scratch = Scratch(x_TD, largest_block(offsets))
    for expert, start, stop, _ in blocks(offsets):
        token, count = token_S[start:stop], stop - start
        h = h_SM[start:stop] if keep else scratch.take("h", count, width_h)
        project_up(scratch.gather("x", x_TD, token), weights, expert, h)
        a = activate(h.to(exact), activation, options.gate)
        if scale_S is not None:
            a.mul_(scale_S[start:stop, None])
        y = torch.mm(a.to(x_TD.dtype), weights.down_EDN[expert].T, out=scratch.take("y", count, width))
        if weights.down_bias_ED is not None:
            bias = weights.down_bias_ED[expert]
            y.add_(bias) if scale_S is None else y.addr_(scale_S[start:stop].to(y.dtype), bias)
        add_rows(out_TD, token, y, scratch)
    return out_TD.to(x_TD.dtype), h_SM


def block_backward(grad_y: Tensor, h: Tensor, down: Tensor, bias: Tensor | None, scale: Tensor | None,
                   activation: Activation, gate: str, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
    """dA', A, dH and dS of one block: (grad_scale [n], scaled_a [n, N], grad_h [n, M]), the first in the wide dtype.

    grad_y: dO of the block's tokens [n, D]; scale: routing weights [n] or None.
    """
    exact = accumulate_dtype(h.dtype)
    grad_a = torch.mm(grad_y, down, out=scratch.take("grad_a", h.shape[0], down.shape[1])).to(exact)
    scaled = grad_a if scale is None else grad_a * scale[:, None]
    a, grad_h = activate_backward(scaled, h.to(exact), activation, gate)
    grad_scale = torch.linalg.vecdot(grad_a, a)
    if bias is not None:
        grad_scale += torch.mv(grad_y, bias).to(exact)
    if scale is not None:
        a.mul_(scale[:, None])
    return grad_scale, a.to(h.dtype), grad_h.to(h.dtype)


def accumulate_mm(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total (+)= left @ right."""
    if first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


def accumulate_sum(total: Tensor, rows: Tensor, first: bool) -> None:
    """total (+)= the sum of rows."""
    total.copy_(rows.sum(0)) if first else total.add_(rows.sum(0))


def backward(grad_TD: Tensor, x_TD: Tensor, h_SM: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor,
             weight_TK: Tensor | None, top_k: int, options: Options, needs: Needs) -> Gradients:
    """As reference.backward; a gradient that is not needed is not computed."""
    activation = find_activation(options.activation)
    dtype, exact = x_TD.dtype, accumulate_dtype(x_TD.dtype)
    gate_up, down, _, down_bias = weights
    token_S = order_S // max(top_k, 1)
    scale_S = row_weight(weight_TK, order_S, exact)
    grad_x = torch.zeros(x_TD.shape, dtype=exact) if needs.x else None
    grad_gate_up = gate_up.new_empty(gate_up.shape) if needs.gate_up else None
    grad_down = down.new_empty(down.shape) if needs.down else None
    grad_scale = torch.zeros(order_S.shape[0], dtype=exact) if needs.weight else None
    grad_up_bias = gate_up.new_empty(gate_up.shape[:2]) if needs.gate_up_bias else None
    grad_down_bias = down.new_empty(down.shape[:2]) if needs.down_bias else None
    for expert in (offsets.diff() == 0).nonzero().flatten().tolist():
        for total in (grad_gate_up, grad_down, grad_up_bias, grad_down_bias):
            if total is not None:
                total[expert].zero_()

    scratch = Scratch(x_TD, largest_block(offsets))
    for expert, start, stop, first in blocks(offsets):
        token, count = token_S[start:stop], stop - start
        scale = None if scale_S is None else scale_S[start:stop]
        grad_y = scratch.gather("grad_y", grad_TD, token)
        gather_x = grad_gate_up is not None or options.save == "recompute"
        rows = scratch.gather("x", x_TD, token) if gather_x else None
        if options.save == "default":
            h = h_SM[start:stop]
        else:
            assert rows is not None
            h = project_up(rows, weights, expert, scratch.take("h", count, gate_up.shape[1]))
        bias = None if down_bias is None or grad_scale is None else down_bias[expert]
        grad_s, scaled_a, grad_h = block_backward(
            grad_y, h, down[expert], bias, scale, activation, options.gate, scratch)
        if grad_scale is not None:
            grad_scale[start:stop] = grad_s
        if grad_down is not None:
            accumulate_mm(grad_down[expert], grad_y.T, scaled_a, first)
        if grad_down_bias is not None:
            accumulate_sum(grad_down_bias[expert], grad_y if scale is None else grad_y * scale[:, None], first)
        if grad_gate_up is not None:
            assert rows is not None
            accumulate_mm(grad_gate_up[expert], grad_h.T, rows, first)
        if grad_up_bias is not None:
            accumulate_sum(grad_up_bias[expert], grad_h, first)
        if grad_x is not None:
            y = torch.mm(grad_h, gate_up[expert], out=scratch.take("y", count, x_TD.shape[1]))
            add_rows(grad_x, token, y, scratch)

    grad_weight = None
    if grad_scale is not None and weight_TK is not None:
        flat = torch.empty_like(grad_scale).index_copy_(0, order_S.long(), grad_scale)
        grad_weight = flat.reshape(weight_TK.shape).to(weight_TK.dtype)
    return Gradients(
        None if grad_x is None else grad_x.to(dtype), grad_gate_up, grad_down, grad_weight, grad_up_bias,
        grad_down_bias)

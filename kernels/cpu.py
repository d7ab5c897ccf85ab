"""The CPU form: the library's GEMMs on slices, and all else done on panels of rows small enough to stay in the cache.

Rows are sorted once. A panel is some consecutive sorted rows: several experts, or a part of one. Its
gathered tokens, activations and products live in scratch that the next panel reuses, so that nothing of size T*K x D is
ever made; gathers, element-wise work and sums are done a panel at a time, GEMMs an expert at a time. Routing weights
scale A (N wide) rather than the expert's output (D wide). by_expert.py does the same with more rows than a panel's in
one call of C.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moebius.kernels import by_expert
from moebius.kernels.contract import Gradients, Needs, Options, Weights, accumulate_dtype
from moebius.kernels.gating import gated, gated_backward
from moebius.kernels.native import panel_work
from moebius.kernels.panels import Scratch, panels
from moebius.kernels.products import (
    Blocks,
    BlockWeights,
    Matrices,
    Operands,
    accumulate_outer,
    accumulate_sums,
    existing,
    linear,
    matrices,
    multiply,
    project_up,
)
from moebius.kernels.reference import row_weight

PACKS = False  # dispatch.find_form


def add_rows(total_TD: Tensor, token: Tensor, rows: Tensor, scratch: Scratch) -> None:
    """total[token] += rows, in total's (wider) dtype."""
    if panel_work.add(total_TD, token, rows):
        return
    if rows.dtype != total_TD.dtype:
        rows = scratch.take("wide", rows.shape[0], rows.shape[1], total_TD.dtype).copy_(rows)
    total_TD.index_add_(0, token, rows)


def tokens(order_S: Tensor, top_k: int, exact: torch.dtype) -> Tensor:
    """The token of each row, in the integers that make their sums fast: C reads 32 bits, torch sums faster by 64."""
    token_S = order_S // max(top_k, 1)
    return token_S.long() if exact == torch.float64 else token_S


def forward(x_TD: Tensor, weights: Weights | BlockWeights, order_S: Tensor, offsets: Tensor, weight_TK: Tensor | None,
            top_k: int, options: Options) -> tuple[Tensor, Tensor]:
    """As reference.forward."""
    exact = accumulate_dtype(x_TD.dtype)
    keep = options.save == "default"
    width, width_h = x_TD.shape[1], weights.gate_up_E2ND.shape[1]
    bounds = offsets.tolist()
    h_SM = x_TD.new_empty(order_S.shape[0] if keep else 0, width_h)
    h_SM[bounds[-1]:].zero_()
    operands = Operands(*map(matrices, weights))
    if whole := by_expert.layer(x_TD, operands, bounds, order_S, weight_TK, h_SM if keep else None, options, top_k):
        return whole.forward(), h_SM
    token_S = tokens(order_S, top_k, exact)
    scale_S = row_weight(weight_TK, order_S, exact)
    out_TD = torch.zeros(x_TD.shape, dtype=exact, device=x_TD.device)
    scratch = Scratch(x_TD, order_S.shape[0])
    for panel in panels(bounds):
        start, stop = panel.start, panel.stop
        token, count = token_S[start:stop], stop - start
        h = h_SM[start:stop] if keep else scratch.take("h", count, width_h)
        project_up(scratch.gather("x", x_TD, token), operands, panel, h, options.gate, options.format("up"))
        scale = None if scale_S is None else scale_S[start:stop]
        name = options.format("down")
        # in 8 bits A is what is rounded: with its weight it would round to something else
        a = gated(h, scale if name is None else None, options, scratch.take("a", count, weights.down_EDN.shape[2]))
        y = linear(a, operands.down, panel, scratch.take("y", count, width, None if name is None else exact), name)
        if scale is not None and name is not None:
            y.mul_(scale[:, None])
        for block in operands.down_bias:
            for to, (expert, low, high, _) in zip(panel.cut(y[:, block.rows]), panel.segments, strict=True):
                bias = existing(block.parts[expert])
                to += bias if scale is None else scale[low:high, None].to(y.dtype) * bias
        add_rows(out_TD, token, y, scratch)
    return out_TD.to(x_TD.dtype), h_SM


class Rooms:
    """Room for the gradients of Weights' four, each made when the first of it is computed.

    make: what makes the room of one of them, given its place; None where no gradient is needed.
    """

    def __init__(self, make: Callable[[int], Tensor | Blocks | None]) -> None:
        self.make = make
        self.made: dict[int, list[Matrices]] = {}

    def matrices(self, place: int) -> list[Matrices]:
        if place not in self.made:
            self.made[place] = matrices(self.make(place))
        return self.made[place]


GATE_UP, DOWN, GATE_UP_BIAS, DOWN_BIAS = range(4)  # places in Weights


def empty_experts(offsets: Tensor) -> list[int]:
    """Those without rows."""
    bounds = offsets.tolist()
    return [expert for expert, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)) if low == high]


def clear(room: Tensor, experts: list[int]) -> Tensor:
    """The room with zeros for these experts."""
    return room.index_fill_(0, torch.tensor(experts, dtype=torch.int64, device="cpu"), 0) if experts else room


def backward(grad_TD: Tensor, x_TD: Tensor, h_SM: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor,
             weight_TK: Tensor | None, top_k: int, options: Options, needs: Needs) -> Gradients:
    """As reference.backward; a gradient that is not needed is not computed."""
    empty = empty_experts(offsets)
    needed = (needs.gate_up, needs.down, needs.gate_up_bias, needs.down_bias)
    found: dict[int, Tensor | None] = {}

    def make(place: int) -> Tensor | None:
        weight = weights[place]
        found[place] = clear(weight.new_empty(weight.shape), empty) if needed[place] and weight is not None else None
        return found[place]

    grad_x, grad_weight = backward_into(
        Rooms(make), grad_TD, x_TD, [h_SM], weights, order_S, offsets, weight_TK, top_k, options, needs.x, needs.weight)
    return Gradients(grad_x, found[GATE_UP], found[DOWN], grad_weight, found[GATE_UP_BIAS], found[DOWN_BIAS])


def backward_into(
    rooms: Rooms, grad_TD: Tensor, x_TD: Tensor, kept: list[Tensor],
    weights: Weights | BlockWeights, order_S: Tensor, offsets: Tensor, weight_TK: Tensor | None, top_k: int,
    options: Options, needs_x: bool, needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the routing weights; those of Weights' four are written into rooms, where there is
    one. The rooms of experts without rows are left as they are. kept: H, taken out of the list when it is not needed.

    In each panel what is D wide takes one buffer in turns, and the room for gate_up's gradient, half of all there is to
    be, is made when most else is gone: with few rows this is the peak of a training step.
    """
    dtype, exact = x_TD.dtype, accumulate_dtype(x_TD.dtype)
    bounds, operands = offsets.tolist(), Operands(*map(matrices, weights))
    h_SM = kept[0] if options.save == "default" else None
    if whole := by_expert.layer(x_TD, operands, bounds, order_S, weight_TK, h_SM, options, top_k):
        grads = Operands(*(rooms.matrices(place) for place in range(len(weights))))
        if by_expert.can_write(grads):
            shape = None if weight_TK is None or not needs_weight else weight_TK.shape
            dot_TK = None if shape is None else torch.zeros(shape, dtype=torch.float32, device="cpu")
            grad_x = whole.backward(grad_TD, dot_TK, grads, needs_x)
            return grad_x, dot_TK if dot_TK is None or weight_TK is None else dot_TK.to(weight_TK.dtype)
    del h_SM, whole

    token_S = tokens(order_S, top_k, exact)
    scale_S = row_weight(weight_TK, order_S, exact)
    grad_s_S = torch.zeros(order_S.shape[0], dtype=exact, device="cpu") if needs_weight else None
    grad_x = torch.zeros(x_TD.shape, dtype=exact, device="cpu") if needs_x else None
    scratch, end = Scratch(x_TD, order_S.shape[0]), bounds[-1]
    width, width_h, narrow = x_TD.shape[1], weights.gate_up_E2ND.shape[1], weights.down_EDN.shape[2]
    for panel in panels(bounds):
        start, stop = panel.start, panel.stop
        token, count = token_S[start:stop], stop - start
        scale = None if scale_S is None else scale_S[start:stop]
        h = kept[0][start:stop] if options.save == "default" else project_up(
            scratch.gather("rows", x_TD, token), operands, panel, scratch.take("h", count, width_h), options.gate,
            options.format("up"))

        # dA' is before the routing weight, so that dS = <dA', A>
        grad_y = scratch.gather("rows", grad_TD, token)
        grad_a = multiply(grad_y, operands.down, panel, scratch.take("grad_a", count, narrow),
                          options.format("grad_act"))
        grad_s = None if grad_s_S is None else grad_s_S[start:stop]
        scaled_a, grad_h = scratch.take("a", *grad_a.shape), scratch.take("grad_h", *h.shape)
        gated_backward(grad_a, h, scale, options, scaled_a, grad_h, grad_s)
        del h, grad_a
        if grad_s is not None:
            for block in operands.down_bias:
                parts = zip(panel.cut(grad_y[:, block.rows]), panel.cut(grad_s), panel.segments, strict=True)
                for part, to, segment in parts:
                    to += torch.mv(part, existing(block.parts[segment.expert]))
        accumulate_outer(rooms.matrices(DOWN), grad_y, scaled_a, panel, options.format("grad_down"))
        if rooms.matrices(DOWN_BIAS):
            grad_rows = grad_y if scale is None else grad_y * scale[:, None]
            accumulate_sums(rooms.matrices(DOWN_BIAS), grad_rows, panel)
        del scaled_a
        if stop == end:  # the last panel
            scratch.drop("a", "grad_a")
            kept.clear()
        if grad_x is not None:
            y = multiply(grad_h, operands.gate_up, panel, scratch.take("rows", count, width), options.format("grad_x"))
            add_rows(grad_x, token, y, scratch)
        if rooms.matrices(GATE_UP):
            rows = scratch.gather("rows", x_TD, token)
            accumulate_outer(rooms.matrices(GATE_UP), grad_h, rows, panel, options.format("grad_gate_up"))
        accumulate_sums(rooms.matrices(GATE_UP_BIAS), grad_h, panel)

    for place in range(len(weights)):
        rooms.matrices(place)  # where no expert has rows

    return None if grad_x is None else grad_x.to(dtype), weight_gradient(grad_s_S, order_S, weight_TK)


def weight_gradient(grad_s_S: Tensor | None, order_S: Tensor, weight_TK: Tensor | None) -> Tensor | None:
    """The routing weights' gradient from that of the sorted rows' weights."""
    if grad_s_S is None or weight_TK is None:
        return None
    flat = torch.empty_like(grad_s_S).index_copy_(0, order_S.long(), grad_s_S)
    return flat.reshape(weight_TK.shape).to(weight_TK.dtype)

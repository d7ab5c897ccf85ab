"""The CPU form: the library's GEMMs on slices, and all else done on panels of rows small enough to stay in the cache.

Rows are sorted once. A panel is at most PANEL_ROWS consecutive sorted rows: several experts, or a part of one. Its
gathered tokens, activations and products live in scratch that the next panel reuses, so that nothing of size T*K x D is
ever made; gathers, element-wise work and sums are done a panel at a time, GEMMs an expert at a time. Routing weights
scale A (N wide) rather than the expert's output (D wide).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moebius.kernels.activations import activate, activate_backward, find_activation
from moebius.kernels.contract import Gradients, Needs, Options, Weights, accumulate_dtype
from moebius.kernels.native import panel_work
from moebius.kernels.quantize import round_gate_up, round_left, round_matrix, round_outer
from moebius.kernels.reference import row_weight

PANEL_ROWS = 1024


class Blocks:
    """A weight [E, rows, …] as blocks of rows, one after another: each one tensor of all experts, or one an expert.

    blocks: (which rows, the tensors). As room for gradients: an expert that is None gets none.
    """

    def __init__(self, blocks: list[tuple[slice, Tensor | Sequence[Tensor | None]]]) -> None:
        self.blocks = blocks

    @property
    def shape(self) -> tuple[int, ...]:
        rows, parts = self.blocks[-1]
        assert parts[0] is not None
        return (len(parts), rows.stop, *parts[0].shape[1:])


class BlockWeights(NamedTuple):
    """As contract.Weights, of weights that are not one tensor."""

    gate_up_E2ND: Blocks
    down_EDN: Blocks
    gate_up_bias_EM: Blocks | None
    down_bias_ED: Blocks | None


def blocks_of(weight: Tensor | Blocks) -> list[tuple[slice, Tensor | Sequence[Tensor | None]]]:
    return [(slice(None), weight)] if isinstance(weight, Tensor) else weight.blocks


class Segment(NamedTuple):
    """Rows low:high of a panel, all of one expert; first: no earlier panel has this expert."""

    expert: int
    low: int
    high: int
    first: bool


class Panel(NamedTuple):
    """Sorted rows start:stop, at least one."""

    start: int
    stop: int
    segments: list[Segment]


def panels(offsets: Tensor) -> Iterator[Panel]:
    """The experts' rows in sorted order; an expert is cut only where it is larger than a panel. offsets: [E+1]."""
    bounds = offsets.tolist()
    start, segments = 0, list[Segment]()
    for expert, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if segments and high - start > PANEL_ROWS:
            yield Panel(start, low, segments)
            start, segments = low, []
        for at in range(low, high, PANEL_ROWS):
            stop = min(at + PANEL_ROWS, high)
            segments.append(Segment(expert, at - start, stop - start, at == low))
            if stop < high:
                yield Panel(start, stop, segments)
                start, segments = stop, []
    if segments:
        yield Panel(start, bounds[-1], segments)


class Scratch:
    """Buffers of one call, made on first use at a full panel's size and handed out as slices."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self.like, self.rows = like, min(rows, PANEL_ROWS)
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


def linear(rows: Tensor, weight: Tensor | Blocks, segments: list[Segment], out: Tensor,
           name: str | None = None) -> Tensor:
    """out[r] = weight[expert of r] @ rows[r], for a panel's rows, in the format of that name."""
    if name is not None:
        return multiply(rows, tensor(weight).mT, segments, out, name)
    for columns, matrices in blocks_of(weight):
        for expert, low, high, _ in segments:
            torch.mm(rows[low:high], tensor(matrices[expert]).T, out=out[low:high, columns])
    return out


def multiply(rows: Tensor, weight: Tensor | Blocks, segments: list[Segment], out: Tensor,
             name: str | None = None) -> Tensor:
    """out[r] = rows[r] @ weight[expert of r], for a panel's rows, in the format of that name."""
    if name is not None:
        left, matrix_EPQ = round_left(rows, name), tensor(weight)
        for expert, low, high, _ in segments:
            out[low:high] = left[low:high] @ round_matrix(matrix_EPQ[expert], name)
        return out
    for number, (columns, matrices) in enumerate(blocks_of(weight)):
        for expert, low, high, _ in segments:
            left, matrix = rows[low:high, columns], tensor(matrices[expert])
            torch.mm(left, matrix, out=out[low:high]) if number == 0 else out[low:high].addmm_(left, matrix)
    return out


def tensor(weight: Tensor | Blocks | None) -> Tensor:
    """A weight that is one tensor: 8 bit formats take no other."""
    assert isinstance(weight, Tensor)
    return weight


def project_up(rows: Tensor, weights: Weights | BlockWeights, segments: list[Segment], out: Tensor,
               options: Options) -> Tensor:
    """H of a panel: rows [n, D] -> out [n, M]."""
    name = options.format("up")
    if name is None:
        linear(rows, weights.gate_up_E2ND, segments, out)
    else:
        left, gate_up_E2ND = round_left(rows, name), tensor(weights.gate_up_E2ND)
        for expert, low, high, _ in segments:
            out[low:high] = left[low:high] @ round_gate_up(gate_up_E2ND[expert], options.gate, name).T
    if weights.gate_up_bias_EM is not None:
        for columns, bias in blocks_of(weights.gate_up_bias_EM):
            for expert, low, high, _ in segments:
                out[low:high, columns] += tensor(bias[expert])
    return out


def add_rows(total_TD: Tensor, token: Tensor, rows: Tensor, scratch: Scratch) -> None:
    """total[token] += rows, in total's (wider) dtype."""
    if panel_work.add(total_TD, token, rows):
        return
    if rows.dtype != total_TD.dtype:
        rows = scratch.take("wide", rows.shape[0], rows.shape[1], total_TD.dtype).copy_(rows)
    total_TD.index_add_(0, token, rows)


def gated(h: Tensor, scale: Tensor | None, options: Options, out: Tensor) -> Tensor:
    """A of a panel, times its rows' weights, in h's dtype. h: [n, M]; scale: [n]; out: [n, N]."""
    activation = find_activation(options.activation, options.gate)
    if not panel_work.gated(out, h, scale, activation, options.gate):
        a = activate(h.to(accumulate_dtype(h.dtype)), activation, options.gate)
        out.copy_(a if scale is None else a.mul_(scale[:, None]))
    return out


def gated_backward(grad_a: Tensor, h: Tensor, scale: Tensor | None, options: Options, scratch: Scratch,
                   dot: Tensor | None) -> tuple[Tensor, Tensor]:
    """(A times its weight [n, N], dH [n, M]), in h's dtype, from dA before the weight; dot [n] becomes <dA, A>."""
    activation = find_activation(options.activation, options.gate)
    a, grad_h = scratch.take("a", *grad_a.shape), scratch.take("grad_h", *h.shape)
    if not panel_work.gated_backward(grad_h, a, dot, grad_a, h, scale, activation, options.gate):
        exact = accumulate_dtype(h.dtype)
        grad_a = grad_a.to(exact)
        value, slope = activate_backward(
            grad_a if scale is None else grad_a * scale[:, None], h.to(exact), activation, options.gate)
        if dot is not None:
            torch.linalg.vecdot(grad_a, value, out=dot)
        a.copy_(value if scale is None else value.mul_(scale[:, None]))
        grad_h.copy_(slope)
    return a, grad_h


def forward(x_TD: Tensor, weights: Weights | BlockWeights, order_S: Tensor, offsets: Tensor, weight_TK: Tensor | None,
            top_k: int, options: Options) -> tuple[Tensor, Tensor]:
    """As reference.forward."""
    exact = accumulate_dtype(x_TD.dtype)
    token_S = order_S // max(top_k, 1)
    scale_S = row_weight(weight_TK, order_S, exact)
    keep = options.save == "default"
    width, width_h = x_TD.shape[1], weights.gate_up_E2ND.shape[1]
    h_SM = x_TD.new_empty(order_S.shape[0] if keep else 0, width_h)
    h_SM[int(offsets[-1]):].zero_()
    out_TD = torch.zeros(x_TD.shape, dtype=exact, device=x_TD.device)
    scratch = Scratch(x_TD, order_S.shape[0])
    for start, stop, segments in panels(offsets):
        token, count = token_S[start:stop], stop - start
        h = h_SM[start:stop] if keep else scratch.take("h", count, width_h)
        project_up(scratch.gather("x", x_TD, token), weights, segments, h, options)
        scale = None if scale_S is None else scale_S[start:stop]
        name = options.format("down")
        # in 8 bits A is what is rounded: with its weight it would round to something else
        a = gated(h, scale if name is None else None, options, scratch.take("a", count, weights.down_EDN.shape[2]))
        y = linear(a, weights.down_EDN, segments,
                   scratch.take("y", count, width, None if name is None else exact), name)
        if scale is not None and name is not None:
            y.mul_(scale[:, None])
        if weights.down_bias_ED is not None:
            for columns, biases in blocks_of(weights.down_bias_ED):
                for expert, low, high, _ in segments:
                    bias = tensor(biases[expert])
                    y[low:high, columns] += bias if scale is None else scale[low:high, None].to(y.dtype) * bias
        add_rows(out_TD, token, y, scratch)
    return out_TD.to(x_TD.dtype), h_SM


def accumulate_outer(total: Tensor | Blocks, left: Tensor, right: Tensor, segments: list[Segment],
                     name: str | None) -> None:
    """total[e] (+)= left[rows of e].T @ right[rows of e], for a panel's rows, in the format of that name.

    An expert is cut at multiples of PANEL_ROWS of its rows, and so never within a format's block.
    """
    for columns, totals in blocks_of(total):
        for expert, low, high, first in segments:
            room = totals[expert]
            if room is None:
                continue
            if name is not None:
                part = round_outer(left[low:high], name).T @ round_outer(right[low:high], name)
                room.copy_(part) if first else room.add_(part)
            elif first:
                torch.mm(left[low:high, columns].T, right[low:high], out=room)
            else:
                room.addmm_(left[low:high, columns].T, right[low:high])


def accumulate_sums(total: Tensor | Blocks, rows: Tensor, segments: list[Segment]) -> None:
    """total[e] (+)= the sum of e's rows, for a panel's rows."""
    for columns, totals in blocks_of(total):
        for expert, low, high, first in segments:
            room = totals[expert]
            if room is not None:
                part = rows[low:high, columns].sum(0)
                room.copy_(part) if first else room.add_(part)


def empty_gradient(parameter: Tensor | None, needed: bool, empty_experts: Tensor) -> Tensor | None:
    """Room for a parameter's gradient, zero for experts without rows; None where it is not needed."""
    if not needed or parameter is None:
        return None
    return parameter.new_empty(parameter.shape).index_fill_(0, empty_experts, 0)


def backward(grad_TD: Tensor, x_TD: Tensor, h_SM: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor,
             weight_TK: Tensor | None, top_k: int, options: Options, needs: Needs) -> Gradients:
    """As reference.backward; a gradient that is not needed is not computed."""
    empty_experts = (offsets.diff() == 0).nonzero().flatten()
    rooms = [empty_gradient(parameter, needed, empty_experts) for parameter, needed in zip(
        weights, (needs.gate_up, needs.down, needs.gate_up_bias, needs.down_bias), strict=True)]
    grad_x, grad_weight = backward_into(
        rooms, grad_TD, x_TD, h_SM, weights, order_S, offsets, weight_TK, top_k, options, needs.x, needs.weight)
    grad_gate_up, grad_down, grad_up_bias, grad_down_bias = rooms
    return Gradients(grad_x, grad_gate_up, grad_down, grad_weight, grad_up_bias, grad_down_bias)


def backward_into(
    rooms: Sequence[Tensor | Blocks | None], grad_TD: Tensor, x_TD: Tensor, h_SM: Tensor,
    weights: Weights | BlockWeights, order_S: Tensor, offsets: Tensor, weight_TK: Tensor | None, top_k: int,
    options: Options, needs_x: bool, needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the routing weights; those of Weights' four are written into rooms, where there is
    one. The rooms of experts without rows are left as they are."""
    dtype, exact = x_TD.dtype, accumulate_dtype(x_TD.dtype)
    token_S = order_S // max(top_k, 1)
    scale_S = row_weight(weight_TK, order_S, exact)
    grad_x = torch.zeros(x_TD.shape, dtype=exact) if needs_x else None
    grad_s_S = torch.zeros(order_S.shape[0], dtype=exact) if needs_weight else None
    grad_gate_up, grad_down, grad_up_bias, grad_down_bias = rooms

    scratch = Scratch(x_TD, order_S.shape[0])
    width, width_h, narrow = x_TD.shape[1], weights.gate_up_E2ND.shape[1], weights.down_EDN.shape[2]
    for start, stop, segments in panels(offsets):
        token, count = token_S[start:stop], stop - start
        scale = None if scale_S is None else scale_S[start:stop]
        grad_y = scratch.gather("grad_y", grad_TD, token)
        rows = x_TD[:0]
        if grad_gate_up is not None or options.save == "recompute":
            rows = scratch.gather("x", x_TD, token)
        h = h_SM[start:stop] if options.save == "default" else project_up(
            rows, weights, segments, scratch.take("h", count, width_h), options)

        # dA' is before the routing weight, so that dS = <dA', A>
        grad_a = multiply(grad_y, weights.down_EDN, segments, scratch.take("grad_a", count, narrow),
                          options.format("grad_act"))
        grad_s = None if grad_s_S is None else grad_s_S[start:stop]
        scaled_a, grad_h = gated_backward(grad_a, h, scale, options, scratch, grad_s)
        if grad_s is not None and weights.down_bias_ED is not None:
            for columns, biases in blocks_of(weights.down_bias_ED):
                for expert, low, high, _ in segments:
                    grad_s[low:high] += torch.mv(grad_y[low:high, columns], tensor(biases[expert]))
        if grad_down is not None:
            accumulate_outer(grad_down, grad_y, scaled_a, segments, options.format("grad_down"))
        if grad_down_bias is not None:
            accumulate_sums(grad_down_bias, grad_y if scale is None else grad_y * scale[:, None], segments)
        if grad_gate_up is not None:
            accumulate_outer(grad_gate_up, grad_h, rows, segments, options.format("grad_gate_up"))
        if grad_up_bias is not None:
            accumulate_sums(grad_up_bias, grad_h, segments)
        if grad_x is not None:
            y = multiply(grad_h, weights.gate_up_E2ND, segments, scratch.take("y", count, width),
                         options.format("grad_x"))
            add_rows(grad_x, token, y, scratch)

    grad_weight = None
    if grad_s_S is not None and weight_TK is not None:
        flat = torch.empty_like(grad_s_S).index_copy_(0, order_S.long(), grad_s_S)
        grad_weight = flat.reshape(weight_TK.shape).to(weight_TK.dtype)
    return None if grad_x is None else grad_x.to(dtype), grad_weight

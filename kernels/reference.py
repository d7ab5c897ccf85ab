"""The readable form: one expert at a time, whole matrices, the formulas as they stand. Any device, any float dtype.

It is what the other forms are compared with (in float64), and what an operator call falls to where no other form fits.
"""
from __future__ import annotations

import torch
from torch import Tensor

from moebius.kernels.activations import activate, activate_backward, find_activation
from moebius.kernels.contract import Gradients, Needs, Options, Weights, accumulate_dtype
from moebius.kernels.quantize import round_gate_up, round_left, round_matrix, round_outer

PACKS = False  # dispatch.find_form


def row_weight(weight_TK: Tensor | None, order_S: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The routing weight of each sorted row, [S], in dtype; None where every weight is one."""
    return None if weight_TK is None else weight_TK.reshape(-1).index_select(0, order_S).to(dtype)


def times(rows: Tensor, matrix: Tensor, name: str | None) -> Tensor:
    """rows [n, K] @ matrix [K, N], in the format of that name."""
    return rows @ matrix if name is None else (round_left(rows, name) @ round_matrix(matrix, name)).to(rows.dtype)


def outer(left: Tensor, right: Tensor, name: str | None) -> Tensor:
    """left.T @ right over one expert's rows, in the format of that name."""
    if name is None:
        return left.T @ right
    return (round_outer(left, name).T @ round_outer(right, name)).to(left.dtype)


def pre_activation(rows: Tensor, weights: Weights, expert: int, options: Options) -> Tensor:
    """H of one expert: rows [n, D] -> [n, M]."""
    gate_up_MD, name = weights.gate_up_E2ND[expert], options.format("up")
    h = rows @ gate_up_MD.T if name is None else (
        round_left(rows, name) @ round_gate_up(gate_up_MD, options.gate, name).T).to(rows.dtype)
    return h if weights.gate_up_bias_EM is None else h + weights.gate_up_bias_EM[expert]


def forward(x_TD: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor, weight_TK: Tensor | None, top_k: int,
            options: Options) -> tuple[Tensor, Tensor]:
    """(out_TD, h_SM); h_SM has no rows with save="recompute". Rows of sentinel slots are zero in h_SM."""
    activation = find_activation(options.activation, options.gate)
    exact = accumulate_dtype(x_TD.dtype)
    token_S = order_S // max(top_k, 1)
    scale_S = row_weight(weight_TK, order_S, exact)
    keep = options.save == "default"
    h_SM = x_TD.new_zeros(order_S.shape[0] if keep else 0, weights.gate_up_E2ND.shape[1])
    out_TD = torch.zeros(x_TD.shape, dtype=exact, device=x_TD.device)
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        token = token_S[start:stop]
        h = pre_activation(x_TD[token], weights, expert, options)
        if keep:
            h_SM[start:stop] = h
        a = activate(h.to(exact), activation, options.gate).to(x_TD.dtype)
        y = times(a, weights.down_EDN[expert].T, options.format("down")).to(exact)
        if weights.down_bias_ED is not None:
            y = y + weights.down_bias_ED[expert]
        if scale_S is not None:
            y = y * scale_S[start:stop, None]
        out_TD.index_add_(0, token, y)
    return out_TD.to(x_TD.dtype), h_SM


def backward(grad_TD: Tensor, x_TD: Tensor, h_SM: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor,
             weight_TK: Tensor | None, top_k: int, options: Options, needs: Needs) -> Gradients:
    """The gradients of forward. All are computed; those not needed are dropped."""
    activation = find_activation(options.activation, options.gate)
    dtype, exact = x_TD.dtype, accumulate_dtype(x_TD.dtype)
    token_S = order_S // max(top_k, 1)
    scale_S = row_weight(weight_TK, order_S, exact)
    grad_x = torch.zeros(x_TD.shape, dtype=exact, device=x_TD.device)
    grad_gate_up = torch.zeros_like(weights.gate_up_E2ND, memory_format=torch.contiguous_format)
    grad_down = torch.zeros_like(weights.down_EDN, memory_format=torch.contiguous_format)
    grad_scale = torch.zeros(order_S.shape[0], dtype=exact, device=x_TD.device)
    grad_up_bias = grad_gate_up.new_zeros(grad_gate_up.shape[:2])
    grad_down_bias = grad_down.new_zeros(grad_down.shape[:2])
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        token = token_S[start:stop]
        rows, grad_y = x_TD[token], grad_TD[token]
        h = h_SM[start:stop] if options.save == "default" else pre_activation(rows, weights, expert, options)
        # before the routing weight
        grad_a = times(grad_y, weights.down_EDN[expert], options.format("grad_act")).to(exact)
        scale = torch.ones_like(grad_a[:, :1]) if scale_S is None else scale_S[start:stop, None]
        a, grad_h = activate_backward(grad_a * scale, h.to(exact), activation, options.gate)
        grad_h = grad_h.to(dtype)
        grad_scale[start:stop] = (grad_a * a).sum(1)
        if weights.down_bias_ED is not None:
            grad_scale[start:stop] += (grad_y * weights.down_bias_ED[expert]).to(exact).sum(1)
            grad_down_bias[expert] = (grad_y * scale).sum(0)
        grad_down[expert] = outer(grad_y, (a * scale).to(dtype), options.format("grad_down"))
        grad_gate_up[expert] = outer(grad_h, rows, options.format("grad_gate_up"))
        grad_up_bias[expert] = grad_h.sum(0)
        grad_rows = times(grad_h, weights.gate_up_E2ND[expert], options.format("grad_x"))
        grad_x.index_add_(0, token, grad_rows.to(exact))
    grad_weight = None
    if needs.weight and weight_TK is not None:
        flat = torch.zeros_like(grad_scale).index_copy_(0, order_S.long(), grad_scale)
        grad_weight = flat.reshape(weight_TK.shape).to(weight_TK.dtype)
    return Gradients(
        grad_x.to(dtype) if needs.x else None, grad_gate_up if needs.gate_up else None,
        grad_down if needs.down else None, grad_weight,
        grad_up_bias if needs.gate_up_bias else None, grad_down_bias if needs.down_bias else None,
    )

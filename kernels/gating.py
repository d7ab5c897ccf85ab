"""The gated activation of rows and its gradient, in the CPU form: in C where C knows it, else by torch's operators."""
from __future__ import annotations

import torch
from torch import Tensor

from moebius.kernels.activations import activate, activate_backward, find_activation
from moebius.kernels.contract import Options, accumulate_dtype
from moebius.kernels.native import panel_work


def gated(h: Tensor, scale: Tensor | None, options: Options, out: Tensor) -> Tensor:
    """A of some rows, times their weights, in h's dtype. h: [n, M]; scale: [n]; out: [n, N]."""
    activation = find_activation(options.activation, options.gate)
    if not panel_work.gated(out, h, scale, activation, options.gate):
        a = activate(h.to(accumulate_dtype(h.dtype)), activation, options.gate)
        out.copy_(a) if scale is None else torch.mul(a, scale[:, None], out=out)
    return out


def gated_backward(grad_a: Tensor, h: Tensor, scale: Tensor | None, options: Options, a: Tensor, grad_h: Tensor,
                   dot: Tensor | None) -> None:
    """From dA before the weight [n, N]: a [n, N] becomes A times its weight, grad_h [n, M] dH, both in h's dtype; dot
    [n] becomes <dA, A>."""
    activation = find_activation(options.activation, options.gate)
    if not panel_work.gated_backward(grad_h, a, dot, grad_a, h, scale, activation, options.gate):
        exact = accumulate_dtype(h.dtype)
        grad_a = grad_a.to(exact)
        value, slope = activate_backward(
            grad_a if scale is None else grad_a * scale[:, None], h.to(exact), activation, options.gate,
            grad_h if grad_h.dtype == exact else None)
        if dot is not None:
            torch.linalg.vecdot(grad_a, value, out=dot)
        a.copy_(value) if scale is None else torch.mul(value, scale[:, None], out=a)
        if slope is not grad_h:
            grad_h.copy_(slope)

"""The activation table of kernels/activations.py for Triton: value and derivative in float32. Tests hold the two
equal."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def act_value(x, NAME: tl.constexpr):
    """f(x). NAME: a name of ACTIVATIONS."""
    if NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif NAME == "relu":
        return tl.where(x < 0, 0.0, x)  # not maximum: NaN stays NaN
    elif NAME == "relu2":
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive
    elif NAME == "sigmoid":
        return tl.sigmoid(x)
    else:
        tl.static_assert(NAME == "identity", "unknown activation")
        return x


@triton.jit
def act_derivative(x, NAME: tl.constexpr):
    """f'(x); 0 at a kink, as torch has it."""
    if NAME == "silu":
        s = tl.sigmoid(x)
        return s * (1 + x * (1 - s))
    elif NAME == "gelu":
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        slope = 0.7978845608028654 * (1 + 0.134145 * x * x)
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope
    elif NAME == "relu":
        return tl.where(x > 0, 1.0, tl.where(x <= 0, 0.0, x))
    elif NAME == "relu2":
        return tl.where(x < 0, 0.0, 2 * x)
    elif NAME == "sigmoid":
        s = tl.sigmoid(x)
        return s * (1 - s)
    else:
        tl.static_assert(NAME == "identity", "unknown activation")
        return tl.full(x.shape, 1.0, x.dtype)

"""Attention on a CPU where products are ours (native/gemm.h): heads that share keys share them packed, nothing is
expanded, and what a causal mask hides is not computed.

Scores of 48 queries at a time stand in the cache; forward keeps q, k, v, its result and a number for each query, as
torch's own form for CPUs does. The result and the gradients are torch's to rounding, in torch's layouts.
"""
from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from moebius.kernels.native import panel_work

LARGEST = 1 << 16  # numbers of one head's keys: three such and the scores fit a second-level cache of 1 MiB
NARROWEST, WIDEST = 16, 256  # numbers of a head
PLAIN = frozenset({Tensor, torch.nn.Parameter})


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether C attends: float32 on a CPU, of one length, each thread at least one group of heads."""
    if panel_work.rows is None or not panel_work.rows.GEMM or not torch.backends.cuda.flash_sdp_enabled():
        return False
    if torch.is_autocast_enabled("cpu") or not all(map(reads, (q, k, v))):
        return False
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    return (
        k.shape == v.shape == (batch, groups, length, width) and groups > 0 and heads % groups == 0 and length > 0
        and NARROWEST <= width <= WIDEST and length * width <= LARGEST
        and batch * groups >= torch.get_num_threads()
    )


def reads(tensor: Tensor) -> bool:
    """Whether C reads it: a head's numbers side by side, one row behind the other."""
    if type(tensor) not in PLAIN or tensor.dtype != torch.float32 or not tensor.is_cpu or tensor.dim() != 4:
        return False
    return (
        tensor.layout == torch.strided and not tensor.is_neg()
        and tensor.stride(3) == 1 and tensor.stride(2) >= tensor.shape[3]
    )


class Attention(torch.autograd.Function):
    """softmax(q k^T scale, causal or not) v, of tensors that C takes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        out, log_sums = torch.empty_like(q), q.new_empty(q.shape[:3])  # laid out as torch does
        run("attention_forward", (q, k, v, out), log_sums, causal, scale)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        grad = grad.resolve_neg()
        if not reads(grad):
            grad = grad.contiguous()
        grads = tuple(torch.empty_like(like) for like in (q, k, v))
        run("attention_backward", (q, k, v, out, grad, *grads), log_sums, ctx.causal, ctx.scale)
        return *grads, None, None


def run(name: str, tensors: tuple[Tensor, ...], log_sums: Tensor, causal: bool, scale: float) -> None:
    q, k, *_ = tensors
    sizes = struct.pack("5q", q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3])
    strides = struct.pack(f"{3 * len(tensors)}q", *(step for tensor in tensors for step in tensor.stride()[:3]))
    places = struct.pack(f"{len(tensors)}q", *(tensor.data_ptr() for tensor in tensors))
    getattr(panel_work.rows, name)(
        sizes, strides, places, log_sums.data_ptr(), scale, causal, torch.get_num_threads())


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor | None:
    """As torch's scaled_dot_product_attention without a mask; None where C does not do it. scale: None for
    1 / sqrt(width); one that turns the mask's -inf to something else is torch's to answer for."""
    if not (scale is None or scale > 0) or not takes(q, k, v):
        return None
    return Attention.apply(q, k, v, causal, q.shape[3] ** -0.5 if scale is None else scale)

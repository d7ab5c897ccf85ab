"""The Triton form of the experts operator: grouped GEMMs over device-side counts, no host synchronisation, no
atomics. One kernel a file, with the host code that launches it; launch.py lets that host code also say what it would
launch, and aot.py compiles exactly that without a GPU. Sources stay within what Triton 3.6, 3.7 and 3.9 share."""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from moebius.kernels.contract import Gradients, Needs, Options, Weights
from moebius.kernels.quantize import pack
from moebius.kernels.triton_form.down import project_down
from moebius.kernels.triton_form.grad_act import grad_activation
from moebius.kernels.triton_form.launch import Config, Launch, Problem, recorder, recording
from moebius.kernels.triton_form.tuning import cache_of, measure, seconds_on_gpu, trial
from moebius.kernels.triton_form.up import project_up, up_kernel
from moebius.kernels.triton_form.weight_grad import row_sum, weight_grad

INTERPRETED = not isinstance(up_kernel, JITFunction)  # TRITON_INTERPRET=1 was set when this was imported

PACKS = True  # dispatch.find_form

__all__ = ["INTERPRETED", "PACKS", "backward", "forward", "tune"]


def tune(x_TD: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor, weight_TK: Tensor | None, top_k: int,
         options: Options, seconds_of: Callable[[Launch], float] = seconds_on_gpu) -> dict[Problem, Config]:
    """Measure the configurations of every kernel of a forward and a backward on these tensors, and keep the fastest
    whose results are the defaults' (tuning.py; holds two results and two sets of gradients for that). On a GPU; the
    arguments are forward's. Returns what was chosen; a configuration that is refused is a warning."""
    row, column = (torch.arange(size, device=x_TD.device, dtype=torch.float32) for size in x_TD.shape)
    grad_TD = torch.sin(row[:, None] * 12.9898 + column * 78.233).to(x_TD.dtype)  # no two rows or columns alike

    def run() -> list[Tensor]:
        out_TD, h_SM = forward(x_TD, weights, order_S, offsets, weight_TK, top_k, options)
        needs = Needs(*(True,) * 4, weights.gate_up_bias_EM is not None, weights.down_bias_ED is not None)
        gradients = backward(grad_TD, x_TD, h_SM, weights, order_S, offsets, weight_TK, top_k, options, needs)
        return [out_TD, *(each for each in gradients if each is not None)]  # (H shows in the gradients)

    coarse = options.save == "fp8" or options.precision is not None
    chosen = {each: config for each, (_, config) in measure(run, seconds_of, coarse).items()}
    if x_TD.is_cuda:
        cache_of(x_TD.device).store(chosen)
    return chosen


def tune_once(*arguments: Any) -> None:
    """With MOEBIUS_TUNE=1: tune at the first call of a shape whose kernels are not all in the cache."""
    x_TD = arguments[0]
    if os.environ.get("MOEBIUS_TUNE") != "1" or not x_TD.is_cuda or trial.get() is not None:
        return
    with recording() as launches:
        forward(*arguments)
    found = cache_of(x_TD.device).found
    if any(launch.problem is not None and str(launch.problem) not in found for launch in launches):
        tune(*arguments)


def forward(x_TD: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor, weight_TK: Tensor | None, top_k: int,
            options: Options) -> tuple[Tensor, Tensor]:
    """As reference.forward, and with save="fp8" h_SM is packed. Temporaries: A [S, N], and for K > 1 a panel of the
    experts' outputs, about S x D / 2."""
    keep = options.save != "recompute"
    slots = order_S.shape[0]
    if slots == 0 or weights.gate_up_E2ND.shape[0] == 0 or weights.down_EDN.numel() == 0:
        h_SM = x_TD.new_zeros(slots if keep else 0, weights.gate_up_E2ND.shape[1])
        out_TD = torch.zeros_like(x_TD, memory_format=torch.contiguous_format)
        return out_TD, pack(h_SM) if options.save == "fp8" else h_SM
    if recorder.get() is None:
        tune_once(x_TD, weights, order_S, offsets, weight_TK, top_k, options)
    h_SM, a_SN = project_up(x_TD, weights, order_S, offsets, top_k, options, keep_h=keep, keep_a=True)
    out_TD = project_down(
        a_SN, weights.down_EDN.transpose(1, 2), weights.down_bias_ED, weight_TK, order_S, offsets, top_k, "down",
        options.format("down"))
    return out_TD, h_SM


def backward(grad_TD: Tensor, x_TD: Tensor, h_SM: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor,
             weight_TK: Tensor | None, top_k: int, options: Options, needs: Needs) -> Gradients:
    """As reference.backward; a gradient that is not needed is not computed."""
    inputs = (x_TD, weights.gate_up_E2ND, weights.down_EDN, weight_TK, weights.gate_up_bias_EM, weights.down_bias_ED)
    if order_S.shape[0] == 0 or weights.gate_up_E2ND.shape[0] == 0 or weights.down_EDN.numel() == 0:
        return Gradients(*(
            torch.zeros_like(t, memory_format=torch.contiguous_format) if t is not None and needed else None
            for t, needed in zip(inputs, needs, strict=True)))
    if options.save == "recompute":
        h_SM, _ = project_up(x_TD, weights, order_S, offsets, top_k, options, keep_h=True, keep_a=False)
    grad_h, scaled_a, grad_s = grad_activation(
        grad_TD, h_SM, weights, order_S, offsets, weight_TK, top_k, options, needs)
    grad_weight = None
    if needs.weight and weight_TK is not None:
        grad_weight = grad_s.reshape(weight_TK.shape).to(weight_TK.dtype)
    return Gradients(
        project_down(grad_h, weights.gate_up_E2ND, None, None, order_S, offsets, top_k, "grad_x",
                     options.format("grad_x")) if needs.x else None,
        weight_grad(grad_h, x_TD, order_S, offsets, top_k, right_gathered=True,
                    name=options.format("grad_gate_up")) if needs.gate_up else None,
        weight_grad(grad_TD, scaled_a, order_S, offsets, top_k, left_gathered=True,
                    name=options.format("grad_down")) if needs.down else None,
        grad_weight,
        row_sum(grad_h, None, order_S, offsets, top_k) if needs.gate_up_bias else None,
        row_sum(grad_TD, weight_TK, order_S, offsets, top_k, gathered=True) if needs.down_bias else None,
    )

"""The contract that every form of the experts operator keeps: argument checks, result shapes, and what is saved.

    out[t] = sum over k of weight[t, k] * ( down[e] @ A + down_bias[e] ),   e = index[t, k]
    A = f(gate) * up   (or f(h), gate="none"),   h = gate_up[e] @ x[t] + gate_up_bias[e]

Letters: T tokens, K slots a token, S = T*K, D model width, N expert width, E experts, M = 2N gated or N ungated.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moebius.kernels.activations import GATES, find_activation
from moebius.kernels.errors import ExpertsInputError, ExpertsTypeError
from moebius.kernels.precision import Precision
from moebius.kernels.quantize import packed_width

SAVES = ("default", "fp8", "recompute")
WEIGHTINGS = ("output", "hidden", "input")
BACKENDS = ("auto", "reference", "cpu", "triton")


class Weights(NamedTuple):
    """An expert layer's parameters. gate_up_E2ND: [E, M, D]; down_EDN: [E, D, N]; biases [E, M] and [E, D] or None."""

    gate_up_E2ND: Tensor
    down_EDN: Tensor
    gate_up_bias_EM: Tensor | None
    down_bias_ED: Tensor | None


@dataclass(frozen=True)
class Options:
    """How the operator computes. activation and gate: activations.py; save: "default" (X and H), "fp8" (X,
    and H in MXFP8) or "recompute" (X). precision: of each GEMM (precision.py);
    None: their own dtype."""

    activation: str = "silu"
    gate: str = "concat"
    save: str = "default"
    backend: str = "auto"
    precision: Precision | None = None

    def format(self, gemm: str) -> str | None:
        """The format of a GEMM (precision.GEMMS), None for the tensors' own dtype."""
        return None if self.precision is None else getattr(self.precision, gemm)

    def check(self) -> None:
        """Raise ExpertsInputError where an option has no such value."""
        for name, value, known in (
            ("gate", self.gate, GATES), ("save", self.save, SAVES), ("backend", self.backend, BACKENDS)
        ):
            if value not in known:
                raise ExpertsInputError(f"{name}={value!r} is not known; one of {', '.join(known)}")
        find_activation(self.activation, self.gate)


class Gradients(NamedTuple):
    """What a form's backward returns. A gradient that was not asked for is None."""

    x_TD: Tensor | None
    gate_up_E2ND: Tensor | None
    down_EDN: Tensor | None
    weight_TK: Tensor | None
    gate_up_bias_EM: Tensor | None
    down_bias_ED: Tensor | None


class Needs(NamedTuple):
    """Which gradients are asked for, in the order of Gradients."""

    x: bool
    gate_up: bool
    down: bool
    weight: bool
    gate_up_bias: bool
    down_bias: bool


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit floats, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def check_types(x: Tensor, weights: Weights, index: Tensor, weight: Tensor | None) -> None:
    """Raise ExpertsTypeError where an argument is no tensor or has a dtype that the contract does not take."""
    tensors = {
        "x_TD": x, "gate_up_E2ND": weights.gate_up_E2ND, "down_EDN": weights.down_EDN, "index_TK": index,
        "weight_TK": weight, "gate_up_bias": weights.gate_up_bias_EM, "down_bias": weights.down_bias_ED,
    }
    optional = ("weight_TK", "gate_up_bias", "down_bias")
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise ExpertsTypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ExpertsTypeError(f"x_TD has dtype {x.dtype}; the operator takes float64, float32, bfloat16 and float16")
    for name in ("gate_up_E2ND", "down_EDN", "gate_up_bias", "down_bias"):
        tensor = tensors[name]
        if tensor is not None and tensor.dtype != x.dtype:
            raise ExpertsTypeError(f"{name} has dtype {tensor.dtype} and x_TD {x.dtype}; cast one to the other's")
    if index.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ExpertsTypeError(f"index_TK has dtype {index.dtype}; expert indices are integers (int64 from topk)")
    if weight is not None and not weight.dtype.is_floating_point:
        raise ExpertsTypeError(f"weight_TK has dtype {weight.dtype}; routing weights are floating point")


def differ(a: int, b: int) -> bool:
    """Whether two sizes are known to differ. A symbolic size says nothing (the running operator sees its number)."""
    return isinstance(a, int) and isinstance(b, int) and a != b


def check_shapes(x: Tensor, weights: Weights, index: Tensor, weight: Tensor | None, options: Options) -> None:
    """Raise ExpertsInputError where shapes or devices do not fit one another."""
    gate_up, down, gate_up_bias, down_bias = weights
    for name, tensor, rank, letters in (
        ("x_TD", x, 2, "[tokens, D]"), ("gate_up_E2ND", gate_up, 3, "[E, M, D]"), ("down_EDN", down, 3, "[E, D, N]"),
        ("index_TK", index, 2, "[tokens, K]"), ("weight_TK", weight, 2, "[tokens, K]"),
        ("gate_up_bias", gate_up_bias, 2, "[E, M]"), ("down_bias", down_bias, 2, "[E, D]"),
    ):
        if tensor is None:
            continue
        if tensor.dim() != rank:
            raise ExpertsInputError(f"{name} must be {letters}; it has shape {tuple(tensor.shape)}")
        if tensor.device != x.device:
            raise ExpertsInputError(f"{name} is on {tensor.device} and x_TD on {x.device}; move them to one device")
    (tokens, width), (experts, rows, width_up), (experts_down, width_down, narrow) = x.shape, gate_up.shape, down.shape
    if differ(width, width_up) or differ(width, width_down):
        raise ExpertsInputError(
            f"x_TD has width {width}, gate_up_E2ND reads {width_up} and down_EDN writes {width_down}; all are D. "
            "Expert weights are oriented as in F.linear: gate_up[e] is [M, D], down[e] is [D, N]; "
            "transpose(1, 2) turns them"
        )
    if differ(experts, experts_down):
        raise ExpertsInputError(f"gate_up_E2ND has {experts} experts and down_EDN {experts_down}")
    wanted = narrow if options.gate == "none" else 2 * narrow
    if differ(rows, wanted):
        raise ExpertsInputError(
            f"gate_up_E2ND has {rows} rows an expert; gate={options.gate!r} with down_EDN's N={narrow} wants {wanted}"
        )
    if differ(index.shape[0], tokens):
        raise ExpertsInputError(f"index_TK has {index.shape[0]} tokens and x_TD {tokens}")
    if weight is not None and (differ(weight.shape[0], index.shape[0]) or differ(weight.shape[1], index.shape[1])):
        raise ExpertsInputError(
            f"weight_TK is {tuple(weight.shape)} and index_TK {tuple(index.shape)}; both are [tokens, K]")
    for name, bias, size in (("gate_up_bias", gate_up_bias, rows), ("down_bias", down_bias, width)):
        if bias is not None and (differ(bias.shape[0], experts) or differ(bias.shape[1], size)):
            raise ExpertsInputError(f"{name} is {tuple(bias.shape)}; it goes with [{experts}, {size}]")


def stored_width(width_h: int, save: str) -> int:
    """Elements of a row of H as it is kept; with save="fp8" they are bytes."""
    return {"default": width_h, "fp8": packed_width(width_h), "recompute": 0}[save]


def saved_elements(tokens: int, width: int, expert_width: int, top_k: int, gate: str = "concat",
                   save: str = "default", num_experts: int = 0) -> int:
    """Elements kept for backward by one call, parameters excluded: X, H, the routing weights and the sorted order.

    tokens T, width D, expert_width N, top_k K. Counts T*D + T*K*M (default), T*D (recompute) or T*D and
    T*K*(M + M/32) bytes (fp8), + 2*T*K for the routing weights and the int32 order, + E+1 offsets where num_experts is
    given.
    """
    options = Options(gate=gate, save=save)
    options.check()
    slots = tokens * top_k
    pre_activation = slots * stored_width(expert_width * (1 if gate == "none" else 2), save)
    return tokens * width + pre_activation + 2 * slots + (num_experts + 1 if num_experts else 0)

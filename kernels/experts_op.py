"""The torch operators: ``moebius::experts`` and its backward, with fake and autograd registration, and their front
door.

Both are opaque to graph transformations, functional, and read sizes only from their arguments' shapes, so that they
trace with symbolic and unbacked sizes. Nothing but X, H, the routing weights and two index tensors is saved for
backward.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moebius.kernels import reference, twice
from moebius.kernels.calibrate import Layer, Recorder, note, resolve
from moebius.kernels.contract import (
    WEIGHTINGS,
    Needs,
    Options,
    Weights,
    accumulate_dtype,
    check_shapes,
    check_types,
    differ,
)
from moebius.kernels.dispatch import find_form
from moebius.kernels.errors import ExpertsInputError, ExpertsTypeError
from moebius.kernels.precision import Budget, Precision, text_of
from moebius.kernels.quantize import pack, packed_width, unpack
from moebius.kernels.rounding import round_tokens
from moebius.kernels.routing import ids_from_counts, sort_rows
from moebius.kernels.unchanged import refuse_changed, sampled


@torch.library.custom_op("moebius::experts", mutates_args=())
def experts_forward(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor | None, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, gate: str, save: str, backend: str, precision: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out_TD, h_SM, order_S, offsets): routing.sort_rows' two, and what the form's ``forward`` returns."""
    weights, options = Weights(gate_up, down, gate_up_bias, down_bias), Options(activation, gate, save, backend)
    check_shapes(x, weights, index, weight, options)
    order_S, offsets = sort_rows(index, gate_up.shape[0])
    if precision or Recorder.report is not None:
        layer = Layer(x, weights, order_S, offsets, weight, index.shape[1])
        options = replace(options, precision=resolve(precision, layer, options, forward=True))
        note(layer, options)
    form = find_form(backend, x)
    around = save == "fp8" and not form.PACKS  # H packed here, around a form that keeps it as it is
    if around:
        options = replace(options, save="default")
    out_TD, h_SM = form.forward(x, weights, order_S, offsets, weight, index.shape[1], options)
    if around:
        h_SM = pack(h_SM)
    return out_TD, h_SM, order_S, offsets


@experts_forward.register_fake
def fake_forward(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor | None, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, gate: str, save: str, backend: str, precision: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options(activation, gate, save, backend)
    check_shapes(x, Weights(gate_up, down, gate_up_bias, down_bias), index, weight, options)
    slots = index.shape[0] * index.shape[1]
    return (
        x.new_empty((x.shape[0], x.shape[1])),
        x.new_empty((slots if save != "recompute" else 0, packed_width(gate_up.shape[1]) if save == "fp8" else
                     gate_up.shape[1]), dtype=torch.uint8 if save == "fp8" else x.dtype),
        index.new_empty((slots,), dtype=torch.int32),
        index.new_empty((gate_up.shape[0] + 1,), dtype=torch.int32),
    )


@torch.library.custom_op("moebius::experts_backward", mutates_args=())
def experts_backward(
    grad: Tensor, x: Tensor, h: Tensor, order: Tensor, offsets: Tensor, gate_up: Tensor, down: Tensor,
    weight: Tensor | None, gate_up_bias: Tensor | None, down_bias: Tensor | None, top_k: int,
    activation: str, gate: str, save: str, backend: str, precision: str, needs: list[bool],
) -> list[Tensor]:
    """The gradients that ``needs`` (contract.Needs) asks for, in its order."""
    weights, options = Weights(gate_up, down, gate_up_bias, down_bias), Options(activation, gate, save, backend)
    if precision or Recorder.report is not None:
        layer = Layer(x, weights, order, offsets, weight, top_k, grad)
        options = replace(options, precision=resolve(precision, layer, options, forward=False))
        note(layer, options)
    form = find_form(backend, x)
    if save == "fp8" and not form.PACKS:
        h, options = unpack(h, gate_up.shape[1], x.dtype), replace(options, save="default")
    gradients = form.backward(
        grad, x, h, weights, order, offsets, weight, top_k, options, Needs(*needs))
    return [gradient for gradient, needed in zip(gradients, needs, strict=True) if needed]


@experts_backward.register_fake
def fake_backward(
    grad: Tensor, x: Tensor, h: Tensor, order: Tensor, offsets: Tensor, gate_up: Tensor, down: Tensor,
    weight: Tensor | None, gate_up_bias: Tensor | None, down_bias: Tensor | None, top_k: int,
    activation: str, gate: str, save: str, backend: str, precision: str, needs: list[bool],
) -> list[Tensor]:
    inputs = (x, gate_up, down, weight, gate_up_bias, down_bias)
    asked = [like for like, needed in zip(inputs, needs, strict=True) if needed]
    return [like.new_empty(like.shape) for like in asked if like is not None]


# Positions in experts_forward's signature of what Needs lists.
DIFFERENTIABLE = (0, 1, 2, 4, 5, 6)


def as_they_are(weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The weights with the data that they have now, whatever ``weight.data`` is set to before backward: a loop over
    experts keeps views of them, which hold on to theirs. A write in place is seen, and is an error in backward."""
    return [None if weight is None else weight.detach() for weight in weights]


def set_up_context(ctx, inputs, output) -> None:
    x, gate_up, down, index, weight, gate_up_bias, down_bias, *options = inputs
    _, h, order, offsets = output
    weights = as_they_are((gate_up, down, gate_up_bias, down_bias))
    themselves = gate_up, down, gate_up_bias, down_bias  # for a second derivative, which reaches them
    ctx.save_for_backward(x, h, order, offsets, *weights[:2], weight, *weights[2:], *themselves)
    ctx.mark_non_differentiable(h, order, offsets)
    ctx.set_materialize_grads(False)  # else a zero gradient of H's size is made for the unused output
    ctx.top_k, ctx.options = index.shape[1], options
    ctx.sample = sampled((x, weight, *computed_again(weights, weight, save=options[2])))


def computed_again(weights: Sequence[Tensor | None], weight: Tensor | None, save: str) -> list[Tensor | None]:
    """The weights with which backward computes what autograd's loop has kept. weights: gate_up, down and the biases."""
    gate_up, down, gate_up_bias, down_bias = weights
    routed = weight is not None and weight.requires_grad
    return [*([down, down_bias] if routed else []), *([gate_up, gate_up_bias] if save == "recompute" else [])]


def differentiate(ctx, grad, *unused):
    if grad is None:
        return (None,) * 12
    needs = [bool(ctx.needs_input_grad[position]) for position in DIFFERENTIABLE]
    *saved, gate_up, down, gate_up_bias, down_bias = ctx.saved_tensors
    if ctx.sample:
        x, _, _, _, *then, weight, up_bias_then, down_bias_then = saved
        again = computed_again((*then, up_bias_then, down_bias_then), weight, ctx.options[2])
        refuse_changed((x, weight, *again), ctx.sample)
    if torch.is_grad_enabled() and not ctx.options[-1]:  # create_graph=True
        x, _, order, offsets, *then, weight, up_bias_then, down_bias_then = saved
        inputs = (x, gate_up, down, weight, gate_up_bias, down_bias)
        data = (x, *then, weight, up_bias_then, down_bias_then)
        found = twice.gradients(partial(as_reference, order, offsets, ctx), grad, inputs, data, needs)
        computed = iter([each for each in found if each is not None])
    else:
        computed = iter(experts_backward(grad, *saved, ctx.top_k, *ctx.options, needs))
    gradients: list[Tensor | None] = [None] * 12
    for position, needed in zip(DIFFERENTIABLE, needs, strict=True):
        if needed:
            gradients[position] = next(computed)
    return tuple(gradients)


def as_reference(order: Tensor, offsets: Tensor, ctx, inputs: Sequence[Tensor]) -> Tensor:
    """The operator's result by the reference form. inputs: in the order of DIFFERENTIABLE."""
    x, gate_up, down, weight, *biases = inputs
    activation, gate, *_ = ctx.options
    options = Options(activation, gate, "recompute", "reference")
    return reference.forward(x, Weights(gate_up, down, *biases), order, offsets, weight, ctx.top_k, options)[0]


experts_forward.register_autograd(differentiate, setup_context=set_up_context)


def experts(
    x_TD: Tensor,
    gate_up_E2ND: Tensor,
    down_EDN: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor | None,
    activation: str = "silu",
    *,
    gate: str = "concat",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weighting: str = "output",
    save: str = "default",
    token_rounding: int | None = None,
    precision: str | Precision | Budget | None = None,
    backend: str = "auto",
) -> Tensor:
    """A layer of routed experts: ``out[t] = sum over k of weight[t, k] * expert[index[t, k]](x[t])``, shape [T, D].

    An expert is ``down[e] @ (f(g) * u) + down_bias[e]`` with ``g, u = gate_up[e] @ x[t] + gate_up_bias[e]``.

    x_TD: [tokens, D], float64, float32, bfloat16 or float16, any strides; the result has its dtype and device.
    gate_up_E2ND: [E, M, D] and down_EDN: [E, D, N], x's dtype, oriented as in F.linear; M = 2N, or N with gate="none".
    index_TK: integer [tokens, K]; a slot whose index lies outside [0, E) contributes nothing and gets a zero gradient.
    weight_TK: floating point [tokens, K], or None for all ones. Its gradient is <dA', A> (before the weight).
    activation: f, a name of moebius.kernels.ACTIVATIONS; or the whole gate as an expression of g and u
    (expressions.py), for example "clamp(g, None, 7) * sigmoid(1.702 * clamp(g, None, 7)) * (clamp(u, -7, 7) + 1)".
    gate: "concat" (first half of M is g), "interleaved" (even rows are g) or "none" (A = f(h)).
    gate_up_bias: [E, M]; down_bias: [E, D]; x's dtype.
    weighting: what a routing weight scales: "output" (the expert's result, as above), "hidden" (A, so that down_bias
    is added unscaled) or "input" (x[t], as Llama 4 does; this one gathers and scales S = T*K rows of x).
    save: "default" keeps X and H for backward (T*D + T*K*M elements); "recompute" keeps X and recomputes H; "fp8" keeps
    X, and H in MXFP8 (quantize.py; T*K*M*33/32 bytes): the result is the same, gradients are off by a few per cent.
    token_rounding: drops slots, which changes the result: every expert keeps a multiple of this many rows, those with
    the largest weights (rounding.py); None drops nothing.
    precision: of the GEMMs' operands (precision.py). None: x's dtype; "fp8": E4M3 with a scale a row, weight gradients
    in x's dtype; "fp8_block": E4M3 in blocks of 128 and 128x128; "mxfp8": E4M3 in blocks of 32; a Precision says it for
    each GEMM, a Budget(limit) chooses by measuring. All but None change the result, by a few per cent.
    backend: "auto", "reference", "cpu" or "triton".

    16-bit inputs: GEMMs accumulate in float32, H and A are rounded to the dtype (H alone where a CPU multiplies more
    than 1,024 rows in float32), the sum over k is in float32.
    Under autocast, x, weights and biases are cast to autocast's dtype and the result back to x's; float64 stays.
    Results are the same bits run for run. Raises ExpertsInputError (a ValueError; ExpertsTypeError, also a TypeError,
    for types and dtypes). With ``create_graph=True`` gradients are the reference form's, and can be differentiated
    again; with a precision there is no second derivative, and torch raises.
    """
    options = Options(activation, gate, save, backend)
    options.check()
    precision_text = text_of(precision)
    if precision_text.startswith("budget") and "@" not in precision_text and isinstance(down_EDN, Tensor) and (
            not torch.compiler.is_compiling() and type(down_EDN) in (Tensor, torch.nn.Parameter)):
        precision_text += f"@{down_EDN.data_ptr():x}"
    if weighting not in WEIGHTINGS:
        raise ExpertsInputError(f"weighting={weighting!r} is not known; one of {', '.join(WEIGHTINGS)}")
    if token_rounding is not None:
        check_types(x_TD, Weights(gate_up_E2ND, down_EDN, gate_up_bias, down_bias), index_TK, weight_TK)
        check_shapes(x_TD, Weights(gate_up_E2ND, down_EDN, gate_up_bias, down_bias), index_TK, weight_TK, options)
        index_TK = round_tokens(index_TK, weight_TK, gate_up_E2ND.shape[0], token_rounding)
    if weight_TK is not None and weighting != "output":
        check_arguments(x_TD, gate_up_E2ND, down_EDN, index_TK, weight_TK, down_bias)
        run = partial(experts, activation=activation, gate=gate, gate_up_bias=gate_up_bias, save=save,
                      precision=precision_text, backend=backend)
        if weighting == "input":
            return scale_input(partial(run, down_bias=down_bias), x_TD, gate_up_E2ND, down_EDN, index_TK, weight_TK)
        return scale_hidden(run, x_TD, gate_up_E2ND, down_EDN, index_TK, weight_TK, down_bias)
    weights = Weights(gate_up_E2ND, down_EDN, gate_up_bias, down_bias)
    result_dtype: torch.dtype | None = None
    device = x_TD.device.type if isinstance(x_TD, Tensor) else "cpu"
    # torch 2.11 does not trace the question whether a device has autocast; of a tensor's devices meta has none
    if device != "meta" and torch.is_autocast_enabled(device) and x_TD.dtype != torch.float64:
        result_dtype, dtype = x_TD.dtype, torch.get_autocast_dtype(device)
        x_TD = x_TD.to(dtype)
        weights = Weights._make(w.to(dtype) if isinstance(w, Tensor) else w for w in weights)
    check_types(x_TD, weights, index_TK, weight_TK)
    trained = (x_TD, *weights, weight_TK)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)):
        save = "recompute"  # no backward: H is not kept
    out_TD = experts_forward(
        x_TD, weights.gate_up_E2ND, weights.down_EDN, index_TK, weight_TK, weights.gate_up_bias_EM,
        weights.down_bias_ED, activation, gate, save, backend, precision_text)[0]
    return out_TD if result_dtype is None else out_TD.to(result_dtype)


def check_arguments(x_TD: Tensor, gate_up: Tensor, down: Tensor, index_TK: Tensor, weight_TK: Tensor,
                    down_bias: Tensor | None) -> None:
    """What scale_input and scale_hidden look into before the operator checks the rest."""
    for name, tensor, rank in (("x_TD", x_TD, 2), ("gate_up_E2ND", gate_up, 3), ("down_EDN", down, 3),
                               ("index_TK", index_TK, 2), ("weight_TK", weight_TK, 2)):
        if not isinstance(tensor, Tensor):
            raise ExpertsTypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dim() != rank:
            raise ExpertsInputError(f"{name} must have {rank} dimensions; it has shape {tuple(tensor.shape)}")
    if not weight_TK.dtype.is_floating_point:
        raise ExpertsTypeError(f"weight_TK has dtype {weight_TK.dtype}; routing weights are floating point")
    if differ(index_TK.shape[0], x_TD.shape[0]) or any(map(differ, weight_TK.shape, index_TK.shape)):
        raise ExpertsInputError(f"weight_TK is {tuple(weight_TK.shape)}, index_TK {tuple(index_TK.shape)} and x_TD "
                                f"{tuple(x_TD.shape)}; they are [tokens, K], [tokens, K] and [tokens, D]")
    if down_bias is not None:
        if not isinstance(down_bias, Tensor):
            raise ExpertsTypeError(f"down_bias must be a tensor, not {type(down_bias).__name__}")
        if down_bias.dtype != x_TD.dtype:
            raise ExpertsTypeError(f"down_bias has dtype {down_bias.dtype} and x_TD {x_TD.dtype}; cast one to the "
                                   "other's")
        if down_bias.dim() != 2 or differ(down_bias.shape[0], down.shape[0]) or differ(
                down_bias.shape[1], x_TD.shape[1]):
            raise ExpertsInputError(
                f"down_bias is {tuple(down_bias.shape)}; it goes with [{down.shape[0]}, {x_TD.shape[1]}]")


def scale_input(run: Callable[..., Tensor], x_TD: Tensor, gate_up: Tensor, down: Tensor, index_TK: Tensor,
                weight_TK: Tensor) -> Tensor:
    """experts with weighting="input": every slot a row of its own, x[t] * weight[t, k]."""
    tokens, top_k = index_TK.shape
    real_TK = (index_TK >= 0) & (index_TK < gate_up.shape[0])
    weight_TK1 = weight_TK.masked_fill(~real_TK, 0)[:, :, None]  # a sentinel slot's weight, even NaN, reaches nothing
    rows_SD = (x_TD[:, None, :] * weight_TK1.to(x_TD.dtype)).reshape(tokens * top_k, x_TD.shape[1])
    out_SD = run(rows_SD, gate_up, down, index_TK.reshape(-1, 1), None)
    return out_SD.reshape(tokens, top_k, x_TD.shape[1]).to(accumulate_dtype(x_TD.dtype)).sum(1).to(x_TD.dtype)


def scale_hidden(run: Callable[..., Tensor], x_TD: Tensor, gate_up: Tensor, down: Tensor, index_TK: Tensor,
                 weight_TK: Tensor, down_bias: Tensor | None) -> Tensor:
    """experts with weighting="hidden": down(weight * A), and each slot's bias as it is."""
    out_TD = run(x_TD, gate_up, down, index_TK, weight_TK)
    if down_bias is None:
        return out_TD
    num_experts = down_bias.shape[0]
    ids = index_TK.long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    # not every CPU multiplies 16 bits fast
    exact = accumulate_dtype(out_TD.dtype) if out_TD.device.type == "cpu" else out_TD.dtype
    counts_TE = torch.zeros((ids.shape[0], num_experts + 1), dtype=exact, device=ids.device).scatter_add(
        1, ids, torch.ones_like(ids, dtype=exact))
    return torch.addmm(out_TD.to(exact), counts_TE[:, :num_experts], down_bias.to(exact)).to(out_TD.dtype)


def experts_rows(
    x_SD: Tensor,
    gate_up_E2ND: Tensor,
    down_EDN: Tensor,
    expert_S: Tensor | None = None,
    weight_S: Tensor | None = None,
    activation: str = "silu",
    *,
    counts_E: Tensor | None = None,
    gate: str = "concat",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    save: str = "default",
    precision: str | Precision | Budget | None = None,
    backend: str = "auto",
) -> Tensor:
    """Experts over rows that are routed already, one expert a row: ``out[s] = weight[s] * expert[expert[s]](x[s])``,
    [S, D].

    What a rank runs on the rows that it received. It is :func:`experts` with K = 1; all else is as there.

    expert_S: integer [S], in any order; outside [0, E): the row's result is zero. Or instead
    counts_E: integer [E], rows an expert, the rows lying in expert order; rows past the counts' sum give zero.
    weight_S: floating point [S], or None for all ones.
    """
    if (expert_S is None) == (counts_E is None):
        raise ExpertsInputError(
            "experts_rows takes either expert_S (an expert id per row) or counts_E (rows an expert)")
    if expert_S is None:
        assert counts_E is not None
        if counts_E.dim() != 1 or counts_E.shape[0] != gate_up_E2ND.shape[0]:
            raise ExpertsInputError(
                f"counts_E is {tuple(counts_E.shape)} and there are {gate_up_E2ND.shape[0]} experts; it is [E]")
        expert_S = ids_from_counts(counts_E, x_SD.shape[0])
    if expert_S.dim() != 1 or (weight_S is not None and weight_S.dim() != 1):
        raise ExpertsInputError("expert_S and weight_S are one-dimensional: one entry a row")
    return experts(
        x_SD, gate_up_E2ND, down_EDN, expert_S[:, None], None if weight_S is None else weight_S[:, None], activation,
        gate=gate, gate_up_bias=gate_up_bias, down_bias=down_bias, save=save, precision=precision,
        backend=backend)

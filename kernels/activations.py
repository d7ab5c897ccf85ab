"""What stands between an expert's two products, in torch: the named activations as one table, gates given as
expressions (expressions.py), and the layouts of gate and up. The Triton form writes its own code from expressions of
the same names; tests hold the two equal."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moebius.kernels import expressions
from moebius.kernels.errors import ExpertsInputError


@dataclass(frozen=True)
class Activation:
    """One scalar function applied to the pre-activation.

    value: f(x), element by element, in x's dtype.
    backward: (grad, x) -> grad * f'(x). At a kink (relu at 0) the derivative is torch's: 0.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)**2 (So et al. 2021, "Primer")."""
    positive = functional.relu(x)
    return positive * positive


def sigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    return grad * y * (1 - y)


ACTIVATIONS: dict[str, Activation] = {
    entry.name: entry
    for entry in (
        Activation("silu", functional.silu, torch.ops.aten.silu_backward),
        Activation("gelu", functional.gelu, torch.ops.aten.gelu_backward),
        Activation(
            "gelu_tanh",
            lambda x: functional.gelu(x, approximate="tanh"),
            lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
        ),
        Activation("relu", functional.relu, lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0)),
        Activation("relu2", relu_squared, lambda grad, x: grad * (2 * functional.relu(x))),
        Activation("sigmoid", torch.sigmoid, sigmoid_backward),
        Activation("identity", lambda x: x.clone(), lambda grad, x: grad.clone()),
    )
}

GATES = ("concat", "interleaved", "none")


def find_activation(text: str, gate: str) -> Activation | expressions.Gating:
    """The table's entry of that name, or the gate that an expression says. Raises ExpertsInputError for neither."""
    if not isinstance(text, str):
        raise ExpertsInputError(f"activation={text!r} is a {type(text).__name__}; it is a name or an expression")
    entry = ACTIVATIONS.get(text)
    if entry is not None:
        return entry
    if text.isidentifier() and text not in ("g", "h"):
        raise ExpertsInputError(
            f"activation={text!r} is not known; one of {', '.join(ACTIVATIONS)}, or an expression of g and u")
    return expressions.gating(text, gate != "none")


def expression_of(text: str, gate: str) -> expressions.Gating:
    """Any activation as an expression: a name f stands for f(g) * u, or f(g) without a gate."""
    if text in ACTIVATIONS:
        text = f"{text}(g)" if gate == "none" else f"{text}(g) * u"
    return expressions.gating(text, gate != "none")


def split_gate(h: Tensor, gate: str, dim: int = -1) -> tuple[Tensor, Tensor | None]:
    """The gate and up halves of a pre-activation (or of the weight's rows) as views; up is None for an ungated expert.

    concat: the first half of ``dim`` is the gate (Mixtral, Qwen-MoE, DeepSeek); interleaved: even positions are
    (gpt-oss).
    """
    if gate == "none":
        return h, None
    width = h.shape[dim]
    if gate == "concat":
        return h.narrow(dim, 0, width // 2), h.narrow(dim, width // 2, width // 2)
    dim = dim % h.dim()
    pairs = h.unflatten(dim, (width // 2, 2))
    return pairs.select(dim + 1, 0), pairs.select(dim + 1, 1)


def activate(h: Tensor, activation: Activation | expressions.Gating, gate: str) -> Tensor:
    """A = f(gate) * up, or f(h) where there is no gate. h: [rows, M]; A: [rows, N], its own storage."""
    return activate_halves(*split_gate(h, gate), activation)


def activate_halves(gate_half: Tensor, up_half: Tensor | None, activation: Activation | expressions.Gating) -> Tensor:
    """The same of the two halves, of one shape."""
    if isinstance(activation, expressions.Gating):
        return expressions.evaluate([activation.value], gate_half, up_half)[0]
    value = activation.value(gate_half)
    if up_half is None:
        return value
    return value * up_half if value.requires_grad else value.mul_(up_half)  # (autograd keeps the value of some)


def activate_backward(grad_a: Tensor, h: Tensor, activation: Activation | expressions.Gating, gate: str,
                      room: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A recomputed from h, and dH from dA. grad_a: [rows, N] and h: [rows, M] -> (a [rows, N], grad_h [rows, M]).

    grad_h has h's layout of gate and up; it is the room, where there is one.
    """
    gate_half, up_half = split_gate(h, gate)
    if up_half is None and isinstance(activation, Activation) and room is None:
        return activation.value(gate_half), activation.backward(grad_a, gate_half)
    grad_h = torch.empty_like(h, memory_format=torch.contiguous_format) if room is None else room
    return backward_halves(grad_a, gate_half, up_half, activation, *split_gate(grad_h, gate)), grad_h


def backward_halves(grad_a: Tensor, gate_half: Tensor, up_half: Tensor | None,
                    activation: Activation | expressions.Gating, grad_gate: Tensor, grad_up: Tensor | None) -> Tensor:
    """A, of the two halves, whose gradients are written into grad_gate and grad_up."""
    if isinstance(activation, expressions.Gating):
        roots = [part for part in (activation.value, activation.d_gate, activation.d_up) if part is not None]
        value, *slopes = expressions.evaluate(roots, gate_half, up_half)
        for half, slope in zip((grad_gate, grad_up), slopes, strict=False):
            assert half is not None
            torch.mul(grad_a, slope, out=half)
        return value
    value = activation.value(gate_half)
    if up_half is None:
        grad_gate.copy_(activation.backward(grad_a, gate_half))
        return value
    assert grad_up is not None
    torch.mul(grad_a, value, out=grad_up)
    grad_gate.copy_(activation.backward(grad_a * up_half, gate_half))
    return value.mul_(up_half)

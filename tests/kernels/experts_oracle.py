"""An independent oracle: the layer written as users write it, a Python loop, differentiated by torch's own autograd."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

FUNCTIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
# Whole gates as expressions, and what they say: gpt-oss' clamped SwiGLU, a clamp on one side, an offset inside a ReLU.
EXPRESSIONS = {
    "clamp(g, None, 1.5) * sigmoid(1.702 * clamp(g, None, 1.5)) * (clamp(u, -0.7, 0.7) + 1)":
        lambda g, u: g.clamp(max=1.5) * torch.sigmoid(1.702 * g.clamp(max=1.5)) * (u.clamp(-0.7, 0.7) + 1),
    "clamp(silu(g), -0.2, None) * u + tanh(u) / (2 - -exp(-square(g)))":
        lambda g, u: functional.silu(g).clamp(min=-0.2) * u + torch.tanh(u) / (2 + torch.exp(-g * g)),
    "where(g > 0.2, expm1(clamp(g, None, 1)), 0.5 * abs(g)) * hardtanh(u, -0.5, 0.6)":
        lambda g, u: torch.where(g > 0.2, torch.expm1(g.clamp(max=1.0)), 0.5 * g.abs())
        * functional.hardtanh(u, -0.5, 0.6),
    "relu(u + 0.1) * erf(g) - u": lambda g, u: functional.relu(u + 0.1) * torch.erf(g) - u,
}
UNGATED_EXPRESSIONS = {
    "silu(clamp(h, -1, 1))": lambda h: functional.silu(h.clamp(-1, 1)),
    "sin(h) * sqrt(1 + square(h)) - cos(h) * rsqrt(2 + abs(h)) + log(3 + abs(h)) * log1p(square(h))":
        lambda h: torch.sin(h) * torch.sqrt(1 + h * h) - torch.cos(h) * torch.rsqrt(2 + h.abs())
        + torch.log(3 + h.abs()) * torch.log1p(h * h),
    "relu2(h) + 0.5 * gelu_tanh(h)": lambda h: functional.relu(h) ** 2 + functional.gelu(h, approximate="tanh") / 2,
}


@dataclass
class Layer:
    """Arguments of one call, as leaves. weight, up_bias and down_bias may be None."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    index: Tensor
    weight: Tensor | None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "silu"
    gate: str = "concat"
    weighting: str = "output"

    def leaves(self) -> list[Tensor]:
        every = (self.x, self.gate_up, self.down, self.weight, self.up_bias, self.down_bias)
        return [tensor for tensor in every if tensor is not None]

    def to(self, dtype: torch.dtype) -> Layer:
        """The same values in dtype, as fresh leaves that require gradients."""
        def move(tensor):
            return None if tensor is None else tensor.detach().to(dtype).clone().requires_grad_()
        return replace(self, x=move(self.x), gate_up=move(self.gate_up), down=move(self.down), weight=move(self.weight),
                       up_bias=move(self.up_bias), down_bias=move(self.down_bias))


def make_layer(tokens: int, width: int, narrow: int, experts: int, top_k: int, *, gate: str = "concat",
               activation: str = "silu", bias: bool = False, weighted: bool = True, seed: int = 0,
               dtype: torch.dtype = torch.float32, index: Tensor | None = None,
               weighting: str = "output") -> Layer:
    """Random arguments of unit-scale results; index: given, or K distinct experts a token."""
    generator = torch.Generator().manual_seed(seed)
    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    rows = narrow if gate == "none" else 2 * narrow
    if index is None:
        index = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    weight = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return Layer(
        normal(tokens, width), normal(experts, rows, width, scale=max(width, 1) ** -0.5),
        normal(experts, width, narrow, scale=max(narrow, 1) ** -0.5), index, weight if weighted else None,
        normal(experts, rows) if bias else None, normal(experts, width) if bias else None, activation, gate,
        weighting)


def loop(layer: Layer) -> Tensor:
    """The user's loop."""
    out = torch.zeros_like(layer.x)
    for e in range(layer.gate_up.shape[0]):
        token, slot = torch.where(layer.index == e)
        weight = torch.ones_like(layer.x[token][:, :1])
        if layer.weight is not None:
            weight = layer.weight[token, slot][:, None]
        scaled = {place: weight if layer.weighting == place else 1 for place in ("output", "hidden", "input")}
        h = (layer.x[token] * scaled["input"]) @ layer.gate_up[e].T
        if layer.up_bias is not None:
            h = h + layer.up_bias[e]
        y = (pass_gate(layer, h) * scaled["hidden"]) @ layer.down[e].T
        if layer.down_bias is not None:
            y = y + layer.down_bias[e]
        out = out.index_add(0, token, y * scaled["output"])
    return out


def pass_gate(layer: Layer, h: Tensor) -> Tensor:
    """A from H."""
    if layer.gate == "none":
        return (FUNCTIONS | UNGATED_EXPRESSIONS)[layer.activation](h)
    g, u = h.chunk(2, -1) if layer.gate == "concat" else (h[:, ::2], h[:, 1::2])
    if layer.activation in EXPRESSIONS:
        return EXPRESSIONS[layer.activation](g, u)
    return FUNCTIONS[layer.activation](g) * u


def activations(gate: str) -> list[str]:
    """Every activation that goes with a gate, by name and by expression."""
    return [*FUNCTIONS, *(UNGATED_EXPRESSIONS if gate == "none" else EXPRESSIONS)]


def oracle(layer: Layer, grad: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Result and the gradients of every leaf, in float64."""
    exact = layer.to(torch.float64)
    out = loop(exact)
    grad = torch.ones_like(out) if grad is None else grad.double()
    if not out.requires_grad:  # no expert: the loop has no iteration
        return out, [torch.zeros_like(p) for p in exact.leaves()]
    grads = torch.autograd.grad(out, exact.leaves(), grad, allow_unused=True)
    return out, [torch.zeros_like(p) if g is None else g for p, g in zip(exact.leaves(), grads, strict=True)]


def run(layer: Layer, **options) -> Tensor:
    """The operator on the layer."""
    from moebius.kernels import experts

    return experts(layer.x, layer.gate_up, layer.down, layer.index, layer.weight, layer.activation, gate=layer.gate,
                   gate_up_bias=layer.up_bias, down_bias=layer.down_bias, weighting=layer.weighting, **options)


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; where want is zero, ||got||. Not a number counts as infinite."""
    got, want = got.detach().double(), want.detach().double()
    if got.numel() == 0:
        return 0.0
    norm = want.norm()
    error = float((got - want).norm() / (norm if norm > 0 else 1))
    return error if error == error else float("inf")


def worst_error(layer: Layer, grad: Tensor | None = None, **options) -> float:
    """The largest relative error of the result and of every gradient against the oracle."""
    out = run(layer, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype) if grad is None else grad
    grads = torch.autograd.grad(out, layer.leaves(), grad)
    exact_out, exact_grads = oracle(layer, grad)
    return max(relative_error(a, b) for a, b in zip((out, *grads), (exact_out, *exact_grads), strict=True))


def plain_error(layer: Layer, grad: Tensor | None = None) -> float:
    """The same for the user's loop itself, in the layer's own dtype: what cancellation in the sums costs anyone."""
    out = loop(layer)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype) if grad is None else grad
    exact_out, exact_grads = oracle(layer, grad)
    if not out.requires_grad:
        return relative_error(out, exact_out)
    grads = torch.autograd.grad(out, layer.leaves(), grad, allow_unused=True)
    return max(relative_error(torch.zeros_like(b) if a is None else a, b)
               for a, b in zip((out, *grads), (exact_out, *exact_grads), strict=True))

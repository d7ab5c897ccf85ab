"""Ways to compute a layer of routed experts, for bench/experts.py: each a function of a Problem that returns the
layer's result. What is not installed or not offered says so with Unavailable."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

if importlib.util.find_spec("moebius") is None:
    # a checkout that is not installed (no package index): the kernels need torch alone
    package = types.ModuleType("moebius")
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["moebius"] = package

from moebius.kernels import experts  # noqa: E402
from moebius.kernels.routing import sort_rows  # noqa: E402


class Unavailable(Exception):
    """A contender that cannot run here; the text says why."""


@dataclass(frozen=True)
class Shape:
    """T tokens, D model width, N expert width, E experts, K slots a token."""

    tokens: int
    width: int
    narrow: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"T={self.tokens} D={self.width} N={self.narrow} E={self.experts} K={self.top_k}"

    @property
    def forward_flops(self) -> int:
        """Multiply-adds counted twice, of the two products of a gated expert; backward has twice as many."""
        return 6 * self.tokens * self.top_k * self.width * self.narrow


@dataclass
class Problem:
    """Random unit-scale arguments; leaves require gradients."""

    shape: Shape
    x: Tensor
    gate_up: Tensor
    down: Tensor
    index: Tensor
    weight: Tensor
    grad: Tensor
    order: Tensor = field(init=False)
    bounds: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.order, offsets = sort_rows(self.index, self.shape.experts)
        self.bounds = offsets.tolist()

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.gate_up, self.down, self.weight


def make_problem(shape: Shape, dtype: torch.dtype, device: str) -> Problem:
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype).mul_(scale)

    t, d, n, e, k = shape.tokens, shape.width, shape.narrow, shape.experts, shape.top_k
    scores = torch.randn(t, e, generator=generator, device=device)
    weight, index = scores.softmax(-1).topk(k)
    return Problem(shape, normal(t, d).requires_grad_(), normal(e, 2 * n, d, scale=d**-0.5).requires_grad_(),
                   normal(e, d, n, scale=n**-0.5).requires_grad_(), index, weight.to(dtype).requires_grad_(),
                   normal(t, d))


def moebius_default(p: Problem) -> Tensor:
    return experts(p.x, p.gate_up, p.down, p.index, p.weight)


def moebius_recompute(p: Problem) -> Tensor:
    return experts(p.x, p.gate_up, p.down, p.index, p.weight, save="recompute")


def eager_loop(p: Problem) -> Tensor:
    """The loop of transformers' MoE layers ("eager" experts)."""
    out = torch.zeros_like(p.x)
    with torch.no_grad():
        mask = functional.one_hot(p.index, p.shape.experts).permute(2, 1, 0)
        hit = mask.sum((-1, -2)).gt(0).nonzero()
    for row in hit:
        expert = row[0]
        slot, token = torch.where(mask[expert])
        gate, up = functional.linear(p.x[token], p.gate_up[expert]).chunk(2, -1)
        y = functional.linear(functional.silu(gate) * up, p.down[expert]) * p.weight[token, slot, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


def grouped_mm(p: Problem) -> Tensor:
    """One sort, two torch.nn.functional.grouped_mm, routing weights on the outputs."""
    multiply = getattr(functional, "grouped_mm", None)
    if multiply is None:
        raise Unavailable(f"torch {torch.__version__} has no grouped_mm")
    k = p.shape.top_k
    flat = p.index.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(p.shape.experts, dtype=torch.int32, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = multiply(p.x[order // k], p.gate_up.mT, offs=ends).chunk(2, -1)
    y = multiply(functional.silu(gate) * up, p.down.mT, offs=ends) * p.weight.flatten()[order, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return y[back].view(p.shape.tokens, k, -1).sum(1)


def compiled_grouped_mm() -> Callable[[Problem], Tensor]:
    torch.compiler.reset()
    run = torch.compile(grouped_mm_of_tensors, dynamic=False)
    return lambda p: run(p.x, p.gate_up, p.down, p.index, p.weight)


def grouped_mm_of_tensors(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    k, num_experts = index.shape[1], gate_up.shape[0]
    flat = index.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=flat.device).scatter_add(
        0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = functional.grouped_mm(x[order // k], gate_up.mT, offs=ends).chunk(2, -1)
    y = functional.grouped_mm(functional.silu(gate) * up, down.mT, offs=ends) * weight.flatten()[order, None]
    back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return y[back].view(index.shape[0], k, -1).sum(1)


def liger() -> Callable[[Problem], Tensor]:
    try:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
    except ImportError as error:
        raise Unavailable(f"liger-kernel with fused_moe is not installed ({error})") from error
    return lambda p: LigerFusedMoEFunction.apply(p.x, p.gate_up, p.down, p.index.int(), p.weight)


def scattermoe() -> Callable[[Problem], Tensor]:
    """The two products of its GLUMLP, on the problem's weights."""
    try:
        from scattermoe.parallel_experts import flatten_sort_count, parallel_linear
    except ImportError as error:
        raise Unavailable(f"scattermoe is not installed ({error})") from error

    def run(p: Problem) -> Tensor:
        experts, slots, offsets = flatten_sort_count(p.index, num_experts=p.shape.experts)
        routed = (experts, slots, offsets)
        gate, up = parallel_linear(p.x, p.gate_up.mT, p.shape.top_k, *routed, grouped_out=True).chunk(2, -1)
        return parallel_linear(functional.silu(gate) * up, p.down.mT, 1, *routed, grouped_in=True, gates=p.weight)

    return run


def interleaved(gate_up: Tensor) -> Tensor:
    """Rows of gate and up in turn, from [E, 2N, D] with gate first."""
    return torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)


def sonicmoe() -> Callable[[Problem], Tensor]:
    """Its layer on the problem's routing and weights, gate_up interleaved, which is its own layout."""
    try:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs
    except ImportError as error:
        raise Unavailable(f"sonicmoe is not installed ({error})") from error
    stream = torch.cuda.current_stream().cuda_stream

    def run(p: Problem) -> Tensor:
        token = torch.arange(p.shape.tokens, dtype=torch.int32, device=p.x.device).repeat_interleave(p.shape.top_k)
        return moe_general_routing_inputs(
            p.x, p.weight.flatten().float(), token, p.index.flatten().int(), p.gate_up.permute(1, 2, 0), None,
            p.down.permute(1, 2, 0), None, p.shape.experts, stream, ActivationType.SWIGLU)[0]

    return run


class Gemms:
    """The same products alone, one expert after another, on operands and results that lie there already: the time that
    no way of computing experts from the library's GEMMs can be below."""

    def __init__(self, p: Problem) -> None:
        rows = p.shape.tokens * p.shape.top_k
        self.p = p
        self.gate_up, self.down = p.gate_up.detach(), p.down.detach()
        self.x = torch.randn(rows, p.shape.width).to(p.x)
        self.h = torch.randn(rows, 2 * p.shape.narrow).to(p.x)
        self.a = torch.randn(rows, p.shape.narrow).to(p.x)
        self.y = torch.empty_like(self.x)
        self.grad_gate_up, self.grad_down = torch.empty_like(self.gate_up), torch.empty_like(self.down)

    def experts(self):
        for expert, (low, high) in enumerate(zip(self.p.bounds, self.p.bounds[1:], strict=False)):
            if high > low:
                yield expert, slice(low, high)

    def forward(self) -> None:
        for e, rows in self.experts():
            torch.mm(self.x[rows], self.gate_up[e].T, out=self.h[rows])
        for e, rows in self.experts():
            torch.mm(self.a[rows], self.down[e].T, out=self.y[rows])

    def backward(self) -> None:
        for e, rows in self.experts():
            torch.mm(self.x[rows], self.down[e], out=self.a[rows])
            torch.mm(self.x[rows].T, self.a[rows], out=self.grad_down[e])
            torch.mm(self.h[rows].T, self.x[rows], out=self.grad_gate_up[e])
            torch.mm(self.h[rows], self.gate_up[e], out=self.y[rows])

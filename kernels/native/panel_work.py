"""The row work of the CPU form, handed to C: the gated activation and its gradient, sums by token, the loop over the
experts of a panel that calls torch's products, a whole layer, and the order of slots.

Each function returns False (sort_rows: None), having done nothing, where C does not do it: the extension is not
built, the dtype is float64 (but for products), the activation is an expression, or memory is not laid out row after
row. The caller then uses torch's operators, which give the same to rounding. One pass over a row does what torch does
in up to eight, with 16 bits widened in registers instead of in memory.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moebius.kernels.activations import Activation
from moebius.kernels.expressions import Gating
from moebius.kernels.panels import Panel

if TYPE_CHECKING:
    from moebius.kernels.native.rows import Operand

try:  # after torch, whose thread pool it looks for
    from moebius.kernels.native import rows
except ImportError:  # a checkout that was not built: torch's operators do all of it
    rows = None  # type: ignore[assignment]

# The numbers that elements.h and rows.c give them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MULTIPLIED = {**DTYPES, torch.float64: 3}  # by torch, of which C finds the operands
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2, "relu2": 3, "sigmoid": 4, "identity": 5, "gelu": 6}
GATES = {"concat": 0, "interleaved": 1, "none": 2}
NEVER, ALWAYS, LATER = range(3)  # whether a product is added; LATER: unless no earlier panel has the expert


def by_rows(*tensors: Tensor) -> bool:
    """Whether C reads them: an own dtype, one row after the other without gaps."""
    return all(tensor.dtype in DTYPES and tensor.is_contiguous() for tensor in tensors)


def add(total_TD: Tensor, token: Tensor, panel: Tensor) -> bool:
    """total[token[row]] += panel[row], rows in order, in float32. Raises IndexError for a token that is not there."""
    if rows is None or token.dtype != torch.int32 or total_TD.dtype != torch.float32 or not token.is_contiguous() \
            or not by_rows(total_TD, panel):
        return False
    rows.add(total_TD.data_ptr(), panel.data_ptr(), token.data_ptr(), token.shape[0], total_TD.shape[0],
             total_TD.shape[1], DTYPES[panel.dtype], torch.get_num_threads())
    return True


def knows(dtype: torch.dtype, activation: Activation | Gating) -> bool:
    """Whether the gated activation is one that C computes."""
    named = isinstance(activation, Activation) and activation.name in ACTIVATIONS
    return rows is not None and dtype in DTYPES and named


def gated(out: Tensor, h: Tensor, scale: Tensor | None, activation: Activation | Gating, gate: str) -> bool:
    """out = f(gate) * up * scale. out: [rows, N] and h: [rows, M] of one dtype; scale: [rows], float32."""
    if not knows(h.dtype, activation) or not by_rows(h):
        return False
    assert isinstance(activation, Activation) and by_rows(out) and out.dtype == h.dtype
    rows.gated(h.data_ptr(), 0, address(scale), out.data_ptr(), 0, 0, out.shape[0], out.shape[1], DTYPES[h.dtype],
               ACTIVATIONS[activation.name], GATES[gate], torch.get_num_threads())
    return True


def gated_backward(grad_h: Tensor, a: Tensor, dot: Tensor | None, grad_a: Tensor, h: Tensor, scale: Tensor | None,
                   activation: Activation | Gating, gate: str) -> bool:
    """grad_h [rows, M] = dH; a [rows, N] = A * scale; dot [rows] = <dA, A>, dA being before the routing weight.

    grad_a: [rows, N] and h: [rows, M] of one dtype with the results; scale and dot: [rows], float32.
    """
    if not knows(h.dtype, activation) or not by_rows(h):
        return False
    assert isinstance(activation, Activation) and by_rows(grad_h, a, grad_a) and grad_a.dtype == a.dtype == h.dtype
    rows.gated_backward(h.data_ptr(), grad_a.data_ptr(), address(scale), a.data_ptr(), grad_h.data_ptr(), address(dot),
                        a.shape[0], a.shape[1], DTYPES[h.dtype], ACTIVATIONS[activation.name], GATES[gate],
                        torch.get_num_threads())
    return True


def multiplies() -> bool:
    """Whether C finds the operands of products."""
    return rows is not None and bool(rows.PRODUCTS)


def time_product(size: int, dtype: torch.dtype) -> float:
    """Seconds of one thread that the library takes for a product of two square matrices, unseen by torch's modes."""
    assert rows is not None
    return rows.time_product(size, DTYPES[dtype], torch.get_num_threads())


def products(out: Operand, left: Operand, right: Operand, panel: Panel, dtype: torch.dtype, add: int, wide: int
             ) -> None:
    """out = left @ right for each segment of a panel, by torch, in float32 where it has ``wide`` rows or more. The
    operands are as rows.pyi says, of this dtype."""
    assert rows is not None
    rows.products(out, left, right, panel.table.buffer_info()[0], len(panel.segments), MULTIPLIED[dtype], add, wide,
                  torch.get_num_threads())


def table(parts: Sequence[Tensor | None]) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes] | None:
    """As rows.pyi says."""
    assert rows is not None
    return rows.table(parts)


def sort_rows(ids_S: Tensor, num_experts: int) -> tuple[Tensor, Tensor] | None:
    """routing.sort_rows' two, of flat ids on a CPU; None where C does not read them."""
    if rows is None or ids_S.device.type != "cpu" or ids_S.dtype not in (torch.int64, torch.int32) \
            or not ids_S.is_contiguous() or ids_S.is_neg():
        return None
    order_S = torch.empty(ids_S.shape[0], dtype=torch.int32, device="cpu")
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device="cpu")
    rows.sort_rows(ids_S.data_ptr(), ids_S.itemsize, ids_S.shape[0], num_experts, order_S.data_ptr(),
                   offsets.data_ptr())
    return order_S, offsets


def layer_forward(task: int) -> None:
    """A layer.h Layer at that address (by_expert.py). IndexError for a row of a slot that is not there."""
    assert rows is not None
    rows.layer_forward(task)


def layer_backward(task: int) -> None:
    """Likewise."""
    assert rows is not None
    rows.layer_backward(task)


def address(numbers: Tensor | None) -> int:
    """Where a row's numbers stand, 0 for None."""
    if numbers is None:
        return 0
    assert numbers.dtype == torch.float32 and numbers.is_contiguous()
    return numbers.data_ptr()

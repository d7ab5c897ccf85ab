# rows.c. Addresses are data_ptr()s, 0 where nothing is; the numbers of dtypes, activations and gates are panel_work's.

from collections.abc import Sequence
from typing import Any

from torch import Tensor, dtype

POOL: int
# 1 where torch's OpenMP threads were found at import
PRODUCTS: int
# 1 where torch's C interface was
ROOTS: int
# 1 where MKL's square root was
GEMM: int
# 1 where products of one thread in float32 are ours (gemm.h)

def add(
    total: int, rows: int, index: int, count: int, tokens: int, width: int, dtype: int, threads: int, /,
) -> None: ...
def gated(
    h: int, nothing: int, scale: int, a: int, no_grad_h: int, no_dot: int, count: int, width: int, dtype: int,
    activation: int, gate: int, threads: int, /,
) -> None: ...
def gated_backward(
    h: int, grad_a: int, scale: int, a: int, grad_h: int, dot: int, count: int, width: int, dtype: int,
    activation: int, gate: int, threads: int, /,
) -> None: ...

# ids: the address of integers of so many bytes (4 or 8), one a slot; one outside [0, experts) is no expert's, and its
# slot comes last. Written: order, int32 [slots], and offsets, int32 [experts + 1], as routing.sort_rows has them.
def sort_rows(ids: int, bytes: int, slots: int, experts: int, order: int, offsets: int, /) -> None: ...

# (address, rows, columns, their strides, axis): a panel's rows, from the address on, the rows of each segment along
# that axis; or axis -1: the address of a table of int64, each expert's matrix's address or 0.
Operand = tuple[int, int, int, int, int, int]

def products(
    out: Operand, left: Operand, right: Operand, segments: int, count: int, dtype: int, add: int, wide: int,
    threads: int, /,
) -> None: ...
# segments: the address of count times four int64 (expert, low, high, first); add: 0 never, 1 always, 2 if not first.
# wide: a segment of so many rows or more is multiplied in float32, in so many threads, and the product rounded once.

# How many products were made since the import, of each dtype, in the order of their numbers.
def products_made() -> tuple[int, int, int, int]: ...

# How many of them were ours, and whether they are from now on. Returns whether they were.
def gemm_products() -> int: ...
def use_gemm(use: bool, /) -> bool: ...

# Seconds of one thread that a product of two square matrices takes torch. threads: that torch has.
def time_product(size: int, dtype: int, threads: int, /) -> float: ...

# The address of a layer.h Layer, filled by by_expert.py.
def layer_forward(task: int, /) -> None: ...
def layer_backward(task: int, /) -> None: ...

# Dtype, sizes and strides that tensors have in common, and their addresses, int64, 0 for a None among them; None where
# one has others or is negated, or there is none.
def table(parts: Sequence[Tensor | None], /) -> tuple[dtype, tuple[int, ...], tuple[int, ...], bytes] | None: ...

# Runs operators element by element (chain.c), in place, outside of autograd. steps: seven int32 each, chain.c's Step.
# inputs: so many tensors, then the numbers for which None stands among ``numbers``. kinds: chains.KINDS. False, and
# nothing is done, where a tensor or number is none that C reads, or tensors have a part of their memory in common.
# IndexError for a step that names what is not there.
def chain(steps: bytes, tensors: int, inputs: tuple[Any, ...], numbers: tuple[Any, ...], kinds: tuple[Any, ...],
          threads: int, /) -> bool: ...

# Attention (attention.c). sizes: batch, heads, heads of k and v, length, width; strides: of the first three axes of
# each tensor [batch, heads, length, width], whose last is 1; addresses: of q, k, v and the result, and backward of its
# gradient and those of q, k and v; all int64. log_sums: the address of float32 [batch, heads, length], written by
# forward. ValueError where GEMM is 0.
def attention_forward(
    sizes: bytes, strides: bytes, addresses: bytes, log_sums: int, scale: float, causal: bool, threads: int, /,
) -> None: ...
def attention_backward(
    sizes: bytes, strides: bytes, addresses: bytes, log_sums: int, scale: float, causal: bool, threads: int, /,
) -> None: ...

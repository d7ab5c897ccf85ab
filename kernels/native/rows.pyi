# rows.c. Addresses are data_ptr()s, 0 where nothing is; the numbers of dtypes, activations and gates are panel_work's.

POOL: int
# 1 where torch's OpenMP threads were found at import

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

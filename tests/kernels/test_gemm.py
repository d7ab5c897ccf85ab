"""Products of our own: right for all sizes and layouts, and an element's bits depend on its row and column alone."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from experts_oracle import make_layer, run, worst_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moebius.kernels.native import panel_work
from moebius.kernels.panels import Panel, Segment

rows = panel_work.rows
pytestmark = pytest.mark.skipif(not rows or not rows.GEMM, reason="this processor's products are the library's")
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 130, 257]))
DEPTHS = st.one_of(st.integers(1, 40), st.sampled_from([511, 512, 513, 1100]))  # longer than 512: in blocks


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def multiply(out: Tensor, left: Tensor, right: Tensor, add: bool = False) -> int:
    """out (+)= left @ right in C. Returns how many of the products were ours."""
    panel = Panel(0, len(left), [Segment(0, 0, len(left), True)])
    table = torch.tensor([right.data_ptr()])
    ours = rows.gemm_products()
    rows.products(
        (out.data_ptr(), *out.shape, *out.stride(), 0), (left.data_ptr(), *left.shape, *left.stride(), 0),
        (table.data_ptr(), *right.shape, *right.stride(), -1), panel.table.buffer_info()[0], 1, 0, int(add), 0, 1)
    return rows.gemm_products() - ours


def matrix(height: int, width: int, turned: bool, seed: int) -> Tensor:
    """Among other numbers, which are no number: what is read beside it shows."""
    generator = torch.Generator().manual_seed(seed)
    room = torch.full((height + 2, width + 3) if not turned else (width + 2, height + 3), float("nan"))
    inside = room[1:-1, 1:-2]
    inside.copy_(torch.randn(inside.shape, generator=generator))
    return inside.T if turned else inside


@settings(max_examples=300, deadline=None)
@given(height=SIZES, deep=DEPTHS, width=SIZES, turned=st.tuples(st.booleans(), st.booleans()), add=st.booleans())
def test_a_product(height: int, deep: int, width: int, turned: tuple[bool, bool], add: bool) -> None:
    left, right = matrix(height, deep, turned[0], 1), matrix(deep, width, turned[1], 2)
    room = torch.full((height + 2, width + 3), 7.0)
    out = room[1:-1, 1:-2]
    ours = multiply(out, left, right, add)
    assert ours == (height >= 4 and width >= 16)
    expected = left.double() @ right.double() + (7.0 if add else 0.0)
    sizes = left.abs().double() @ right.abs().double() + 7.0
    assert ((out - expected).abs() <= (deep + 2) * 2.0**-24 * sizes).all()  # Higham (2002), 3.1: any order of summing
    assert (out - expected).abs().mean() < 1e-7 * deep + 1e-6  # and no worse than rounding at random
    out.fill_(7.0)
    assert (room == 7.0).all()  # and nothing else was written


@settings(max_examples=60, deadline=None)
@given(height=st.integers(16, 90), deep=DEPTHS, width=st.integers(16, 90), turned=st.booleans(), data=st.data())
def test_the_bits_are_the_rows_and_columns_own(height: int, deep: int, width: int, turned: bool, data: st.DataObject
                                               ) -> None:
    left, right = matrix(height, deep, turned, 3), matrix(deep, width, not turned, 4)
    whole = torch.empty(height, width)
    assert multiply(whole, left, right) == 1
    low, left_column = data.draw(st.integers(0, height - 16)), data.draw(st.integers(0, width - 16))
    part = torch.empty(height - low, width - left_column)
    assert multiply(part, left[low:], right[:, left_column:]) == 1
    assert torch.equal(part, whole[low:, left_column:])


def test_what_is_no_number_and_what_is_infinite_stays() -> None:
    left, right = torch.randn(20, 33), torch.randn(33, 40)
    left[3, 5], left[7, 9], right[11, 2] = float("nan"), float("inf"), -float("inf")
    out = torch.empty(20, 40)
    assert multiply(out, left, right) == 1
    torch.testing.assert_close(out, left @ right, equal_nan=True)


@pytest.mark.parametrize("save", ["default", "recompute"])
def test_a_layer_of_experts(save: str) -> None:
    """Ours and the library's, on a layer large enough that ours are taken."""
    layer = make_layer(700, 48, 80, 5, 3)
    ours = rows.gemm_products()
    error = worst_error(layer, backend="cpu", save=save)
    taken = rows.gemm_products() - ours
    before = rows.use_gemm(False)
    try:
        assert error < max(3e-6, 2 * worst_error(layer, backend="cpu", save=save))
    finally:
        rows.use_gemm(before)
    assert taken >= 25 and rows.gemm_products() - ours == taken
    first = run(layer, backend="cpu")
    assert torch.equal(first, run(layer, backend="cpu"))

"""Sizes that operators make of tensors (``arange`` between them), and inputs whose shape the step changes in place."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, explain, stats
from moebius.guards import shapes
from moebius.tensors.tensors import TensorOperations


def bounds(box):
    return box.min().to(torch.int32), torch.clamp(box.max().ceil() + 1, max=400).to(torch.int32)


def length_used(box):
    low, high = bounds(box)
    rows = torch.arange(low, high, dtype=torch.float32) + 0.5
    return rows[None, :].expand(3, rows.size(0)) + 1, rows + rows.size(0)


def length_given_back(box):
    low, high = bounds(box)
    rows = torch.arange(low, high)
    return rows.size(0), rows, slice(low, high)


def length_over_a_break(box):
    low, high = bounds(box)
    rows = torch.arange(low, high)
    breakpoint_of_the_graph()
    return rows.size(0), rows * 2


def breakpoint_of_the_graph():
    print(end="")


def pasted(box):
    """As detectors paste masks: a grid as wide as the boxes."""
    _, high = bounds(box)
    columns = torch.arange(high - 2, high, dtype=torch.float32)
    row = columns[None, None, :].expand(1, 2, columns.size(0))
    return torch.nn.functional.grid_sample(torch.ones(1, 1, 5, 5), torch.stack([row, row], 3), align_corners=False)


def check_bounds(step):
    captured = capture(step, backend="eager")
    for k in range(1, 5):
        box = torch.tensor([[0.0, 1, 2, 4]]) * k
        assert repr(captured(box)) == repr(step(box)), k
    return stats(captured)


STEPS = [length_used, length_given_back, length_over_a_break, pasted]


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_between_two_tensors(step):
    assert check_bounds(step).graphs == 1


def test_a_size_of_no_known_origin_is_no_crash(monkeypatch):
    """Without the bounds' numbers the length comes from nowhere: the frame runs natively."""
    monkeypatch.setattr(TensorOperations, "bound", lambda self, value: value)
    check_bounds(length_over_a_break)
    found = explain(length_over_a_break, backend="eager")(torch.tensor([[0.0, 1, 2, 4]])).breaks
    assert any("no tensor of this graph has the size" in b.detail for b in found)


CHANGES = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "transpose_": lambda x: x.transpose_(0, 1),
    "squeeze_": lambda x: x.squeeze_(),
    "as_strided_": lambda x: x.as_strided_((2, 2), (1, 1)),
    "data": lambda x: setattr(x, "data", x.data.t()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_inputs_whose_shape_is_changed_in_place(change):
    def step(x):
        CHANGES[change](x)
        return x * 2 + 1

    captured = capture(step, backend="eager")
    for shape in [(2, 3), (3, 4), (4, 5), (5, 4), (9, 3), (3, 9), (7, 7), (2, 9)]:
        mine = torch.rand(shape)
        plain = mine.clone()
        assert torch.equal(captured(mine), step(plain))
        assert mine.shape == plain.shape and mine.stride() == plain.stride()
    assert stats(captured).graphs == 2


def rows_or_columns(x):
    """What a step asks of the strides is part of the graph: one for each way that the numbers lie."""
    return (x.view(-1) if x.is_contiguous() else x.t()), x * 2, x.stride()[0] > x.stride()[1]


LAYOUTS = {
    "part": lambda x: x[1:, 1:],
    "columns first": lambda x: x.t()[1:],
    "flat": lambda x: x.view(-1)[2:].view(1, -1),
    "repeated": lambda x: x[:1].expand(3, -1),
    "whole": lambda x: x.clone(),
}


def check_layouts(*names):
    captured = capture(rows_or_columns, backend="eager")
    for size in (3, 4, 5, 7, 6):
        for name in names:
            x = LAYOUTS[name](torch.rand(size, size + 2))
            assert repr(captured(x)) == repr(rows_or_columns(x)), (name, size)
    return stats(captured)


@pytest.mark.parametrize("names", [[name] for name in LAYOUTS] + [["part", "columns first", "whole"], [*LAYOUTS]])
def test_sizes_that_vary_of_parts_and_transposed(names):
    """Parts of larger tensors too, whose strides are no product of their sizes."""
    graphs = check_layouts(*names).graphs
    assert graphs == 2 if len(names) == 1 else graphs <= 3 * len(names)


def test_strides_are_guarded(monkeypatch):
    monkeypatch.setattr(shapes, "strides_of", lambda name, proxy: [])
    with pytest.raises(AssertionError):
        check_layouts("part", "columns first", "whole")

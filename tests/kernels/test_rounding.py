"""Token rounding: which slots go, that they reach nothing, and that it is off unless asked for."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experts_oracle import make_layer, relative_error, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from moebius.kernels import ExpertsInputError, round_tokens


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_experts=st.integers(1, 4), tile=st.integers(1, 6), weighted=st.booleans())
def test_what_is_kept(data: st.DataObject, num_experts: int, tile: int, weighted: bool) -> None:
    slots = data.draw(st.integers(0, 15)) * 2
    ids = data.draw(st.lists(st.integers(-1, num_experts), min_size=slots, max_size=slots))
    weights = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=slots, max_size=slots))
    index = torch.tensor(ids, dtype=torch.int64).reshape(-1, 2)
    weight = torch.tensor(weights).reshape(-1, 2) if weighted else None
    got = round_tokens(index, weight, num_experts, tile).flatten().tolist()
    want = list(ids)
    for expert in range(num_experts):
        mine = [slot for slot, i in enumerate(ids) if i == expert]
        heaviest = sorted(mine, key=lambda slot: (-weights[slot] if weighted else 0, slot))
        for slot in heaviest[len(mine) // tile * tile:] if len(mine) >= tile else []:
            want[slot] = -1
    assert got == want


def test_it_is_the_layer_without_the_dropped_slots() -> None:
    layer = make_layer(40, 6, 4, 3, 2, bias=True, dtype=torch.float64)
    rounded = replace(layer, index=round_tokens(layer.index, layer.weight, 3, 8))
    dropped = rounded.index < 0
    assert dropped.any()
    out = run(layer, token_rounding=8)
    assert torch.equal(out, run(rounded)) and relative_error(out, run(layer)) > 1e-3
    (grad,) = torch.autograd.grad(out.sum(), [layer.weight])
    assert not grad[dropped].any() and grad[~dropped].all()


def test_nothing_is_dropped_unless_asked_for() -> None:
    layer = make_layer(40, 6, 4, 3, 2)
    assert torch.equal(run(layer), run(layer, token_rounding=1))  # every count is a multiple of one


def test_not_a_number_is_kept() -> None:
    weight = torch.tensor([[0.5], [float("nan")], [0.7]])
    assert round_tokens(torch.zeros(3, 1, dtype=torch.int32), weight, 1, 2).flatten().tolist() == [-1, 0, 0]


def test_it_traces() -> None:
    layer = make_layer(20, 6, 4, 3, 2)
    traced = make_fx(lambda i, w: round_tokens(i, w, 3, 4), tracing_mode="symbolic")(layer.index, layer.weight.detach())
    other = make_layer(31, 6, 4, 3, 2, seed=1)
    assert torch.equal(traced(other.index, other.weight.detach()), round_tokens(other.index, other.weight, 3, 4))


@pytest.mark.parametrize("tile", [0, -8, 1.5, True])
def test_bad_tile(tile: object) -> None:
    with pytest.raises(ExpertsInputError, match="token_rounding"):
        run(make_layer(4, 6, 4, 3, 2), token_rounding=tile)


def test_bad_index() -> None:
    with pytest.raises(ExpertsInputError, match="uint8"):
        round_tokens(torch.zeros(2, 1, dtype=torch.uint8), None, 1, 2)

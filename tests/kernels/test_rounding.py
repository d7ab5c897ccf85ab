"""Token rounding: which slots go, that they reach nothing, and that it is off unless asked for."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experts_oracle import make_layer, relative_error, run, worst_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from moebius.kernels import ExpertsInputError, round_routing, round_tokens


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


def routing_by_definition(scores: torch.Tensor, top_k: int, tile: int, to: str, spare: int) -> set[tuple[int, int]]:
    """(token, expert) of every slot, expert by expert, in plain Python."""
    order = [sorted(range(scores.shape[1]), key=lambda e: -row[e]) for row in scores.tolist()]
    slots = set()
    for e in range(scores.shape[1]):
        best = sorted((t for t in range(len(order)) if e in order[t][:top_k]), key=lambda t: -float(scores[t, e]))
        next_ = sorted((t for t in range(len(order)) if e in order[t][top_k:top_k + spare]),
                       key=lambda t: -float(scores[t, e]))
        whole, rest = divmod(len(best), tile)
        lack = (tile - rest) % tile
        if to != "down" and lack <= len(next_) and (to == "up" or lack <= rest):
            best = best + next_[:lack]
        elif to != "up" and whole:
            best = best[:whole * tile]
        slots |= {(t, e) for t in best}
    return slots


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 3), st.integers(1, 9), st.integers(0, 99),
       st.sampled_from(["down", "up", "nearest"]), st.integers(0, 3))
def test_routing_equals_its_definition(tokens, experts, top_k, tile, seed, to, spare) -> None:
    top_k = min(top_k, experts)
    spare = min(spare, experts - top_k)
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    index, weight = round_routing(scores.requires_grad_(), top_k, tile, to, spare)
    got = {(t, int(e)) for t in range(tokens) for e in index[t] if e >= 0}
    assert got == routing_by_definition(scores.detach(), top_k, tile, to, spare)
    assert int((index >= 0).sum()) == len(got)  # no expert twice in one token
    used = index >= 0
    assert torch.equal(weight, torch.where(used, scores.gather(1, index.clamp(min=0)), 0))
    weight.sum().backward()
    assert scores.grad is not None and int(scores.grad.count_nonzero()) == len(got)


def test_rounded_routing_runs_and_fills_tiles() -> None:
    layer = make_layer(200, 16, 8, 4, 2)
    scores = torch.randn(200, 4, generator=torch.Generator().manual_seed(2)).softmax(-1)
    layer.index, weight = round_routing(scores, 2, tile=16, to="up", spare=2)
    counts = torch.bincount(layer.index[layer.index >= 0], minlength=4)
    assert not (counts % 16).any() and int(counts.sum()) >= 400
    layer.weight = weight.requires_grad_()
    assert worst_error(layer) < 1e-5


@pytest.mark.parametrize("change, said", [
    (dict(to="sideways"), "to='sideways' is not known"), (dict(tile=0), "token_rounding=0"), (dict(top_k=9), "top_k=9"),
    (dict(spare=3), "spare=3"), (dict(scores_TE=torch.zeros(3)), "floating point tensor"),
    (dict(scores_TE=torch.zeros(3, 4, dtype=torch.int64)), "floating point tensor"),
])
def test_what_routing_cannot_be_rounded(change: dict, said: str) -> None:
    with pytest.raises(ExpertsInputError, match=said):
        round_routing(**{**dict(scores_TE=torch.rand(5, 4), top_k=2), **change})

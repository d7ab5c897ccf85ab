"""Numbers that such experts draw (row_experts.py): those that the program draws, in its order, and no more."""

from __future__ import annotations

import pytest
import torch
from beside_eager import regions_of
from row_experts import (
    LOOPS,
    Experts,
    apart,
    cut_where_counted,
    drawing_after,
    dropping,
    dropping_three_times,
    lowered,
    masked_where_any,
    over_hits,
)
from spellings import E, K
from torch.nn.functional import dropout, gelu, linear, relu

from moebius.lowering.experts import by_row, hoisted_conditionals, proof, unrolled_loops


def another_draw_between(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    noise = []
    for e in range(E):
        token, slot = torch.where(index == e)
        noise.append(torch.rand(2, dtype=x.dtype))
        out.index_add_(0, token, dropping(x[token], moe.of(e, False), weight[token, slot, None], moe))
    return out + sum(noise).sum()


def experts_backwards(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in reversed(range(E)):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, dropping(x[token], moe.of(e, False), weight[token, slot, None], moe))
    return out


def slots_outside(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            (token,) = torch.where(index[:, k] == e)
            out.index_add_(0, token, dropping(x[token], moe.of(e, False), weight[token, k, None], moe))
    return out


def dropouts_of_two_branches(x, moe):
    """The second factor's numbers are drawn first."""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        p = moe.of(e, False)
        late = dropout(linear(x[token], p["up"]), 0.3)
        early = dropout(linear(x[token], p["up"]), 0.6)
        out.index_add_(0, token, linear(relu(early) * late, p["down"]) * weight[token, slot, None])
    return out


def seen_outside(x, moe):
    """What dropout gave is read once more after the iterations."""
    weight, index = moe.route(x)
    out, total = torch.zeros_like(x), 0.0
    for e in range(E):
        token, slot = torch.where(index == e)
        h = dropout(linear(x[token], moe.apart[e]["up"]), 0.3)
        total = total + h.square().sum()
        out.index_add_(0, token, linear(relu(h), moe.apart[e]["down"]) * weight[token, slot, None])
    return out + total


def on_all_tokens(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        gate = (weight * (index == e)).sum(-1, keepdim=True)
        out = out + dropping(x, moe.of(e, False), 1.0, moe) * gate
    return out


def unsorted_hits(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in set((E - 1 - index).flatten().tolist()):
        token, slot = torch.where(index == E - 1 - e)
        out.index_add_(0, token, dropping(x[token], moe.of(E - 1 - e, False), weight[token, slot, None], moe))
    return out


DRAWING = [another_draw_between, experts_backwards, slots_outside, dropouts_of_two_branches, seen_outside,
           on_all_tokens, unsorted_hits]  # fmt: skip


@pytest.mark.share(2)
@pytest.mark.parametrize("layer", DRAWING)
def test_numbers_are_drawn_as_the_program_draws_them(layer):
    """Whatever becomes of the loop."""
    regions_of(drawing_after(layer), layer=Experts)


def test_slots_outside_are_as_many_layers():
    _, regions = regions_of(drawing_after(slots_outside), layer=Experts)
    assert regions and all(region.lowered for region in regions)


@pytest.mark.parametrize("layer", [another_draw_between, seen_outside])
def test_the_order_of_draws_is_looked_at(monkeypatch, layer):
    monkeypatch.setattr(unrolled_loops.Builder, "check_draws", lambda self, ends: None)
    with pytest.raises(AssertionError):
        regions_of(drawing_after(layer), layer=Experts)


def test_the_iterations_own_draws_go(monkeypatch):
    monkeypatch.setattr(unrolled_loops.Unrolled, "draw_elsewhere", lambda self: None)
    with pytest.raises(AssertionError):
        regions_of(drawing_after(apart(dropping)), layer=Experts)


def dropping_a_part(h, p, w, moe):
    """What is drawn lies in rows all the same."""
    return linear(dropout(linear(h, p["gated"]).chunk(2, -1)[1], 0.5), p["down"]) * w


def test_parts_of_rows():
    assert lowered(apart(dropping_a_part))


def dropping_at_the_end(h, p, w, moe):
    return dropout(linear(relu(linear(h, p["up"])), p["down"]), 0.3) * w


def dropped_beside(h, p, w, moe):
    a = dropout(linear(h, p["up"]), 0.4)
    return (linear(relu(a), p["down"]) + a.sum(-1, keepdim=True)) * w


@pytest.mark.share(4)
@pytest.mark.parametrize("loop", [cut_where_counted, masked_where_any])
@pytest.mark.parametrize("expert", [dropping, dropping_at_the_end, dropping_three_times, dropped_beside])
def test_behind_branches(expert, loop):
    """Numbers drawn behind a branch that is not taken are not drawn."""
    _, regions = regions_of(drawing_after(lambda x, moe: loop(x, moe, expert)), layer=Experts)
    assert expert is not dropping or all(region.lowered for region in regions)


def dropping_alone(h, p, _, moe):
    return linear(dropout(relu(linear(h, p["up"])), 0.4), p["down"])


def test_a_branch_that_was_opened_draws_no_more(monkeypatch):
    """Otherwise what it has drawn would stand between the iterations' draws."""
    layer = drawing_after(lambda x, moe: cut_where_counted(x, moe, dropping_alone))
    assert all(region.lowered for region in regions_of(layer, layer=Experts)[1])
    monkeypatch.setattr(unrolled_loops, "OPENED", "never set")
    assert not any(region.lowered for region in regions_of(layer, layer=Experts)[1])


def drawing_for_nothing(h, p, w, moe):
    dropout(h, 0.5)
    return linear(torch.relu(linear(h, p["up"])), p["down"]) * w


@pytest.mark.parametrize("loop", [*LOOPS, lambda expert: lambda x, moe: cut_where_counted(x, moe, expert),
                                  lambda expert: lambda x, moe: masked_where_any(x, moe, expert)])  # fmt: skip
def test_what_is_drawn_for_nothing_is_drawn(loop):
    regions_of(drawing_after(loop(drawing_for_nothing)), layer=Experts)


@pytest.mark.parametrize(("module", "loop"), [
    (unrolled_loops, masked_where_any), (hoisted_conditionals, cut_where_counted)])
def test_what_a_branch_draws_for_nothing_is_looked_for(monkeypatch, module, loop):
    monkeypatch.setattr(module, "drawn_for_nothing", lambda *_: None)
    with pytest.raises(AssertionError):
        regions_of(drawing_after(lambda x, moe: loop(x, moe, drawing_for_nothing)), layer=Experts)


def test_what_is_drawn_for_nothing_is_looked_for(monkeypatch):
    for module in (proof, by_row):
        monkeypatch.setattr(module, "STEPS", tuple(s for s in module.STEPS if s.name != "nothing else drawn"))
    with pytest.raises(AssertionError):
        regions_of(drawing_after(over_hits(drawing_for_nothing)), layer=Experts)


def numbers_of_dropped_slots(x, moe):
    weight, index = moe.route(x)
    keep = weight > 0.45
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where((index == e) & keep)
        out.index_add_(0, token, dropping(x[token], moe.of(e, True), weight[token, slot, None], moe))
    return out


def test_dropped_slots():
    regions_of(drawing_after(numbers_of_dropped_slots), layer=Experts)


def switched_off(h, p, w, moe):
    a = dropout(gelu(linear(h, p["up"]) + linear(linear(h, p["low"]), p["high"])), 0.5, training=False)
    return linear(dropout(a, 0.3), p["down"]) * w


@pytest.mark.parametrize("loop", LOOPS)
def test_a_dropout_that_is_off(loop):
    assert lowered(loop(switched_off))

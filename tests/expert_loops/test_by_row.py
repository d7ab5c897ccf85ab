"""Experts that the operator has not got: of one projection or many, with low-rank additions, norms, residuals, routing
weights or dropout between, right and subtly wrong. Equal to plain PyTorch in output, gradients and random numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from beside_eager import regions_of
from spellings import D, E, K, N
from torch import nn
from torch.nn import functional
from torch.nn.functional import dropout, gelu, layer_norm, linear, relu, silu

import moebius
from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import by_row, openings, proof, rewrite, rules_each_row, turns
from moebius.lowering.experts.rows_written import KERNEL

R = 2  # rank of low-rank additions


class Experts(nn.Module):
    """Parameters of all experts in one tensor each, and the same for each expert apart."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.base, self.norm = nn.Linear(D, N), nn.LayerNorm(D)
        sizes = {
            "up": (N, D), "more": (N, N), "gated": (2 * N, D), "down": (D, N), "square": (D, D), "low": (R, D),
            "high": (N, R), "low_n": (R, N), "high_d": (D, R), "b_up": (N,), "b_down": (D,), "scale": (D,),
        }  # fmt: skip
        self.whole = nn.ParameterDict({name: torch.randn(E, *size) / 2 for name, size in sizes.items()})
        self.apart = nn.ModuleList(
            nn.ParameterDict({name: torch.randn(size) / 2 for name, size in sizes.items()}) for _ in range(E)
        )

    def route(self, x):
        return torch.topk(self.gate(x).softmax(-1), K)

    def of(self, e, whole):
        return Row(self.whole, e) if whole else self.apart[e]


class Row:
    """Expert e's row of each parameter, taken where it is used."""

    def __init__(self, whole, e):
        self.whole, self.e = whole, e

    def __getitem__(self, name):
        return self.whole[name][self.e]


# ----------------------------------------------------------------------------------------------------------------------
# What an expert does with its rows h, its own parameters p and its rows' weights w [S, 1]
# ----------------------------------------------------------------------------------------------------------------------


def single(h, p, w, moe):
    return linear(h, p["square"], p["b_down"]) * w


def transposed(h, p, w, moe):
    return (h @ p["square"]) * w


def deep(h, p, w, moe):
    h = relu(linear(h, p["up"], p["b_up"]))
    return linear(relu(linear(h, p["more"])), p["down"]) * w


def normed_before(h, p, w, moe):
    return (h + linear(gelu(linear(layer_norm(h, (D,)), p["up"])), p["down"])) * w


def own_norm_between(h, p, w, moe):
    h = torch.addmm(p["b_up"], h, p["up"].T)
    h = layer_norm(silu(h), (N,), p["b_up"])
    return linear(h, p["down"]) * w


def shared_norm(h, p, w, moe):
    return linear(relu(linear(moe.norm(h), p["up"])), p["down"]) * w


def low_rank(h, p, w, moe):
    a = gelu(linear(h, p["up"]) + 2.0 * linear(linear(h, p["low"]), p["high"]))
    return (linear(a, p["down"]) + linear(linear(a, p["low_n"]), p["high_d"]) * 0.5) * w


def low_rank_of_a_shared_base(h, p, w, moe):
    a = relu(moe.base(h) + linear(linear(h, p["low"]), p["high"]))
    return linear(a, p["down"]) * w


def weighted_between(h, p, w, moe):
    return linear(silu(linear(h, p["up"])) * w, p["down"], p["b_down"])


def weighted_before(h, p, w, moe):
    return linear(silu(linear(h * w, p["up"], p["b_up"])), p["down"], p["b_down"])


def gate_of_another_input(h, p, w, moe):
    gate, up = linear(torch.tanh(h), p["gated"]).chunk(2, -1)
    return linear(layer_norm(silu(gate), (N,)) * up, p["down"]) * w


def columns(h, p, w, moe):
    both = linear(h, p["gated"]).softmax(-1)
    return linear(both[:, :N] - both[..., N:] + both.narrow(1, 1, N), p["down"]) * w


def own_scales(h, p, w, moe):
    return linear(relu(linear(h * (1 + p["scale"]), p["up"])), p["down"]) * p["scale"] * w


def dropping(h, p, w, moe):
    return linear(dropout(relu(linear(h, p["up"])), 0.4), p["down"]) * w


def dropping_three_times(h, p, w, moe):
    h = dropout(h, 0.2)
    h = dropout(gelu(linear(h, p["up"])), 0.5)
    return dropout(linear(h, p["down"], p["b_down"]), 0.3) * w


def dropping_all(h, p, w, moe):
    return linear(dropout(linear(h, p["up"]), 1.0), p["down"]) * w


RIGHT = [single, transposed, deep, normed_before, own_norm_between, shared_norm, low_rank, low_rank_of_a_shared_base,
         weighted_between, weighted_before, gate_of_another_input, columns, own_scales, dropping,
         dropping_three_times, dropping_all]  # fmt: skip
DROPPING = [dropping, dropping_three_times, dropping_all]


def across_rows(h, p, w, moe):
    return linear(h - h.mean(0, keepdim=True), p["square"]) * w


def by_the_number_of_rows(h, p, w, moe):
    return linear(h, p["square"]) * w / (1 + h.shape[0])


def of_all_rows(h, p, w, moe):
    return linear(h, p["square"]) * w * torch.sigmoid(linear(h, p["square"]).sum())


def first_row(h, p, w, moe):
    return linear(h, p["square"]) * w[:1]


def other_order(h, p, w, moe):
    return linear(h, p["square"]).flip(0) * w


def row_weight_along_features(h, p, w, moe):
    rows = linear(h, p["square"])
    return rows * w[:, 0].sum() if len(h) != D else rows * w[:, 0]


def cumulative(h, p, w, moe):
    return linear(h.cumsum(0), p["square"]) * w


def cut_off(h, p, w, moe):
    with torch.no_grad():
        low = linear(h, p["low"])
    return linear(linear(low, p["high"]), p["down"]) * w


def softmax_over_rows(h, p, w, moe):
    return linear(linear(h, p["up"]).softmax(0), p["down"]) * w


def noise_as_well(h, p, w, moe):
    return linear(h + torch.rand_like(h), p["square"]) * w


def dropping_in_another_layout(h, p, w, moe):
    return linear(dropout((p["up"] @ h.T).T, 0.4), p["down"]) * w


WRONG = [across_rows, by_the_number_of_rows, of_all_rows, first_row, other_order, row_weight_along_features, cumulative,
         cut_off, softmax_over_rows, noise_as_well, dropping_in_another_layout]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Ways to run the experts: each makes a layer of an expert
# ----------------------------------------------------------------------------------------------------------------------


def in_one_tensor(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, expert(x[token], moe.of(e, True), weight[token, slot, None], moe))
        return out

    return layer


def over_hits(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        mask = functional.one_hot(index, E).permute(2, 1, 0)
        for row in mask.sum((1, 2)).nonzero():
            slot, token = torch.where(mask[row[0]])
            out.index_add_(0, token, expert(x[token], moe.of(row[0], True), weight[token, slot, None], moe))
        return out

    return layer


def apart(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            out[token] += expert(x[token], moe.of(e, False), weight[token, slot, None], moe)
        return out

    return layer


def over_hits_in_place(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in index.unique():
            token, slot = torch.where(index == e)
            out[token] += expert(x[token], moe.of(e, True), weight[token, slot, None], moe)
        return out

    return layer


def apart_where_hit(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            if token.numel() > 0:
                out.index_add_(0, token, expert(x[token], moe.of(e, False), weight[token, slot, None], moe))
        return out

    return layer


def sorted_and_cut(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=E).tolist()
        rows, scale = x[order // K].split(counts), weight.flatten()[order, None]
        ones = [torch.ones(n, 1, dtype=x.dtype) for n in counts]
        y = torch.cat([expert(rows[e], moe.of(e, False), ones[e], moe) for e in range(E)])
        return torch.zeros_like(x).index_add(0, order // K, y * scale)

    return layer


LOOPS = [in_one_tensor, over_hits, apart, apart_where_hit, over_hits_in_place]


def lowered(layer, kernel=KERNEL):
    _, regions = regions_of(drawing_after(layer), layer=Experts)
    assert regions and len({region.lowered for region in regions}) == 1, regions
    assert not regions[0].lowered or {region.kernel for region in regions} == {kernel}
    return regions[0].lowered


def drawing_after(layer):
    """The layer, and numbers that are drawn behind it: others where it has drawn too many, or too few."""

    def function(x, moe):
        return layer(x, moe) * (1.0 + torch.rand(len(x), 1, dtype=x.dtype))

    return function


@pytest.mark.parametrize(("expert", "loop"), zip(RIGHT + RIGHT[2:], itertools.cycle(LOOPS)))
def test_right(expert, loop):
    assert lowered(loop(expert))


@pytest.mark.parametrize("expert", [single, deep, shared_norm, low_rank, dropping_three_times])
def test_right_in_slices(expert):
    assert lowered(sorted_and_cut(expert))


@pytest.mark.parametrize(("expert", "loop"), zip(WRONG, itertools.cycle(LOOPS)))
def test_wrong(expert, loop):
    assert not lowered(loop(expert))


# ----------------------------------------------------------------------------------------------------------------------
# Random numbers
# ----------------------------------------------------------------------------------------------------------------------


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
    """What dropout gave is read once more after the turns."""
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


@pytest.mark.parametrize("layer", DRAWING)
def test_numbers_are_drawn_as_the_program_draws_them(layer):
    """Whatever becomes of the loop."""
    regions_of(drawing_after(layer), layer=Experts)


def test_slots_outside_are_as_many_layers():
    _, regions = regions_of(drawing_after(slots_outside), layer=Experts)
    assert regions and all(region.lowered for region in regions)


@pytest.mark.parametrize("layer", [another_draw_between, seen_outside])
def test_the_order_of_draws_is_looked_at(monkeypatch, layer):
    monkeypatch.setattr(turns.Builder, "check_draws", lambda self, ends: None)
    with pytest.raises(AssertionError):
        regions_of(drawing_after(layer), layer=Experts)


def test_the_turns_own_draws_go(monkeypatch):
    monkeypatch.setattr(turns.Turns, "draw_elsewhere", lambda self: None)
    with pytest.raises(AssertionError):
        regions_of(drawing_after(apart(dropping)), layer=Experts)


def dropping_a_part(h, p, w, moe):
    """What is drawn lies in rows all the same."""
    return linear(dropout(linear(h, p["gated"]).chunk(2, -1)[1], 0.5), p["down"]) * w


def test_parts_of_rows():
    assert lowered(apart(dropping_a_part))


def cut_where_counted(x, moe, expert):
    """Slices of sorted rows, experts without rows left out by a branch on data."""
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    rows, found, start = x[order // K], [], 0
    for e, count in enumerate(torch.bincount(index.flatten(), minlength=E).tolist()):
        end = start + count
        if count == 0:
            continue
        found.append(expert(rows[start:end], moe.apart[e], 1.0, moe))
        start = end
    return torch.zeros_like(x).index_add(0, order // K, torch.cat(found) * weight.flatten()[order, None])


def masked_where_any(x, moe, expert):
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for e in range(E):
        mask = (index == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask], moe.apart[e], 1.0, moe) * gates[mask, e, None]
    return out


def dropping_at_the_end(h, p, w, moe):
    return dropout(linear(relu(linear(h, p["up"])), p["down"]), 0.3) * w


def dropped_beside(h, p, w, moe):
    a = dropout(linear(h, p["up"]), 0.4)
    return (linear(relu(a), p["down"]) + a.sum(-1, keepdim=True)) * w


@pytest.mark.parametrize("loop", [cut_where_counted, masked_where_any])
@pytest.mark.parametrize("expert", [dropping, dropping_at_the_end, dropping_three_times, dropped_beside])
def test_behind_branches(expert, loop):
    """Numbers drawn behind a branch that is not taken are not drawn."""
    _, regions = regions_of(drawing_after(lambda x, moe: loop(x, moe, expert)), layer=Experts)
    assert expert is not dropping or all(region.lowered for region in regions)


def test_a_branch_that_was_opened_draws_no_more(monkeypatch):
    """Otherwise what it has drawn would stand between the turns' draws."""
    monkeypatch.setattr(turns, "OPENED", "never set")
    _, regions = regions_of(drawing_after(lambda x, moe: cut_where_counted(x, moe, dropping)), layer=Experts)
    assert not any(region.lowered for region in regions)


def test_experts_that_all_read_the_same_rows():
    """Nothing is sorted, and nothing copied."""

    def layer(x, moe):
        rows = moe.norm(x)
        gates = torch.stack([moe.gate(x), moe.gate(x) * 2.0]).softmax(-1)
        each = torch.stack([deep(rows, moe.apart[e], 1.0, moe) for e in range(E)])
        return torch.einsum("kte,etd->td", gates, each)

    _, regions = regions_of(layer, layer=Experts)
    assert not any(region.lowered for region in regions)


# ----------------------------------------------------------------------------------------------------------------------
# What it rests on
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", [across_rows, softmax_over_rows])
def test_operators_that_mix_rows(monkeypatch, expert):
    monkeypatch.setattr(rules_each_row, "aligned", lambda *_: True)
    monkeypatch.setattr(rules_each_row, "along_rows", lambda *_: True)
    with pytest.raises(AssertionError):
        lowered(in_one_tensor(expert))


@pytest.mark.parametrize("switch", ["takes_rows", "replace_meeting"])
def test_off(monkeypatch, switch):
    layer = sorted_and_cut(deep) if switch == "replace_meeting" else in_one_tensor(deep)
    monkeypatch.setattr(rewrite, switch, lambda work: None)
    assert not lowered(layer)


def test_rows_behind_an_expert_are_all_found(monkeypatch):
    """An expert that reads other rows beside its own is none of these."""

    def layer(x, moe):
        weight, index = moe.route(x)
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=E).tolist()
        rows, others = x[order // K].split(counts), x.flip(0)[order // K].split(counts)
        y = torch.cat([deep(rows[e] + others[e], moe.of(e, False), 1.0, moe) for e in range(E)])
        return torch.zeros_like(x).index_add(0, order // K, y * weight.flatten()[order, None])

    regions_of(layer, layer=Experts)


def test_a_shared_parameter_where_no_turn_may_run():
    """Without a turn it has no gradient; the index may say that none runs."""

    def layer(x, moe):
        weight, index = moe.route(x)
        index = torch.where(weight > 2.0, index, E)  # none
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            if token.numel() > 0:
                rows = low_rank_of_a_shared_base(x[token], moe.of(e, True), weight[token, slot, None], moe)
                out.index_add_(0, token, rows)
        return out + x

    regions_of(layer, layer=Experts)


def drawing_for_nothing(h, p, w, moe):
    dropout(h, 0.5)
    return linear(torch.relu(linear(h, p["up"])), p["down"]) * w


@pytest.mark.parametrize("loop", [*LOOPS, lambda expert: lambda x, moe: cut_where_counted(x, moe, expert),
                                  lambda expert: lambda x, moe: masked_where_any(x, moe, expert)])  # fmt: skip
def test_what_is_drawn_for_nothing_is_drawn(loop):
    regions_of(drawing_after(loop(drawing_for_nothing)), layer=Experts)


@pytest.mark.parametrize(("module", "loop"), [(turns, masked_where_any), (openings, cut_where_counted)])
def test_what_a_branch_draws_for_nothing_is_looked_for(monkeypatch, module, loop):
    monkeypatch.setattr(module, "drawn_for_nothing", lambda *_: None)
    with pytest.raises(AssertionError):
        regions_of(drawing_after(lambda x, moe: loop(x, moe, drawing_for_nothing)), layer=Experts)


def test_what_is_drawn_for_nothing_is_looked_for(monkeypatch):
    for module in (proof, by_row):
        monkeypatch.setattr(module, "STEPS", tuple(s for s in module.STEPS if s.name != "nothing else drawn"))
    with pytest.raises(AssertionError):
        regions_of(drawing_after(over_hits(drawing_for_nothing)), layer=Experts)


# ----------------------------------------------------------------------------------------------------------------------
# What its own steps rest on
# ----------------------------------------------------------------------------------------------------------------------


def vectors_written_afterwards(x, moe):
    """A loop keeps the vectors themselves, which are others in backward."""
    out = in_one_tensor(own_scales)(x, moe)
    moe.whole["scale"].data.mul_(0.5)
    return out


def vectors_of_each_written_afterwards(x, moe):
    out = apart(own_norm_between)(x, moe)
    moe.apart[1]["b_up"].data.mul_(-1.0)
    return out


def all_skipped(x, moe):
    """No turn runs: what the turns share has no gradient."""
    weight, index = moe.route(x)
    index = torch.where(weight > 2.0, index, E)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        if token.numel() > 0:
            out.index_add_(0, token, shared_norm(x[token], moe.of(e, True), weight[token, slot, None], moe))
    return out + x


def numbers_of_dropped_slots(x, moe):
    weight, index = moe.route(x)
    keep = weight > 0.45
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where((index == e) & keep)
        out.index_add_(0, token, dropping(x[token], moe.of(e, True), weight[token, slot, None], moe))
    return out


def numbers_in_the_order_of_a_set(x, moe):
    """{8, 1} is gone through as 8, 1."""
    logits = x @ torch.linspace(-1, 1, D * 10, dtype=x.dtype).sin().view(D, 10)
    weight, index = torch.topk((logits - 100.0 * (torch.arange(10) == 0)).softmax(-1), K)
    weights, out = torch.cat([moe.whole["square"]] * 3), torch.zeros_like(x)
    for e in set(index.flatten().tolist()):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, linear(dropout(x[token], 0.4), weights[e]) * weight[token, slot, None])
    return out


STEPS = [
    ("vectors unchanged", vectors_written_afterwards),
    ("vectors unchanged", vectors_of_each_written_afterwards),
    ("some turn runs", all_skipped),
    ("drawn in order", numbers_in_the_order_of_a_set),
]


@pytest.mark.parametrize(("name", "layer"), STEPS)
def test_each_step_is_needed(monkeypatch, name, layer):
    _, regions = regions_of(drawing_after(layer), layer=Experts)
    assert regions and not any(region.lowered for region in regions)
    assert any(name in region.refusal for region in regions), regions
    monkeypatch.setattr(by_row, "STEPS", tuple(step for step in by_row.STEPS if step.name != name))
    with pytest.raises(AssertionError):
        regions_of(drawing_after(layer), layer=Experts)


def test_dropped_slots():
    regions_of(drawing_after(numbers_of_dropped_slots), layer=Experts)


def test_tokens_and_weights_may_change_afterwards():
    """Of these, a loop keeps copies, and so do projections of sorted rows."""

    def layer(x, moe):
        y = x * 1.0
        out = in_one_tensor(deep)(y, moe)
        y.data.mul_(0.5)
        return out + y.sum()

    _, regions = regions_of(layer, layer=Experts)
    assert regions and all(region.lowered for region in regions)


def switched_off(h, p, w, moe):
    a = dropout(gelu(linear(h, p["up"]) + linear(linear(h, p["low"]), p["high"])), 0.5, training=False)
    return linear(dropout(a, 0.3), p["down"]) * w


@pytest.mark.parametrize("loop", LOOPS)
def test_a_dropout_that_is_off(loop):
    assert lowered(loop(switched_off))


# ----------------------------------------------------------------------------------------------------------------------
# Under autocast
# ----------------------------------------------------------------------------------------------------------------------


def under_autocast(expert, loop):
    """(the largest relative difference from plain PyTorch in results and gradients, the regions), weights in fp32."""
    moebius.reset()
    torch.manual_seed(0)
    layers = [Experts(), Experts()]
    layers[1].load_state_dict(layers[0].state_dict())

    def step(x, moe):
        with torch.autocast("cpu", torch.bfloat16):
            return loop(expert)(x, moe)

    captured, worst = capture(step), 0.0
    for seed in range(2):
        found = []
        for run, moe in zip((captured, step), layers, strict=True):
            moe.zero_grad()
            x = torch.randn(10, D, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            torch.manual_seed(seed)
            out = run(x, moe)
            out.square().sum().backward()
            found.append([out, x.grad, *(p.grad for p in moe.parameters())])
        for ours, plain in zip(*found, strict=True):
            assert (ours is None) == (plain is None)
            if plain is not None:
                assert ours.dtype == plain.dtype
                worst = max(worst, ((ours - plain).norm() / plain.norm().clamp_min(1e-6)).item())
    return worst, report_of(captured_of(captured)).expert_regions


@pytest.mark.parametrize(("expert", "loop"), [
    (transposed, apart), (deep, apart), (normed_before, over_hits), (shared_norm, apart),
    (dropping_three_times, apart), (own_scales, in_one_tensor), (low_rank, apart)])  # fmt: skip
def test_under_autocast(expert, loop):
    worst, regions = under_autocast(expert, loop)
    assert worst < 1e-6, worst
    assert regions and all(region.lowered and region.kernel == KERNEL for region in regions), regions


def partly_out_of_autocast(h, p, w, moe):
    h = linear(layer_norm(h, (D,)), p["square"])
    with torch.autocast("cpu", enabled=False):
        h = linear(h.float(), p["up"])
    return linear(relu(h), p["down"]).float() * w


def test_autocast_that_changes_in_a_turn():
    worst, regions = under_autocast(partly_out_of_autocast, in_one_tensor)
    assert worst < 1e-6, worst


def test_autocast_is_asked_for(monkeypatch):
    monkeypatch.setattr(by_row, "autocast_of", lambda claim: None)
    _, regions = under_autocast(normed_before, over_hits)
    assert not regions[0].lowered and "one dtype" in regions[0].refusal

"""Experts in forms that no front end of the proof takes: the report has a region with a reason and the user's line.
What is no layer of experts, however alike its parts are, has none."""

from __future__ import annotations

import linecache
import re

import pytest
import torch
from beside_eager import compare, regions_of
from module_layers import MLP, Layer
from spellings import D, E, K, N
from table import tensors
from torch import nn
from torch.nn.functional import cross_entropy, dropout, gelu, one_hot, relu, silu

import moebius
from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.errors import DEFECT
from moebius.lowering.experts import missed_experts, rewrite
from moebius.lowering.experts.rows_written import KERNEL


class Deep(nn.Module):
    """Three projections, one after another."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, N), nn.Linear(N, N), nn.Linear(N, D)

    def forward(self, x):
        return self.c(relu(self.b(relu(self.a(x)))))


class Dropping(MLP):
    def forward(self, x):
        return self.net[2](dropout(self.net[1](self.net[0](x)), 0.3, True))  # random


class Adapted(nn.Module):
    """Low-rank additions to both projections."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, N), nn.Linear(N, D)
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, N, bias=False)

    def forward(self, x):
        return self.down(gelu(self.up(x) + 2.0 * self.b(self.a(x))))


class More(Layer):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.heads = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.classifiers = nn.ModuleList(nn.Linear(D, 5) for _ in range(E))
        self.numbers = nn.ModuleList(nn.Linear(1, D) for _ in range(D))
        self.deep = nn.ModuleList(Deep() for _ in range(E))
        self.dropping = nn.ModuleList(Dropping() for _ in range(E))
        self.adapted = nn.ModuleList(Adapted() for _ in range(E))
        self.wider = nn.ModuleList(nn.Sequential(nn.Linear(D, 3 + e), nn.ReLU(), nn.Linear(3 + e, D)) for e in range(E))
        self.phi = nn.Parameter(torch.randn(D, E * 2))
        self.squares = nn.Parameter(torch.randn(E, D, D))
        self.alpha = nn.Parameter(torch.randn(E))
        self.register_buffer("slopes", torch.rand(E))
        self.own_heads, self.other_heads = nn.Parameter(torch.randn(D, 2, 4)), nn.Parameter(torch.randn(D, 2, 4))
        self.two = nn.Linear(D, 2)


def gates_of(x, moe):
    weight, index = moe.route(x)
    return torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)


def sorted_rows(x, moe):
    weight, index = moe.route(x)
    order = index.flatten().argsort()
    return weight, index.flatten(), order, x.repeat_interleave(K, 0)[order]


def back(y, order, weight):
    return (torch.empty_like(y).index_copy(0, order, y).view(-1, K, D) * weight[..., None]).sum(1)


def single_projections(x, moe):
    weight, _, order, rows = sorted_rows(x, moe)
    y = torch.cat([linear(part) for linear, part in zip(moe.linears, rows.chunk(E), strict=True)])  # meet
    return back(y, order, weight)


def three_projections(x, moe):
    weight, flat, order, rows = sorted_rows(x, moe)
    parts = rows.split(torch.bincount(flat, minlength=E).tolist())
    return back(torch.cat([f(part) for f, part in zip(moe.deep, parts, strict=True)]), order, weight)  # meet


def drawing(x, moe):
    weight, flat, order, rows = sorted_rows(x, moe)
    parts = rows.split(torch.bincount(flat, minlength=E).tolist())
    return back(torch.cat([f(part) for f, part in zip(moe.dropping, parts, strict=True)]), order, weight)  # meet


def drawing_on_all(x, moe):
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.dropping):
        out = out + expert(x) * gates[:, e, None]  # meet
    return out


def low_rank_additions(x, moe):
    weight, flat, order, rows = sorted_rows(x, moe)
    parts = rows.split(torch.bincount(flat, minlength=E).tolist())
    return back(torch.cat([f(part) for f, part in zip(moe.adapted, parts, strict=True)]), order, weight)  # meet


def two_by_name(x, moe):
    gate = moe.two(x).softmax(-1)
    first = moe.mlps[0](x) * gate[:, :1]
    second = moe.mlps[1](x) * gate[:, 1:]
    return first + second  # meet


def one_or_the_other(x, moe):
    gate = moe.two(x)[:, :1].sigmoid()
    return gate * moe.mlps[0](x) + (1 - gate) * moe.mlps[1](x)  # meet


def chosen_by_a_condition(x, moe):
    return torch.where(moe.two(x)[:, :1] > 0, moe.mlps[0](x), moe.mlps[1](x))  # meet


def soft_slots_of_linears(x, moe):
    x = x * 1.0
    logits = (x @ moe.phi).view(-1, E, 2)
    slots = torch.einsum("tes,td->esd", logits.softmax(0), x)
    y = torch.einsum("esd,edf->esf", slots, moe.squares)
    return torch.einsum("tes,esd->td", logits.flatten(1).softmax(1).view(-1, E, 2), y)  # meet


def soft_slots_of_modules(x, moe):
    x = x * 1.0
    logits = x @ moe.phi
    slots = (logits.softmax(0).T @ x).view(E, 2, D)
    y = torch.cat([linear(slots[e]) for e, linear in enumerate(moe.linears)])  # meet
    return logits.softmax(1) @ y


def looked_up_in_the_stack(x, moe):
    best = moe.gate(x).argmax(-1)
    y = torch.stack([linear(x) for linear in moe.linears])  # meet
    return y[best, torch.arange(len(x))]


def weighted_stack(x, moe):
    y = torch.stack([linear(x) for linear in moe.linears], -2)  # meet
    return (y * moe.gate(x).sigmoid()[..., None]).mean(1)


def weighted_before_the_stack(x, moe):
    weight, index = moe.route(x)
    y = [f(x) * (weight * (index == e)).sum(-1, keepdim=True) for e, f in enumerate(moe.experts)]
    return torch.stack(y).mean(0)  # meet


def gathered_squares(x, moe):
    weight, index = moe.route(x)
    return (torch.einsum("td,tkdf->tkf", x, moe.squares[index]) * weight[..., None]).sum(1)  # meet


def all_squares(x, moe):
    y = torch.einsum("td,edf->tef", x, moe.squares)
    return (y * gates_of(x, moe)[..., None]).sum(1)  # meet


def of_different_widths(x, moe):
    gates = gates_of(x, moe)
    return sum(gates[:, e, None] * expert(x) for e, expert in enumerate(moe.wider))  # meet


def activations_of_their_own(x, moe):
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, act in enumerate((relu, gelu, silu, torch.tanh)):
        out = out + moe.mlps[e].net[2](act(moe.mlps[e].net[0](x))) * gates[:, e, None]  # meet
    return out


def into_a_sum_that_fades(x, moe):
    gates, out = gates_of(x, moe), torch.zeros_like(x)
    for e, expert in enumerate(moe.mlps):
        out = out * 0.5
        out = torch.where(gates[:, e, None] > 0, expert(x), out)  # meet
    return out


def taken_away(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, linear in enumerate(moe.linears):
        token, slot = torch.where(index == e)
        out[token] -= linear(x[token]) * weight[token, slot, None]  # meet
    return out


def sums_of_their_own(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, linear in enumerate(moe.linears):
        token, slot = torch.where(index == e)
        rows = linear(x[token]) * weight[token, slot, None]
        out = out + torch.zeros_like(out).index_add(0, token, rows)  # meet
    return out


def weights_mixed_by_data(x, moe):
    mixed = torch.einsum("te,edf->tdf", moe.gate(x).softmax(-1), moe.squares)  # meet
    return torch.einsum("td,tdf->tf", x, mixed)


def over_hits_and_dropout(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in one_hot(index, E).sum((0, 1)).nonzero():
        token, slot = torch.where(index == e)
        out.index_add_(0, token, moe.dropping[e[0]](x[token]) * weight[token, slot, None])
    return out


def dense_over_hits(x, moe, two=False):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in index.unique().tolist():
        rows = moe.experts[e](x)
        rows = rows + moe.mlps[e](x) if two else rows
        out += rows * (weight * (index == e)).sum(-1, keepdim=True)
    return out


FOUND = [single_projections, three_projections, drawing, low_rank_additions, soft_slots_of_modules,
         over_hits_and_dropout, looked_up_in_the_stack, sums_of_their_own]  # fmt: skip
ON_ALL = [two_by_name, one_or_the_other, chosen_by_a_condition, weighted_before_the_stack, into_a_sum_that_fades]
REFUSED = [drawing_on_all, soft_slots_of_linears, weighted_stack, gathered_squares, all_squares,
           weights_mixed_by_data, of_different_widths, activations_of_their_own, taken_away]  # fmt: skip
RANDOM = {drawing_on_all}


@pytest.mark.share(4)
@pytest.mark.parametrize("function", FOUND)
def test_projection_by_projection(function):
    """Where their results meet they are found, and are a layer of more or fewer projections than the operator's."""
    graphs, regions = regions_of(function, layer=More)
    assert graphs == 1 and len(regions) == 1 and regions[0].lowered
    assert regions[0].kernel == KERNEL and regions[0].num_experts == E


@pytest.mark.share(3)
@pytest.mark.parametrize("function", ON_ALL)
def test_on_all_tokens(function):
    """Experts that every token has are the operator."""
    graphs, regions = regions_of(function, layer=More)
    assert graphs == 1 and len(regions) == 1 and regions[0].lowered and regions[0].kernel != KERNEL
    assert regions[0].num_experts == (2 if function in (two_by_name, one_or_the_other, chosen_by_a_condition) else E)


@pytest.mark.share(10)
@pytest.mark.parametrize("function", REFUSED)
def test_reason_and_line(function):
    graphs, regions = regions_of(function, layer=More)
    assert graphs == 1 and len(regions) == 1 and not regions[0].lowered
    text = linecache.getline(regions[0].file, regions[0].line)
    assert "# meet" in text, text
    assert regions[0].num_experts == E
    reason = re.search(r"^equal iterations: .*\((.*):(\d+)\)$", regions[0].refusal)
    assert reason is not None and "torch/nn" not in reason[1]
    assert (function in RANDOM) == ("dropout" in regions[0].refusal)
    if function in RANDOM:
        assert "# random" in linecache.getline(reason[1], int(reason[2]))


def test_behind_branches():
    assert compare(lambda x, moe: dense_over_hits(x, moe)) == (1, True)
    graphs, regions = regions_of(lambda x, moe: dense_over_hits(x, moe, two=True), layer=More)
    assert graphs == 1 and len(regions) == 1 and not regions[0].lowered and regions[0].num_experts == E
    assert re.search(r"^equal iterations: .*\.py:\d+\)$", regions[0].refusal)


ACROSS = {
    "mean": "rows = rows - rows.mean(0)",
    "std": "rows = rows / (rows.std(0, unbiased=False) + 1)",
    "amax": "rows = rows / (rows.amax(0) + 9)",
    "sum": "rows = rows + torch.sum(rows, 0, keepdim=True)",
    "norm": "rows = rows / (1 + rows.norm())",
}
LOOP = """
def step(x, moe):
    index = moe.gate(x).argmax(-1)
    out = torch.zeros_like(x)
    for e in range({E}):
        token = torch.where(index == e)[0]
        if len(token) == 0:
            continue
        first, act, last = moe.mlps[e].net
        rows = act(first(x[token]))
        {line}
        out.index_add_(0, token, last(rows))
    return out
"""


@pytest.mark.parametrize("name", [*ACROSS, "none"])
def test_an_operator_across_an_experts_rows_is_named(name, tmp_path):
    """It is what stands in the way: without its line the loop is one operator."""
    line, path = ACROSS.get(name, "rows = rows * 2"), tmp_path / "step.py"
    path.write_text(LOOP.format(E=E, line=line))
    namespace = {"torch": torch}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    graphs, regions = regions_of(namespace["step"], layer=More)
    assert graphs == 1 and len(regions) == 1
    if name == "none":
        assert regions[0].lowered
        return
    said = "is of all rows at once|of the rows of one expert: the proof knows no|is not an operator that the proof"
    assert re.search(rf"{name} ({said})", regions[0].refusal)
    assert linecache.getline(*regions[0].blocker[:2]).strip() == line
    assert linecache.getline(regions[0].file, regions[0].line).strip() == "if len(token) == 0:"


@pytest.mark.faults
def test_a_failing_search_costs_a_line_of_the_report_only(monkeypatch):
    def fails(graph):
        raise ValueError("a bug")

    monkeypatch.setattr(rewrite, "missed_experts", fails)
    graphs, regions = regions_of(of_different_widths, layer=More)
    assert graphs == 1 and len(regions) == 1 and DEFECT in regions[0].refusal


# ----------------------------------------------------------------------------------------------------------------------
# No experts
# ----------------------------------------------------------------------------------------------------------------------


def layers_in_iteration(x, moe):
    for layer in moe.mlps:
        x = x + layer(x)
    return x


def layers_in_iteration_with_gates(x, moe):
    gates = moe.gate(x).sigmoid()
    for e, layer in enumerate(moe.mlps):
        x = x + layer(x) * gates[:, e, None]
    return x


def outputs_of_layers(x, moe):
    gates, found = moe.gate(x).sigmoid(), []
    for e, layer in enumerate(moe.mlps):
        x = layer(x)
        found.append(x * gates[:, e, None])
    return torch.stack(found).sum(0)


def inputs_for_each_layer(x, moe):
    own = (x @ moe.phi).view(-1, E, 2).softmax(-1)
    for e, layer in enumerate(moe.mlps):
        x = x + layer(x * own[:, e, :1])
    return x


def heads(x, moe):
    """A head after another, each with projections of its own."""
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    found = []
    for e in range(E - 2):
        q, k, v = moe.heads[e](x), moe.heads[e + 1](x), moe.linears[e](x)
        scores = (q @ k.T * D**-0.5 - moe.slopes[e] * torch.arange(len(x))).masked_fill(~mask, float("-inf"))
        found.append(scores.softmax(-1) @ v)
    return moe.linears[-1](torch.cat(found, -1)[:, :D])


def one_tensor_of_heads(x, moe):
    q, k, v = (torch.einsum("td,hdf->htf", x, w) for w in (moe.w1, moe.w3, moe.w1 + 1))
    y = (q @ k.transpose(1, 2)).softmax(-1) @ v
    return torch.einsum("htf,hfd->td", y, moe.w2)


def heads_along_the_second_axis(x, moe):
    """XLNet's weights: [D, H, d]."""
    q, k, v = (torch.einsum("th,hnd->tnd", x, w) for w in (moe.own_heads, moe.other_heads, moe.own_heads + 1))
    y = torch.einsum("nts,snd->tnd", torch.einsum("tnd,snd->nts", q, k).softmax(-1), v)
    return torch.einsum("tnd,hnd->th", y, moe.other_heads)


def projections(x, moe):
    q, k, v = (linear(x) for linear in moe.linears[:3])
    return moe.linears[3]((q @ k.T).softmax(-1) @ v) + x


def stacked_projections(x, moe):
    q, k, v = torch.stack([linear(x) for linear in moe.linears[:3]]).unbind(0)
    return (q @ k.T).softmax(-1) @ v


def classifiers(x, moe):
    """Several tasks, each with labels of its own."""
    labels = (x.detach() * 10).abs().long() % 5
    return sum(cross_entropy(head(x), labels[:, e]) for e, head in enumerate(moe.classifiers))


def masked_tasks(x, moe):
    known = x.detach() > 0
    loss = 0
    for e, head in enumerate(moe.heads):
        loss = loss + ((head(x)[:, 0] - x[:, e]).square() * known[:, e]).sum()
    return loss


def ensemble(x, moe):
    return torch.stack([layer(x) for layer in moe.mlps]).mean(0)


def mixed_operations(x, moe):
    """How much of each is learned, and the same for all tokens."""
    share = moe.alpha.softmax(0)
    return sum(share[e].view(1, 1) * layer(x) for e, layer in enumerate(moe.mlps))


def positions(x, moe):
    rows = (x * moe.norm.weight).view(-1, 2, D)
    return torch.stack([layer(rows[:, e]) for e, layer in enumerate(moe.mlps[:2])], 1)


def features(x, moe):
    return torch.stack([linear(x[:, d : d + 1]) for d, linear in enumerate(moe.numbers)], 1).sum(1)


def groups_of_features(x, moe):
    return torch.cat([w(part) for w, part in zip(moe.numbers, x.repeat(1, 2).chunk(2 * D, -1), strict=False)], -1)


def streams(x, moe):
    """Two kinds of tokens, each with layers of its own, that meet in attentions."""
    text, image = x[:4], x[4:]
    for e in (0, 2):
        q = torch.cat([moe.linears[e](text), moe.linears[e + 1](image)])
        y = (q @ q.T).softmax(-1) @ q
        text, image = y.split([4, len(x) - 4])
        text, image = text + moe.mlps[e](text), image + moe.mlps[e + 1](image)
    return torch.cat([text, image])


def twin_critics(x, moe):
    one, other = moe.mlps[0](x), moe.mlps[1](x)
    return torch.where(one < other, one, other)


def a_recurrent_cell(x, moe):
    h = torch.zeros_like(x)
    for _ in range(2):
        z, r = (moe.linears[0](x) + moe.linears[1](h)).sigmoid(), (moe.heads[0](x) + moe.heads[1](h)).sigmoid()
        h = (1 - z) * h + z * (moe.linears[2](x) + r * moe.linears[3](h)).tanh()
    return h


def gated_units(x, moe):
    a, b, c, d = (linear(x) for linear in moe.linears)
    return silu(a) * b + silu(c) * d


def scale_and_shift(x, moe):
    return x * (1 + moe.linears[0](x)) + moe.linears[1](x)


def two_inputs(x, moe):
    gate = moe.two(x)[:, :1].sigmoid()
    return gate * moe.linears[0](x) + (1 - gate) * moe.linears[1](x.flip(0).sin())


def a_bilinear_form(x, moe):
    return torch.einsum("ti,oij,tj->to", x, moe.squares, x.sin())


def layers_behind_branches(x, moe):
    for layer in moe.mlps:
        if x.sum() > 0:
            x = x + layer(x)
    return x


def layers_behind_two_branches(x, moe):
    for layer in moe.mlps:
        if x.sum() > 0:
            y = x.sin()
            if y.mean() > -1:
                x = x + layer(y)
    return x


def one_expert(x, moe):
    """Some tokens pass through a layer, the others by it."""
    score = moe.two(x)[:, 0]
    token = score.topk(3).indices
    return x.index_add(0, token, moe.mlps[0](x[token]) * score[token, None])


ORDINARY = [layers_in_iteration, layers_in_iteration_with_gates, outputs_of_layers, inputs_for_each_layer, heads,
            one_tensor_of_heads, heads_along_the_second_axis, projections, stacked_projections, classifiers,
            masked_tasks, ensemble, mixed_operations, positions, features, groups_of_features, streams, twin_critics,
            a_recurrent_cell, gated_units, scale_and_shift, two_inputs, a_bilinear_form, layers_behind_branches,
            layers_behind_two_branches, one_expert]  # fmt: skip


@pytest.mark.share(10)
@pytest.mark.parametrize("function", ORDINARY)
def test_no_experts(function):
    moebius.reset()
    moe, x = More().double(), tensors(0)[0] * 1.0
    found = capture(function)
    torch.testing.assert_close(found(x, moe), function(x, moe), rtol=1e-9, atol=1e-10)
    assert not report_of(captured_of(found)).expert_regions


@pytest.mark.parametrize(
    ("name", "always", "function"),
    [
        ("reads_another", lambda branch, others: False, layers_behind_branches),
        ("reads_another", lambda branch, others: False, layers_behind_two_branches),
        ("looked_up_rows", lambda piece, place: True, positions),
        ("varies", lambda node: True, mixed_operations),
    ],
)
def test_what_tells_them_apart(monkeypatch, name, always, function):
    """Each question is asked for something: without it an ordinary model would have experts."""
    monkeypatch.setattr(missed_experts, name, always)
    with pytest.raises(AssertionError):
        test_no_experts(function)


def test_other_widths_are_told_where_they_are_read():
    """Not where the step met the parameters first: in its ``zero_grad``."""

    class Widths(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(D, E)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(D, N + e), nn.ReLU(), nn.Linear(N + e, D)) for e in range(E)
            )

        def forward(self, x):
            index, out = self.gate(x).argmax(-1), torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                token = torch.where(index == e)[0]
                out.index_add_(0, token, expert(x[token]))  # read
            return out

    layer = Widths()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()

    captured = capture(step)
    captured(torch.randn(8, D))
    (region,) = report_of(captured_of(captured)).expert_regions
    file, line = re.search(r"\((.*):(\d+)\)$", region.refusal).groups()
    assert linecache.getline(file, int(line)).rstrip().endswith("# read")

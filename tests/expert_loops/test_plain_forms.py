"""Statements that are written in a plainer form (lowering/experts/plain_forms.py): only where nobody can tell, and what
became part of no operator is as it was written."""

from __future__ import annotations

import pytest
import torch
from spellings import D, E, K, N, T
from torch.nn.functional import one_hot, relu

import moebius
from moebius import capture
from moebius.api import captured_of, report_of


def selected(x, w1, w2, weight, index, write):
    flat = index.view(-1).clone() if write == "copy" else index.view(-1)
    a, b = w1.index_select(0, flat), w2.index_select(0, flat)
    if write in ("view", "copy"):
        flat.add_(1).remainder_(E)
    h = relu(torch.einsum("td,tkdn->tkn", x, a.view(*index.shape, D, N)))
    return torch.einsum("tkn,tknd,tk->td", h, b.view(*index.shape, N, D), weight)


def one_hots(x, w1, w2, weight, index, write):
    chosen = one_hot(index, E).to(x.dtype)
    if write == "view":
        index.view(-1).add_(1).remainder_(E)
    if write == "copy":
        chosen.neg_()
    a, b = torch.einsum("tke,edn->tkdn", chosen, w1), torch.einsum("tke,end->tknd", chosen, w2)
    return torch.einsum("tkn,tknd,tk->td", relu(torch.einsum("td,tkdn->tkn", x, a)), b, weight)


def doubled(write, **tensors):
    if write in tensors:
        tensors[write].mul_(2)


def dense(x, w1, w2, weight, index, write):
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for e, (a, b) in enumerate(zip(w1.unbind(), w2.unbind(), strict=True)):
        rows = relu(x @ a) @ b * gates[:, e : e + 1]
        more = out + rows
        doubled(write, view=rows, copy=more)
        out = torch.where((index == e).any(-1, keepdim=True), more, out)
    return out


def added(x, w1, w2, weight, index, write):
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for e in range(E):
        out = torch.addcmul(out, relu(x @ w1[e]) @ w2[e], gates[:, e, None])
        doubled(write, view=out, copy=gates)
    return out


def mapped(x, w1, w2, weight, index, write):
    rows = x * 1
    y = torch.vmap(lambda a, b: relu(rows @ a) @ b)(w1, w2)
    if write == "view":
        y.mul_(2)
    if write == "copy":
        rows = rows.detach().neg_()
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    return torch.einsum("etd,te->td", y, gates) + rows


FUNCTIONS = (selected, one_hots, dense, added, mapped)


def layer_of(function):
    def layer(x, w1, w2, logits, write):
        weight, index = logits.softmax(-1).topk(K, -1)
        return function(x, w1, w2, weight, index, write), index

    return layer


def called(function, write, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w1, w2, logits = (
        torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True)
        for s in ((T, D), (E, D, N), (E, N, D), (T, E))
    )
    out, index = function(x, w1, w2, logits, write)
    try:
        out.square().sum().backward()
    except RuntimeError as error:  # backward was to read what was written into
        return [out, "modified by an inplace operation" in str(error)]
    return [out, x.grad, w1.grad, w2.grad, logits.grad, index]


@pytest.mark.parametrize("write", [None, "view", "copy"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_written_in_between(function, write):
    moebius.reset()
    layer = layer_of(function)
    captured = capture(layer)
    for seed in range(3):
        for ours, plain in zip(called(captured, write, seed), called(layer, write, seed), strict=True):
            if ours is plain is True:
                continue
            torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)
    if write is None:
        regions = report_of(captured_of(captured)).expert_regions
        assert regions and all(region.lowered for region in regions)


def selected_alone(x, w1, w2, weight, index, write):
    return torch.einsum("td,tkdn->tkn", x, w1.index_select(0, index.view(-1)).view(*index.shape, D, N))


def one_hots_alone(x, w1, w2, weight, index, write):
    return torch.einsum("tke,edn->tkdn", one_hot(index, E).to(x.dtype), w1)


def added_alone(x, w1, w2, weight, index, write):
    return torch.addcmul(torch.zeros_like(x), x.tanh(), weight[:, :1])


def where_alone(x, w1, w2, weight, index, write):
    base = x.sin()
    return torch.where(index[:, :1] == 1, base + x.tanh(), base)


def mapped_alone(x, w1, w2, weight, index, write):
    return torch.vmap(lambda a: relu(x @ a))(w1)


ALONE = (selected_alone, one_hots_alone, added_alone, where_alone, mapped_alone)


@pytest.mark.parametrize("function", ALONE)
def test_what_is_no_experts_is_as_it_was_written(function, monkeypatch):
    """The graph that runs has the operators that the captured one has."""
    seen = []
    monkeypatch.setattr("moebius.lowering.entry.run_passes", lambda *given: seen.append(passes(*given)) or seen[-1])
    moebius.reset()
    captured = capture(function)
    generator = torch.Generator().manual_seed(0)
    x, w1, w2 = (
        torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True)
        for s in ((T, D), (E, D, N), (E, N, D))
    )
    weight, index = torch.randn(T, E, dtype=torch.float64, generator=generator).topk(K, -1)
    captured(x, w1, w2, weight, index, None)
    (graph,) = report_of(captured_of(captured)).graphs
    (work,) = seen
    assert [node.target for node in work.gm.graph.nodes] == [node.target for node in graph.gm.graph.nodes]


passes = moebius.lowering.entry.run_passes


def by_index_add(out, token, rows):
    return out.index_add_(0, token, rows)


def by_index_put(out, token, rows):
    return out.index_put_((token,), rows, accumulate=True)


def by_scatter_add(out, token, rows):
    return out.scatter_add_(0, token[:, None].expand(-1, D), rows)


@pytest.mark.parametrize("add", [by_index_add, by_index_put, by_scatter_add])
@pytest.mark.parametrize("unrolled", [False, True])
def test_rows_of_another_dtype_than_the_sum(add, unrolled):
    """What raises in eager raises: torch promotes no rows that are added at positions."""

    def layer(x, w1, w2, index):
        out = torch.zeros_like(x)
        ups, downs = (w1.unbind(), w2.unbind()) if unrolled else (w1, w2)
        for e in range(E):
            token, _ = torch.where(index == e)
            add(out, token, relu(x[token] @ ups[e]) @ downs[e])
        return out

    moebius.reset()
    x, w1, w2 = (torch.randn(s, requires_grad=True) for s in ((T, D), (E, D, N), (E, N, D)))
    index = torch.randn(T, E).topk(K, -1).indices
    errors = []
    for function in (layer, capture(layer)):
        with pytest.raises(RuntimeError) as error, torch.autocast("cpu", torch.bfloat16):
            function(x, w1, w2, index)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def all_at_once(x, w1, w2, weight, index):
    gates = torch.zeros(len(x), E, dtype=weight.dtype).scatter(1, index, weight)
    h = relu(torch.einsum("td,edn->etn", x, w1))
    return torch.einsum("etd,te->td", torch.einsum("etn,end->etd", h, w2), gates.to(h.dtype))


def one_after_another(x, w1, w2, weight, index):
    order = index.flatten().argsort(stable=True)
    sizes = index.flatten().bincount(minlength=E).tolist()
    rows = [relu(part @ w1[e]) @ w2[e] for e, part in enumerate(x[order // K].split(sizes))]
    return torch.zeros_like(x).index_add(0, order // K, torch.cat(rows).float() * weight.flatten()[order, None])


def all_on_all(x, w1, w2, weight, index):
    out = torch.zeros_like(x)
    for e, (a, b) in enumerate(zip(w1.unbind(), w2.unbind(), strict=True)):
        out = out + relu(x @ a) @ b * (weight * (index == e)).sum(-1, keepdim=True)
    return out


@pytest.mark.parametrize("function", [all_at_once, one_after_another, all_on_all])
def test_sums_of_ours_under_autocast(function):
    """What adds the rows of a batch of experts up is no line of the program: their dtype is not asked there."""

    def layer(x, w1, w2, logits):
        weight, index = logits.softmax(-1).topk(K, -1)
        with torch.autocast("cpu", torch.bfloat16):
            return function(x, w1, w2, weight, index)

    moebius.reset()
    captured = capture(layer)
    values = [torch.randn(s) for s in ((T, D), (E, D, N), (E, N, D), (T, E))]
    seen = []
    for call in (captured, layer):
        leaves = [value.clone().requires_grad_() for value in values]
        out = call(*leaves)
        out.float().square().sum().backward()
        seen.append([out, *(leaf.grad for leaf in leaves)])
    for ours, plain in zip(*seen, strict=True):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.05 * plain.abs().max().item())
    regions = report_of(captured_of(captured)).expert_regions
    assert regions and all(region.lowered for region in regions)


LOOKUPS = {
    "index_select": "w1.index_select(0, index_TK.view(-1)).view(10, 2, 8, 16)",
    "gather": "torch.gather(w1, 0, index_TK.view(-1)[:, None, None].expand(-1, 8, 16)).view(10, 2, 8, 16)",
    "one_hot": "torch.einsum('tke,edn->tkdn', F.one_hot(index_TK, 4).to(w1.dtype), w1)",
}


@pytest.mark.parametrize("wrong", [-1, 4])
@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_that_torch_refuses_is_refused(name, wrong):
    names = {"torch": torch, "F": torch.nn.functional, "w1": torch.randn(4, 8, 16), "w2": torch.randn(4, 16, 8)}
    text = (
        "def step(x_TD, index_TK, weight_TK):\n"
        f"    h_TKN = torch.einsum('td,tkdn->tkn', x_TD, {LOOKUPS[name]}).relu()\n"
        "    y_TKD = torch.einsum('tkn,tknd->tkd', h_TKN, w2[index_TK])\n"
        "    return (y_TKD * weight_TK[..., None]).sum(1)\n"
    )
    exec(text, names)
    index_TK = torch.randint(0, 4, (10, 2))
    captured, given = moebius.capture(names["step"]), (torch.randn(10, 8), index_TK, torch.rand(10, 2))
    torch.testing.assert_close(captured(*given), names["step"](*given))
    index_TK[3, 1] = wrong
    for step in (names["step"], captured):
        with pytest.raises((IndexError, RuntimeError)):
            step(*given)


@pytest.mark.parametrize("when", ["never", "between", "after"])
@pytest.mark.parametrize("pick", ["product", "sum"])
def test_a_column_that_a_number_picks(pick, when):
    """``gates @ one_hot(e)``: of the gates as they are then; what it gives is no view of them."""

    def layer(gates, x, w1, w2):
        table, out = gates * 1.0, torch.zeros_like(x)
        picks = [torch.nn.functional.one_hot(torch.tensor(e), E).to(table.dtype) for e in range(E)]
        picked = [table * one for one in picks] if pick == "sum" else []
        if when == "between":
            table.mul_(3.0)
        columns = [one.sum(-1) for one in picked] or [table @ one for one in picks]
        if when == "after":
            table.mul_(3.0)
        for e in range(E):
            t = columns[e].nonzero().squeeze(-1)
            out.index_add_(0, t, (relu(x[t] @ w1[e]) @ w2[e]) * columns[e][t, None])
        return out

    moebius.reset()
    given = torch.rand(T, E).round(), torch.randn(T, D), torch.randn(E, D, N), torch.randn(E, N, D)
    captured = capture(layer)
    torch.testing.assert_close(captured(*given), layer(*given), rtol=1e-4, atol=1e-4)
    regions = report_of(captured_of(captured)).expert_regions
    assert regions and all(region.lowered for region in regions)

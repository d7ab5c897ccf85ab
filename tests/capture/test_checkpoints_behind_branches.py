"""Checkpointed calls behind branches on data: ``if t.numel() == 0: continue``, then an expert that runs again."""

from __future__ import annotations

import copy

import pytest
import torch
from gradient_programs import kept
from torch import nn
from torch.utils.checkpoint import checkpoint

from moebius import capture, explain, stats
from moebius.lowering.experts import blocks
from moebius.lowering.step import checkpoint as lowered

D, N, E, K = 8, 32, 4, 2
AGAIN = {"use_reentrant": False}


class Layer(nn.Module):
    def __init__(self, between=nn.SiLU, widths=(N,) * E):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, n), between(), nn.Linear(n, D)) for n in widths)
        self.scale = 1.0


def continues(layer, x, once):
    weight, index = layer.gate(x).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        t, k = torch.where(index == e)
        if t.numel() == 0:
            continue
        out = out.index_add(0, t, once(expert, x[t]) * weight[t, k, None])
    return out


def adds_in_place(layer, x, once):
    weight, index = layer.gate(x).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        chosen = index == e
        if chosen.any():
            t, k = torch.where(chosen)
            out[t] += once(expert, x[t]) * weight[t, k].unsqueeze(1)
    return out


def appends(layer, x, once):
    weight, index = layer.gate(x).softmax(-1).topk(K)
    tokens, rows = [], []
    for e, expert in enumerate(layer.experts):
        t, k = torch.where(index == e)
        if len(t) > 0:
            tokens.append(t)
            rows.append(once(expert, x[t]) * weight[t, k, None])
    return torch.zeros_like(x).index_add(0, torch.cat(tokens), torch.cat(rows))


def looks_up_inside(layer, x, once):
    def routed(expert, x, t, k, weight):
        return expert(x[t]) * weight[t, k, None]

    weight, index = layer.gate(x).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        t, k = torch.where(index == e)
        if t.numel() > 0:
            out.index_add_(0, t, once(routed, expert, x, t, k, weight))
    return out


def one_in_another(layer, x, once):
    return once(continues, layer, x, once)


LAYERS = {f.__name__: f for f in (continues, adds_in_place, appends, looks_up_inside, one_in_another)}


def again(function, *args):
    return checkpoint(function, *args, **AGAIN)


def step(layer, x, form, once=again):
    layer.zero_grad()
    out = form(layer, x, once)
    out.square().sum().backward()
    return out.detach()


def batches():
    for seed, rows in ((0, 10), (1, 10), (2, 3), (3, 2), (4, 7)):  # (of few rows: experts without)
        yield seed, torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(layer, form, backend="moebius"):
    """The captured step beside plain Python's. Returns what its breaks were, and whether its experts were lowered."""
    captured, ours = capture(step, backend=backend), copy.deepcopy(layer)
    for seed, x in batches():
        results = []
        for function, model in ((captured, ours), (step, layer)):
            torch.manual_seed(seed)
            given = x.clone().requires_grad_()
            out = function(model, given, form)
            grads = [parameter.grad for parameter in model.parameters()]
            results.append([out, given.grad, torch.get_rng_state(), *grads, *model.buffers()])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    report = explain(captured)(ours, next(batches())[1].requires_grad_(), form)
    return stats(captured).breaks, [region.lowered for region in report.expert_regions]


@pytest.mark.parametrize("form", LAYERS.values(), ids=list(LAYERS))
def test_equal_experts_are_one_operator(form):
    assert compare(Layer().double(), form) == (0, [True])


@pytest.mark.parametrize(
    ("form", "backend"), [(continues, "eager"), (continues, "moebius"), (looks_up_inside, "moebius")]
)
def test_other_experts_stay_behind_their_branches(form, backend):
    breaks, lowered_experts = compare(Layer(widths=range(N, N + E)).double(), form, backend)
    assert not breaks and not any(lowered_experts)


@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_dropout_has_the_same_mask_in_backward(backend):
    assert not compare(Layer(lambda: nn.Dropout(0.5)).double(), continues, backend)[0]


def kept_by(layer, form, once, captured):
    def forward(layer, x):
        return form(layer, x, once).sum()

    x = next(batches())[1].clone().requires_grad_()
    run = capture(forward) if captured else forward
    run(layer, x)
    return kept(run, layer, x)


@pytest.mark.parametrize("widths", [(N,) * E, tuple(range(N, N + E))], ids=["one operator", "branches"])
def test_it_keeps_no_more_for_backward_than_without(widths, monkeypatch):
    """Nor much more than plain Python; of bodies of branches, whose marks are not looked at, all that is computed."""
    layer = Layer(widths=widths).double()
    plain = kept_by(layer, continues, again, False)
    assert kept_by(layer, continues, again, True) <= plain
    assert kept_by(layer, continues, lambda f, *args: f(*args), False) > plain
    if len(set(widths)) > 1:
        monkeypatch.setattr(lowered, "bodies_of", lambda gm: [])
        assert kept_by(layer, continues, again, True) > plain


def test_what_it_reads_is_changed_before_backward():
    def scaled(layer, x, once):
        def one(expert, rows):
            return expert(rows).tanh() * layer.scale

        layer.scale = 1.0
        out = continues(layer, x, lambda expert, rows: once(one, expert, rows))
        layer.scale = 2.0
        return out

    assert compare(Layer().double(), scaled)[0]


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("run", [again, lambda expert, rows: expert(rows)], ids=["checkpointed", "kept"])
def test_an_argument_that_is_written_before_backward_is_an_error(run, backend):
    def written(layer, x, once):
        weight, index = layer.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(layer.experts):
            t, k = torch.where(index == e)
            if t.numel() > 0:
                rows = x[t]
                out = out.index_add(0, t, run(expert, rows) * weight[t, k, None])
                rows.mul_(2)
        return out

    for function in (step, capture(step, backend=backend)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(Layer().double(), next(batches())[1], written)


@pytest.mark.parametrize("asks", [False, True])
def test_tokens_that_are_written_before_backward(asks, monkeypatch):
    """Rows that were looked up outside of the checkpointed calls are not looked up again."""

    def residual(layer, x, once):
        tokens = x.detach() * 1.5  # (they need a gradient when backward looks them up, and none before)
        weight, index = layer.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(layer.experts):
            t, k = torch.where(index == e)
            if asks and t.numel() == 0:
                continue
            out = out.index_add(0, t, once(expert, tokens[t]) * weight[t, k, None])
        tokens += out
        return tokens

    layer = Layer().double()
    assert compare(layer, residual) == (0, [True])
    if not asks:  # (behind a branch the rows are looked up before it anyway)
        monkeypatch.setattr(blocks, "in_front", lambda first, calls, node: first)
        with pytest.raises((AssertionError, RuntimeError)):
            compare(layer, residual)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False, "context_fn": None}])
def test_those_of_other_kinds_break_the_graph(options):
    def contexts():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    chosen = {**options, **({"context_fn": contexts} if "context_fn" in options else {})}

    def other(layer, x, once):
        return continues(layer, x, lambda function, *args: checkpoint(function, *args, **chosen))

    layer = Layer().double()
    captured = capture(step, backend="eager")
    x = next(batches())[1]
    torch.testing.assert_close(captured(layer, x.clone().requires_grad_(), other), step(layer, x, continues))
    assert stats(captured).breaks

"""Experts written by hypothesis out of lines that each go row by row, or subtly do not: projections of an expert's own
and shared ones, low-rank additions, norms, residuals, vectors, routing weights and dropout between, in every loop of
test_generated_loops and over slices that are joined. Captured and lowered they give what eager gives in float64:
output, every gradient, a missing one included, and the random numbers that are drawn afterwards."""

from __future__ import annotations

import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from test_generated_loops import HEADS, ROWS, SETTINGS, SKIPS, SUMS, UNROLLED, D, E, T, compiled, outcome

import moebius
from moebius import capture
from moebius.api import captured_of, report_of

LINES = {
    "projection": "h = F.linear(h, square[e])",
    "projection with a bias": "h = F.linear(h, square[e], bias[e])",
    "turned": "h = h @ square[e]",
    "addmm": "h = torch.addmm(bias[e], h, square[e])",
    "low rank": "h = h + 0.5 * F.linear(F.linear(h, low[e]), high[e])",
    "low rank of a shared base": "h = F.linear(h, shared) + F.linear(F.linear(h, low[e]), high[e])",
    "shared": "h = F.linear(h, shared, scale)",
    "gated": "g, u = F.linear(h, wide[e]).chunk(2, -1)\nh = F.silu(g) * u",
    "part of the columns": "h = F.linear(h[:, : D // 2], square[e][:, D // 2 :])",
    "norm": "h = F.layer_norm(h, (D,))",
    "own norm": "h = F.layer_norm(h, (D,), bias[e], vector[e])",
    "shared norm": "h = F.layer_norm(h, (D,), scale)",
    "rms": "h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * scale",
    "own scale": "h = h * (1 + vector[e])",
    "own shift": "h = h + bias[e]",
    "own mean": "h = h - bias[e].mean()",
    "residual": "h = h + rows",
    "weight": "h = h * w",
    "weight of a function": "h = h * torch.sigmoid(w)",
    "relu": "h = torch.relu(h)",
    "where": "h = torch.where(h > 0.1, h, 0.5 * h)",
    "softmax": "h = h.softmax(-1)",
    "dropout": "h = F.dropout(h, 0.3)",
    "dropout of half": "h = F.dropout(h, 0.5)",
    "dropout that is off": "h = F.dropout(h, 0.5, training=False)",
    "glu": "h = F.glu(F.linear(h, wide[e]), -1)",
}
# Lines that are no rows' own business. Experts in front of such a line may be lowered, with the line kept as it is.
MISTAKES = {
    "mean over rows": "h = h - h.mean(0)",
    "softmax over rows": "h = h.softmax(0)",
    "norm over all": "h = F.layer_norm(h, h.shape)",
    "turned round": "h = h.flip(0)",
    "by how many": "h = h / (1 + len(h))",
    "by all": "h = h * torch.sigmoid(h.sum())",
    "first weight": "h = h * w[:1]",
    "sum so far": "h = h + 0.1 * out.sum()",
    "counted": "count = count * 0.5\nh = h * count",
    "next vector": "h = h * vector[(e + 1) % E]",
    "a vector that changes": "bias[e].data.mul_(0.5)\nh = h + bias[e]",
    "a vector that changes later": "h = h * vector[e]\nvector[e].data.mul_(0.5)",
    "a shared one that changes": "h = h * scale\nscale.data.mul_(0.5)",
    "noise": "h = h + torch.rand_like(h)",
    "a number between": "h = F.dropout(h, 0.3) * torch.rand(1, dtype=h.dtype)",
    "dropout for nothing": "F.dropout(h, 0.4)",
    "dropout of columns": "h = F.dropout(h.t().contiguous(), 0.4).t()",
    "dropout of one row": "h = h * F.dropout(scale, 0.4)",
    "cumulative": "h = h.cumsum(0)",
    "cut off": "with torch.no_grad():\n    h = torch.relu(h)",
    "the other way": "h = (h.t() @ h) [: len(h)].sum() * 0.01 + h",
    "columns as rows": "h = h.reshape(D, -1).t().reshape(-1, D)",
    "in place": "h = h * 1.0\nh.mul_(2.0)",
    "tokens that change": "x.data.mul_(0.9)",
    "unlike the others": "h = h if e != 1 else torch.tanh(h)",
}
PIECES = """\
    order = index.flatten().argsort(stable=True)
    counts = torch.bincount(index.flatten(), minlength=E).tolist()
    parts, scales = x[order // K].split(counts), weight.flatten()[order, None].split(counts)
    found = []
    for e in range(E):
        rows, w = parts[e], scales[e]
{body}
        found.append(h)
    out = torch.zeros_like(x).index_add(0, order // K, torch.cat(found))
"""
LOOP = """\
{before}
    {head}
{start}
        rows, w = x[token], weight[token, slot, None]
{body}
        y = h
        {total}
"""
NAMES = "x, router, square, wide, low, high, bias, vector, scale, shared"


def indented(text, by):
    return textwrap.indent(text, " " * by)


def source(head, rows, skip, total, lines, mistake, at):
    body = [LINES[line] for line in lines]
    if mistake is not None:
        body.insert(at % (len(body) + 1), MISTAKES[mistake])
    body = indented("\n".join(["h = rows", *body]), 8)
    if head == "pieces":
        loop = PIECES.format(body=body)
    else:
        before, head, start = HEADS[head]
        start = "\n".join(line for line in (start, ROWS[rows], SKIPS[skip]) if line)
        loop = LOOP.format(
            before=indented(before.replace("w1", "square"), 4), head=head.replace("w1", "square"),
            start=indented(start, 8), body=body, total=SUMS[total],
        )  # fmt: skip
    return f"""\
def layer({NAMES}):
    x = x * 1.0
    weight, index = (x @ router.T).softmax(-1).topk(K, -1)
    count = torch.ones((), dtype=x.dtype)
    out = torch.zeros_like(x)
{loop}
    return out * (1.0 + torch.rand(len(x), 1, dtype=x.dtype))
"""


def inputs(seed, apart):
    """Leaves. apart: every expert's are leaves of their own, in lists."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((T, D), (E, D), (E, D, D), (E, 2 * D, D), (E, 2, D), (E, D, 2), (E, D), (E, D), (D,), (D, D))
    made = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    own = [[p.clone().requires_grad_() for p in t] if apart and 1 < i < 8 else t.requires_grad_()
           for i, t in enumerate(made)]  # fmt: skip
    torch.manual_seed(seed)
    return own


def check(text, seed, apart):
    """Compares, and returns the expert regions that capture found."""
    moebius.reset()
    layer = compiled(text)
    captured = capture(layer)
    for iteration in range(2):
        found, expected = (outcome(run, inputs(seed + iteration, apart)) for run in (captured, layer))
        if isinstance(expected[0], type):
            assert found[0] is expected[0], text
            continue
        assert not isinstance(found[0], type), (found[0], text)
        pairs = [(found[0], expected[0]), *zip(found[1], expected[1], strict=True)]
        for ours, plain in pairs:
            assert (ours is None) == (plain is None), text
            if plain is not None:
                torch.testing.assert_close(ours, plain, rtol=1e-8, atol=1e-10, msg=lambda m: f"{m}\n{text}")
    return report_of(captured_of(captured)).expert_regions


FORMS = {
    "head": st.sampled_from([*sorted(HEADS), "pieces"]),
    "rows": st.sampled_from(sorted(ROWS)),
    "skip": st.sampled_from(sorted(SKIPS)),
    "total": st.sampled_from(sorted(SUMS)),
    "lines": st.lists(st.sampled_from(sorted(LINES)), min_size=1, max_size=5),
    "seed": st.integers(0, 99),
    "apart": st.booleans(),
}


def alone(form):
    """Whether each expert's parameters may be leaves of their own."""
    return form.pop("apart") and form["head"] in (*UNROLLED, "range", "pieces")


@settings(SETTINGS, max_examples=examples(40))
@given(**FORMS)
def test_rows(seed, **form):
    apart = alone(form)
    text = source(**form, mistake=None, at=0)
    regions = check(text, seed, apart)
    projects = any("[e]" in LINES[line] and "F.linear" in LINES[line] for line in form["lines"])
    assert regions or not projects or form["head"] == "pieces", text


@settings(SETTINGS, max_examples=examples(60))
@given(mistake=st.sampled_from(sorted(MISTAKES)), at=st.integers(0, 5), **FORMS)
def test_rows_with_one_mistake(seed, mistake, at, **form):
    apart = alone(form)
    text = source(**form, mistake=mistake, at=at)
    check(text, seed, apart)


@pytest.mark.share(5)
@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_each_mistake(mistake):
    for head, total, apart in (("range", "index_add_", False), ("enumerate", "+=", True)):
        form = {"head": head, "rows": "where", "skip": "none", "total": total}
        text = source(**form, lines=["low rank", "dropout", "projection"], mistake=mistake, at=2)
        check(text, 3, apart)

"""Experts as batched products written by hypothesis as source text, right and subtly wrong: captured and lowered they
give what eager gives in float64, output and every gradient. Where rows mix between the products, nothing is lowered."""

from __future__ import annotations

import textwrap

from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from test_generated_loops import GATES, SETTINGS, check

OF_SLOTS, OF_EXPERTS = "(y * weight[..., None]).sum(1)", "(y * gates.T[..., None]).sum(0)"
# (the line before, the up-projection, the down-projection, the result)
FORMS = {
    "gathered, einsum": ("", 'torch.einsum("td,tknd->tkn", x, w1[index])',
                         'torch.einsum("tkn,tkdn->tkd", h, w2[index])', OF_SLOTS),
    "gathered, one line": ("", 'torch.einsum("td,tknd->tkn", x, w1[index])',
                           'torch.einsum("tkn,tkdn,tk->td", h, w2[index], weight)', "y"),
    "gathered, matmul": ("", "x[:, None, None] @ w1[index].mT",
                         "(h @ w2[index].transpose(-1, -2)).squeeze(2)", OF_SLOTS),
    "gathered, bmm": ("e, rows = index.flatten(), x.repeat_interleave(K, 0)[:, None]", "torch.bmm(rows, w1[e].mT)",
                      "torch.bmm(h, w2[e].mT)[:, 0]", "(y.view(-1, K, D) * weight[..., None]).sum(1)"),
    "all, einsum": ("", 'torch.einsum("td,end->etn", x, w1)', 'torch.einsum("etn,edn->etd", h, w2)', OF_EXPERTS),
    "all, one line": ("", 'torch.einsum("td,end->etn", x, w1)',
                      'torch.einsum("etn,edn,te->td", h, w2, gates)', "y"),
    "all, matmul": ("", "x @ w1.mT", "torch.matmul(h, w2.mT)", OF_EXPERTS),
    "all, bmm": ("rows = x.expand(E, -1, -1)", "torch.bmm(rows, w1.mT)", "torch.bmm(h, w2.mT)", OF_EXPERTS),
    "all, masked": ("rows = x[None] * gates.T[..., None]", "torch.bmm(rows, w1.mT)", "torch.bmm(h, w2.mT)", "y.sum(0)"),
}  # fmt: skip
HARMLESS = ("", "h = h * 2.0", "h = h.contiguous()", "h = h.transpose(0, 1).transpose(1, 0)", "h = h[..., :]")
MISTAKES = (
    "h = h.roll(1, 0)", "h = h - h.mean(0)", "h = h.flip(0)", "h = h.cumsum(0)", "h = h + h[:1]", "h = h.softmax(0)",
    "h = h * h.mean()", "h = h.detach()", "h.mul_(0.5)", "w2 = w2.roll(1, 0)", "h = h * h.amax((0, 1))",
    "with torch.no_grad():\n    w2.mul_(1.5)",
)  # fmt: skip


def source(form, gate, line):
    before, up, down, total = FORMS[form]
    return f"""\
def layer(x, router, w1, w2, b1, b2):
    weight, index = (x @ router.T).softmax(-1).topk(K, -1)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    {before}
    h = {up}
    {"" if gate == "ungated" else "g, u = h.chunk(2, -1)"}
    h = {GATES[gate]}
{textwrap.indent(line, "    ")}
    y = {down}
    return {total}
"""


@settings(SETTINGS, max_examples=examples(14))
@given(
    seed=st.integers(0, 99),
    form=st.sampled_from(sorted(FORMS)),
    gate=st.sampled_from(sorted(GATES)),
    line=st.sampled_from(HARMLESS),
)
def test_right_batches(seed, form, gate, line):
    text = source(form, gate, line)
    assert check(text, gate != "ungated", seed), text


@settings(SETTINGS, max_examples=examples(26))
@given(
    seed=st.integers(0, 99),
    form=st.sampled_from(sorted(FORMS)),
    gate=st.sampled_from(sorted(GATES)),
    line=st.sampled_from(MISTAKES),
)
def test_subtly_wrong_batches(seed, form, gate, line):
    text = source(form, gate, line)
    assert not check(text, gate != "ungated", seed), text

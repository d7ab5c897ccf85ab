"""Iterations that end behind their expert: what was computed of its rows by then, drawn, and who gets no gradient."""

from __future__ import annotations

import itertools

import pytest
from beside_eager import compare
from test_drawn_layers import layer_of

HEADS = {
    "hits": "for e in index.unique().tolist():",
    "range": "for e in range(E):",
    "enumerate": "for i, e in enumerate(index.unique().tolist()):",
}
ROWS = {"rows": "x[t]", "dropout": "F.dropout(x[t], 0.3, True)"}
Y = "y = moe.experts[e](rows)\n"
END = "if len(t) > 5:\n    continue\n"
ADD = "out.index_add_(0, t, y * w[t, k, None])"
BODIES = {
    "before": f"{END}{Y}{ADD}",
    "behind": f"{Y}{END}{ADD}",
    "behind what is made of it": f"{Y}y = y * w[t, k, None]\n{END}out.index_add_(0, t, y)",
    "behind a name": f"{Y}{END}y = y * w[t, k, None]\nout.index_add_(0, t, y * 2)",
    "behind a drawn one": f"{Y}y = F.dropout(y, 0.3, True)\n{END}{ADD}",
    "behind a write": f"{Y}y = y * w[t, k, None]\nw[t, k] = 0.5\n{END}out.index_add_(0, t, y)",
    "behind a count": f"{Y}y = y * 2\nseen[e] += len(t)\n{END}{ADD}",
    "at both": f"if len(t) == 0:\n    continue\n{Y}y = y + w[t, k, None]\n{END}{ADD}",
    "on its norm": f"{Y}if y.norm() > 9:\n    continue\n{ADD}",
    "else": f"{Y}if len(t) > 5:\n    out[0] += 1\nelse:\n    {ADD}",
    "another instead": f"{Y}if len(t) > 5:\n    y = x[t] * 2\n{ADD}",
    "half of it": f"{Y}if len(t) > 5:\n    y = y * 0.5\n{ADD}",
}


@pytest.mark.share(4)
@pytest.mark.parametrize(("head", "rows", "body"), [*itertools.product(HEADS, ROWS, BODIES)])
def test_as_plain(head, rows, body):
    lines = f"t, k = torch.where(index == e)\nrows = {ROWS[rows]}\n{BODIES[body]}".replace("\n", "\n        ")
    text = f"""\
def layer(x, moe):
    w, index = moe.gate(x).softmax(-1).topk(K, -1)
    w, out, seen = w.clone(), x * 0, x.new_zeros(E)
    {HEADS[head]}
        {lines}
    return out + seen.sum() + w.sum() + torch.rand(1, dtype=x.dtype)
"""
    graphs, lowered = compare(layer_of(text), text=text)
    assert graphs == 1
    assert lowered or body != "before" or rows == "dropout"

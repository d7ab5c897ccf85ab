"""``for i, e in enumerate(hits)``, ``for e, i in zip(hits, counts)``: loops over hits, each with a number."""

from __future__ import annotations

import itertools

import pytest
from beside_eager import compare
from test_drawn_layers import layer_of

HEADS = {
    "enumerate a list": "for i, e in enumerate(ids.tolist()):",
    "from a number": "for i, e in enumerate(ids.tolist(), start=2):",
    "enumerate a tensor": "for i, e in enumerate(ids):",
    "rows of nonzero": "for i, e in enumerate(torch.bincount(index.flatten(), minlength=E).nonzero()[:, 0]):",
    "zip lists": "for e, i in zip(ids.tolist(), counts.tolist()):",
    "strictly": "for e, i in zip(ids.tolist(), counts.tolist(), strict=True):",
    "zip tensors": "for e, i in zip(ids, counts):",
    "made before": "pairs = enumerate(ids.tolist())\n    for i, e in pairs:",
}
# what an iteration does with the number, and whether the loop is one graph
USES = {
    "nothing": ("", True),
    "a factor": ("y = y * i", True),
    "skipped": ("if i > 2:\n            continue", True),
    "by place": ("y = y * (inverse == i).sum()", True),
    "writes into the hits": ("ids.clamp_(max=1)", False),
    "writes into the counts": ("counts[:] = 0\n        y = y * i", None),
    "left early": ("if i > 1:\n            break", False),
}


@pytest.mark.share(4)
@pytest.mark.parametrize(("head", "use"), [*itertools.product(HEADS, USES)])
def test_pair(head, use):
    line, alone = USES[use]
    text = f"""\
def layer(x, moe):
    w, index = moe.gate(x).softmax(-1).topk(K, -1)
    ids, inverse, counts = torch.unique(index, return_inverse=True, return_counts=True)
    out = torch.zeros_like(x)
    {HEADS[head]}
        t, k = torch.where(index == e)
        y = moe.experts[int(e)](x[t]) * w[t, k, None]
        {line}
        out.index_add_(0, t, y)
    return out + ids.sum() + counts.sum() + 0 * x
"""
    graphs, lowered = compare(layer_of(text), text=text)
    assert alone is not True or (graphs, lowered) == (1, True)

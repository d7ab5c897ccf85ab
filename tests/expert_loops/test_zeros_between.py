"""What stands between the rows of two experts and looks as if it added zeros, sums of what was zero once among it,
beside rows that are added, or set: set rows lose what was added before. Every pair beside plain Python."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from moebius import capture

E, D, N = 4, 8, 12
BETWEEN = {
    "sum": "out = out + out.sum()",
    "columns": "out = out + out.sum(0)",
    "rows": "out = out + out.sum(1, keepdim=True)",
    "mean": "out = out + out.mean(0)",
    "in place": "out += out.sum()",
    "product": "out = out + (out * 3).sum()",
    "of a view": "out = out + out[0].sum()",
    "view written": "other[0].fill_(e + 1.0); out = out + other.sum()",
    "view of a view written": "other.view(-1)[2:].add_(1.0); out = out + other.mean(0)",
    "another name written": "name = other.t(); name += 1; out = out + other.mean(0)",
    "written by out=": "torch.ones(3, D, dtype=x.dtype, out=other); out = out + other.mean(0)",
    "never written": "out = out + other.sum()",
    "zeros of parameters": "out = out + 0 * sum(p.sum() for p in expert.parameters())",
    "in place, of parameters": "out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())",
}
WRITES = {
    "set": "out[token] = expert(x[token])",
    "added": "out[token] += expert(x[token])",
    "index_add": "out.index_add_(0, token, expert(x[token]))",
    "index_copy": "out.index_copy_(0, token, expert(x[token]))",
    "index_put": "out.index_put_((token,), expert(x[token]))",
    "index_put, added": "out.index_put_((token,), expert(x[token]), accumulate=True)",
    "after": "out = out.index_copy(0, token, expert(x[token]))",
}
LOOP = """
def mixed(x, experts):
    index = torch.arange(len(x)) % E
    out, other = torch.zeros_like(x), torch.zeros(3, D, dtype=x.dtype)
    for e, expert in enumerate(experts):
        token = torch.where(index {mask} e)[0]
        {lines}
    return out
"""


@pytest.mark.share(40)
@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("between, write, mask", list(itertools.product(BETWEEN, WRITES, ["==", "!="])))
def test_as_plain(between, write, mask, first, infinite):
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Sequential(nn.Linear(D, N), nn.SiLU(), nn.Linear(N, D)) for _ in range(E)).double()
    if infinite:
        with torch.no_grad():
            experts[0][2].weight[0, 0] = torch.inf
    lines = [BETWEEN[between], WRITES[write]]
    names = {"torch": torch, "E": E, "D": D}
    exec(LOOP.format(mask=mask, lines="\n        ".join(lines if first else lines[::-1])), names)
    captured = capture(names["mixed"])
    for tokens in (10, 10, 6):
        x = torch.randn(tokens, D, dtype=torch.float64)
        expected = names["mixed"](x, experts)
        torch.testing.assert_close(captured(x, experts), expected, rtol=1e-9, atol=1e-9, equal_nan=True)

"""Experts as batched products stay as they were written, and the report has a region that says where and why. What only
looks like them has none."""

from __future__ import annotations

import inspect

import pytest
import torch
from module_spellings import MODULES
from spellings import SPELLINGS
from table import Runner

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import rewrite

ALL_AT_ONCE, GATHERED = "the weights of all experts at once", "a copy of its expert's weights"
BATCHED = {
    "einsum_dispatch": ALL_AT_ONCE,
    "bmm_over_experts": ALL_AT_ONCE,
    "einsum_over_capacity": ALL_AT_ONCE,
    "gathered_weights": GATHERED,
    "gathered_per_slot": GATHERED,
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_region_says_where_and_why(name):
    runner = Runner(name)
    assert not runner.call(0)
    regions = report_of(captured_of(runner.captured)).expert_regions
    assert len(regions) == (2 if name == "gathered_per_slot" else 1)
    lines, first = inspect.getsourcelines({**SPELLINGS, **MODULES}[name].function)
    for region in regions:
        assert not region.lowered and region.refusal.startswith("batched experts: ") and BATCHED[name] in region.refusal
        assert region.file.endswith("spellings.py")
        assert any(product in lines[region.line - first] for product in ("bmm", "einsum"))
        assert f":{region.line})" in region.refusal


def test_without_the_search_there_is_no_region(monkeypatch):
    monkeypatch.setattr(rewrite, "batched_regions", lambda graph: [])
    runner = Runner("bmm_over_experts")
    assert not runner.call(0)
    assert not report_of(captured_of(runner.captured)).expert_regions


def heads(x, wq, wk, wo):
    """Attention whose projections have an axis of heads."""
    q, k = torch.einsum("td,hde->hte", x, wq), torch.einsum("td,hde->hte", x, wk)
    rows = torch.bmm(torch.bmm(q, k.mT).softmax(-1), k)
    return torch.einsum("hte,hed->td", rows, wo)


def one_product(x, wq, wk, wo):
    """A batched product alone is no expert."""
    return torch.einsum("td,hde->the", x, wq).relu().sum(1)


def lookup(x, wq, wk, wo):
    """Weights gathered for one product."""
    index = x.argmax(-1) % 3
    return torch.bmm(x[:, None], wq[index])[:, 0]


@pytest.mark.parametrize("function", [heads, one_product, lookup], ids=lambda f: f.__name__)
def test_no_region_where_there_are_no_experts(function):
    torch.manual_seed(0)
    x, *weights = (torch.randn(*s, requires_grad=True) for s in ((5, 6), (3, 6, 4), (3, 6, 4), (3, 4, 6)))
    captured = capture(function)
    torch.testing.assert_close(captured(x, *weights), function(x, *weights))
    assert not report_of(captured_of(captured)).expert_regions


def test_the_turns_of_a_lowered_loop_are_no_products_of_all_experts():
    def turns(x, up, down):
        index = (x.detach()[:, 0] * 2).long().abs() % 3
        out, start, order = torch.zeros_like(x), 0, index.argsort(stable=True)
        for expert, count in enumerate(index.bincount(minlength=3).tolist()):
            rows = order[start : start + count]
            out.index_add_(0, rows, (x[rows] @ up[expert]).relu() @ down[expert])
            start += count
        return out

    torch.manual_seed(0)
    x, *weights = (torch.randn(*s, requires_grad=True) for s in ((9, 6), (3, 6, 4), (3, 4, 6)))
    captured = capture(turns)
    torch.testing.assert_close(captured(x, *weights), turns(x, *weights))
    (region,) = report_of(captured_of(captured)).expert_regions
    assert "batched" not in region.idiom

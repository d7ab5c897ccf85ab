"""All experts on all tokens, masked by a gate: one operator where the gate is 0 for all that did not choose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import dense, rewrite, zeros

T, D, N, E, K = 7, 4, 6, 5, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(D, E).double()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, N), nn.ReLU(), nn.Linear(N, D)) for _ in range(E))
        self.experts.double()

    def route(self, x):
        return self.gate(x).softmax(-1).topk(K, dim=-1)

    def gates(self, x):
        weight, index = self.route(x)
        return torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)


def added(layer, x):
    gates, out = layer.gates(x), torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        out = out + gates[:, e].unsqueeze(-1) * expert(x)
    return out


def added_in_place(layer, x):
    weight, index = layer.route(x)
    gates, out = x.new_zeros(len(x), E), x.clone()
    gates.scatter_(1, index, weight)
    for e, expert in enumerate(layer.experts):
        out.add_(expert(x) * gates[:, e, None])
    return out * 2


def summed(layer, x):
    gates = layer.gates(x)
    return sum(expert(x) * gates[:, e, None] for e, expert in enumerate(layer.experts))


def stacked(layer, x):
    gates = layer.gates(x)
    return (gates[..., None] * torch.stack([expert(x) for expert in layer.experts], dim=1)).sum(1)


def any_slot(layer, x):
    """A slot may name an expert twice: both count."""
    weight, index = layer.route(x)
    index, out = index // 2, torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        out += ((index == e).to(x.dtype) * weight).sum(dim=1)[:, None] * expert(x)
    return out


def named_twice(layer, x):
    """scatter keeps one of two; in no row of what topk gave is an expert twice, but here two rows became one."""
    weight, index = layer.gate(x.repeat_interleave(2, dim=0)).topk(1, dim=-1)
    index, weight = index.reshape(len(x), 2), (weight * torch.arange(1.0, 2 * len(x) + 1)[:, None]).reshape(len(x), 2)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    return sum(expert(x) * gates[:, e, None] for e, expert in enumerate(layer.experts))


def not_on_zeros(layer, x):
    weight, index = layer.route(x)
    gates = torch.full((len(x), E), 0.1, dtype=x.dtype).scatter(1, index, weight)
    return sum(expert(x) * gates[:, e, None] for e, expert in enumerate(layer.experts))


def on_zeros_that_were_written(layer, x):
    weight, index = layer.route(x)
    zeros = torch.zeros(len(x), E, dtype=x.dtype)
    zeros[:, 1] = 0.3
    gates = zeros.scatter(1, index, weight)
    return sum(expert(x) * gates[:, e, None] for e, expert in enumerate(layer.experts))


def gates_that_were_written(layer, x):
    gates = layer.gates(x)
    gates[:, 2] += 0.2
    return sum(expert(x) * gates[:, e, None] for e, expert in enumerate(layer.experts))


def weight_that_was_written(layer, x):
    weight, index = layer.route(x)
    weight = weight * 1.0
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight.detach())
    with torch.no_grad():
        weight.mul_(2)
    return sum(expert(x) * gates[:, e, None] for e, expert in enumerate(layer.experts)) * weight.sum()


def index_that_was_written(layer, x):
    weight, index = layer.route(x)
    index = index.clone()
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight.detach())
    index.add_(1).remainder_(E)
    return sum(expert(x) * gates[:, e, None] for e, expert in enumerate(layer.experts)) + index[:, :1]


def another_column(layer, x):
    gates = layer.gates(x)
    return sum(expert(x) * gates[:, (e + 1) % E, None] for e, expert in enumerate(layer.experts))


def soft(layer, x):
    gates = layer.gate(x).softmax(-1)
    return sum(expert(x) * gates[:, e, None] for e, expert in enumerate(layer.experts))


def over_the_tokens(layer, x):
    gates = layer.gates(x)
    return sum((expert(x) - expert(x).mean(0)) * gates[:, e, None] for e, expert in enumerate(layer.experts))


def read_between(layer, x):
    gates, out, seen = layer.gates(x), torch.zeros_like(x), 0
    for e, expert in enumerate(layer.experts):
        out += expert(x) * gates[:, e, None]
        seen = seen + out.sum()
    return out * seen


def read_under_another_name(layer, x):
    gates, out = layer.gates(x), torch.zeros_like(x)
    rows = out[1:]
    for e, expert in enumerate(layer.experts):
        out += expert(x) * gates[:, e, None]
    return rows * 2 + out[1:]


def of_the_sum(layer, x):
    """Layers one after another, each scaled: none stands beside another."""
    gates, out = layer.gates(x), x * 1.0
    for e, expert in enumerate(layer.experts):
        out = out + expert(out) * gates[:, e, None]
    return out


def no_experts(layer, x):
    """Scaled rows are added, and nothing is projected in between."""
    gates, out = layer.gates(x), torch.zeros_like(x)
    for e in range(E):
        out = out + x * gates[:, e, None]
    return out


LOWERED = (added, added_in_place, summed, stacked, any_slot, weight_that_was_written)
# As experts that every token has: what their results are multiplied with is no proof that the rest is 0.
ON_ALL_TOKENS = (
    named_twice,
    not_on_zeros,
    on_zeros_that_were_written,
    gates_that_were_written,
    index_that_was_written,
    another_column,
    soft,
    read_between,
    read_under_another_name,
)
LEFT = (over_the_tokens, of_the_sum, no_experts)


def run(function):
    """(regions, faults, the operators that run): against a plain layer, result and every gradient, in float64."""
    captured, faults = capture(function), []
    mine, plain = Layer(), Layer()
    for batch in range(3):
        torch.manual_seed(batch)
        x = torch.randn(T, D, dtype=torch.float64) * (1.0, 3.0, 0.1)[batch]
        pair = [x.clone().requires_grad_() for _ in range(2)]
        results = captured(mine, pair[0]), function(plain, pair[1])
        compared = [results]
        for layer, result in zip((mine, plain), results, strict=True):
            layer.zero_grad()
            result.square().sum().backward()
        leaves = zip([pair[0], *mine.parameters()], [pair[1], *plain.parameters()], strict=True)
        for p, q in leaves:
            if (p.grad is None) != (q.grad is None):
                faults.append(f"a gradient of {tuple(p.shape)} is there in one of both (batch {batch})")
            elif p.grad is not None:
                compared.append((p.grad, q.grad))
        faults += [f"batch {batch}" for a, b in compared if not torch.allclose(a, b, rtol=1e-10, atol=1e-12)]
    record = captured_of(captured)
    ran = [str(node.target) for segment in record.segments for node in segment.lowered.gm.graph.nodes]
    return report_of(record).expert_regions, faults, ran


@pytest.mark.parametrize("function", LOWERED + ON_ALL_TOKENS + LEFT)
def test_same_as_plain(function):
    regions, faults, ran = run(function)
    assert not faults
    assert all(region.lowered == (function not in LEFT) for region in regions)
    assert all(region.lowered or region.refusal for region in regions)
    assert len(regions) == (function not in (of_the_sum, no_experts))
    if function in LOWERED:
        assert len(regions) == 1
        assert sum("linear" in name for name in ran) == 1, "the experts on all tokens are not computed any more"


def test_experts_by_other_numbers_are_refused(monkeypatch):
    """Expert e on the tokens of the gate's column e + 1: experts, but not those that the operator's numbers name."""
    monkeypatch.setattr(rewrite, "replace_meeting", lambda work, failed: None)  # by gates alone
    (region,), faults, _ = run(another_column)
    line = another_column.__code__.co_firstlineno + 2
    assert not faults and not region.lowered
    assert (region.line, region.num_experts) == (line, E)
    assert "meets in add in a way that the proof does not know" in region.refusal
    assert f":{line})" in region.refusal


def test_experts_by_other_numbers_need_the_detector(monkeypatch):
    monkeypatch.setattr(rewrite, "replace_meeting", lambda work, failed: None)  # by gates alone
    monkeypatch.setattr(rewrite, "missed_experts", lambda graph: [])
    regions, faults, _ = run(another_column)
    assert not regions and not faults


SWITCHES = {
    "distinct": (named_twice, lambda index: True),
    "number_of": (not_on_zeros, lambda node: 0),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switched_off(name, monkeypatch):
    """Without the question the loop would be lowered to something else."""
    function, always = SWITCHES[name]
    monkeypatch.setattr(zeros if name == "number_of" else dense, name, always)
    regions, faults, _ = run(function)
    assert faults and regions[0].lowered


def test_not_looked_for(monkeypatch):
    monkeypatch.setattr(dense, "scaled_rows", lambda node: None)
    monkeypatch.setattr(rewrite, "replace_meeting", lambda work, failed: None)  # by gates alone
    (region,), faults, _ = run(added)
    assert not faults and not region.lowered and "a way that the proof does not know" in region.refusal

"""Branches on what the step knows run as calls of their code: same bits, equal ones made once, failures in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import moebius
from moebius.lowering.graph import expert_loop, skip_iteration
from moebius.lowering.region_calls import RegionCall, find_regions
from moebius.lowering.repeats import written_once


def step(model, optimizer, x_TD):
    optimizer.zero_grad()
    loss = model(x_TD).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()



def branch(value: float, operator: str = "mul") -> torch.fx.GraphModule:
    """``if not left_out: x.operator_(value)``, as capture writes it."""
    graph = torch.fx.Graph()
    _, left_out, x = (graph.placeholder(name) for name in ("row", "left_out", "x"))
    graph.call_function(skip_iteration, (left_out,))
    graph.call_method(f"{operator}_", (x, value))
    graph.output(())
    return torch.fx.GraphModule(nn.Module(), graph)


def branches(*bodies: torch.fx.GraphModule, times: int = 1) -> torch.fx.GraphModule:
    """A graph with a branch after the other, each on a condition and a tensor of its own."""
    graph, root = torch.fx.Graph(), nn.Module()
    for place, body in enumerate(bodies):
        root.add_module(f"body_{place}", body)
        left_out, x = graph.placeholder(f"left_out_{place}"), graph.placeholder(f"x_{place}")
        at = graph.get_attr(f"body_{place}")
        graph.call_function(expert_loop, (at, times, (), (left_out, x)))
    graph.output(())
    return torch.fx.GraphModule(root, graph)


@pytest.mark.parametrize("other, equal", [
    (branch(2.0), True), (branch(-2.0), False), (branch(2), False), (branch(2.0, "add"), False),
])  # fmt: skip
def test_equal_regions_have_one_call(other, equal):
    found = find_regions(branches(branch(2.0), other))
    first, second = (call for call, _ in found.values())
    assert (first is second) == equal


def test_zeros_of_two_signs_are_two_regions():
    first, second = (call for call, _ in find_regions(branches(branch(0.0), branch(-0.0))).values())
    assert first is not second


def test_a_loop_stays_a_loop():
    gm = branches(branch(2.0), times=3)
    assert not find_regions(gm) and written_once(gm, chains=True) is None


@pytest.mark.parametrize("count", [1, 8])
def test_what_runs(count):
    gm = branches(*(branch(2.0) for _ in range(count)))
    code = written_once(gm, chains=True)
    for left_out in (True, False):
        x_N = [torch.ones(3) for _ in range(count)]
        code.forward(*(value for x in x_N for value in (left_out, x)))
        assert all(x.tolist() == [2.0 - left_out] * 3 for x in x_N)


def test_a_failure_is_at_the_branch():
    gm = branches(*(branch(2.0) for _ in range(4)))
    code = written_once(gm, chains=True)
    inputs = [value for _ in range(4) for value in (False, torch.ones(3))]
    inputs[5] = "no tensor"
    with pytest.raises(AttributeError) as caught:
        code.forward(*inputs)
    at = code.reached(caught.value)
    assert at.node is [node for node in gm.graph.nodes if node.target is expert_loop][2]


@pytest.mark.parametrize("layers", [1, 6])
def test_radam_branches_while_it_runs(layers):
    """Its first five steps take the other side."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)))
    ours, x_TD = copy.deepcopy(plain), torch.randn(4, 5)
    optimizers = [torch.optim.RAdam(model.parameters(), lr=0.1) for model in (plain, ours)]
    captured, called = moebius.capture(step), []
    run = RegionCall.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegionCall, "__call__", lambda self, *given: called.append(self) or run(self, *given))
        for _ in range(12):
            assert torch.equal(step(plain, optimizers[0], x_TD), captured(ours, optimizers[1], x_TD))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    assert len(set(map(id, called))) < len(called) / (2 * layers)  # equal regions of several parameters are one call

"""Passes keep their contracts, and what they drop is dead."""

import operator

import pytest
import torch
from expert_loops import captured, leaves

from moebius import capture
from moebius.lowering import ContractError, LoweringOptions, lower, pipeline
from moebius.lowering.contract import Contract, Work
from moebius.lowering.dead_code import drop_dead_code
from moebius.lowering.draft import finish
from moebius.lowering.pipeline import PASSES, copy_graph, run_passes

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def step(x):
    out = torch.zeros_like(x)
    out.add_(x)
    unused = torch.relu(x)
    unused.mul_(2.0)
    return out * 1.0


def graph_of(function):
    return captured(function, *leaves([X]))


def test_effects_are_not_dead():
    """fx's own elimination would drop the unused ``out.add_(x)``."""
    work = Work(copy_graph(graph_of(step).gm), graph_of(step), LoweringOptions())
    work.loose += list(work.gm.graph.nodes)
    drop_dead_code(work)
    work.gm.recompile()
    assert torch.equal(work.gm(X)[0], X)


def test_only_loose_nodes_go():
    def function(x):
        torch.relu(x)
        return torch.tanh(torch.exp(x)) * 1.0

    graph = graph_of(function)
    before = len(graph.gm.graph.nodes)
    assert len(lower(graph, LoweringOptions()).gm.graph.nodes) == before
    work = Work(copy_graph(graph.gm), graph, LoweringOptions())
    work.loose += work.gm.graph.find_nodes(op="call_function", target=torch.relu)
    drop_dead_code(work)
    assert len(work.gm.graph.nodes) == before - 1


def test_grad_mode_survives():
    def function(x):
        return x * 2.0

    graph = graph_of(function)
    switch = torch._C._set_grad_enabled
    first = next(node for node in graph.gm.graph.nodes if node.op.startswith("call"))
    with graph.gm.graph.inserting_before(first):
        for mode in (False, True, False):
            graph.gm.graph.call_function(switch, (mode,))
    with graph.gm.graph.inserting_after(first):
        graph.gm.graph.call_function(switch, (True,))
    graph.gm.recompile()
    made = lower(graph, LoweringOptions())
    assert [n.args[0] for n in made.gm.graph.find_nodes(op="call_function", target=switch)] == [False, True]
    (result,) = made.fn(X.clone().requires_grad_())
    assert not result.requires_grad and torch.is_grad_enabled()


@pytest.mark.parametrize("contract", PASSES, ids=lambda contract: contract.name)
def test_a_malformed_graph_is_caught_before_each_pass(contract):
    work = Work(copy_graph(graph_of(step).gm), graph_of(step), LoweringOptions())
    output = work.gm.graph.output_node()
    output.args = (output.args[0][0],)
    with pytest.raises(ContractError, match=f"pass '{contract.name}' needs: .*the output is not a tuple"):
        contract.apply(work)


def test_a_pass_that_breaks_its_promise_is_named():
    def forget_the_output(work):
        work.gm.graph.output_node().args = (None,)

    bad = Contract("bad", "nothing", "a graph with a tuple", forget_the_output, need=())
    with pytest.raises(ContractError, match="pass 'bad' promises: a graph with a tuple; but the output is not a tuple"):
        run_passes(graph_of(step), LoweringOptions(), (bad,))


@pytest.mark.parametrize("asked", [False, True])
def test_a_way_to_an_output_that_a_pass_takes_away(monkeypatch, asked):
    """Without loops to keep, and with ``allow_unused`` too, the captured graph runs as it is."""

    def function(x):
        half = x * 0.5
        return half, half + 1.0

    def by_another_way(work):
        (half,) = work.gm.graph.find_nodes(op="call_function", target=operator.mul)
        (total,) = work.gm.graph.find_nodes(op="call_function", target=operator.add)
        with work.gm.graph.inserting_before(total):
            again = work.gm.graph.node_copy(half)
        total.replace_input_with(half, again)

    bad = Contract("bad", "nothing", "the same", by_another_way, (), ())
    graph = graph_of(function)
    monkeypatch.setattr(pipeline, "asks_of_each", lambda gm: asked)
    work = run_passes(graph, LoweringOptions(), (bad, *PASSES))
    half, total = finish(work.gm)(X.clone().requires_grad_())
    (grad,) = torch.autograd.grad(total.sum(), [half])
    assert torch.equal(grad, torch.ones_like(X))
    monkeypatch.setattr(pipeline, "is_lost", lambda *_: False)
    half, total = finish(run_passes(graph, LoweringOptions(), (bad, *PASSES)).gm)(X.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(total.sum(), [half])


def test_switches_around_whole_numbers_say_what_follows() -> None:
    """Where the graph begins without gradients, the second switch is the one that turns them on."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        best = x.argmax()
        torch.set_grad_enabled(True)
        result = (x * weight).sum() + best
        torch.set_grad_enabled(False)
        return result

    own, weight = capture(step), torch.ones(3, requires_grad=True)
    with torch.no_grad():
        for _ in range(2):
            assert own(torch.ones(3), weight).requires_grad and step(torch.ones(3), weight).requires_grad

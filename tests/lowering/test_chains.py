"""What an optimizer does to a parameter runs as one pass: same bits, nothing passes what looks, failures in place."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import moebius
from moebius.kernels.chains import Chain
from moebius.lowering import chains
from moebius.lowering.chains import ChainCall, find_chains
from moebius.lowering.repeats import written_once

O = torch.optim  # noqa: E741
# optimizer -> whether its steps are chains
OPTIMIZERS = {
    "AdamW": (lambda p: O.AdamW(p, lr=1e-2), True),
    "Adam, decay": (lambda p: O.Adam(p, lr=1e-2, weight_decay=0.1), True),
    "Adam, amsgrad": (lambda p: O.AdamW(p, lr=1e-2, amsgrad=True), True),
    "AdamW, maximize": (lambda p: O.AdamW(p, lr=1e-2, maximize=True), True),
    "AdamW, foreach": (lambda p: O.AdamW(p, lr=1e-2, foreach=True), False),
    "AdamW, fused": (lambda p: O.AdamW(p, lr=1e-2, fused=True), False),
    "SGD": (lambda p: O.SGD(p, lr=0.1), False),
    "SGD, momentum": (lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), True),
    "SGD, nesterov": (lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True), True),
    "RMSprop": (lambda p: O.RMSprop(p, lr=1e-2, momentum=0.5, centered=True), True),
    "Adagrad": (O.Adagrad, True),
    "NAdam": (O.NAdam, True),
    "RAdam": (O.RAdam, True),
}


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 61), nn.ReLU(), nn.Linear(61, 53), nn.ReLU(), nn.Linear(53, 3))


@pytest.fixture(autouse=True)
def short_ones_too(monkeypatch):
    """Whatever they cost, as most of what follows asks what chains do, on small tensors."""
    monkeypatch.setattr(chains, "FEWEST", 2)


@pytest.fixture
def ran(monkeypatch):
    """What each chain answered: whether C did it."""
    answers, run = [], Chain.run

    def noted(self, *given):
        answers.append(run(self, *given))
        return answers[-1]

    monkeypatch.setattr(Chain, "run", noted)
    return answers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_plain_pytorchs_bits(name, ran):
    make, chained = OPTIMIZERS[name]
    plain, ours = make_model(), make_model()
    optimizers = make(plain.parameters()), make(ours.parameters())
    captured = moebius.capture(step)
    x, y = torch.randn(5, 37), torch.randint(0, 3, (5,))
    for _ in range(5):
        assert torch.equal(step(plain, optimizers[0], x, y), captured(ours, optimizers[1], x, y))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    assert [p._version for p in plain.parameters()] == [p._version for p in ours.parameters()]
    for theirs, mine in zip(*(o.state.values() for o in optimizers), strict=True):
        tensors = [key for key in theirs if isinstance(theirs[key], torch.Tensor)]
        assert all(torch.equal(theirs[key], mine[key]) for key in tensors)
    assert (bool(ran) and all(ran)) == chained


def test_a_mode_sees_each_operator():
    """Also of a graph that was captured without."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    run = chained_graph(4)
    with torch.no_grad(), Names():
        run(*[torch.ones(20) for _ in range(8)])
    assert seen.count("aten::addcmul_") == 4 and seen.count("aten::mul_") == 4


def chained_graph(pairs: int):
    """``mul_`` and ``addcmul_`` on each of so many pairs of tensors of 20, as a function of the pairs."""
    repeats = written_once(traced(pairs), chains=True)
    assert repeats is not None
    return repeats.forward


def traced(pairs: int, numbers: int = 0, size: int = 20) -> fx.GraphModule:
    """numbers: how many are computed between the two operators."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"t{i}") for i in range(2 * pairs)]
    given = graph.placeholder("rate") if numbers else 2.0
    graph.call_function(torch._C._set_grad_enabled, (False,))
    for a, b in zip(inputs[::2], inputs[1::2], strict=True):
        nodes, number = [graph.call_method("mul_", (a, 0.5))], given
        for _ in range(numbers):
            number = graph.call_function(operator.add, (number, 1.0))
        nodes.append(graph.call_method("addcmul_", (a, b, b), {"value": number}))
        for node in nodes:
            node.meta["val"] = torch.ones(size)
    for node in inputs:
        node.meta["val"] = torch.ones(size)
    if numbers:
        given.meta["val"] = 1.0
    graph.output(())
    return fx.GraphModule({}, graph)


def test_nothing_moves_past_what_reads_it():
    """A number is read, between two operators, out of the memory that the first has written."""
    graph = fx.Graph()
    a = graph.placeholder("a")
    view = graph.call_method("select", (a, 0, 0))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    first = graph.call_method("mul_", (a, 2.0))
    number = graph.call_method("item", (view,))
    second = graph.call_method("add_", (a, number))
    graph.output(())
    for node in (a, first, second):
        node.meta["val"] = torch.ones(20)
    view.meta["val"] = torch.ones(())
    assert find_chains(graph) == []
    number.replace_input_with(view, other := graph_input(graph, a))
    assert [nodes for _, nodes, _ in find_chains(graph)] == [[first, second]] and other in number.all_input_nodes


def graph_input(graph: fx.Graph, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        node = graph.placeholder("step")
    node.meta["val"] = torch.ones(())
    return node


def test_two_parameters_are_two_chains_of_one_call():
    found = find_chains(traced(3).graph)
    assert len(found) == 3 and len({id(call) for call, _, _ in found}) == 1
    assert all(isinstance(call, ChainCall) and len(nodes) == 2 for call, nodes, _ in found)


@pytest.mark.parametrize("fewest, size, pays", [(2, 20, True), (3, 20, False), (3, 2**18, True)])
def test_few_operators_are_one_call_where_that_pays(monkeypatch, fewest, size, pays):
    monkeypatch.setattr(chains, "FEWEST", fewest)
    assert bool(find_chains(traced(1, size=size).graph)) == pays


@pytest.mark.parametrize("used", [True, False])
def test_what_others_use_stays(used):
    gm = traced(1)
    *_, last, output = gm.graph.nodes
    if used:
        output.args = ((last,),)
    assert len(find_chains(gm.graph)) == (not used)


@pytest.mark.parametrize("numbers", [0, 8])  # with eight, an iteration is a function of the code, with a chain in it
@pytest.mark.parametrize("bad", [0, 1])
def test_a_failure_is_at_its_operator(numbers, bad):
    """Operands of another kind than they were captured with: torch's error, at the node that raised it."""
    gm = traced(8, numbers)
    repeats = written_once(gm, chains=True)
    assert bool(repeats.calls) == bool(numbers)
    inputs = [torch.ones(20) for _ in range(16)]
    inputs[-2 + bad] = torch.ones(7) if bad else torch.ones(20, dtype=torch.int64)
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        repeats.forward(*inputs, *([1.0] if numbers else []))
    at = repeats.reached(caught.value)
    assert at.node is [n for n in gm.graph.nodes if n.op == "call_method"][-2 + bad]
    assert numbers == 0 or at.values[next(n for n in gm.graph.nodes if n.name == "rate")] == 1.0


def test_a_step_that_leaves_out_a_parameter(ran):
    """The optimizer passes over what has no gradient: its chain is not run, the others are."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(30, 30) for _ in range(2))

        def forward(self, x_TD):
            out_TD = x_TD * 1.0
            for i in range(2):
                rows = torch.where(x_TD[:, 0] > i)[0]
                if rows.numel():
                    out_TD = out_TD.index_add(0, rows, self.parts[i](x_TD[rows]))
            return out_TD.sum(0, keepdim=True)

    torch.manual_seed(0)
    plain = Two()
    ours = copy.deepcopy(plain)
    optimizers = O.AdamW(plain.parameters()), O.AdamW(ours.parameters())
    captured, y = moebius.capture(step), torch.tensor([1])
    for first in (3.0, 3.0, 0.5, 3.0, 0.5):
        x_TD = torch.full((4, 30), first)
        assert torch.equal(step(plain, optimizers[0], x_TD, y), captured(ours, optimizers[1], x_TD, y))
    assert all(map(torch.equal, plain.parameters(), ours.parameters())) and any(ran)

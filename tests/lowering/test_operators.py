"""One name for each spelling; who writes where; which activation a piece of code is."""

import operator

import pytest
import torch
from expert_loops import call, captured, leaves, trace
from torch.nn import functional

from moebius.kernels import ACTIVATIONS
from moebius.kernels.expressions import evaluate, parse
from moebius.lowering.aliasing import Storage, writes_into
from moebius.lowering.experts.activations import NAMES, OTHERWISE, table
from moebius.lowering.operators import read_call


def nodes(function, *names):
    graph, _ = trace(function, names, __file__)
    return [node for node in graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize(
    "name,spellings",
    {
        "gt": [lambda m: torch.greater(m, 0), lambda m: m.gt(0), lambda m: m > 0, lambda m: torch.gt(input=m, other=0)],
        "matmul": [lambda m: m @ m, lambda m: torch.mm(m, m), lambda m: m.matmul(m), lambda m: operator.matmul(m, m)],
        "permute": [
            lambda m: m.permute(2, 1, 0),
            lambda m: m.permute((2, 1, 0)),
            lambda m: torch.permute(m, (2, 1, 0)),
        ],
        "chunk": [lambda m: m.chunk(2, dim=-1), lambda m: torch.chunk(m, 2, -1)],
        "clamp": [lambda m: m.clamp(min=None, max=7), lambda m: torch.clip(m, max=7)],
    }.items(),
)
def test_spellings_of_one_operator_are_equal(name, spellings):
    found = [read_call(nodes(spelling, "m")[-1]) for spelling in spellings]
    assert {one.name for one in found} == {name}
    assert not any(one.op.inplace for one in found)
    texts = {str({key: str(value) for key, value in one.args.items()}) for one in found}
    assert len(texts) == 1, texts


def test_where_of_a_method_has_its_condition_second():
    found = read_call(nodes(lambda x, c: x.where(c, 0.0), "x", "c")[0])
    assert (found["input"].name, found["condition"].name) == ("x", "c")


def test_bad_arguments_are_no_call():
    assert read_call(nodes(lambda m: call(torch.relu, m, 1, 2, 3), "m")[0]) is None


@pytest.mark.parametrize(
    "function,written",
    [
        (lambda a, b: a.add_(b), "a"),
        (lambda a, b: call(operator.iadd, a, b), "a"),
        (lambda a, b: torch.add(a, b, out=b), "b"),
        (lambda a, b: functional.silu(a, inplace=True), "a"),
        (lambda a, b: functional.elu(a, inplace=True), "a"),
        (lambda a, b: torch.ops.aten.add_(a, b), "a"),
        (lambda a, b: a.index_fill_(0, b, 1.0), "a"),
        (lambda a, b: a + b, None),
        (lambda a, b: functional.elu(a), None),
        (lambda a, b: torch.ops.aten.add(a, b), None),
        (lambda a, b: a.cumsum(0), None),
    ],
)
def test_what_is_written(function, written):
    (node,) = nodes(function, "a", "b")
    names = [target.name for target in writes_into(node)]
    assert (written in names) if written else not names


def test_storages():
    def function(x, y):
        made = torch.zeros_like(x)
        view = made.view(-1)[2:]
        values, index = torch.topk(y, 2)
        values.mul_(2.0)
        return made, view, index, x.reshape(-1), x + y, functional.pad(x, (0, 0))

    graph = captured(function, *leaves([torch.randn(3, 4), torch.randn(3, 4)])).gm.graph
    made, view, index, flat, total, padded = graph.output_node().args[0]
    x, _ = graph.find_nodes(op="placeholder")
    storage = Storage(graph)
    assert storage.share(made, view) and storage.is_fresh(view)
    assert storage.share(flat, x) and not storage.is_fresh(flat)
    assert not storage.share(total, x) and storage.is_fresh(total)
    assert storage.share(padded, x), "an operator that no table knows may return a view"
    output = graph.output_node()
    assert storage.writer_between(index, output) is None, "topk's values are not its indices"
    assert storage.writer_between(made, output) is None


@pytest.mark.parametrize("name,text", [*((name, f"{name}(g)") for name in NAMES), *OTHERWISE.items()])
def test_each_spelling_of_an_activation_is_the_kernels_activation(name, text):
    x = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True)
    y = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True)
    (mine,), kernels = evaluate([parse(text)], x, None), ACTIVATIONS[name].value(y)
    torch.testing.assert_close(mine, kernels, rtol=1e-9, atol=1e-9)
    mine.sum().backward()
    torch.testing.assert_close(x.grad, ACTIVATIONS[name].backward(torch.ones_like(y), y.detach()), rtol=1e-9, atol=1e-9)


def test_every_activation_of_the_kernels_can_be_written():
    assert {name for name, _ in table().values()} == set(ACTIVATIONS)

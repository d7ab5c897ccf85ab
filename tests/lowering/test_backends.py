"""Who runs a lowered graph: ourselves, torch.compile's backends, the user's function; with a loop left or without."""

import pytest
import torch
from expert_loops import captured, leaves, loop, lowered, make_inputs, outputs_and_gradients, same
from torch.nn import functional

from moebius.kernels import experts
from moebius.lowering import LoweringError, LoweringOptions, UnknownBackendError, check_backend, expert_loop, lower

E = 4


def iteration(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    gate, up = functional.linear(x[token], gate_up[e]).chunk(2, dim=-1)
    out.index_add_(0, token, functional.linear(functional.silu(gate) * up, down[e]) * weights[token, slot, None])
    return ()


def layer(x, logits, gate_up, down):
    weights, index = torch.topk(torch.softmax(logits, -1), 2)
    out = torch.zeros_like(x)
    loop(iteration, E, (), (out, x, index, weights, gate_up, down))
    return torch.tanh(out) + x


def atan_iteration(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    gate, up = functional.linear(x[token], gate_up[e]).chunk(2, dim=-1)
    out.index_add_(0, token, functional.linear(torch.atan(gate) * up, down[e]) * weights[token, slot, None])
    return ()


def with_a_refused_loop(x, logits, gate_up, down):
    """Two layers; the operator has no word for atan, so the second loop stays."""
    x = layer(x * 0.5, logits, gate_up, down)
    weights, index = torch.topk(torch.softmax(logits, -1), 2)
    out = torch.zeros_like(x)
    loop(atan_iteration, E, (), (out, x, index, weights, gate_up, down))
    return torch.tanh(out) + x, x.sum()


def test_moebius_runs_the_lowered_graph():
    made = lowered(layer, make_inputs())
    assert any(node.target is experts for node in made.gm.graph.nodes)
    assert same(layer, made.fn, make_inputs())


def test_eager_runs_the_captured_graph():
    made = lowered(layer, make_inputs(), backend="eager")
    assert any(node.target is expert_loop for node in made.gm.graph.nodes)
    (region,) = made.regions
    assert not region.lowered and "eager" in region.refusal and region.kernel == "loop"
    expected, actual = (outputs_and_gradients(f, make_inputs()) for f in (layer, made.fn))
    for a, b in zip(expected[0] + expected[1], actual[0] + actual[1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("function", [layer, with_a_refused_loop])
def test_a_torch_compile_backend_by_name(function):
    made = lowered(function, make_inputs(), backend="aot_eager")
    assert same(function, made.fn, make_inputs(seed=1))


def test_a_callable_gets_the_lowered_graph_and_example_inputs():
    seen = []

    def backend(gm, example_inputs):
        seen.append((gm, example_inputs))
        return gm.forward

    made = lowered(layer, make_inputs(), backend=backend)
    ((gm, examples),) = seen
    assert any(node.target is experts for node in gm.graph.nodes)
    assert [tuple(v.shape) for v in examples] == [tuple(v.shape) for v in make_inputs()]
    assert same(layer, made.fn, make_inputs())


def test_a_refused_loop_is_left_out_of_what_a_backend_gets():
    parts = []

    def backend(gm, example_inputs):
        assert not any(node.target is expert_loop for node in gm.graph.nodes)
        assert isinstance(gm.graph.output_node().args[0], tuple | list)
        assert len(example_inputs) == len(gm.graph.find_nodes(op="placeholder"))
        parts.append(gm)
        return gm.forward

    made = lowered(with_a_refused_loop, make_inputs(), backend=backend)
    assert [region.lowered for region in made.regions] == [True, False]
    assert "atan" in made.regions[1].refusal
    assert len(parts) == 2
    assert same(with_a_refused_loop, made.fn, make_inputs())


def scaled(x, factor):
    return x * factor + 1.0


@pytest.mark.parametrize("backend", ["moebius", "aot_eager"])
def test_plain_number_inputs(backend):
    x = torch.arange(6.0)
    made = lower(captured(scaled, x, 3), LoweringOptions(backend=backend))
    assert torch.equal(made.fn(x, 3)[0], x * 3 + 1)


@pytest.mark.parametrize("backend", ["moebius", "aot_eager"])
def test_symbolic_numbers_among_the_inputs(backend):
    """Capture hands a size that varies over as a SymInt placeholder."""
    x = torch.arange(6.0, requires_grad=True)
    made = lower(captured(scaled, x, 3, dynamic=(0, 1)), LoweringOptions(backend=backend))
    for length, factor in ((6, 3), (4, 7)):
        x = torch.arange(float(length), requires_grad=True)
        (result,) = made.fn(x, factor)
        assert torch.equal(result, x * factor + 1)
        result.sum().backward()
        assert torch.equal(x.grad, torch.full((length,), float(factor)))


@pytest.mark.timeout(240)
def test_inductor_trains_with_a_symbolic_batch():
    """One compile: dynamic batch, a lowered loop, gradients to parameters."""

    def routed(x, router, gate_up, down):
        return layer(x, x @ router, gate_up, down)

    def inputs(tokens):
        x, _, gate_up, down = make_inputs(tokens=tokens, seed=tokens, dtype=torch.float32)
        return x, torch.linspace(-1, 1, 6 * E).reshape(6, E).sin(), gate_up, down

    made = lowered(routed, inputs(13), dynamic=(0,), backend="inductor")
    assert made.regions[0].lowered
    for tokens in (13, 5):
        assert same(routed, made.fn, inputs(tokens), tolerance=1e-4)


def test_unknown_backend_lists_the_choices():
    with pytest.raises(UnknownBackendError, match="'indctor' is not known; one of moebius, eager,.*inductor") as raised:
        lowered(layer, make_inputs(), backend="indctor")
    assert isinstance(raised.value, LoweringError) and isinstance(raised.value, ValueError)
    for wrong in (None, 3, lambda gm: gm):
        with pytest.raises(UnknownBackendError):
            check_backend(wrong)
    check_backend("inductor")


def test_a_backend_that_returns_nothing_is_told_so():
    with pytest.raises(LoweringError, match="returned a NoneType; it is to return a callable"):
        lowered(layer, make_inputs(), backend=lambda gm, example_inputs: None)


def test_options_that_cannot_be_followed():
    with pytest.raises(LoweringError, match="precision='fp6' is not known"):
        lowered(layer, make_inputs(), precision="fp6")
    with pytest.raises(LoweringError, match="save='less' is not known"):
        lowered(layer, make_inputs(), save="less")
    for asked in ({"precision": "fp8"}, {"save": "fp8"}):
        with pytest.raises(LoweringError, match="change nothing there"):
            lowered(layer, make_inputs(), backend="eager", **asked)
    with pytest.raises(LoweringError, match="mesh"):
        lowered(layer, make_inputs(), backend="eager", mesh=object())


def test_captured_graph_stays_usable_after_a_foreign_backend():
    graph = captured(layer, *leaves(make_inputs()))
    lower(graph, LoweringOptions(backend="aot_eager"))
    assert same(layer, lower(graph, LoweringOptions()).fn, make_inputs())

"""The torch operators under everything that traces: opcheck, make_fx, aot_function, torch.compile; autocast;
no_grad."""
from __future__ import annotations

import pytest
import torch
from experts_oracle import Layer, make_layer, oracle, relative_error, run
from functorch.compile import aot_function, nop
from torch.fx.experimental.proxy_tensor import make_fx

from moebius.kernels import experts, experts_rows


@pytest.fixture
def layer() -> Layer:
    return make_layer(24, 12, 8, 5, 2, bias=True)


def step(x, gate_up, down, index, weight):
    return experts(x, gate_up, down, index, weight).square().mean()


def arguments(layer: Layer) -> tuple:
    return layer.x, layer.gate_up, layer.down, layer.index, layer.weight


def gradients(layer: Layer, fn=step) -> list[torch.Tensor]:
    wanted = (layer.x, layer.gate_up, layer.down, layer.weight)
    return list(torch.autograd.grad(fn(*arguments(layer)), wanted))


@pytest.mark.share(2)
@pytest.mark.parametrize("save", ["default", "fp8", "recompute"])
@pytest.mark.parametrize("gate", ["concat", "interleaved", "none"])
def test_opcheck(gate: str, save: str) -> None:
    layer = make_layer(7, 6, 4, 3, 2, gate=gate, bias=gate != "concat", weighted=gate != "none")
    layer.index[0, 0] = -1
    torch.library.opcheck(torch.ops.moebius.experts.default, (
        layer.x, layer.gate_up, layer.down, layer.index, layer.weight, layer.up_bias, layer.down_bias,
        "silu", gate, save, "auto"))


def test_opcheck_backward() -> None:
    layer = make_layer(7, 6, 4, 3, 2)
    x, gate_up, down, weight = (t.detach() for t in layer.leaves())
    out, h, order, offsets = torch.ops.moebius.experts(
        x, gate_up, down, layer.index, weight, None, None, "silu", "concat", "default", "auto")
    torch.library.opcheck(torch.ops.moebius.experts_backward.default, (
        torch.ones_like(out), x, h, order, offsets, gate_up, down, weight, None, None, 2, "silu", "concat", "default",
        "auto", "", [True, False, True, True, False, False]))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(layer: Layer, mode: str) -> None:
    want = gradients(layer)

    def joint(x, gate_up, down, index, weight):
        return torch.autograd.grad(step(x, gate_up, down, index, weight), (x, gate_up, down, weight))

    traced = make_fx(joint, tracing_mode=mode)(*arguments(layer))
    called = [node.target for node in traced.graph.nodes]
    assert called.count(torch.ops.moebius.experts.default) == 1
    assert called.count(torch.ops.moebius.experts_backward.default) == 1
    assert all(torch.equal(a, b) for a, b in zip(traced(*arguments(layer)), want, strict=True))
    if mode == "symbolic":  # another number of tokens, the same graph
        other = make_layer(31, 12, 8, 5, 2, seed=3)
        assert all(torch.equal(a, b) for a, b in zip(traced(*arguments(other)), gradients(other), strict=True))


def test_aot_function(layer: Layer) -> None:
    traced = gradients(layer, aot_function(step, nop))
    assert all(torch.equal(a, b) for a, b in zip(traced, gradients(layer), strict=True))


@pytest.mark.share(1)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(layer: Layer, backend: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, dynamic=dynamic, fullgraph=True)
    for each in (layer, make_layer(17, 12, 8, 5, 2, seed=5)):
        for got, want in zip(gradients(each, compiled), gradients(each), strict=True):
            assert relative_error(got, want) < 1e-6


def test_compile_with_a_size_that_depends_on_data(layer: Layer) -> None:
    torch._dynamo.reset()

    def some_rows(x, gate_up, down, ids):
        return experts_rows(x[ids >= 2], gate_up, down, ids[ids >= 2]).sum()

    ids = layer.index[:, 0]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(some_rows, backend="aot_eager", fullgraph=True)
        got = torch.autograd.grad(compiled(layer.x, layer.gate_up, layer.down, ids), layer.leaves()[:3])
    want = torch.autograd.grad(some_rows(layer.x, layer.gate_up, layer.down, ids), layer.leaves()[:3])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_meta_device(layer: Layer) -> None:
    out = experts(*(t.to("meta") for t in arguments(layer)))
    assert out.shape == layer.x.shape and out.device.type == "meta"


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(layer: Layer, compiled: bool) -> None:
    torch._dynamo.reset()
    fn = torch.compile(experts, backend="aot_eager", fullgraph=True) if compiled else experts
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fn(*arguments(layer))
    assert out.dtype == torch.float32
    plain = Layer(*(t.detach() for t in arguments(layer)))
    error = relative_error(out, oracle(plain)[0])
    assert 1e-4 < error < 1.5e-2  # computed in bfloat16, and not in float32


def test_autocast_leaves_float64(layer: Layer) -> None:
    doubles = [t.detach().double() if t.is_floating_point() else t for t in arguments(layer)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = experts(*doubles)
    assert out.dtype == torch.float64 and torch.equal(out, experts(*doubles))


def test_no_gradient_keeps_nothing(layer: Layer) -> None:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), torch.no_grad():
        out = run(layer)
    assert not kept and not out.requires_grad
    traced = make_fx(lambda x: experts(x, *(t.detach() for t in arguments(layer)[1:])))(layer.x.detach())
    (call,) = [node for node in traced.graph.nodes if node.target is torch.ops.moebius.experts.default]
    assert call.args[9] == "recompute"


def test_only_the_result_is_differentiable(layer: Layer) -> None:
    out, h, order, offsets = torch.ops.moebius.experts(
        *arguments(layer), None, None, "silu", "concat", "default", "auto")
    assert out.requires_grad and not h.requires_grad
    received: list[object] = []
    out.grad_fn.register_prehook(lambda grads: received.extend(grads))
    out.sum().backward()
    assert received[0] is not None and received[1:] == [None] * 3


def test_backward_makes_no_zero_gradient_for_h(layer: Layer) -> None:
    def joint(x, gate_up, down, index, weight):
        return torch.autograd.grad(step(x, gate_up, down, index, weight), (x, gate_up, down, weight))

    traced = make_fx(joint, tracing_mode="fake")(*arguments(layer))
    h_shape = (layer.index.numel(), layer.gate_up.shape[1])
    made = [node.name for node in traced.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
            and tuple(node.meta["val"].shape) == h_shape]
    assert made == ["getitem_1"]  # H itself


def test_unused_result_has_no_gradient(layer: Layer) -> None:
    out = run(layer)
    grads = torch.autograd.grad(layer.x.sum() + 0 * out.detach().sum(), layer.leaves(), allow_unused=True)
    assert torch.equal(grads[0], torch.ones_like(layer.x)) and all(grad is None for grad in grads[1:])

"""Experts whose rows lie in equal blocks: batched products, what they keep, and when they are taken."""

from __future__ import annotations

import itertools

import pytest
import torch

from moebius.kernels import experts
from moebius.kernels.contract import Options
from moebius.kernels.equal_blocks import experts_in_blocks, layout_of, takes
from moebius.kernels.separate_weights import Block

E, C, D, N = 3, 5, 8, 6
GATES = {"concat": 2, "interleaved": 2, "none": 1}


def made(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def weights(gate: str, pieces: int, biased: tuple[bool, bool], turned: bool, dtype=torch.float64):
    """(gate_up's blocks, down's, their biases'), the leaves."""
    width = GATES[gate] * N // pieces

    def matrix(out: int, into: int) -> Block:
        return Block(turned, made(E, into, out, dtype=dtype) if turned else made(E, out, into, dtype=dtype))

    ups, down = [matrix(width, D) for _ in range(pieces)], [matrix(D, N)]
    up_bias = [Block(False, made(E, width, dtype=dtype)) for _ in range(pieces)] if biased[0] else None
    down_bias = [Block(False, made(E, D, dtype=dtype))] if biased[1] else None
    blocks = (ups, down, up_bias, down_bias)
    return blocks, [block.parts for part in blocks for block in part or ()]


def joined(blocks) -> torch.Tensor | None:
    if blocks is None:
        return None
    return torch.cat([block.parts.mT if block.turned else block.parts for block in blocks], 1)


def by_index(x, blocks, activation: str, gate: str):
    """The operator's reference on the same rows."""
    gate_up, down, up_bias, down_bias = map(joined, blocks)
    index = torch.arange(E).repeat_interleave(C)[:, None]
    return experts(x, gate_up, down, index, None, activation, gate=gate, gate_up_bias=up_bias, down_bias=down_bias,
                   backend="reference")


def in_blocks(x, blocks, activation: str, gate: str):
    found = layout_of(*blocks, gate)
    assert found is not None and takes(x, found[0], Options(activation, gate))
    return experts_in_blocks(x, *found, E, Options(activation, gate))


CASES = [
    (gate, pieces, biased, turned, activation)
    for gate, pieces, biased, turned, activation in itertools.product(
        GATES, (1, 2), ((False, False), (True, True), (True, False), (False, True)), (False, True),
        ("silu", "gelu", "relu", "clamp(g, None, 1) * sigmoid(g)"))
    if pieces == 1 or gate == "concat"
]  # fmt: skip


@pytest.mark.share(58)
@pytest.mark.parametrize("gate, pieces, biased, turned, activation", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_to_the_operator(gate, pieces, biased, turned, activation, dtype):
    torch.manual_seed(0)
    if "(" in activation and gate != "none":
        activation += " * u"
    blocks, leaves = weights(gate, pieces, biased, turned, dtype)
    x = made(E * C, D, dtype=dtype)
    one, other = (run(x, blocks, activation, gate) for run in (in_blocks, by_index))
    limit = {"rtol": 1e-9, "atol": 1e-11} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(one, other, **limit)
    grad = torch.randn_like(one)
    for a, b in zip(*(torch.autograd.grad(out, [x, *leaves], grad) for out in (one, other)), strict=True):
        torch.testing.assert_close(a, b, **limit)


@pytest.mark.parametrize("gate, pieces, biased, turned, activation", CASES[::3])
def test_a_tensor_for_each_expert(gate, pieces, biased, turned, activation):
    """The same as stacked: result, gradients, a second one; one expert's are frozen."""
    torch.manual_seed(0)
    if "(" in activation and gate != "none":
        activation += " * u"
    blocks, leaves = weights(gate, pieces, biased, turned)
    apart = {leaf: tuple(part.detach().requires_grad_(e > 0) for e, part in enumerate(leaf)) for leaf in leaves}
    own = tuple(part and [Block(block.turned, apart[block.parts]) for block in part] for part in blocks)
    found, x = [], made(E * C, D)
    for given, wanted in ((blocks, leaves), (own, [part for leaf in leaves for part in apart[leaf][1:]])):
        out = in_blocks(x, given, activation, gate)
        grads = torch.autograd.grad(out.square().sum(), [x, *wanted], retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), [x, *wanted], create_graph=True)
        second = torch.autograd.grad(again[0].square().sum(), x)
        if given is blocks:
            grads = [grads[0], *(part for grad in grads[1:] for part in grad[1:])]
        found.append([out, *grads, *second])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("frozen", range(6))
def test_gradients_that_nobody_wants(frozen):
    torch.manual_seed(0)
    blocks, leaves = weights("concat", 2, (True, True), True)
    every = [made(E * C, D), *leaves]
    every[frozen].requires_grad_(False)
    wanted = [leaf for leaf in every if leaf.requires_grad]
    grads = [torch.autograd.grad(run(every[0], blocks, "silu", "concat").square().sum(), wanted)
             for run in (in_blocks, by_index)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_can_be_differentiated():
    torch.manual_seed(0)
    blocks, leaves = weights("concat", 1, (True, True), False)
    x = made(E * C, D)
    found = []
    for run in (in_blocks, by_index):
        grads = torch.autograd.grad(run(x, blocks, "silu", "concat").square().sum(), [x, *leaves], create_graph=True)
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), [x, *leaves]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("pieces", [1, 2])
def test_kept_are_x_and_h(pieces):
    torch.manual_seed(0)
    blocks, leaves = weights("concat", pieces, (True, True), True)
    x = made(E * C, D)
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, *leaves)}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        in_blocks(x, blocks, "silu", "concat")
    assert sum(size for place, size in kept.items() if place not in own) == E * C * 2 * N * 8


@pytest.mark.parametrize("turned", [False, True])
def test_a_weights_gradient_is_laid_out_as_the_weight(turned):
    """Else autograd copies it."""
    blocks, leaves = weights("none", 1, (False, False), turned)
    in_blocks(made(E * C, D), blocks, "relu", "none").sum().backward()
    assert all(leaf.grad.stride() == leaf.stride() for leaf in leaves)


def test_the_result_may_be_written_into():
    blocks, _ = weights("none", 1, (False, False), True)
    out = in_blocks(made(E * C, D), blocks, "relu", "none")
    out[1:] *= 0.5
    out.sum().backward()


def test_what_is_left_to_other_forms():
    blocks, _ = weights("concat", 2, (False, False), True)
    layout, _ = layout_of(*blocks, "concat")
    x = torch.zeros(E * C, D)
    assert takes(x, layout, Options("silu"))
    assert not takes(x.bfloat16(), layout, Options("silu"))
    assert not takes(x, layout, Options("silu", save="recompute"))
    assert not takes(torch.zeros(4000, D), layout, Options("silu"))  # C does all of it at once
    assert takes(torch.zeros(4000, D), layout, Options("tanh(g) * u"))
    own = [Block(False, tuple(made(N, D) for _ in range(E)))]
    assert layout_of(own, *blocks[1:], "none") is None  # half of them
    assert layout_of(*blocks, "interleaved") is None

"""Loops that differ from the family beyond spelling: top-1, precision, autocast, sums that are not fresh zeros."""

import pytest
import torch
from expert_loops import captured, leaves, loop, lowered, make_inputs, no_grad, outputs_and_gradients, same
from torch.nn import functional

from moebius.kernels import experts
from moebius.lowering import LoweringOptions, lower
from moebius.lowering.errors import DEFECT
from moebius.lowering.graph import expert_loop

E = 4


def expert(rows, e, gate_up, down):
    gate, up = functional.linear(rows, gate_up[e]).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down[e])


def iteration(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    y = expert(x[token], e, gate_up, down).to(out.dtype) * weights[token, slot, None].to(out.dtype)
    out.index_add_(0, token, y)
    return ()


def layer(x, logits, gate_up, down, out=None):
    weights, index = torch.topk(torch.softmax(logits.double(), -1), 2)
    out = torch.zeros_like(x) if out is None else out
    loop(iteration, E, (), (out, x, index, weights.to(x.dtype), gate_up, down))
    return out


def check(function, inputs, tolerance=1e-10):
    made = lowered(function, inputs)
    assert all(region.lowered for region in made.regions), [region.refusal for region in made.regions]
    assert same(function, made.fn, inputs, tolerance)
    return made


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


def test_top_1_without_a_slot_axis():
    def top_1(x, logits, gate_up, down):
        scores = torch.sigmoid(logits)
        index = torch.argmax(scores, -1)
        chosen = scores.max(-1)[0]

        def iteration(e, out, x, index, chosen, gate_up, down):
            (token,) = torch.where(index == e)
            out.index_add_(0, token, expert(x[token], e, gate_up, down) * chosen[token][:, None])
            return ()

        out = torch.zeros_like(x)
        loop(iteration, E, (), (out, x, index, chosen, gate_up, down))
        return out * 1.0

    (region,) = check(top_1, make_inputs()).regions
    assert region.top_k == 1


def test_top_1_with_a_boolean_mask():
    def masked(x, logits, gate_up, down):
        index = torch.argmax(logits, -1)

        def iteration(e, out, x, index, gate_up, down):
            mask = index == e
            (token,) = mask.nonzero(as_tuple=True)
            out.index_add_(0, token, expert(x[mask], e, gate_up, down))
            return ()

        out = torch.zeros_like(x)
        loop(iteration, E, (), (out, x, index, gate_up, down))
        return out * 1.0

    check(masked, make_inputs())


def test_added_onto_a_shared_expert():
    def function(x, logits, gate_up, down):
        return layer(x, logits, gate_up, down, out=x * 0.5) * 1.0

    made = check(function, make_inputs())
    assert "add_" in targets(made.gm)


def test_a_view_of_the_sum_is_used_after_the_loop():
    def function(x, logits, gate_up, down):
        out = torch.zeros_like(x)
        flat = out.view(-1)
        layer(x, logits, gate_up, down, out=out)
        return out * 1.0, flat * 2.0

    made = check(function, make_inputs())
    assert "add_" in targets(made.gm)


def test_two_layers_in_a_row():
    def function(x, logits, gate_up, down):
        x = x + layer(x, logits, gate_up, down)
        return layer(torch.tanh(x), logits, gate_up, down).view(-1, 2) * 1.0

    made = check(function, make_inputs())
    assert targets(made.gm).count(experts) == 2 and expert_loop not in targets(made.gm)


def test_two_loops_add_to_one_tensor():
    def function(x, logits, gate_up, down):
        out = layer(x, logits, gate_up, down)
        return layer(x, -logits, gate_up, down, out=out) * 1.0

    check(function, make_inputs())


def test_a_written_sum_is_not_taken_for_zero():
    def function(x, logits, gate_up, down):
        out = torch.zeros_like(x)
        out.add_(x)
        return layer(x, logits, gate_up, down, out=out) * 1.0

    check(function, make_inputs())


def test_a_sum_from_outside_is_refused():
    def function(x, logits, gate_up, down, out):
        return layer(x, logits, gate_up, down, out=out.detach()) * 1.0

    inputs = (*make_inputs(), torch.zeros(13, 6, dtype=torch.float64))
    (region,) = lowered(function, inputs).regions
    assert region.refusal.startswith("own storage: ")


def test_values_computed_in_the_loop_from_outside_ones_are_moved_out():
    def function(x, logits, gate_up, down):
        def iteration(e, out, x, index, weights, gate_up, down):
            token, slot = torch.where(index == e)
            with no_grad():
                mask = index == e  # noqa: F841
            parts = gate_up.view(E, 2, -1, gate_up.shape[2])
            gate = functional.linear(x[token], parts[:, 0][e])
            up = functional.linear(x[token], parts[:, 1][e])
            y = functional.linear(functional.silu(gate) * up, down[e])
            out.index_add_(0, token, y * weights[token, slot, None])
            return ()

        weights, index = torch.topk(logits, 2)
        with no_grad():
            out = torch.zeros_like(x)
        loop(iteration, E, (), (out, x, index, weights, gate_up, down))
        return out * 1.0

    check(function, make_inputs())


def test_bfloat16_with_float32_routing_weights():
    def function(x, logits, gate_up, down):
        def iteration(e, out, x, index, weights, gate_up, down):
            token, slot = torch.where(index == e)
            y = expert(x[token], e, gate_up, down) * weights[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
            return ()

        weights, index = torch.topk(torch.softmax(logits.float(), -1), 2)
        out = torch.zeros_like(x)
        loop(iteration, E, (), (out, x, index, weights, gate_up, down))
        return out * 1.0

    check(function, make_inputs(dtype=torch.bfloat16), tolerance=0.05)


def test_sum_in_float32_of_bfloat16_rows():
    def function(x, logits, gate_up, down):
        out = layer(x, logits, gate_up, down, out=torch.zeros_like(x, dtype=torch.float32))
        return out.to(x.dtype) * 1.0

    check(function, make_inputs(dtype=torch.bfloat16), tolerance=0.05)


def test_autocast_around_the_step():
    inputs = make_inputs(dtype=torch.float32)

    def function(x, logits, gate_up, down):
        return layer(x, logits, gate_up, down) * 1.0

    with torch.autocast("cpu", torch.bfloat16):
        made = lower(captured(function, *leaves(inputs)), LoweringOptions())
        assert made.regions[0].lowered, made.regions[0].refusal
        assert same(function, made.fn, inputs, tolerance=0.05)
        (result,), _ = outputs_and_gradients(made.fn, inputs)
    with torch.autocast("cpu", enabled=False):
        (exact,), _ = outputs_and_gradients(function, inputs)
    assert not torch.allclose(result, exact, rtol=1e-6), "autocast did nothing"


@pytest.mark.parametrize("width,narrow", [(6, 5), (1, 1)])
def test_experts_without_tokens(width, narrow):
    def function(x, logits, gate_up, down):
        return layer(x, logits, gate_up, down) * 1.0

    made = lowered(function, make_inputs(width=width, narrow=narrow))
    assert same(function, made.fn, make_inputs(tokens=13, width=width, narrow=narrow, seed=3))
    skewed = list(make_inputs(width=width, narrow=narrow))
    skewed[1] = torch.zeros_like(skewed[1]) + torch.arange(E)  # two experts get everything
    assert same(function, made.fn, skewed)


def test_no_tokens_at_all():
    def function(x, logits, gate_up, down):
        return layer(x, logits, gate_up, down) * 1.0

    check(function, make_inputs(tokens=0))


@pytest.mark.faults
def test_a_failing_proof_leaves_the_loop(monkeypatch):
    from moebius.lowering.experts import writing

    def broken(claim, writer, index, x):
        raise KeyError("a bug")

    monkeypatch.setattr(writing, "routing_scale", broken)
    def function(x, logits, gate_up, down):
        return layer(x, logits, gate_up, down) * 1.0

    made = lowered(function, make_inputs())
    (region,) = made.regions
    assert not region.lowered and region.refusal.startswith(DEFECT) and "a bug" in region.refusal
    assert experts not in targets(made.gm) and targets(made.gm).count(expert_loop) == 1
    assert same(function, made.fn, make_inputs())

"""Each step of the proof refuses a loop that no other step would: without it, the loop is lowered to something else.
So it is with the proof of the operator and with that of projections of sorted rows, which shares most steps."""

import operator

import pytest
import torch
from expert_loops import call, loop, lowered, make_inputs, no_grad, same, skip
from torch.nn import functional

from moebius.lowering.errors import DEFECT
from moebius.lowering.experts import by_row, proof, rewrite

E = 4
SEEN = []
BY_ROWS: list[bool] = []  # not empty: the experts are none of the operator's


def note(value):
    SEEN.append(value)


def before(rows):
    """What is done with an expert's rows first."""
    return functional.layer_norm(rows, rows.shape[-1:]) if BY_ROWS else rows


def expert(rows, e, gate_up, down):
    rows = before(rows)
    gate, up = functional.linear(rows, gate_up[e]).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down[e])


def route(logits):
    weights, index = torch.topk(torch.softmax(logits, -1), 2)
    return weights, index


def layer(iteration, source=E, before=None):
    """A layer whose iteration is ``iteration(e, out, x, index, weights, gate_up, down)``. before: changes the
    captures."""

    def function(x, logits, gate_up, down):
        weights, index = route(logits)
        captures = [torch.zeros_like(x), x, index, weights, gate_up, down]
        loop(iteration, source, (), before(*captures) if before else captures)
        return captures[0] * 1.0

    return function


def plain(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    out.index_add_(0, token, expert(x[token], e, gate_up, down) * weights[token, slot, None])
    return ()


# ----------------------------------------------------------------------------------------------------------------------
# One wrong loop a step
# ----------------------------------------------------------------------------------------------------------------------


def with_an_unknown_function(e, out, x, index, weights, gate_up, down):
    call(note, 1)
    return plain(e, out, x, index, weights, gate_up, down)


def counting_usage(x, logits, gate_up, down):
    usage = x.new_zeros(3)

    def iteration(e, usage, *captures):
        usage.add_(1.0)
        return plain(e, *captures)

    weights, index = route(logits)
    out = torch.zeros_like(x)
    loop(iteration, E, (), (usage, out, x, index, weights, gate_up, down))
    return out * 1.0, usage * 1.0


def adding_twice(e, out, x, index, weights, gate_up, down):
    plain(e, out, x, index, weights, gate_up, down)
    return plain(e, out, x, index, weights, gate_up, down)


def reading_its_own_sum(x, logits, gate_up, down):
    weights, index = route(logits)
    out = x * 0.5
    loop(plain, E, (), (out, out.view(-1, x.shape[1]), index, weights, gate_up, down))
    return out * 1.0


def skipping_an_expert(e, out, x, index, weights, gate_up, down):
    skip(e == 1)
    return plain(e, out, x, index, weights, gate_up, down)


def rows_by_slot(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    out.index_add_(0, token, expert(x[slot], e, gate_up, down) * weights[token, slot, None])
    return ()


def other_positions(x, logits, gate_up, down):
    def iteration(e, out, x, index, other, weights, gate_up, down):
        token, slot = torch.where(index == e)
        elsewhere, _ = torch.where(other == e)
        out.index_add_(0, elsewhere, expert(x[token], e, gate_up, down) * weights[token, slot, None])
        return ()

    weights, index = route(logits)
    out = torch.zeros_like(x)
    loop(iteration, E, (), (out, x, index, index.flip(0), weights, gate_up, down))
    return out * 1.0


def weights_turned(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    out.index_add_(0, token, expert(x[token], e, gate_up, down) * weights[slot, token, None])
    return ()


def two_inputs(x, logits, gate_up, down):
    def iteration(e, out, x, y, index, weights, gate_up, down):
        token, slot = torch.where(index == e)
        gate, _ = functional.linear(x[token], gate_up[e]).chunk(2, dim=-1)
        _, up = functional.linear(y[token], gate_up[e]).chunk(2, dim=-1)
        out.index_add_(0, token, functional.linear(functional.silu(gate) * up, down[e]) * weights[token, slot, None])
        return ()

    weights, index = route(logits)
    out = torch.zeros_like(x)
    loop(iteration, E, (), (out, x, torch.flip(x, (0,)), index, weights, gate_up, down))
    return out * 1.0


def bias_on_the_gate_alone(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    gate, up = functional.linear(x[token], gate_up[e]).chunk(2, dim=-1)
    bias = gate_up.sum(2)[:, :5]
    out.index_add_(
        0, token, functional.linear(functional.silu(gate + bias[e]) * up, down[e]) * weights[token, slot, None]
    )
    return ()


def part_of_a_weight(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    gate, up = functional.linear(x[token], gate_up[e]).chunk(2, dim=-1)
    rows = functional.linear((functional.silu(gate) * up)[:, :3], down[e][:, :3])
    out.index_add_(0, token, rows * weights[token, slot, None])
    return ()


def more_rows_than_routed(x, logits, gate_up, down):
    weights, index = route(logits[:5])
    out = torch.zeros_like(x)
    loop(plain, E, (), (out, x, index, weights, gate_up, down))
    return out * 1.0


def down_in_other_precision(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    gate, up = functional.linear(x[token], gate_up[e]).chunk(2, dim=-1)
    a = (functional.silu(gate) * up * weights[token, slot, None]).float()
    out.index_add_(0, token, functional.linear(a, down[e].float()).double())
    return ()


def cut_off_gate(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    gate, up = functional.linear(before(x[token]), gate_up[e]).chunk(2, dim=-1)
    with no_grad():
        gate = functional.silu(gate)
    out.index_add_(0, token, functional.linear(gate * up, down[e]) * weights[token, slot, None])
    return ()


def mask_changed(x, logits, gate_up, down):
    def iteration(e, out, x, mask, weights, gate_up, down):
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, expert(x[token], e, gate_up, down) * weights[token, slot, None])
        return ()

    weights, index = route(logits)
    mask = functional.one_hot(index, num_classes=E).permute(2, 1, 0)
    mask.mul_(mask.flip(2))
    out = torch.zeros_like(x)
    loop(iteration, E, (), (out, x, mask, weights, gate_up, down))
    return out * 1.0


def tokens_changed(x, logits, gate_up, down):
    """Autograd's loop keeps copies of the rows."""
    x = x * 1.0
    out = layer(plain)(x, logits, gate_up, down)
    x.add_(1)
    return out


def a_token_twice(x, logits, gate_up, down):
    def iteration(e, out, x, index, weights, gate_up, down):
        token, slot = torch.where(index == e)
        rows = expert(x[token], e, gate_up, down) * weights[token, slot, None]
        call(operator.setitem, out, token, out[token] + rows)
        return ()

    weights, index = route(logits)
    index = torch.argmax(logits, -1)[:, None].expand(-1, 2).contiguous()  # both slots go to one expert
    out = torch.zeros_like(x)
    loop(iteration, E, (), (out, x, index, weights, gate_up, down))
    return out * 1.0


def hits_of_one_token(x, logits, gate_up, down):
    def iteration(row, out, x, mask, weights, gate_up, down):
        slot, token = torch.where(mask[row[0]])
        out.index_add_(0, token, expert(x[token], row[0], gate_up, down) * weights[token, slot, None])
        return ()

    weights, index = route(logits)
    mask = functional.one_hot(index, num_classes=E).permute(2, 1, 0)
    hit = functional.one_hot(index[:1], num_classes=E).permute(2, 1, 0).sum((1, 2)).nonzero()
    out = torch.zeros_like(x)
    loop(iteration, hit, (), (out, x, mask, weights, gate_up, down))
    return out * 1.0


WRONG = {
    "nothing else written": counting_usage,
    "one sum": layer(adding_twice),
    "own storage": reading_its_own_sum,
    "every expert once": hits_of_one_token,
    "harmless skips": layer(skipping_an_expert),
    "rows by token": layer(rows_by_slot),
    "one selection": other_positions,
    "tokens once": a_token_twice,
    "routing weights": layer(weights_turned),
    "same input": two_inputs,
    "whole weights": layer(part_of_a_weight),
    "sizes": more_rows_than_routed,
    "one precision": layer(down_in_other_precision),
    "gradients": layer(cut_off_gate),
    "routing unchanged": mask_changed,
    "kept unchanged": tokens_changed,
}


def one_routed_token(x, logits, gate_up, down):
    """Its row would be added to all rows of the result."""
    weights, index = route(logits[:1])
    out = torch.zeros_like(x)
    loop(plain, E, (), (out, x, index, weights, gate_up, down))
    return out * 1.0


def nothing_projected(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    out.index_add_(0, token, before(x[token]) * down[:, :, 0][e] * weights[token, slot, None])
    return ()


def numbers_by_rows_in_another_layout(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    rows = functional.dropout((gate_up[e] @ before(x[token]).T).T, 0.5)
    out.index_add_(0, token, functional.linear(rows[:, :5], down[e]) * weights[token, slot, None])
    return ()


def with_an_unhit_shared_bias(x, logits, gate_up, down):
    """Where all iterations are skipped, what they share has no gradient."""

    def iteration(e, out, x, index, weights, gate_up, down, bias):
        token, slot = torch.where(index == e)
        skip(token.numel() == 0)
        rows = functional.layer_norm(x[token], (6,), bias)
        out.index_add_(0, token, functional.linear(rows, down[e] @ gate_up[e][:5]) * weights[token, slot, None])
        return ()

    weights, index = route(logits)
    out = torch.zeros_like(x)
    loop(iteration, E, (), (out, x, index, weights, gate_up, down))
    return out * 1.0


OF_ROWS = {
    **{name: WRONG[name] for name in by_row.SHARED if name in WRONG},
    "one place": other_positions,
    "sizes": one_routed_token,
}


@pytest.fixture(autouse=True)
def loops_alone(monkeypatch):
    """The proof of loops by itself: experts that are replaced within iterations that stay need few of its steps."""
    monkeypatch.setattr(rewrite, "takes_blocks", lambda work: False)


@pytest.fixture
def of_rows(monkeypatch):
    """Experts that the operator has not got."""
    monkeypatch.setattr(rewrite, "takes_rows", lambda work: True)
    BY_ROWS.append(True)
    yield
    BY_ROWS.clear()


def without(monkeypatch, name):
    for module in (proof, by_row):
        monkeypatch.setattr(module, "STEPS", tuple(step for step in module.STEPS if step.name != name))


def differs(function, inputs):
    """Whether what lowering makes of the function is not what the function computes."""
    try:
        made = lowered(function, inputs)
        (region,) = made.regions
        if not region.lowered and DEFECT in region.refusal:
            return True  # the operator itself does not take what the step let through
        assert region.lowered, f"another step refuses too: {region.refusal}"
        return not same(function, made.fn, inputs)
    except (RuntimeError, ValueError, TypeError):
        return True


def is_needed(name, function, monkeypatch):
    """Asserts that this step refuses the function's loop, and no other."""
    if name == "whole weights":  # (as projections of rows, or written out, it is right)
        monkeypatch.setattr(rewrite, "takes_rows", lambda work: False)
        monkeypatch.setattr(rewrite, "replace_written_out", lambda *_: None)
    inputs = make_inputs(tokens=2 if name == "routing weights" else 13)
    (region,) = lowered(function, inputs).regions
    assert not region.lowered and region.refusal.startswith(f"{name}: "), region.refusal
    assert same(function, lowered(function, inputs).fn, inputs)
    without(monkeypatch, name)
    assert differs(function, inputs), f"without the step {name!r} the loop is lowered and right: the step is not needed"


@pytest.mark.faults  # (without a step of the proof the operator may refuse)
@pytest.mark.parametrize("name", WRONG)
def test_the_step_and_only_the_step_refuses(name, monkeypatch):
    is_needed(name, WRONG[name], monkeypatch)


@pytest.mark.parametrize("name", OF_ROWS)
def test_the_step_for_projections_of_rows(name, monkeypatch, of_rows):
    is_needed(name, OF_ROWS[name], monkeypatch)


def test_experts_of_rows(of_rows):
    """The loop that all the others are made of."""
    function, inputs = layer(plain), make_inputs()
    made = lowered(function, inputs)
    assert made.regions[0].lowered, made.regions[0].refusal
    assert same(function, made.fn, inputs)


def test_a_bias_on_the_gate_alone():
    """The other has zeros."""
    function, inputs = layer(bias_on_the_gate_alone), make_inputs()
    made = lowered(function, inputs)
    assert made.regions[0].lowered, made.regions[0].refusal
    assert same(function, made.fn, inputs)


@pytest.mark.parametrize("iterations", [2, E - 1])
def test_the_first_experts_alone(iterations):
    """Rows of the others go nowhere, and their weights get zeros for gradients."""
    function, inputs = layer(plain, source=iterations), make_inputs()
    made = lowered(function, inputs)
    (region,) = made.regions
    assert region.lowered and region.num_experts == iterations, region.refusal
    assert same(function, made.fn, inputs)


def test_known_operators(monkeypatch):
    function, inputs = layer(with_an_unknown_function), make_inputs()
    made = lowered(function, inputs)
    assert made.regions[0].refusal.startswith("known operators: ") and "note" in made.regions[0].refusal
    SEEN.clear()
    made.fn(*inputs)
    assert len(SEEN) == E
    without(monkeypatch, "known operators")
    made = lowered(function, inputs)
    SEEN.clear()
    made.fn(*inputs)
    assert not SEEN, "without the step, the function's effect would be lost"


def test_an_unknown_function_may_write(monkeypatch):
    def iteration(e, out, x, *others):
        call(note, x)
        return plain(e, out, x, *others)

    (region,) = lowered(layer(iteration), make_inputs()).regions
    assert "note may change a tensor in place" in region.refusal


def switched_off_for_good(e, out, x, index, weights, gate_up, down):
    plain(e, out, x, index, weights, gate_up, down)
    call(torch._C._set_grad_enabled, False)
    return ()


def added_without_gradients(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    y = expert(x[token], e, gate_up, down) * weights[token, slot, None]
    with no_grad():
        out.index_add_(0, token, y)
    return ()


def scaled_by_integers(e, out, x, index, weights, gate_up, down):
    token, slot = torch.where(index == e)
    out.index_add_(0, token, expert(x[token], e, gate_up, down) * index[token, slot, None])
    return ()


@pytest.mark.parametrize(
    "iteration,step",
    [
        (switched_off_for_good, "gradients"),
        (added_without_gradients, "gradients"),
        (scaled_by_integers, "routing weights"),
    ],
)
def test_more_refusals(iteration, step):
    (region,) = lowered(layer(iteration), make_inputs()).regions
    assert region.refusal.startswith(f"{step}: "), region.refusal


def given_routing(classes, skipped):
    """A layer that takes its routing index as an input. classes: of one_hot; skipped: the expert to skip, or None."""

    def iteration(row, out, x, mask, weights, gate_up, down):
        e = row[0]
        if skipped is not None:
            skip(e == skipped)
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, expert(x[token], e, gate_up, down) * weights[token, slot, None])
        return ()

    def function(x, index, weights, gate_up, down):
        mask = functional.one_hot(index, num_classes=classes).permute(2, 1, 0)
        hit = mask.sum((1, 2)).nonzero()
        out = torch.zeros_like(x)
        loop(iteration, hit, (), (out, x, mask, weights, gate_up, down))
        return out * 1.0

    return function


def routed(*experts):
    x, logits, gate_up, down = make_inputs(tokens=len(experts))
    index = torch.tensor([[e, 0] for e in experts])
    return x, index, logits[:, :2].exp(), gate_up, down


def test_allowed_routing(monkeypatch):
    """One-hot with two classes beyond the weights, one of them skipped: the other raises in eager."""
    function = given_routing(E + 2, E)
    (region,) = lowered(function, routed(1, 2, 3)).regions
    assert region.refusal.startswith("allowed routing: "), region.refusal
    with pytest.raises(IndexError):
        function(*routed(1, 2, E + 1))
    without(monkeypatch, "allowed routing")
    lowered(function, routed(1, 2, 3)).fn(*routed(1, 2, E + 1))  # would not raise


@pytest.mark.parametrize("classes,skipped,top", [(E, None, E), (E + 1, E, E + 1), (E + 1, None, E)])
def test_a_routing_index_beyond_the_experts_raises_as_in_eager(classes, skipped, top):
    function = given_routing(classes, skipped)
    made = lowered(function, routed(1, 2, 3))
    assert made.regions[0].lowered, made.regions[0].refusal
    allowed = routed(0, top - 1, 1)
    assert same(function, made.fn, allowed)
    for wrong in (routed(0, top, 1), routed(0, -1, 1)):
        with pytest.raises((IndexError, RuntimeError)):
            function(*wrong)
        with pytest.raises((IndexError, RuntimeError), match="routing index"):
            made.fn(*wrong)


def test_indices_that_topk_made_are_not_checked():
    made = lowered(layer(plain), make_inputs())
    assert not any("assert" in str(node.target) for node in made.gm.graph.nodes)


def test_every_step_is_here():
    apart = {"known operators", "allowed routing", "nothing else drawn"}
    apart |= {"routed again", "a weight's factor"}  # (test_routed_again.py; test_grouped.py, in float16)
    assert {step.name for step in proof.STEPS} == {*WRONG, *apart}

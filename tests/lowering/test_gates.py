"""Gates that are none of the named activations become expressions of the operator: clamps, limits, offsets."""

import pytest
import torch
from expert_loops import loop, lowered, make_inputs, same
from torch.nn import functional

from moebius.kernels import experts
from moebius.lowering.experts.rows_written import KERNEL

E = 4


def gpt_oss(gate, up):
    gate, up = gate.clamp(min=None, max=0.7), up.clamp(min=-0.7, max=0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


GATES = {
    "gpt-oss": gpt_oss,
    "clamped silu": lambda g, u: functional.silu(g).clamp(max=0.3) * u.clamp(-0.4, 0.4),
    "both halves through tanh": lambda g, u: torch.tanh(g) * torch.tanh(u) / 2.0,
    "sum": lambda g, u: functional.relu(g) + functional.gelu(u, approximate="tanh") ** 2 - 0.1,
    "softplus": lambda g, u: functional.softplus(g) * u,
    "root": lambda g, u: torch.sqrt(torch.abs(g)) * u,
}
UNSAID = {
    "arc tangent": lambda g, u: torch.atan(g) * u,
    "mixed rows": lambda g, u: functional.silu(g) * u.flip(0),
    "a power": lambda g, u: torch.abs(g) ** 1.7 * u,
}


def layer(gate_function, interleaved):
    def iteration(e, out, x, index, weights, gate_up, down):
        token, slot = torch.where(index == e)
        h = functional.linear(x[token], gate_up[e])
        first, second = (h[..., ::2], h[..., 1::2]) if interleaved else (h[..., :5], h[..., 5:])
        y = functional.linear(gate_function(first, second), down[e])
        out.index_add_(0, token, y * weights[token, slot, None])
        return ()

    def run(x, logits, gate_up, down):
        weights, index = torch.topk(torch.softmax(logits, -1), 2)
        out = torch.zeros_like(x)
        loop(iteration, E, (), (out, x, index, weights, gate_up, down))
        return out

    return run


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_lowered_with_its_layout(name, interleaved):
    inputs = make_inputs()
    function = layer(GATES[name], interleaved)
    made = lowered(function, inputs)
    assert all(region.lowered for region in made.regions), [region.refusal for region in made.regions]
    (call,) = [node for node in made.gm.graph.nodes if node.target is experts]
    assert call.kwargs["gate"] == ("interleaved" if interleaved else "concat")
    assert same(function, made.fn, inputs, 1e-10)


@pytest.mark.parametrize("name", UNSAID)
def test_what_cannot_be_said_is_no_gate_of_the_operator(name):
    """What is known to keep to rows is computed between the projections; the rest stays a loop."""
    inputs = make_inputs()
    function = layer(UNSAID[name], False)
    made = lowered(function, inputs)
    assert made.regions[0].kernel == (KERNEL if name == "a power" else "loop")
    assert same(function, made.fn, inputs, 1e-12)

"""The loop of MixtralExperts.forward (transformers 5.23, eager experts), as capture hands it over."""

import torch
from expert_loops import captured, leaves, loop, lowered, make_inputs, no_grad, same, skip
from torch import nn
from torch.nn import functional

from moebius.kernels import experts

E = 4


def iteration(expert_idx, final, mask, hidden, gate_up_proj, down_proj, weights):
    expert_idx = expert_idx[0]
    skip(expert_idx == E)
    top_k_pos, token_idx = torch.where(mask[expert_idx])
    current = hidden[token_idx]
    gate, up = nn.functional.linear(current, gate_up_proj[expert_idx]).chunk(2, dim=-1)
    current = functional.silu(gate) * up
    current = nn.functional.linear(current, down_proj[expert_idx])
    current = current * weights[token_idx, top_k_pos, None]
    final.index_add_(0, token_idx, current.to(final.dtype))
    return ()


def mixtral(x, logits, gate_up, down):
    weights, index = torch.topk(torch.softmax(logits, -1), 2)
    weights = weights / weights.sum(-1, keepdim=True)
    final = torch.zeros_like(x)
    with no_grad():
        mask = nn.functional.one_hot(index, num_classes=E + 1)
        mask = mask.permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    loop(iteration, hit, (), (final, mask, x, gate_up, down, weights))
    return final * 1.0


def operators(gm):
    return [node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


def test_lowered_and_equal():
    inputs = make_inputs()
    made = lowered(mixtral, inputs)
    (region,) = made.regions
    assert region.lowered, region.refusal
    assert (region.num_experts, region.top_k, region.kernel) == (E, 2, "cpu")
    assert region.idiom == "for row in nonzero(…)"
    targets = operators(made.gm)
    assert targets.count(experts) == 1
    assert nn.functional.one_hot not in targets and torch.where not in targets
    assert targets.count(torch._C._set_grad_enabled) <= 1  # whether the graph began with gradients is not known to it
    assert same(mixtral, made.fn, inputs)


def test_where_and_saved_bytes():
    made = lowered(mixtral, make_inputs())
    (region,) = made.regions
    assert region.file == __file__
    with open(__file__) as file:
        assert "loop(iteration, hit" in file.read().splitlines()[region.line - 1]
    tokens, width, narrow, top_k, double = 13, 6, 5, 2, 8
    bound = tokens * width + 2 * tokens * top_k * narrow
    assert bound * double <= region.saved_bytes <= (bound + 2 * tokens * top_k + E + 1) * double


def test_captured_graph_is_left_alone():
    inputs = make_inputs()
    graph = captured(mixtral, *leaves(inputs))
    before = str(graph.gm.graph)
    from moebius.lowering import LoweringOptions, lower

    lower(graph, LoweringOptions())
    assert str(graph.gm.graph) == before
    assert same(mixtral, graph.gm, inputs)


def routed_inside(x, router, gate_up, down):
    return mixtral(x, functional.linear(x, router), gate_up, down)


def test_symbolic_batch():
    def inputs(tokens):
        x, _, gate_up, down = make_inputs(tokens=tokens, seed=tokens)
        return x, torch.linspace(-1, 1, E * 6, dtype=x.dtype).reshape(E, 6), gate_up, down

    made = lowered(routed_inside, inputs(13), dynamic=(0,))
    (region,) = made.regions
    assert region.lowered, region.refusal
    assert region.saved_bytes is None
    for tokens in (13, 2, 40):
        assert same(routed_inside, made.fn, inputs(tokens))

"""Loops over a tensor's rows become one node; what such a node cannot say is a graph break. Same results always."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, explain
from moebius.lowering import expert_loop

E, K, T, D, N = 4, 2, 10, 6, 5


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up = torch.nn.Parameter(torch.randn(E, 2 * N, D) * 0.3)
        self.down = torch.nn.Parameter(torch.randn(E, D, N) * 0.3)
        self.router = torch.nn.Linear(D, E, bias=False)
        self.log = []

    def route(self, x):
        weights, index = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        mask = torch.nn.functional.one_hot(index, E).permute(2, 1, 0)
        return weights, index, mask, torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()

    def one(self, e, rows):
        gate, up = torch.nn.functional.linear(rows, self.gate_up[e]).chunk(2, dim=-1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, self.down[e])


def plain(m, x):
    weights, _, mask, hit = m.route(x)
    out = torch.zeros_like(x)
    for row in hit:
        e = row[0]
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, m.one(e, x[token]) * weights[token, slot, None])
    return out


def with_continue(m, x):
    weights, _, mask, hit = m.route(x)
    out = torch.zeros_like(x)
    for row in hit:
        e = row[0]
        if e == 2:
            continue
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, m.one(e, x[token]) * weights[token, slot, None])
    return out


def with_guarded_body(m, x):
    weights, _, mask, hit = m.route(x)
    out = torch.zeros_like(x)
    for row in hit:
        e = row[0]
        slot, token = torch.where(mask[e])
        if (weights[token, slot] > 0.3).any():
            out.index_add_(0, token, m.one(e, x[token]) * weights[token, slot, None])
    return out


def carried(m, x):
    weights, _, mask, hit = m.route(x)
    out = x * 0
    for row in hit:
        slot, token = torch.where(mask[row[0]])
        out = out.index_add(0, token, m.one(row[0], x[token]) * weights[token, slot, None])
    return out


def iterations_depend(m, x):
    weights, _, mask, hit = m.route(x)
    out = torch.zeros_like(x)
    for row in hit:
        slot, token = torch.where(mask[row[0]])
        out.index_add_(0, token, m.one(row[0], x[token] + out[token]) * weights[token, slot, None])
    return out


def changes_a_list(m, x):
    weights, _, mask, hit = m.route(x)
    out, seen = torch.zeros_like(x), []
    for row in hit:
        slot, token = torch.where(mask[row[0]])
        seen.append(row)
        out.index_add_(0, token, m.one(row[0], x[token]) * weights[token, slot, None])
    m.log = seen
    return out + len(seen)


def leaves_early(m, x):
    weights, _, mask, hit = m.route(x)
    out = torch.zeros_like(x)
    for row in hit:
        if row[0] == 2:
            break
        slot, token = torch.where(mask[row[0]])
        out.index_add_(0, token, m.one(row[0], x[token]) * weights[token, slot, None])
    return out


def reads_the_last_row(m, x):
    _, _, _, hit = m.route(x)
    row = x[0]
    for row in hit:  # noqa: B007
        pass
    return row * 2 + x.sum().long()


def counts(m, x):
    _, _, _, hit = m.route(x)
    n = 0
    for _row in hit:
        n += 1
    return x * n


ONE_GRAPH = [plain, with_continue, with_guarded_body, carried, iterations_depend]
GATHERS = [changes_a_list]  # each expert's iteration is a branch of its own
BREAKS = [leaves_early, reads_the_last_row, counts]


def outcome(function, x):
    model = Experts().double()
    x = x.clone().requires_grad_()
    out = function(model, x)
    if out.requires_grad:
        (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), x.grad, [p.grad for p in model.parameters()]


@pytest.mark.share(9)
@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize("function", ONE_GRAPH + GATHERS + BREAKS, ids=lambda f: f.__name__)
def test_output_and_every_gradient(function, backend):
    captured = capture(function, backend=backend)
    for seed in range(3):
        x = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(outcome(captured, x), outcome(function, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("function", ONE_GRAPH, ids=lambda f: f.__name__)
def test_the_loop_is_one_node_of_one_graph(function):
    report = explain(function, backend="eager")(Experts(), torch.randn(T, D))
    assert not report.breaks
    (graph,) = report.graphs
    assert sum(n.target is expert_loop for n in graph.gm.graph.nodes) == 1
    (region,) = report.expert_regions
    assert region.file == __file__ and not region.lowered


def test_only_what_is_proven_is_lowered():
    lowered = {}
    for function in ONE_GRAPH:
        (region,) = explain(function)(Experts(), torch.randn(T, D)).expert_regions
        lowered[function.__name__] = region.lowered
        assert region.lowered or region.refusal
    assert lowered["plain"] and lowered["carried"]
    assert not lowered["with_guarded_body"] and not lowered["iterations_depend"]


@pytest.mark.parametrize("function", GATHERS, ids=lambda f: f.__name__)
def test_what_an_iteration_appends_is_no_break(function):
    report = explain(function)(Experts(), torch.randn(T, D))
    assert not report.breaks and [region.lowered for region in report.expert_regions] == [True]


@pytest.mark.parametrize("function", BREAKS, ids=lambda f: f.__name__)
def test_what_the_node_cannot_say_is_a_break_with_its_reason(function):
    report = explain(function)(Experts(), torch.randn(T, D))
    assert report.breaks and all(b.reason and b.hint for b in report.breaks)


def test_transformers_mixtral_is_one_graph_with_every_loop_lowered():
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).train()
    ids = torch.randint(64, (2, 12))

    def loss(model, ids):
        return model(input_ids=ids, labels=ids).loss

    report = explain(loss)(model, ids)
    assert len(report.graphs) == 1 and not report.breaks
    assert [r.lowered for r in report.expert_regions] == [True, True]
    assert [(r.num_experts, r.top_k) for r in report.expert_regions] == [(4, 2), (4, 2)]
    torch.testing.assert_close(report.result, loss(model, ids))


def on_one_line(m, x):
    """Two accesses to locals on one line are one instruction of 3.13's."""
    hit, w, out = (x.sum(-1) > 0).nonzero()[:, 0], x.sum(0), torch.zeros_like(x)
    for e in hit:
        t = x[e]; w = w * 0.5 + t  # fmt: skip  # noqa: E702
        out.index_add_(0, e[None], w[None])
    return out


def test_what_a_iteration_reads_and_replaces_on_one_line():
    captured = capture(on_one_line)
    for seed in range(3):
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(captured(None, x), on_one_line(None, x))
    report = explain(on_one_line)(None, x)
    (graph,) = report.graphs
    assert graph.gm.graph.find_nodes(op="call_function", target=expert_loop)
    assert not report.breaks and not report.expert_regions  # (it runs no expert)

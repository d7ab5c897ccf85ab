"""Experts as batched products become the operator where every row keeps to one expert, and equal eager with it; what
only looks like them stays as it was written, and the report says at which line and why."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
from module_spellings import MODULES
from spellings import SPELLINGS
from table import Runner
from torch.nn.functional import one_hot, silu
from torch.profiler import ProfilerActivity, profile

import moebius
from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import blocks, rewrite, weight_concat
from moebius.lowering.experts.batched_iterations import Batched

E, T, K, D, N = 4, 4, 2, 6, 5  # as many tokens as experts: axes cannot be told apart by their sizes
BATCHED = {"einsum_dispatch": 1, "bmm_over_experts": 1, "einsum_over_capacity": 1, "gathered_weights": 1,
           "gathered_per_slot": 2}  # fmt: skip


@pytest.mark.parametrize("name", BATCHED)
def test_lowered_at_its_line(name):
    runner = Runner(name)
    assert not runner.call(0)
    regions = report_of(captured_of(runner.captured)).expert_regions
    assert len(regions) == BATCHED[name]
    lines, first = inspect.getsourcelines({**SPELLINGS, **MODULES}[name].function)
    for region in regions:
        assert region.lowered, region.refusal
        assert region.idiom in ("experts as batched products", "weights gathered for each row")
        assert region.file.endswith("spellings.py")
        assert any(product in lines[region.line - first] for product in ("bmm", "einsum"))


def test_without_the_search_nothing_is_lowered(monkeypatch):
    monkeypatch.setattr(rewrite, "batched_layers", lambda graph: [])
    runner = Runner("bmm_over_experts")
    assert not runner.call(0)
    assert not report_of(captured_of(runner.captured)).expert_regions


def test_a_capacity_of_one_is_a_size_that_varies():
    """Its hint is 1 where the size becomes symbolic; rows are experts times capacity all the same."""
    torch.manual_seed(0)
    router, up, down = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((E, D), (E, D, N), (E, N, D)))

    def layer(x):
        capacity = max(1, (x.shape[0] + E - 1) // E)
        index = (x @ router.T).argmax(-1)
        place = ((one_hot(index, E).cumsum(0) - 1) * one_hot(index, E)).sum(-1)
        kept = place < capacity
        rows = x.new_zeros(E, capacity, D)
        rows[index[kept], place[kept]] = x[kept]
        rows = torch.bmm(torch.relu(torch.bmm(rows, up)), down)
        out = torch.zeros_like(x)
        out[kept] = rows[index[kept], place[kept]]
        return out

    captured = capture(layer)
    for tokens in (4, 3, 2, 9, 5, 12, 1):
        x = torch.randn(tokens, D, dtype=torch.float64)
        (mine, theirs) = (torch.autograd.grad(f(x).square().sum(), (up, down)) for f in (captured, layer))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    regions = report_of(captured_of(captured)).expert_regions
    assert regions and all(region.lowered for region in regions), [region.refusal for region in regions]


def test_another_backend_keeps_its_products():
    runner = Runner("gathered_weights", backend="aot_eager")
    assert not runner.call(0, exact=True)
    (region,) = report_of(captured_of(runner.captured)).expert_regions
    assert not region.lowered and "backend aot_eager" in region.refusal


def test_gathered_weights_are_not_kept_for_backward():
    """Eager keeps a copy of its expert's weights for each slot; the operator keeps rows."""
    e, t, k, d, n = 4, 32, 2, 16, 24

    def layer(x, index, up, down):
        return torch.einsum("tkn,tknd->td", silu(torch.einsum("td,tkdn->tkn", x, up[index])), down[index])

    torch.manual_seed(0)
    leaves = [torch.randn(s, requires_grad=True) for s in ((t, d), (e, d, n), (e, n, d))]
    x, up, down = leaves
    index = torch.randint(e, (t, k))
    own = {tensor.untyped_storage().data_ptr() for tensor in (*leaves, index)}

    def saved(function):
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = function(x, index, up, down)
        return out, sum(size for place, size in kept.items() if place not in own)

    captured = capture(layer)
    captured(x, index, up, down)
    (mine, less), (plain, more) = saved(captured), saved(layer)
    torch.testing.assert_close(mine, plain)
    assert more >= 2 * t * k * d * n * 4  # both gathered weights
    assert less < more / 10


# ----------------------------------------------------------------------------------------------------------------------
# Near-variants
# ----------------------------------------------------------------------------------------------------------------------


def compare(layer, lowered, *, tokens=T, word=""):
    """Captured as plain, result and gradients, on three batches. lowered: whether all regions are."""
    moebius.reset()
    captured = capture(layer)
    for seed in range(3):
        outcomes = []
        for function in (captured, layer):
            generator = torch.Generator().manual_seed(seed)
            shapes = ((tokens, D), (E, D), (E, D, N), (E, D, N), (E, N, D))
            made = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
            out = function(*made)
            out.square().sum().backward()
            outcomes.append([out, *(leaf.grad for leaf in made)])
        for mine, plain in zip(*outcomes, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-11)
    regions = report_of(captured_of(captured)).expert_regions
    if lowered is None:
        assert not regions
    else:
        assert regions and all(region.lowered == lowered for region in regions), [r.refusal for r in regions]
        for region in regions:
            assert lowered or (word in region.refusal and "test_batched.py:" in region.refusal), region.refusal


def route(x, router):
    return (x @ router.T).softmax(-1).topk(K, -1)


def gathered_einsum(x, router, w1, w3, w2):
    weight, index = route(x, router)
    h = silu(torch.einsum("td,tkdn->tkn", x, w1[index])) * torch.einsum("td,tkdn->tkn", x, w3[index])
    return (torch.einsum("tkn,tknd->tkd", h, w2[index]) * weight[..., None]).sum(1)


def gathered_matmul(x, router, w1, w3, w2):
    weight, index = route(x, router)
    rows = x[:, None, None, :]
    h = silu(rows @ w1[index]) * (rows @ w3[index])
    return ((h @ w2[index]).squeeze(2) * weight[..., None]).sum(1)


def columns(x, router, w1, w3, w2):
    weight, index = route(x, router)
    chosen = index.flatten()
    rows = x.repeat_interleave(K, 0).unsqueeze(-1)
    h = silu(w1[chosen].mT @ rows) * (w3[chosen].transpose(1, 2) @ rows)
    y = torch.bmm(w2.index_select(0, chosen).mT, h)[:, :, 0]
    return (y.view(-1, K, D) * weight[..., None]).sum(1)


def weighted_inside(x, router, w1, w3, w2):
    weight, index = route(x, router)
    h = silu(torch.einsum("td,tkdn->tkn", x, w1[index])) * torch.einsum("td,tkdn->tkn", x, w3[index])
    return torch.einsum("tkn,tknd->td", h * weight.unsqueeze(-1), w2[index])


def numbers_from_the_end(x, router, w1, w3, w2):
    weight, index = route(x, router)
    index = index - E
    h = silu(torch.einsum("td,tkdn->tkn", x, w1[index])) * torch.einsum("td,tkdn->tkn", x, w3[index])
    return torch.einsum("tkn,tknd,tk->td", h, w2[index], weight)


def numbers_computed(x, router, w1, w3, w2):
    index = (x.detach()[:, :K] * 3).long().abs() % E
    h = silu(torch.einsum("td,tkdn->tkn", x, w1[index])) * torch.einsum("td,tkdn->tkn", x, w3[index])
    return torch.einsum("tkn,tknd->td", h, w2[index])


def all_einsum(x, router, w1, w3, w2):
    h = silu(torch.einsum("td,edn->etn", x, w1)) * torch.einsum("td,edn->etn", x, w3)
    return torch.einsum("etn,end,te->td", h, w2, (x @ router.T).softmax(-1))


def all_matmul(x, router, w1, w3, w2):
    h = silu(x @ w1) * torch.matmul(x, w3)
    return ((h @ w2) * (x @ router.T).softmax(-1).T.unsqueeze(-1)).sum(0)


def experts_last(x, router, w1, w3, w2):
    h = silu(torch.einsum("td,edn->tne", x, w1)) * torch.einsum("td,edn->tne", x, w3)
    return torch.einsum("tne,end->tde", h, w2).mul((x @ router.T).softmax(-1)[:, None]).sum(-1)


def rows_of_one_feature(x, router, w1, w3, w2):
    rows = x[:, :1].expand(-1, D)
    h = silu(torch.einsum("td,edn->etn", rows, w1)) * torch.einsum("td,edn->etn", rows, w3)
    return torch.einsum("etn,end->td", h, w2) + router.sum()


def with_biases(x, router, w1, w3, w2):
    gates = (x @ router.T).softmax(-1)
    h = silu(torch.baddbmm(w2[:, None, :, 0], x.expand(E, -1, -1), w1)) * (x @ w3 + w2[:, :, 1].unsqueeze(1))
    return (torch.bmm(h, w2) * gates.T[:, :, None]).sum(0)


def axes_moved(x, router, w1, w3, w2):
    h = torch.einsum("td,edn->ten", x, w1)
    h = (silu(h) * torch.einsum("td,edn->etn", x, w3).transpose(0, 1)).permute(1, 0, 2)
    return torch.bmm(h, w2).sum(0) + router.sum()


def result_changed(x, router, w1, w3, w2):
    y = torch.bmm(silu(x @ w1) * (x @ w3), w2)
    y[1:] *= 0.5
    return y.sum(0) + router.sum()


RIGHT = (result_changed, gathered_einsum, gathered_matmul, columns, weighted_inside, numbers_from_the_end,
         numbers_computed, all_einsum, all_matmul, rows_of_one_feature, experts_last, with_biases,
         axes_moved)  # fmt: skip


@pytest.mark.share(12)
@pytest.mark.parametrize("layer", RIGHT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tokens", [T, 7])
def test_right_ones_are_lowered(layer, tokens):
    compare(layer, True, tokens=tokens)


def other_experts(x, router, w1, w3, w2):
    weight, index = route(x, router)
    h = silu(torch.einsum("td,tkdn->tkn", x, w1[index])) * torch.einsum("td,tkdn->tkn", x, w3[index])
    return torch.einsum("tkn,tknd,tk->td", h, w2[(index + 1) % E], weight)


def bias_of_a_token(x, router, w1, w3, w2):
    """router is [E, D] and there are as many tokens as experts."""
    h = silu(x @ w1) * (x @ w3) + router[:, :N]
    return torch.bmm(h, w2).sum(0)


def gate_and_up_of_other_experts(x, router, w1, w3, w2):
    weight, index = route(x, router)
    h = silu(torch.einsum("td,tkdn->tkn", x, w1[index])) * torch.einsum("td,tkdn->tkn", x, w3[index.flip(1)])
    return torch.einsum("tkn,tknd,tk->td", h, w2[index], weight)


def tokens_as_experts(x, router, w1, w3, w2):
    h = silu(torch.einsum("td,edn->etn", x, w1)) * torch.einsum("td,edn->etn", x, w3)
    return torch.bmm(h.transpose(0, 1), w2).sum(0) + router.sum()


def experts_as_tokens(x, router, w1, w3, w2):
    h = silu(torch.einsum("td,edn->ten", x, w1)) * torch.einsum("td,edn->etn", x, w3)
    return torch.einsum("ten,end->td", h, w2) + router.sum()


def norm_over_tokens(x, router, w1, w3, w2):
    h = silu(x @ w1) * (x @ w3)
    return torch.bmm(h.softmax(1), w2).sum(0) + router.sum()


def norm_over_experts(x, router, w1, w3, w2):
    h = silu(x @ w1) * (x @ w3)
    return torch.bmm(h - h.mean(0), w2).sum(0) + router.sum()


def experts_rolled(x, router, w1, w3, w2):
    h = silu(x @ w1) * (x @ w3)
    return torch.bmm(h.roll(1, 0), w2).sum(0) + router.sum()


def first_experts_features(x, router, w1, w3, w2):
    h = silu(x @ w1) * (x @ w3)
    return torch.bmm(h + h[:1], w2).sum(0) + router.sum()


def changed_in_place(x, router, w1, w3, w2):
    h = silu(x @ w1) * (x @ w3)
    h.mul_(2.0)
    return torch.bmm(h, w2).sum(0) + router.sum()


def rows_changed_between(x, router, w1, w3, w2):
    """(With gradients it would be an error.)"""
    with torch.no_grad():
        rows = x * 1.0
        h = silu(rows @ w1) * (rows @ w3)
        rows.add_(1.0)
        y = torch.bmm(h, w2).sum(0)
    return (x + y + rows).sum() + sum(w.sum() for w in (router, w1, w3, w2))


def gathered_before_a_change(x, router, w1, w3, w2):
    with torch.no_grad():
        weight, index = route(x, router)
        first = w1[index]
        w1.add_(1.0)
        h = silu(torch.einsum("td,tkdn->tkn", x, first)) * torch.einsum("td,tkdn->tkn", x, w3[index])
        y = torch.einsum("tkn,tknd->td", h, w2[index])
        w1.sub_(1.0)
    return (x + y).sum() + sum(w.sum() for w in (router, w1, w3, w2))


def cut_off(x, router, w1, w3, w2):
    return torch.bmm(silu(x @ w1).detach() * (x @ w3), w2).sum(0) + router.sum()


def experts_summed_first(x, router, w1, w3, w2):
    h = torch.einsum("td,edn->tn", x, w1) * torch.einsum("td,edn->tn", x, w3)
    return torch.einsum("tn,end->td", h, w2) + router.sum()


WRONG = {
    other_experts: "", gate_and_up_of_other_experts: "different experts", tokens_as_experts: "other experts",
    experts_as_tokens: "different experts or tokens", norm_over_tokens: "keeps to rows", norm_over_experts: "",
    experts_rolled: "keeps to rows", first_experts_features: "", changed_in_place: "",
    rows_changed_between: "changes between", gathered_before_a_change: "changes between",
    cut_off: "",
    experts_summed_first: "adds rows up",
}  # fmt: skip


@pytest.mark.parametrize("layer", WRONG, ids=lambda f: f.__name__)
def test_subtly_wrong_ones_are_not_lowered(layer):
    compare(layer, False, word=WRONG[layer])


def test_rows_of_tokens_beside_those_of_experts():
    """The operator has no word for them; they are rows that are known."""
    compare(bias_of_a_token, True, tokens=E)


@pytest.mark.parametrize("layer", [rows_changed_between, gathered_before_a_change])
def test_without_the_check_of_writes_they_would_be_wrong(layer, monkeypatch):
    monkeypatch.setattr(Batched, "check_between", lambda self: None)
    with pytest.raises((AssertionError, RuntimeError)):
        compare(layer, True)


def test_without_the_check_of_experts_they_would_be_wrong(monkeypatch):
    kept = Batched.of_experts

    def first_alone(self, *given):
        if not self.index_dims:
            kept(self, *given)

    monkeypatch.setattr(Batched, "of_experts", first_alone)
    with pytest.raises(AssertionError):
        compare(gate_and_up_of_other_experts, True)


def test_an_index_beyond_the_experts_raises_as_in_eager():
    def layer(x, index, w1, w2):
        return torch.einsum("tn,tnd->td", silu(torch.einsum("td,tdn->tn", x, w1[index])), w2[index])

    torch.manual_seed(0)
    x, w1, w2 = (torch.randn(s, requires_grad=True) for s in ((T, D), (E, D, N), (E, N, D)))
    captured = capture(layer)
    index = torch.tensor([0, -1, 3, -4])
    torch.testing.assert_close(captured(x, index, w1, w2), layer(x, index, w1, w2))
    assert report_of(captured_of(captured)).expert_regions[0].lowered
    with pytest.raises(IndexError):
        captured(x, torch.tensor([0, 1, E, 2]), w1, w2)


def test_gate_and_up_in_one_weight():
    def layer(x, router, w1, w3, w2):
        weight, index = route(x, router)
        both = torch.cat([w1, w3], 2).transpose(1, 2)
        rows = torch.einsum("td,end->ten", x, both.contiguous())
        gate, up = rows[..., :N], rows.narrow(-1, N, N)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        return torch.einsum("ten,end,te->td", silu(gate) * up, w2, gates)

    compare(layer, False, word="not understood")  # the weights are made in the step: nothing says whose they are


# ----------------------------------------------------------------------------------------------------------------------
# What is no expert layer
# ----------------------------------------------------------------------------------------------------------------------


def heads(x, wq, wk, wo):
    """Attention whose projections have an axis of heads."""
    q, k = torch.einsum("td,hde->hte", x, wq), torch.einsum("td,hde->hte", x, wk)
    rows = torch.bmm(torch.bmm(q, k.mT).softmax(-1), k)
    return torch.einsum("hte,hed->td", rows, wo)


def one_product(x, wq, wk, wo):
    """A batched product alone is no expert."""
    return torch.einsum("td,hde->the", x, wq).relu().sum(1)


def lookup(x, wq, wk, wo):
    """Weights gathered for one product, by the places of rows."""
    index = torch.arange(len(x)) % 3
    return torch.bmm(x[:, None], wq[index])[:, 0]


@pytest.mark.parametrize("function", [heads, one_product, lookup], ids=lambda f: f.__name__)
def test_no_region_where_there_are_no_experts(function):
    torch.manual_seed(0)
    x, *weights = (torch.randn(*s, requires_grad=True) for s in ((5, 6), (3, 6, 4), (3, 6, 4), (3, 4, 6)))
    captured = capture(function)
    torch.testing.assert_close(captured(x, *weights), function(x, *weights))
    assert not report_of(captured_of(captured)).expert_regions


def test_the_iterations_of_a_lowered_loop_are_no_products_of_all_experts():
    def iterations(x, up, down):
        index = (x.detach()[:, 0] * 2).long().abs() % 3
        out, start, order = torch.zeros_like(x), 0, index.argsort(stable=True)
        for expert, count in enumerate(index.bincount(minlength=3).tolist()):
            rows = order[start : start + count]
            out.index_add_(0, rows, (x[rows] @ up[expert]).relu() @ down[expert])
            start += count
        return out

    torch.manual_seed(0)
    x, *weights = (torch.randn(*s, requires_grad=True) for s in ((9, 6), (3, 6, 4), (3, 4, 6)))
    captured = capture(iterations)
    torch.testing.assert_close(captured(x, *weights), iterations(x, *weights))
    (region,) = report_of(captured_of(captured)).expert_regions
    assert "batched" not in region.idiom


# ----------------------------------------------------------------------------------------------------------------------
# How they run
# ----------------------------------------------------------------------------------------------------------------------


def dispatched(x, router, w1, w3, w2):
    """GShard's buffers [E, C, D]."""
    weight, index = route(x, router)
    slots = one_hot(index, E).to(x.dtype)
    place = (slots.flatten(0, 1).cumsum(0).view_as(slots) - 1).long().clamp(0, C - 1)
    mask = slots[..., None] * one_hot(place, C).to(x.dtype)
    rows = torch.einsum("tkec,td->ecd", mask, x)
    h = silu(torch.einsum("ecd,edn->ecn", rows, w1)) * torch.einsum("ecd,edn->ecn", rows, w3)
    return torch.einsum("tkec,tk,ecd->td", mask, weight, torch.einsum("ecn,end->ecd", h, w2))


def bmm_over_buffers(x, router, w1, w3, w2):
    rows = torch.einsum("te,td->etd", (x @ router.T).softmax(-1), x)
    return torch.bmm(silu(torch.bmm(rows, w1)) * torch.bmm(rows, w3), w2).sum(0)


C = 3


def operators_of(layer) -> Counter:
    """Which operators a captured call and its backward run."""
    moebius.reset()
    captured = capture(layer)
    torch.manual_seed(0)
    made = [torch.randn(s, requires_grad=True) for s in ((T, D), (E, D), (E, D, N), (E, D, N), (E, N, D))]
    captured(*made).sum().backward()
    for leaf in made:
        leaf.grad = None
    assert [region.lowered for region in report_of(captured_of(captured)).expert_regions] == [True]
    with profile(activities=[ProfilerActivity.CPU]) as found:
        captured(*made).sum().backward()
    return Counter({event.key: event.count for event in found.key_averages()})


@pytest.mark.parametrize("layer", [dispatched, bmm_over_buffers], ids=lambda f: f.__name__)
def test_rows_in_equal_blocks_run_as_batched_products(layer, monkeypatch):
    """Nothing is gathered or sorted, nor added up by token, and each product is one for all experts."""
    products = ("aten::bmm", "aten::baddbmm_")
    count = operators_of(layer)
    others = ("sort", "index_add", "SeparateExperts", "moebius::experts")
    assert not any(name in key for key in count for name in others)
    monkeypatch.setattr(weight_concat, "experts_in_order", lambda node: None)
    without = operators_of(layer)
    assert sum(count[name] - without[name] for name in products) == 3 + 3 * 2  # gate, up and down: forward, backward
    assert any("SeparateExperts" in key for key in without)


def test_weights_that_lie_the_other_way_are_not_turned_in_backward(monkeypatch):
    """The gradient of w1 [E, D, N] is written as w1 lies, where it would be turned, and copied."""

    def layer(x, router, w1, w3, w2):
        return ((silu(x @ w1) @ w2) * (x @ router.T).softmax(-1).T[..., None]).sum(0) + w3.sum()

    def copies() -> int:
        return operators_of(layer)["aten::copy_"]

    fewer = copies()
    monkeypatch.setattr(weight_concat, "is_turned", lambda weight: False)
    assert copies() > fewer


class Slots(torch.nn.Module):
    """Soft MoE: experts with parameters of their own, each on its slots [batch, slots, D] of one buffer."""

    def __init__(self):
        super().__init__()
        self.phi = torch.nn.Parameter(torch.randn(D, E, C))
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(D, N), torch.nn.GELU(), torch.nn.Linear(N, D)) for _ in range(E)
        )

    def forward(self, x):
        weight = torch.einsum("bnd,des->bnes", x, self.phi)
        slots = torch.einsum("bnd,bnes->ebsd", x, weight.softmax(1))
        rows = torch.stack([expert(own) for expert, own in zip(self.experts, slots, strict=True)])
        return torch.einsum("ebsd,bnes->bnd", rows, weight.flatten(2).softmax(-1).view_as(weight))


def test_experts_of_their_own_on_pieces_of_one_buffer(monkeypatch):
    """No piece is copied to where it is read, and what the experts give is a block of one result."""
    torch.manual_seed(0)
    model, x = Slots().double(), torch.randn(2, T, D, dtype=torch.float64)
    expected = [model(x), *torch.autograd.grad(model(x).square().sum(), list(model.parameters()))]

    def names() -> Counter:
        moebius.reset()
        captured = capture(model)
        out = captured(x)
        for mine, plain in zip([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))], expected,
                               strict=True):
            torch.testing.assert_close(mine, plain)
        assert [region.lowered for region in report_of(captured_of(captured)).expert_regions] == [True]
        with profile(activities=[ProfilerActivity.CPU]) as found:
            captured(x).sum().backward()
        return Counter({event.key: event.count for event in found.key_averages()})

    count = names()
    assert not any("SeparateExperts" in key or "NarrowBackward" in key or "SliceBackward" in key for key in count)
    assert count["EqualBlocksBackward"] == 1
    monkeypatch.setattr(blocks, "piece_of", lambda rows: rows)
    without = names()
    assert not without["EqualBlocksBackward"] and without["aten::cat"] > count["aten::cat"]

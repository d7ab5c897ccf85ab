"""What a step asks of a device: operations are those that torch counts for plain Python, bytes those of its
operators."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import moebius
from moebius.lowering.planner.hardware import DEVICES, Reached
from moebius.lowering.planner.work import Work
from moebius.lowering.roofline import METER, render
from moebius.lowering.roofline.experts import Layer, variants
from moebius.lowering.roofline.meter import bytes_of, size
from moebius.lowering.roofline.page import binding

DEVICE = DEVICES["h200"]


@pytest.fixture
def meter(monkeypatch):
    monkeypatch.setattr(METER, "on", True)
    monkeypatch.setattr(METER, "counts", [])
    return METER


class Routed(nn.Module):
    """A router, experts in a loop, a head."""

    def __init__(self, experts: int = 4, top_k: int = 2, width: int = 8, inner: int = 6):
        super().__init__()
        self.top_k = top_k
        self.router, self.head = nn.Linear(width, experts, bias=False), nn.Linear(width, 3)
        self.gate_up_EMD = nn.Parameter(torch.randn(experts, 2 * inner, width))
        self.down_EDN = nn.Parameter(torch.randn(experts, width, inner))

    def forward(self, x_TD):
        weight_TK, index_TK = torch.topk(torch.softmax(self.router(x_TD), -1), self.top_k)
        out_TD = torch.zeros_like(x_TD)
        for e in range(len(self.down_EDN)):
            token, slot = torch.where(index_TK == e)
            gate, up = F.linear(x_TD[token], self.gate_up_EMD[e]).chunk(2, dim=-1)
            h = F.linear(F.silu(gate) * up, self.down_EDN[e])
            out_TD.index_add_(0, token, h * weight_TK[token, slot, None])
        return self.head(out_TD)


def step(model, optimizer, x_TD):
    optimizer.zero_grad()
    loss = model(x_TD).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(meter, calls: int = 3, **shape):
    """Steps of a model and of its copy in plain Python, which have to be equal. Returns plain's operations in one step
    and what was counted of the graph that ran most."""
    torch.manual_seed(0)
    plain = Routed(**shape)
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (plain, ours)]
    captured = moebius.capture(step)
    for _ in range(calls):
        x_TD = torch.randn(32, 8)
        with FlopCounterMode(display=False) as counter:
            loss = step(plain, optimizers[0], x_TD)
        torch.testing.assert_close(captured(ours, optimizers[1], x_TD), loss)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    return counter.get_total_flops(), max(meter.counts, key=lambda count: count.calls)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (4, 2), (6, 3)])
def test_operations_are_those_of_plain_python(meter, experts, top_k):
    """The experts' are known by formula, all others by torch: together what torch counts for the loop."""
    flops, count = trained(meter, experts=experts, top_k=top_k)
    assert sum(one.work.flops for one in count.operations) == flops
    layers = [one for one in count.operations if one.layer is not None]
    assert [one.name for one in layers] == ["experts", "experts, backward"]
    assert {one.place for one in layers} == {0} and count.regions[0].lowered


def test_only_the_first_calls_are_counted(meter):
    _, count = trained(meter, calls=6)
    assert count.calls > 2 and len(count.seconds) == count.calls - 2


def test_nothing_is_counted_where_nobody_asked():
    before = len(METER.counts)
    moebius.capture(lambda x: x + 1)(torch.ones(2))
    assert not METER.on and len(METER.counts) == before



@pytest.mark.parametrize(("name", "call", "expected"), [
    ("add", lambda a, b: a + b, 3 * 24 * 4),
    ("add", lambda a, b: a + b[:1].expand(4, 6), (24 + 6 + 24) * 4),
    ("add_", lambda a, b: a.add_(b), 3 * 24 * 4),
    ("copy_", lambda a, b: a.copy_(b), 2 * 24 * 4),
    ("sum", lambda a, b: a.sum(), (24 + 1) * 4),
    ("cat", lambda a, b: torch.cat([a, b]), 4 * 24 * 4),
    ("embedding", lambda a, b: F.embedding(torch.tensor([1]), a), 2 * 6 * 4),
])  # fmt: skip
def test_bytes_of_an_operator(name, call, expected):
    from moebius.lowering.torch_private import DispatchMode, is_view

    seen = []

    class Look(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **kwargs or {})
            if not is_view(func):
                seen.append((func.overloadpacket.__name__, bytes_of(func.overloadpacket.__name__, args, {}, found)))
            return found

    a, b = torch.ones(4, 6), torch.ones(4, 6)
    with Look():
        call(a, b)
    assert (name, expected) in seen


def test_size_in_memory():
    assert size(torch.ones(4, 6)) == 96 and size(torch.ones(4, 1).expand(4, 6)) == 16 and size(torch.ones(0, 3)) == 0


LAYER = Layer(tokens=64, top_k=4, width=32, inner=16, up=32, experts=8, busy=8, element=2)


def test_what_would_change():
    found = dict(variants(LAYER, DEVICE))
    assert set(found) == {"save='fp8'", "save='recompute'", "precision='fp8'", "top-2", "top-8"}
    assert found["top-8"].forward().flops == 2 * LAYER.forward().flops == 4 * found["top-2"].forward().flops
    assert found["save='recompute'"].backward().flops > LAYER.backward().flops == 2 * LAYER.forward().flops
    assert LAYER.kept == 64 * 32 * 2 + 64 * 4 * 32 * 2
    assert found["save='fp8'"].kept == 64 * 32 * 2 + 64 * 4 * 32
    assert found["save='recompute'"].kept == 64 * 32 * 2
    assert found["precision='fp8'"].seconds(DEVICE) <= LAYER.seconds(DEVICE)


def test_bound():
    """Each of the three, by a work that is large in it alone."""
    assert binding(Work("dense", flops=1e15, moved=1.0, calls=1), DEVICE, None) == "products"
    assert binding(Work("dense", flops=1.0, moved=1e12, calls=1), DEVICE, None) == "memory"
    assert binding(Work("moves", moved=1.0, calls=1), DEVICE, None) == "starting operators"


def test_share_by_rows():
    reached = Reached(grouped=0.5, by_rows=((1, 0.1), (16, 0.5), (256, 0.9)))
    assert reached.grouped_at(0.5) == 0.1 and reached.grouped_at(4) == pytest.approx(0.3)
    assert reached.grouped_at(16) == 0.5 and reached.grouped_at(1e6) == 0.9 and Reached().grouped_at(7) == 0.5
    assert Reached(fresh=0.25, large=100).written([50, 200]) == 600 and Reached().written([1e12]) == 0


def test_the_answer(meter):
    trained(meter, calls=4)
    text = render(meter.counts, DEVICE)
    assert "On H200 SXM: 989.4 TFLOP/s (bf16)" in text and "test_roofline.py:" in text
    assert "1 layer: 32 tokens, top-2 of 4, 8 wide, experts 6" in text
    for word in ("other products", "everything else", "the step", "save='recompute'", "top-4"):
        assert word in text
    assert "measured" not in text and "measured:" in render(meter.counts, DEVICE, here=True)


def test_a_backend_of_others_says_what_cannot_be_seen(meter):
    captured = moebius.capture(lambda x: (x @ x).sum(), backend=lambda gm, examples: gm.forward)
    for _ in range(2):
        captured(torch.ones(4, 4))
    assert "leave out backend=" in render(meter.counts, DEVICE)


def test_no_graph():
    assert "No graph ran" in render([], DEVICE)

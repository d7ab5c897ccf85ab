"""Weights that lowering joined (gate with up, experts with parameters of their own): on a CPU the operator takes the
parts, elsewhere they are joined, and joined again for backward. What is kept, and gradients, with plain PyTorch as the
oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import weight_concat


@pytest.fixture(params=["parts", "joined"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the operator takes weights of several tensors: as they lie, or joined, as on a GPU."""
    if request.param == "joined":
        monkeypatch.setattr(weight_concat, "takes_parts", lambda *given: False)
    return request.param


T, D, N, E, K = 24, 16, 32, 6, 2


class Apart(nn.Module):
    """Gate, up and down are three tensors of all experts, the first two transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Parameter(torch.randn(E, D, N)), nn.Parameter(torch.randn(E, D, N))
        self.w2 = nn.Parameter(torch.randn(E, N, D))

    def run(self, e: int, rows: Tensor) -> Tensor:
        return (functional.silu(rows @ self.w1[e]) * (rows @ self.w3[e])) @ self.w2[e]


class Modules(nn.Module):
    """Each expert has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(D, 2 * N) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(N, D) for _ in range(E))

    def run(self, e: int, rows: Tensor) -> Tensor:
        gate, up = self.up[e](rows).chunk(2, -1)
        return self.down[e](functional.silu(gate) * up)


def layer(x: Tensor, router: Tensor, experts: nn.Module) -> Tensor:
    weight, index = (x @ router).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, experts.run(e, x[token]) * weight[token, slot, None])
    return out


def given(kind: type[nn.Module]) -> tuple[Tensor, Tensor, nn.Module]:
    torch.manual_seed(3)
    experts = kind().double()
    return torch.randn(T, D, dtype=torch.float64, requires_grad=True), torch.randn(D, E, dtype=torch.float64), experts


def elements_kept(call: object, parameters: list[Tensor]) -> int:
    known = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()  # type: ignore[operator]
    return sum(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in kept.values())


@pytest.mark.parametrize("kind", [Apart, Modules])
def test_joined_weights_are_not_kept(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    x, router, experts = given(kind)
    weights = sum(p.numel() for p in experts.parameters() if p.dim() > 1)
    captured = capture(layer)
    captured(x, router, experts)
    assert report_of(captured_of(captured)).expert_regions[0].lowered
    kept = elements_kept(lambda: captured(x, router, experts), [*experts.parameters(), x, router])
    assert kept < T * K * (2 * N + 4) + 8 * T * E < weights  # pre-activations and routing
    monkeypatch.setattr(weight_concat, "applies", lambda options: False)
    plain = capture(layer)
    plain(x, router, experts)
    assert elements_kept(lambda: plain(x, router, experts), [*experts.parameters(), x, router]) > kept + weights // 2


@pytest.mark.parametrize("kind", [Apart, Modules])
@pytest.mark.parametrize("inside", ["nothing", "checkpoint", "hooks"])
def test_gradients(kind: type[nn.Module], inside: str) -> None:
    results = []
    for make in (capture, lambda function: function):
        x, router, experts = given(kind)
        step = make(layer)
        if inside == "checkpoint":
            out = checkpoint(step, x, router, experts, use_reentrant=False)
        elif inside == "hooks":  # what outer hooks make of the parts comes back
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
                out = step(x, router, experts)
        else:
            out = step(x, router, experts)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in experts.parameters())])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [Apart, Modules])
def test_weights_changed_before_backward(kind: type[nn.Module]) -> None:
    """Eager raises there, and so do we: the weights that are joined again must be those of the forward."""
    for make in (capture, lambda function: function):
        x, router, experts = given(kind)
        loss = make(layer)(x, router, experts).sum()
        with torch.no_grad():
            next(experts.parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("kind", [Apart, Modules])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_parts(kind: type[nn.Module], frozen: int) -> None:
    """A part that asks for no gradient gets none, and the others theirs."""
    results = []
    for make in (capture, lambda function: function):
        x, router, experts = given(kind)
        list(experts.parameters())[frozen].requires_grad_(False)
        make(layer)(x, router, experts).square().sum().backward()
        results.append([x.grad, *(p.grad for p in experts.parameters())])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


def test_parts_are_not_copied(form: str) -> None:
    """With parts, no tensor as large as the up-projections of all experts is made, in forward or in backward."""
    x, router, experts = given(Modules)
    captured = capture(layer)
    captured(x, router, experts).sum().backward()
    experts.zero_grad()
    largest = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        captured(x, router, experts).sum().backward()
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            largest = max(largest, event.nbytes())
    stacked = sum(layer.weight.numel() * 8 for layer in experts.up)
    assert (largest < stacked) == (form == "parts")

"""The experts' weights change between forward and backward, in every way that there is.

Autograd's loop keeps some tensors as they were and looks at others again; the grouped operator keeps less. Three steps
of each, beside plain Python: losses, gradients, weights, and whether backward raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moebius import capture
from moebius.api import captured_of
from moebius.kernels import experts, experts_op, separate_weights
from moebius.lowering.experts import proof

EXPERTS, D, N, TOKENS, TOP = 4, 8, 12, 32, 2


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.2)


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, N), nn.Linear(D, N), nn.Linear(N, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Direct(nn.Module):
    """Multiplies with the parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = parameter(D, N), parameter(D, N), parameter(N, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (F.silu(x @ self.gate) * (x @ self.up)) @ self.down


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = parameter(N, D), parameter(N, D), parameter(D, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (F.silu(x @ self.gate.T) * (x @ self.up.t())) @ self.down.T


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = parameter(D, 2 * N), parameter(N, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.gate_up).chunk(2, -1)
        return torch.mm(F.silu(gate) * up, self.down)


class Modules(nn.Module):
    """An expert of its own module each."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.experts = nn.ModuleList(kind() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(TOP)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
        return out


class Whole(nn.Module):
    """All experts' weights in one parameter."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned, self.router = turned, nn.Linear(D, EXPERTS, bias=False)
        self.gate_up = parameter(EXPERTS, D, 2 * N) if turned else parameter(EXPERTS, 2 * N, D)
        self.down = parameter(EXPERTS, N, D) if turned else parameter(EXPERTS, D, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(TOP)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for e in mask.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[e])
            gate_up = self.gate_up[e] if self.turned else self.gate_up[e].T
            gate, up = (x[token] @ gate_up).chunk(2, -1)
            h = F.silu(gate) * up
            y = h @ self.down[e] if self.turned else F.linear(h, self.down[e])
            out.index_add_(0, token, y * weight[token, slot, None])
        return out


class Viewed(nn.Module):
    """All experts' weights in one matrix, viewed as a weight for each in the iteration (DBRX)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.gate_up, self.down = parameter(EXPERTS * 2 * N, D), parameter(EXPERTS * D, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(TOP)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for e in mask.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[e])
            gate, up = F.linear(x[token], self.gate_up.view(EXPERTS, 2 * N, D)[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down.view(EXPERTS, D, N)[e])
            out.index_add_(0, token, y * weight[token, slot, None])
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linears": lambda: Modules(Linears),
    "direct": lambda: Modules(Direct),
    "turned": lambda: Modules(Turned),
    "fused": lambda: Modules(Fused),
    "whole": lambda: Whole(False),
    "whole, turned": lambda: Whole(True),
    "viewed": Viewed,
}


# ----------------------------------------------------------------------------------------------------------------------
# Changes
# ----------------------------------------------------------------------------------------------------------------------


def data_set(weights: list[nn.Parameter]) -> None:
    for p in weights:
        p.data = p.data * 1.5 + 0.01


def one_set(weights: list[nn.Parameter]) -> None:
    weights[-1].data = weights[-1].data * 3


def set_and_set_back(weights: list[nn.Parameter]) -> None:
    before = weights[0].data
    weights[0].data = before.clone() + 1
    weights[0].data = before


def data_copied(weights: list[nn.Parameter]) -> None:
    for p in weights:
        p.data.copy_(p.data * 1.5 + 0.01)


def data_multiplied(weights: list[nn.Parameter]) -> None:
    for p in weights:
        p.data.mul_(1.5)


def copied(weights: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for p in weights:
            p.copy_(p * 1.5)


def detached(weights: list[nn.Parameter]) -> None:
    weights[0].detach().mul_(1.5)


def storage_set(weights: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for p in weights:
            p.set_(p.clone() * 1.5)


def nothing(weights: list[nn.Parameter]) -> None: ...


CHANGES = [data_set, one_set, set_and_set_back, data_copied, data_multiplied, copied, detached, storage_set, nothing]
SILENT = (data_copied, data_multiplied)  # into the storage, where no version of autograd's tells


def whole_step(model: nn.Module, change: Callable[..., None], **options: Any) -> tuple[Any, Any]:
    weights = [p for name, p in model.named_parameters() if "router" not in name]

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = (model(x) ** 2).sum()
        change(weights)
        loss.backward()
        return loss

    step = capture(step, **options) if options else step
    return step, step


def forward_alone(model: nn.Module, change: Callable[..., None], **options: Any) -> tuple[Any, Any]:
    weights = [p for name, p in model.named_parameters() if "router" not in name]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    run = capture(forward, **options) if options else forward

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = (run(x) ** 2).sum()
        change(weights)
        loss.backward()
        return loss

    return step, run


def three(make: Any, name: str, change: Callable[..., None], **options: Any) -> tuple[list[Any], Any]:
    """What three steps leave; and the captured callable."""
    torch.manual_seed(0)
    model = MODELS[name]()
    step, captured = make(model, change, **options)
    found: list[Any] = []
    for seed in range(3):
        x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        try:
            found.append(step(x).detach())
        except RuntimeError as error:
            found.append(type(error).__name__)
        if isinstance(found[-1], torch.Tensor):  # (how far backward came before it failed is nobody's business)
            found += [x.grad, *(p.grad for p in model.parameters())]
        found += [p.detach().clone() for p in model.parameters()]
    return found, captured


def same(ours: list[Any], plain: list[Any]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and a == b
        for a, b in zip(ours, plain, strict=True)
    )  # fmt: skip


def regions(captured: Any) -> list[Any]:
    owner = captured_of(captured)
    assert owner is not None
    return [region for member in owner.family() for segment in member.segments for region in segment.regions]


@pytest.mark.share(6)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_in_the_step(name: str, change: Callable[..., None]) -> None:
    plain, _ = three(whole_step, name, change)
    ours, captured = three(whole_step, name, change, backend="moebius")
    assert same(ours, plain)
    if change is nothing:
        assert all(region.lowered for region in regions(captured))


@pytest.mark.share(14)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_outside_of_the_captured_forward(name: str, change: Callable[..., None]) -> None:
    plain, _ = three(forward_alone, name, change)
    ours, captured = three(forward_alone, name, change, backend="moebius")
    assert all(region.lowered for region in regions(captured))
    if name in ("direct", "fused") and change in (data_set, one_set):
        assert "RuntimeError" in ours  # one formula cannot follow both halves of what autograd does
    elif change in SILENT:
        assert ours[0] == "RuntimeError" != plain[0]  # the operator has not kept what the router's gradient is made of
    else:
        assert same(ours, plain)


def test_tokens_that_change_before_backward() -> None:
    """``h += experts(h)`` is fine with autograd, where nothing else kept h."""

    def make(is_captured: bool) -> Any:
        torch.manual_seed(0)
        model, first = Whole(False), nn.Linear(D, D)
        model.router.requires_grad_(False)

        def step(x: torch.Tensor) -> torch.Tensor:
            h = first(x)
            with torch.no_grad():
                weight, chosen = model.router(h).softmax(-1).topk(TOP)
            out = torch.zeros_like(h)
            for e in range(EXPERTS):
                token, slot = torch.where(chosen == e)
                gate, up = (h[token] @ model.gate_up[e].T).chunk(2, -1)
                y = (F.silu(gate) * up) @ model.down[e].T
                out.index_add_(0, token, y * weight[token, slot, None])
            h += out
            h.sum().backward()
            return h.detach()

        run = capture(step) if is_captured else step
        result = [run(torch.ones(TOKENS, D) * seed + torch.arange(D)) for seed in range(2)]
        return result + [p.grad for p in (*first.parameters(), model.gate_up, model.down)]

    assert same(make(True), make(False))


# ----------------------------------------------------------------------------------------------------------------------
# Switched off
# ----------------------------------------------------------------------------------------------------------------------


def test_without_the_step_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "STEPS", tuple(s for s in proof.STEPS if s.name != "kept unchanged"))
    for name in ("linears", "whole"):
        plain, _ = three(whole_step, name, data_multiplied)
        ours, _ = three(whole_step, name, data_multiplied, backend="moebius")
        assert not same(ours, plain)


def test_without_the_weights_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate_weights, "as_they_are", list)
    monkeypatch.setattr(experts_op, "as_they_are", list)
    for name in ("linears", "whole"):
        plain, _ = three(forward_alone, name, data_set)
        ours, _ = three(forward_alone, name, data_set, backend="moebius")
        assert not same(ours, plain)


def one_row(weights: list[nn.Parameter]) -> None:
    weights[-1].data.flatten()[-1].add_(1)


@pytest.mark.parametrize("name", MODELS)
def test_one_number_that_is_another(name: str) -> None:
    """In tensors of this size each number is looked at."""
    ours, _ = three(forward_alone, name, one_row, backend="moebius")
    assert "RuntimeError" in ours


def test_without_looking_at_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate_weights, "refuse_changed", lambda *_: None)
    monkeypatch.setattr(experts_op, "refuse_changed", lambda *_: None)
    for name in ("linears", "whole"):
        plain, _ = three(forward_alone, name, data_multiplied)
        ours, _ = three(forward_alone, name, data_multiplied, backend="moebius")
        assert "RuntimeError" not in ours and not same(ours, plain)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_change(name: str, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain Python's ``x[token]`` are copies; the operator keeps x as it came."""
    if not looks:
        monkeypatch.setattr(separate_weights, "refuse_changed", lambda *_: None)
        monkeypatch.setattr(experts_op, "refuse_changed", lambda *_: None)

    def gradients(is_captured: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model, leaf = MODELS[name](), torch.randn(TOKENS, D, requires_grad=True)
        x = leaf * 1
        out = (capture(model) if is_captured else model)(x)
        x.data.mul_(1.5)
        out.square().sum().backward()
        return [p.grad for key, p in model.named_parameters() if "router" not in key]

    plain = gradients(False)
    if looks:
        with pytest.raises(RuntimeError, match="tokens"):
            gradients(True)
    else:
        assert not same(gradients(True), plain)


@pytest.mark.parametrize("what", ["x", "weight"])
def test_the_operators_arguments_change(what: str) -> None:
    torch.manual_seed(0)
    leaves = dict(x=torch.randn(TOKENS, D), weight=torch.rand(TOKENS, TOP))
    given = {key: leaf.requires_grad_() * 1 for key, leaf in leaves.items()}
    index = torch.rand(TOKENS, EXPERTS).topk(TOP)[1]
    out = experts(given["x"], parameter(EXPERTS, 2 * N, D), parameter(EXPERTS, D, N), index, given["weight"])
    given[what].data.mul_(1.5)
    with pytest.raises(RuntimeError, match="routing weights"):
        out.sum().backward()


def test_hooks_on_saved_tensors_that_round_are_no_change() -> None:
    """What they give back lies elsewhere: backward goes on with it, as autograd does."""
    torch.manual_seed(0)
    sizes = (TOKENS, D), (EXPERTS, 2 * N, D), (EXPERTS, D, N), (TOKENS, TOP)
    x, gate_up, down, weight = (torch.randn(size, requires_grad=True) for size in sizes)
    index = torch.rand(TOKENS, EXPERTS).topk(TOP)[1]

    def pack(t: torch.Tensor) -> torch.Tensor:
        return t.to(torch.bfloat16) if t.is_floating_point() else t

    def unpack(t: torch.Tensor) -> torch.Tensor:
        return t.float() if t.is_floating_point() else t

    def gradients(*hooks: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            out = experts(x * 1, gate_up, down, index, weight)
        return list(torch.autograd.grad(out.sum(), [x, gate_up, down, weight]))

    for rounded, exact in zip(gradients(pack, unpack), gradients(lambda t: t, lambda t: t), strict=True):
        assert not torch.equal(rounded, exact) and (rounded - exact).norm() < 0.02 * exact.norm()


def test_without_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate_weights, "refuse_other_data", lambda used: None)
    plain, _ = three(forward_alone, "direct", data_set)
    ours, _ = three(forward_alone, "direct", data_set, backend="moebius")
    assert "RuntimeError" not in ours and not same(ours, plain)

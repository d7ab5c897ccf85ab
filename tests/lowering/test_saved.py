"""What a captured plain loop keeps for backward, measured with saved-tensor hooks, parameters excluded: what its
router keeps by itself, and for the experts at most 1.02 x (T*D + 2*T*K*N) elements, whatever the gate."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import moebius

T, D, N, E, K = 256, 128, 64, 8, 4

GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu": lambda gate, up: functional.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up: functional.relu(gate) * up,
    "relu2": lambda gate, up: functional.relu(gate).square() * up,
    "sigmoid": lambda gate, up: torch.sigmoid(gate) * up,
    "clamped": lambda gate, up: gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1),
}


def route(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ router.T).softmax(-1).topk(K)


def layer(act: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def moe(x, router, gate_up, down):
        weight, chosen = route(x, router)
        mask = functional.one_hot(chosen, len(router)).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for expert in mask.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[expert])
            gate, up = (x[token] @ gate_up[expert].T).chunk(2, -1)
            out.index_add_(0, token, act(gate, up) @ down[expert].T * weight[token, slot, None])
        return out

    return moe


def kept(call: Callable[[], object], parameters: list[Tensor]) -> tuple[int, int]:
    """(elements, bytes) of the storages that backward keeps, once each, parameters excluded."""
    excluded = {p.untyped_storage().data_ptr() for p in parameters}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in excluded:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    del result
    sizes = [t.untyped_storage().nbytes() for t in found.values()]
    return sum(n // t.itemsize for n, t in zip(sizes, found.values(), strict=True)), sum(sizes)


@pytest.mark.parametrize("name", GATES)
def test_a_plain_loop_keeps_tokens_and_pre_activations(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, *parameters = (torch.randn(size, generator=generator, requires_grad=True)
                      for size in ((T, D), (E, D), (E, 2 * N, D), (E, D, N)))
    moe = layer(GATES[name])
    captured = moebius.capture(moe)
    captured(x, *parameters)
    assert moebius.stats(captured).graphs
    router, router_bytes = kept(lambda: route(x.detach().requires_grad_(), parameters[0]), parameters)
    elements, size = kept(lambda: captured(x, *parameters), parameters)
    bound = T * D + 2 * T * K * N
    # the router alone keeps the tokens too; they are counted once
    assert elements <= 1.02 * bound + router - T * D
    assert size <= 4 * (1.02 * bound - T * D) + router_bytes
    plain, _ = kept(lambda: moe(x, *parameters), parameters)
    assert plain > 2 * bound  # so the measurement does see what a loop keeps

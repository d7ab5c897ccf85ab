"""What is kept for backward, measured with saved-tensor hooks, parameters excluded: X and H and little else."""
from __future__ import annotations

import pytest
import torch
from experts_oracle import make_layer, run

from moebius.kernels import saved_elements

T, D, N, E, K = 512, 256, 128, 16, 4


def measure(layer, **options) -> tuple[int, int]:
    """(elements, bytes) of the unique storages saved by one call, parameters excluded."""
    parameters = {p.untyped_storage().data_ptr() for p in (layer.gate_up, layer.down, layer.up_bias, layer.down_bias)
                  if p is not None}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(layer, **options)
    del out
    assert layer.x.untyped_storage().data_ptr() in kept  # the caller's own tokens, and no copy of them
    sizes = [(t.untyped_storage().nbytes() // t.itemsize, t.untyped_storage().nbytes()) for t in kept.values()]
    return sum(s[0] for s in sizes), sum(s[1] for s in sizes)


@pytest.mark.parametrize("save", ["default", "fp8", "recompute"])
@pytest.mark.parametrize("gate", ["concat", "interleaved", "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_saved_elements_is_what_is_saved(gate: str, save: str, bias: bool) -> None:
    layer = make_layer(T, D, N, E, K, gate=gate, bias=bias)
    assert measure(layer, save=save)[0] == saved_elements(T, D, N, K, gate, save, num_experts=E)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity"])
def test_default_is_within_two_per_cent_of_the_bound(activation: str) -> None:
    elements, size = measure(make_layer(T, D, N, E, K, activation=activation))
    bound = T * D + 2 * T * K * N
    assert elements <= 1.02 * bound and size <= 1.02 * 4 * bound


def test_recompute_is_within_five_per_cent_of_the_tokens() -> None:
    assert measure(make_layer(T, D, N, E, K), save="recompute")[0] <= 1.05 * T * D


def test_bfloat16_halves_the_bytes() -> None:
    layer = make_layer(T, D, N, E, K, dtype=torch.bfloat16)
    assert measure(layer)[1] <= 1.02 * 2 * (T * D + 2 * T * K * N)


def test_fp8_lies_between() -> None:
    layer = make_layer(T, D, N, E, K, dtype=torch.bfloat16)
    default, fp8, recompute = (measure(layer, save=save)[1] for save in ("default", "fp8", "recompute"))
    assert recompute < fp8 and default - fp8 >= 0.48 * 2 * 2 * T * K * N  # of H's bytes, in bfloat16
    assert fp8 <= 1.05 * (2 * T * D + 2 * T * K * N * 33 / 32)  # bytes: X in bfloat16, H in one and its scales

"""What the benchmarks run: functions over many small tensors, and a tiny Mixtral with the plain loop over experts."""

from __future__ import annotations

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM


class Chain(nn.Module):
    """``count`` parameters, each used once: a call has that many tensors to check and next to nothing to compute."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def tiny_mixtral(layers: int = 2) -> tuple[nn.Module, torch.Tensor]:
    """A Mixtral of equal layers, 8 experts and top-2, random weights; and token ids, int64 [2, 16]."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
        experts_implementation="eager",
    )
    return MixtralForCausalLM(config).eval(), torch.randint(0, 128, (2, 16))

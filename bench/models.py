"""What the benchmarks run: many small modules, a tiny Mixtral, and an MoE of plain PyTorch with a loop over experts."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


class Scale(nn.Module):
    """One parameter, used once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Stack(nn.Module):
    """``used`` modules of one parameter each a call runs through, and ``unused`` ones it does not touch: there
    is much to check in a call, and next to nothing to compute."""

    def __init__(self, used: int, unused: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(used))
        self.others = nn.ModuleList(Scale() for _ in range(unused))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
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


def demo_mixtral() -> tuple[nn.Module, torch.Tensor]:
    """The Mixtral of ``examples/train_mixtral.py``, experts a Python loop; and bytes, int64 [8, 128]."""
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_mixtral.py"))
    model, *_ = example["make_training"](seed=0, steps=1)
    return model, torch.randint(0, 256, (example["BATCH"], example["LENGTH"]))


def qwen3_moe() -> tuple[nn.Module, torch.Tensor]:
    """A Qwen3-MoE of four layers, 64 experts, top-8, experts a Python loop; and token ids, int64 [8, 128]."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=128,
        use_cache=False,
        experts_implementation="eager",
    )
    return Qwen3MoeForCausalLM(config), torch.randint(0, 256, (8, 128))


class PlainMoE(nn.Module):
    """Embedding, two residual layers of 16 experts (top-2, plain loop) and a head: 3.5 million parameters."""

    def __init__(self, width: int = 128, hidden: int = 256, experts: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.layers = nn.ModuleList(MoELayer(width, hidden, experts) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(tokens)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(x_BTD)


class MoELayer(nn.Module):
    """A gated MLP for each expert, written as the loop that everybody reads first."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(width), nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * 0.02)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_TD = self.norm(x_BTD).flatten(0, 1)
        weight_TK, chosen_TK = self.router(x_TD).softmax(-1).topk(2)
        mask_EKT = F.one_hot(chosen_TK, len(self.down)).permute(2, 1, 0)
        out_TD = torch.zeros_like(x_TD)
        for expert in mask_EKT.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask_EKT[expert])
            gate, up = F.linear(x_TD[token], self.gate_up[expert]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, self.down[expert])
            out_TD.index_add_(0, token, rows * weight_TK[token, slot, None])
        return x_BTD + out_TD.view_as(x_BTD)

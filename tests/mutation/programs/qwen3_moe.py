"""transformers' Qwen3-MoE, one layer: experts are modules of a list."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ROUNDING = 1e-5  # as in mixtral.py


def f(model, ids):
    return model(input_ids=ids, labels=ids).loss


def make():
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        use_cache=False,
        experts_implementation="eager",
    )
    return f, [Qwen3MoeForCausalLM(config), torch.randint(0, 16, (2, 8))], {}

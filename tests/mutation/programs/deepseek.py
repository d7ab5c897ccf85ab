"""transformers' DeepSeek-V3, one layer of experts: groups of experts, a shared one, a buffer of biases."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

ROUNDING = 1e-5  # as in mixtral.py


def f(model, ids):
    return model(input_ids=ids, labels=ids).loss


def make():
    config = DeepseekV3Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=4,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        max_position_embeddings=32,
        use_cache=False,
        experts_implementation="eager",
    )
    return f, [DeepseekV3ForCausalLM(config), torch.randint(0, 16, (2, 8))], {}

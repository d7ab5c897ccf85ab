"""transformers' Mixtral, one layer, as users have it."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

# Autograd adds up gradients in the order of the forward's nodes; a loop over experts that became one node is in another
# place of that order than its iterations were. Sums of a few float32 numbers then round differently.
ROUNDING = 1e-5


def f(model, ids):
    return model(input_ids=ids, labels=ids).loss


def make():
    config = MixtralConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        use_cache=False,
        experts_implementation="eager",
    )
    return f, [MixtralForCausalLM(config), torch.randint(0, 16, (2, 8))], {}

"""Shapes of public MoE models, by name: what their config.json says, under the names that it says it.

Only the keys that a shape is made of (shapes.py) stand here. source: the model whose config.json it is, on the hub.
billions: of parameters, in all and of one token, as its authors state them; the tests hold the shapes to these.
"""
from __future__ import annotations

from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One model. billions: (all parameters, those of one token), None where the authors state none."""

    source: str
    billions: tuple[float, float | None]
    config: dict[str, Any]


def _mla(q_lora_rank: int | None) -> dict[str, Any]:
    """DeepSeek's attention: all of its models have these widths."""
    return dict(q_lora_rank=q_lora_rank, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


MODELS: dict[str, Entry] = {
    "mixtral-8x7b": Entry("mistralai/Mixtral-8x7B-v0.1", (46.7, 12.9), dict(
        model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, num_local_experts=8, num_experts_per_tok=2)),
    "mixtral-8x22b": Entry("mistralai/Mixtral-8x22B-v0.1", (141, 39), dict(
        model_type="mixtral", hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
        num_key_value_heads=8, vocab_size=32000, num_local_experts=8, num_experts_per_tok=2)),
    "qwen3-30b-a3b": Entry("Qwen/Qwen3-30B-A3B", (30.5, 3.3), dict(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
        num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[])),
    "qwen3-235b-a22b": Entry("Qwen/Qwen3-235B-A22B", (235, 22), dict(
        model_type="qwen3_moe", hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151936,
        num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[])),
    "qwen1.5-moe-a2.7b": Entry("Qwen/Qwen1.5-MoE-A2.7B", (14.3, 2.7), dict(
        model_type="qwen2_moe", hidden_size=2048, intermediate_size=5632, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
        vocab_size=151936, num_experts=60, num_experts_per_tok=4, decoder_sparse_step=1)),
    "qwen2-57b-a14b": Entry("Qwen/Qwen2-57B-A14B", (57, 14), dict(
        model_type="qwen2_moe", hidden_size=3584, intermediate_size=18944, moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=151936, num_experts=64, num_experts_per_tok=8, decoder_sparse_step=1)),
    "deepseek-v3": Entry("deepseek-ai/DeepSeek-V3", (671, 37), dict(
        model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
        num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, vocab_size=129280,
        n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=3, n_group=8,
        topk_group=4, **_mla(1536))),
    "deepseek-v2-lite": Entry("deepseek-ai/DeepSeek-V2-Lite", (15.7, 2.4), dict(
        model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
        num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, vocab_size=102400, n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, **_mla(None))),
    "moonlight-16b-a3b": Entry("moonshotai/Moonlight-16B-A3B", (16, 3), dict(
        model_type="deepseek_v3", hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408,
        num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, vocab_size=163840, n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1, **_mla(None))),
    "kimi-k2": Entry("moonshotai/Kimi-K2-Base", (1040, 32), dict(
        model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
        num_hidden_layers=61, num_attention_heads=64, num_key_value_heads=64, vocab_size=163840, n_routed_experts=384,
        num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, **_mla(1536))),
    "gpt-oss-20b": Entry("openai/gpt-oss-20b", (20.9, 3.6), dict(
        model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, vocab_size=201088, num_local_experts=32, num_experts_per_tok=4,
        attention_bias=True, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12)),
    "gpt-oss-120b": Entry("openai/gpt-oss-120b", (116.8, 5.1), dict(
        model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, vocab_size=201088, num_local_experts=128, num_experts_per_tok=4,
        attention_bias=True, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18)),
    "olmoe-1b-7b": Entry("allenai/OLMoE-1B-7B-0924", (6.9, 1.3), dict(
        model_type="olmoe", hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=50304, num_experts=64, num_experts_per_tok=8)),
    "phi-3.5-moe": Entry("microsoft/Phi-3.5-MoE-instruct", (41.9, 6.6), dict(
        model_type="phimoe", hidden_size=4096, intermediate_size=6400, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32064, num_local_experts=16, num_experts_per_tok=2)),
}

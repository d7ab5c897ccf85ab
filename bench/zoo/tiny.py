"""Tiny random-weight instances of every Mixture-of-Experts text model family shipped by `transformers`.

    from zoo.tiny import tiny_models
    models = tiny_models()                    # {family name: zero-argument builder}
    model, inputs = models["mixtral"]()       # a train-mode model on CPU (fp32), and a dict of example inputs
    out = model(**forward_inputs(inputs))     # forward only: out.logits
    loss = model(**inputs).loss               # with labels: a scalar loss

Depends on torch + transformers only.  Nothing is downloaded: every model is made from its config class, with the
config's fields shrunk by name.  Written against transformers 5.23.0; families are found by scanning the installed
package, so others may turn up with another version (a builder that cannot build raises when it is called).

What every builder promises:
  * the experts run through the family's own eager code, in most a Python loop over the experts that were hit
    (`config._experts_implementation = "eager"`), unless
    `experts="grouped_mm"` (or another registered name) is given; the 9 families outside that interface (dbrx, doge,
    jetmoe, llama4, longcat_flash, nllb_moe, step3p7, switch_transformers, vitpose_backbone) then raise ValueError;
  * at least one layer is a MoE layer (`count_moe_modules(model) > 0`), all weights are finite and random (seeded);
  * dropout and router jitter are off, the KV cache is off, so a forward is a deterministic function of its inputs;
  * `inputs` holds LongTensors of shape (batch, seq), with ids in [3, vocab).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 128
BATCH, SEQ = 2, 16
_MOE_CLASS = re.compile(r"^class \w*(?:Moe|MoE|Experts)\w*", re.M)

# ----------------------------------------------------------------------------------------------------------------------
# field name -> tiny value.  Only the names a config class really has are passed.
# ----------------------------------------------------------------------------------------------------------------------
FIELDS: dict[str, Any] = {
    # widths
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "d_ff": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "share_expert_dim": 32,
    "expert_ffn_hidden_size": 32,
    "prefix_dense_intermediate_size": 96,
    "moe_hidden_size": 32,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "unpadded_vocab_size": None,
    "router_hidden_size": 16,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_heads": 4,
    "num_heads": 4,
    "d_kv": 16,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "kv_channels": 16,
    "kv_n_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "num_sliding_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "gated_norm_rank": 4,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_kpool": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_chunk_size": 8,
    "keep_window_size": 8,
    "block_size": 8,
    "max_position_embeddings": 256,
    "model_max_length": 256,
    "max_seq_len": 256,
    "canvas_length": 16,
    "d_rel": 4,
    "rel_extent": 16,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    # depth
    "num_hidden_layers": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_nextn_predict_layers": 0,
    # which layers are MoE: all of them
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "decoder_sparse_step": 1,
    "encoder_sparse_step": 1,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "mlp_only_layers": [],
    "moe_layer_start_index": 0,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "is_moe": True,
    "enable_moe_block": True,
    "interleave_moe_layer_step": 1,
    "prefix_dense_sliding_window_pattern": 0,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "zero_expert_num": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 2,
    # state-space / linear-attention layers
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 8,
    "use_mamba_kernels": False,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "hc_mult": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "hc_sinkhorn_iters": 3,
    "n_layers_per_attn_res_block": 1,
    # determinism, and no cache
    "use_cache": False,
    "output_router_logits": False,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "dropout_rate": 0.0,
    "activation_dropout": 0.0,
    "hidden_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "moe_token_dropout": 0.0,
    "classifier_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

# family -> fields that replace the ones above (a value of ... leaves the config's own default)
OVERRIDES: dict[str, dict] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_ocr2": {"mlp_layer_types": ["sparse", "sparse"], "num_key_value_heads": 4},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "diffusion_gemma": {"global_head_dim": 16},
    "dots3_note": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_qk_rope_head_dim": 8,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
        "swa_head_dim": 16,
    },
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "gemma4": {"global_head_dim": 16},
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        }
    },
    "glm5_next": {"qk_rope_head_dim": 0, "qk_nope_head_dim": 16},
    "inkling2": {"unpadded_vocab_size": VOCAB},
    "jamba": {"layer_types": ...},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "qwen3_5_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        }
    },
    "step3p7": {"sliding_window": 8},
    "unlimited_ocr": {"num_key_value_heads": 4},
    "vitpose_backbone": {
        "image_size": [32, 32],
        "patch_size": [8, 8],
        "part_features": 16,
        "num_experts": 4,
        "out_indices": [2],
        "out_features": ["stage2"],
    },
    "zaya": {"num_experts_per_tok": 1},
}

# family -> (config class, model class); where absent, the class is found by name
CLASSES: dict[str, tuple[str, str]] = {
    "nllb_moe": ("NllbMoeConfig", "NllbMoeForConditionalGeneration"),
    "switch_transformers": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration"),
    "vitpose_backbone": ("VitPoseBackboneConfig", "VitPoseBackbone"),
}

# attention, where the default ("eager") does not do
ATTENTION: dict[str, str] = {}


class TextLM(torch.nn.Module):
    """A language-model head over a text model that ships without one."""

    def __init__(self, body, hidden_size: int, vocab_size: int):
        super().__init__()
        self.body = body
        self.config = body.config
        self.lm_head = torch.nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids, labels=None):
        hidden = self.body(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class VisionHead(torch.nn.Module):
    """A loss over the feature map of a vision backbone (the one family here that reads no tokens)."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.config = body.config

    def forward(self, pixel_values, dataset_index, labels=None):
        maps = self.body(pixel_values, dataset_index=dataset_index).feature_maps[-1]
        loss = None if labels is None else (maps - labels).pow(2).mean()
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=maps)


# ----------------------------------------------------------------------------------------------------------------------
def moe_families() -> list[str]:
    """Names of the model folders whose modeling file defines a MoE / experts class."""
    root = Path(transformers.__file__).parent / "models"
    return sorted(
        f.parent.name
        for f in root.glob("*/modeling_*.py")
        if f.stem == f"modeling_{f.parent.name}" and _MOE_CLASS.search(f.read_text())
    )


def _module(family: str, kind: str):
    return importlib.import_module(f"transformers.models.{family}.{kind}_{family}")


def _classes(family: str):
    conf, model = _module(family, "configuration"), _module(family, "modeling")
    if family in CLASSES:
        c, m = CLASSES[family]
        return getattr(conf, c), getattr(model, m)
    own: list[Any] = [c for n, c in vars(model).items() if inspect.isclass(c) and c.__module__ == model.__name__]
    for pattern in (r"ForCausalLM$", r"TextModel$", r"(?<!PreTrained)Model$"):
        found = [c for c in own if re.search(pattern, c.__name__)]
        if found:
            cls = found[0]
            return cls.config_class, cls
    raise LookupError(f"{family}: no text model class")


def _tiny_config(family: str, config_cls: Any) -> Any:
    default: Any = config_cls()

    def has(k):
        return k in default.__dict__ or k in config_cls.__dataclass_fields__

    kw: dict[str, Any] = {k: v for k, v in FIELDS.items() if has(k)}
    depth_key = next((k for k in ("num_hidden_layers", "n_layers", "num_layers", "decoder_layers") if has(k)), None)
    depth = kw.get(depth_key, 2) if depth_key else 2
    old_depth = getattr(default, depth_key, None) if depth_key else None

    # one layer of every kind of attention / mixer the family has, at least two layers in all
    kinds = getattr(default, "layer_types", None)
    if kinds:
        distinct = list(dict.fromkeys(kinds))
        depth = max(depth, len(distinct))
        kw["layer_types"] = (distinct * depth)[:depth]
    mlp = getattr(default, "mlp_layer_types", None)
    if mlp:
        distinct = [k for k in dict.fromkeys(mlp) if k != "dense"] or ["sparse"]
        kw["mlp_layer_types"] = (distinct * depth)[:depth]
    if depth_key:
        kw[depth_key] = depth
    # every other per-layer list is cut to the new depth
    for k, v in default.__dict__.items():
        if isinstance(v, (list, tuple)) and len(v) == old_depth and k not in kw and old_depth and old_depth > 8:
            if has(k) and k in config_cls.__dataclass_fields__:
                kw[k] = [x if not isinstance(x, int) or x < depth else depth - 1 for x in v[:depth]]

    # keep the relations between fields
    if (
        "qk_rope_head_dim" in kw
        and "head_dim" in kw
        and getattr(default, "head_dim", None) == getattr(default, "qk_rope_head_dim", 0)
    ):
        del kw["head_dim"]  # head_dim is derived from qk_rope_head_dim there
    if "kv_lora_rank" in kw and "num_key_value_heads" in kw:
        kw["num_key_value_heads"] = kw["num_attention_heads"]  # MLA: one key head per query head
    for k in (
        "n_group",
        "topk_group",
        "num_expert_group",
        "sliding_window",
        "q_lora_rank",
        "prefix_dense_intermediate_size",
    ):
        if k in kw and getattr(default, k, None) is None:
            del kw[k]
    if getattr(default, "n_group", None) == 1 or getattr(default, "num_expert_group", None) == 1:
        for k in ("n_group", "num_expert_group"):
            if k in kw:
                kw[k] = 1
    for k in ("num_nextn_predict_layers",):
        if k in kw and not getattr(default, k, None):
            del kw[k]
    for k, v in OVERRIDES.get(family, {}).items():
        if v is ...:
            kw.pop(k, None)
        else:
            kw[k] = v
    return config_cls(**kw)


def _finite_init(model):
    """Everything random and finite: some expert tensors are torch.empty until a checkpoint is loaded."""
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _name, p in model.named_parameters():
            if not p.is_floating_point():
                continue
            if p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=gen) * 0.05)
            elif not torch.isfinite(p).all() or p.abs().max() > 1e3:
                p.zero_()


def count_moe_modules(model) -> int:
    """How many modules of the model are expert collections (by class name)."""
    return sum(
        bool(
            re.search(
                r"Experts|ParallelExperts|SparseMLP|CDMoE|MoELinear|Top2|NaiveMoe|Moe(?:Block|MLP|Layer)|MoE(?:Block|MLP|Layer)?$",
                type(m).__name__,
            )
        )
        for m in model.modules()
    )


def set_experts(model, implementation: str):
    """Set the experts implementation on every config reachable from the model."""
    seen = set()
    for m in model.modules():
        c = getattr(m, "config", None)
        if c is not None and id(c) not in seen and hasattr(c, "_experts_implementation"):
            seen.add(id(c))
            c._experts_implementation = implementation


def make_inputs(model, batch: int = BATCH, seq: int = SEQ, seed: int = 0) -> dict:
    gen = torch.Generator().manual_seed(seed)
    if isinstance(model, VisionHead):
        c = model.config
        return {
            "pixel_values": torch.randn(batch, 3, *c.image_size, generator=gen),
            "dataset_index": torch.randint(0, c.num_experts, (batch,), generator=gen),
            "labels": torch.randn(1, generator=gen),
        }
    ids = torch.randint(3, VOCAB, (batch, seq), generator=gen)
    out = {"input_ids": ids, "labels": ids.clone()}
    if getattr(model.config, "is_encoder_decoder", False):
        out["decoder_input_ids"] = ids.clone()
    return out


def forward_inputs(inputs: dict) -> dict:
    return {k: v for k, v in inputs.items() if k != "labels"}


def build(family: str, experts: str = "eager", attention: str | None = None):
    """(model, example inputs) of one family."""
    torch.manual_seed(0)
    config_cls, model_cls = _classes(family)
    config = _tiny_config(family, config_cls)
    config._attn_implementation = attention or ATTENTION.get(family, "eager")
    config._experts_implementation = experts
    model = model_cls(config)
    if family == "vitpose_backbone":
        model = VisionHead(model)
    elif not re.search(r"For(CausalLM|ConditionalGeneration)$", model_cls.__name__):
        model = TextLM(model, config.hidden_size, config.vocab_size)
    _finite_init(model)
    set_experts(model, experts)
    model.train()
    assert count_moe_modules(model) > 0, f"{family}: no MoE layer in the tiny model"
    return model, make_inputs(model)


def tiny_models(experts: str = "eager") -> dict:
    """{family: zero-argument callable giving (model, example_inputs)}; see the module's docstring."""
    return {f: functools.partial(build, f, experts) for f in moe_families()}

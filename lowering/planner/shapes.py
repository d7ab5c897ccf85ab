"""The shape of a model, as far as its cost depends on it, read from a config.json of the hub."""
from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius.lowering.planner.errors import PlannerError
from moebius.lowering.planner.files import read_json
from moebius.lowering.planner.models import MODELS

# What one quantity is called in configurations, the first that is there counts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
MOST = 1 << 24  # of any number in a configuration
HEAD_NORMS = ("qwen3_moe", "olmoe")  # model types whose attention norms queries and keys, without a key that says so


@dataclass(frozen=True)
class ModelShape:
    """One model. D model width, H heads, E experts, K of them for each token, n expert width, V vocabulary.

    queries: D → all heads' queries, the ranks of low-rank steps in between; keys_values: likewise, of keys and values
    together. query_width, value_width: of one head, in the attention's two products. key_value_heads: as they are kept.
    head_norms: queries and keys are normed. windows: of each layer's attention, None: the whole sequence. dense_layers:
    the first of the layers have one MLP of dense_width; the others have E experts and shared ones of shared_width
    together. groups, group_limit: the experts of a token lie in group_limit of so many groups.
    """

    name: str
    layers: int
    width: int
    heads: int
    key_value_heads: int
    query_width: int
    value_width: int
    queries: tuple[int, ...]
    keys_values: tuple[int, ...]
    head_norms: bool
    windows: tuple[int | None, ...]
    vocabulary: int
    tied: bool
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    dense_layers: int
    dense_width: int
    groups: int = 1
    group_limit: int = 1
    gates: int = 2  # matrices into the expert's width: with a gate two

    def __post_init__(self) -> None:
        """Raises PlannerError for what cannot be."""
        if self.heads > self.width:
            raise PlannerError(f"{self.name}: {self.heads} heads of {self.width} numbers")
        if self.top_k > self.experts:
            raise PlannerError(f"{self.name}: {self.top_k} experts a token, and there are {self.experts}")
        if self.experts % self.groups or self.group_limit > self.groups:
            raise PlannerError(f"{self.name}: a token's experts in {self.group_limit} of {self.groups} groups of "
                               f"{self.experts} experts: groups have equally many, and a token has some of them")
        if self.groups > 1 and self.experts // self.groups * self.group_limit < self.top_k:
            raise PlannerError(f"{self.name}: {self.group_limit} of {self.groups} groups of {self.experts} experts "
                               f"have no {self.top_k} for a token")

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def attention_parameters(self) -> int:
        """Of one layer: queries, keys and values, and the way out."""
        found = self.heads * self.value_width * self.width
        for steps in (self.queries, self.keys_values):
            found += sum(a * b for a, b in zip(steps, steps[1:], strict=False))
        if len(self.keys_values) == 3:  # low-rank: a part of the keys has a position, and comes straight from x
            found += self.width * (self.query_width - (self.keys_values[2] // self.heads - self.value_width))
        return found

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return (self.gates + 1) * self.width * self.expert_width

    @property
    def all_expert_parameters(self) -> int:
        return self.moe_layers * self.experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def other_parameters(self) -> int:
        """All that are no routed expert's: embeddings, attention, routers, shared experts, dense layers, norms."""
        moe = self.width * self.experts + (self.gates + 1) * self.width * self.shared_width
        dense = (self.gates + 1) * self.width * self.dense_width
        norms = self.width * (2 * self.layers + 1)
        return (self.embedding_parameters + self.layers * self.attention_parameters + self.moe_layers * moe
                + self.dense_layers * dense + norms)

    @property
    def parameters(self) -> int:
        return self.other_parameters + self.all_expert_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token meets, the embedding among them."""
        return self.other_parameters + self.moe_layers * self.top_k * self.expert_parameters

    def attended(self, sequence: int) -> float:
        """Keys that a token looks at, mean over tokens and layers: a causal mask, and windows."""
        found = 0.0
        for window in self.windows:
            w = min(window or sequence, sequence)
            found += (w * (w + 1) / 2 + (sequence - w) * w) / sequence
        return found / len(self.windows)


def names() -> list[str]:
    return sorted(MODELS)


def named(name: str) -> ModelShape:
    """The shape of a model of the table. Raises PlannerError with close names."""
    key = name.lower().rpartition("/")[2]
    known = {**{k: k for k in MODELS}, **{e.source.lower().rpartition("/")[2]: k for k, e in MODELS.items()}}
    if key in known:
        return shape_of(MODELS[known[key]].config, known[key])
    close = list(dict.fromkeys(known[found] for found in difflib.get_close_matches(key, known, n=4, cutoff=0.4)))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise PlannerError(f"there is no model {name!r} in the table{hint} `moebius plan --list` has all; for any other "
                       f"model give its config.json: --config PATH")


def read_config(path: str | Path) -> ModelShape:
    """The shape that a config.json says. Raises PlannerError where it cannot be read, or has no experts."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise PlannerError(f"{path} holds no object: a config.json of a model is wanted")
    return shape_of(config, Path(path).parent.name if Path(path).stem == "config" else Path(path).stem)


def _first(config: dict[str, Any], keys: Iterable[str], what: str) -> int:
    for key in keys:
        if type(config.get(key)) is int and 0 < config[key] <= MOST:
            return config[key]
    raise PlannerError(f"the configuration has no {what}: one of {', '.join(keys)} as a whole number above 0")


def _or(config: dict[str, Any], key: str, otherwise: int) -> int:
    """A number that a configuration may leave out, or set to null or 0."""
    return _first(config, [key], key) if config.get(key) else otherwise


def shape_of(config: dict[str, Any], name: str = "") -> ModelShape:
    """The shape of a model with this config.json. Raises PlannerError for one without experts or without sizes."""
    inner = config.get("text_config")
    config = {**config, **(inner if isinstance(inner, dict) else {})}
    name = name or str(config.get("model_type", "model"))
    if not any(config.get(key) for key in EXPERTS):
        raise PlannerError(f"{name} has no experts ({', '.join(EXPERTS)}): the planner knows MoE models")

    def size(key: str) -> int:
        return _first(config, [key], key)

    width, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    expert_width, kind = _first(config, EXPERT_WIDTH, "width of an expert"), config.get("model_type")
    kv_heads = _or(config, "num_key_value_heads", heads)
    head_width = _or(config, "head_dim", width // heads)
    queries: tuple[int, ...]
    keys_values: tuple[int, ...]
    if config.get("kv_lora_rank"):
        nope, rope, value_width = size("qk_nope_head_dim"), size("qk_rope_head_dim"), size("v_head_dim")
        query_width, kv_heads = nope + rope, heads
        low = [size("q_lora_rank")] if config.get("q_lora_rank") else []
        queries = (width, *low, heads * query_width)
        keys_values = (width, size("kv_lora_rank"), heads * (nope + value_width))
    else:
        query_width = value_width = head_width
        queries, keys_values = (width, heads * head_width), (width, 2 * kv_heads * head_width)
    dense = _dense_layers(config, layers)
    count = _or(config, "n_shared_experts", _or(config, "num_shared_experts", 0))
    shared = _or(config, "shared_expert_intermediate_size", count * expert_width)
    window, kinds = _or(config, "sliding_window", 0) or None, config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) < layers):
        raise PlannerError(f"{name}: layer_types is no list of {layers} layers")
    if not config.get("use_sliding_window", True):
        window = None
    windows = tuple(window if kinds is None or kinds[i] == "sliding_attention" else None for i in range(layers))
    return ModelShape(
        name, layers, width, heads, kv_heads, query_width, value_width, queries, keys_values,
        bool(config.get("use_qk_norm", kind in HEAD_NORMS)), windows, size("vocab_size"),
        bool(config.get("tie_word_embeddings", False)), _first(config, EXPERTS, "number of experts"),
        _first(config, TOP_K, "number of experts a token"), expert_width, shared, dense,
        size("intermediate_size") if dense else 0, _or(config, "n_group", 1), _or(config, "topk_group", 1),
    )


def _dense_layers(config: dict[str, Any], layers: int) -> int:
    """How many layers have one MLP in place of experts; which they are is of no account here."""
    only, every = config.get("mlp_only_layers") or [], config.get("moe_layer_freq")
    if not isinstance(only, list):
        raise PlannerError("mlp_only_layers is no list of layers")
    step, first = _or(config, "decoder_sparse_step", 1), _or(config, "first_k_dense_replace", 0)
    if isinstance(every, list):
        dense = [i for i in range(layers) if i < len(every) and not every[i]]
    else:
        every = _or(config, "moe_layer_freq", 1)
        dense = [i for i in range(layers) if i in only or (i + 1) % step or i < first or i % every]
    if len(dense) == layers:
        raise PlannerError("the configuration leaves no layer with experts")
    return len(dense)

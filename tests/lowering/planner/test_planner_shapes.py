"""Shapes of models: against what their authors state, and against transformers' own models."""
from __future__ import annotations

import json

import pytest
import torch

from moebius.lowering.planner import PlannerError, shapes
from moebius.lowering.planner.models import MODELS


@pytest.mark.parametrize("name", sorted(MODELS))
def test_parameters_are_those_that_the_authors_state(name):
    shape, (whole, active) = shapes.named(name), MODELS[name].billions
    assert shape.parameters / 1e9 == pytest.approx(whole, rel=0.02)
    # some count the embedding of a token among its parameters and some do not
    low = shape.active_parameters - shape.vocabulary * shape.width
    assert low / 1e9 * 0.96 <= active <= shape.active_parameters / 1e9 * 1.04


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "deepseek-v3", "gpt-oss-20b",
                                  "olmoe-1b-7b", "deepseek-v2-lite"])
def test_parameters_are_those_of_transformers_model(name):
    transformers = pytest.importorskip("transformers")
    config = dict(MODELS[name].config)
    config["num_hidden_layers"] = 2 + config.get("first_k_dense_replace", 0)  # layers of a kind are alike
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    kind = config.pop("model_type")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
    found = sum(p.numel() for p in model.parameters())
    assert shapes.shape_of({**config, "model_type": kind}).parameters == pytest.approx(found, rel=1e-3)


def test_a_config_file_is_read_as_the_table_is(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": MODELS["qwen3-30b-a3b"].config}))
    shape = shapes.read_config(folder / "config.json")
    assert shape.name == "my-model"
    assert shape.parameters == shapes.named("Qwen/Qwen3-30B-A3B").parameters


@pytest.mark.parametrize("config, said", [
    ({"hidden_size": 8, "num_hidden_layers": 2}, "has no experts"),
    ({"num_experts": 4, "hidden_size": 8, "num_hidden_layers": 2}, "num_attention_heads"),
    ({**MODELS["olmoe-1b-7b"].config, "num_experts_per_tok": None}, "number of experts a token"),
    ({**MODELS["qwen3-30b-a3b"].config, "mlp_only_layers": list(range(48))}, "no layer with experts"),
])
def test_what_a_configuration_lacks_is_said(config, said):
    with pytest.raises(PlannerError, match=said):
        shapes.shape_of(config)


def test_close_names_are_offered():
    with pytest.raises(PlannerError, match="did you mean qwen3-30b-a3b"):
        shapes.named("qwen3-30b")


def test_keys_that_a_token_looks_at_by_counting():
    shape = shapes.named("gpt-oss-20b")
    for sequence in (1, 100, 300):
        seen = [[min(i + 1, w or sequence) for i in range(sequence)] for w in shape.windows]
        assert shape.attended(sequence) == pytest.approx(sum(map(sum, seen)) / sequence / shape.layers)

"""Bytes of a rank: against what torch itself holds for tiny models, saved tensors among them."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moebius import capture
from moebius.lowering.planner import hardware, routing, shapes
from moebius.lowering.planner.memory import memory
from moebius.lowering.planner.plans import Candidate, Job

# width, experts' width, experts, top k, layers, vocabulary, sequences, tokens of each
CASES = [(64, 96, 8, 2, 2, 128, 2, 32), (128, 64, 16, 4, 2, 512, 1, 128), (64, 192, 4, 1, 4, 96, 2, 48)]


def tiny(kind: str, case: tuple[int, ...]):
    transformers = pytest.importorskip("transformers")
    D, n, E, K, layers, vocabulary, _, _ = case
    sizes = dict(hidden_size=D, intermediate_size=n, num_hidden_layers=layers, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=vocabulary, num_experts_per_tok=K, use_cache=False,
                 experts_implementation="eager")
    if kind == "mixtral":
        config = transformers.MixtralConfig(num_local_experts=E, **sizes)
    else:
        config = transformers.Qwen3MoeConfig(num_experts=E, moe_intermediate_size=n, head_dim=D // 4, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def job_of(model, case: tuple[int, ...], optimizer: str) -> Job:
    shape = shapes.shape_of(model.config.to_dict(), "tiny")
    device = replace(hardware.device("h100"), element=4, rates={"fp32": 1e12}, per_node=1)
    return Job(shape, hardware.cluster(device, 1), case[6], case[7], routing.Routing(shape.experts, shape.top_k),
               optimizer=optimizer)


def bytes_of(tensors) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.share(5)
@pytest.mark.parametrize("save", ["default", "recompute"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_what_a_step_holds(kind, case, save):
    torch.manual_seed(0)
    model = tiny(kind, case)
    optimizer = torch.optim.AdamW(model.parameters())
    run = capture(model, save=save)
    tokens = torch.randint(0, case[5], case[6:])
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = run(input_ids=tokens, labels=tokens, use_cache=False)
    kept = bytes_of(t for t in saved if t.untyped_storage().data_ptr() not in known)
    out.loss.backward()
    optimizer.step()
    ours = memory(job_of(model, case, "adamw"), Candidate(1, 1, case[6], "fp32", save), float(tokens.numel()),
                  float(tokens.numel() * case[3]), 0.0)
    assert ours.weights == pytest.approx(bytes_of(model.parameters()), rel=1e-3)  # norms of heads are not counted
    assert ours.gradients == pytest.approx(bytes_of(p.grad for p in model.parameters()), rel=1e-3)
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    assert ours.optimizer == pytest.approx(bytes_of(moments), rel=1e-3)
    assert ours.saved + tokens.numel() * case[5] * 4 == pytest.approx(kept, rel=0.03)  # and the loss's log-softmax
    assert ours.loss == 3 * tokens.numel() * case[5] * 4  # that, the logits, which are returned, and their gradient

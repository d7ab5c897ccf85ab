"""Bytes that the busiest rank holds at the peak of a step: the end of forward, with all that backward needs."""
from __future__ import annotations

from dataclasses import dataclass, fields

from moebius.lowering.planner.links import BUCKET
from moebius.lowering.planner.plans import OPTIMIZERS, WEIGHTS, Candidate, Job


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. copies: 16-bit copies of weights that are held in float32. saved: for backward, by all layers;
    loss: logits and what the loss keeps of them. working: what the one layer that runs needs beside. reserved: by the
    runtime and the communication library."""

    weights: float
    gradients: float
    optimizer: float
    copies: float
    saved: float
    loss: float
    working: float
    reserved: float

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))


def held_weights(job: Job, plan: Candidate) -> tuple[float, float]:
    """(others, experts): weights that a rank takes part in computing with, before anything is split over data ranks."""
    shape = job.shape
    return shape.other_parameters, shape.moe_layers * plan.local_experts(shape) * shape.expert_parameters


def split(job: Job, plan: Candidate, what: str) -> float:
    """Numbers that a rank holds of its weights where ``what`` ("optimizer" or "all") is split over those that have them
    alike: others over all ranks, experts over the data ranks."""
    others, experts = held_weights(job, plan)
    if plan.shard == "none" or (what == "all" and plan.shard != "all"):
        return others + experts
    return others / job.cluster.ranks + experts / plan.data


def norm_saved(job: Job) -> float:
    """Bytes for each number that a norm takes: its input, or, operator by operator, its input and its result before the
    weight, in float32 and in b."""
    b = job.cluster.device.element
    return (4 + b if b < 4 else 2 * b) if job.eager else b


def attention_saved(job: Job) -> float:
    """Bytes for each token of what one layer's attention and its two norms keep, the norms' results among them."""
    shape, b = job.shape, job.cluster.device.element
    turned = shape.heads * shape.query_width + shape.key_value_heads * shape.query_width
    each = float(turned * b) + shape.key_value_heads * shape.value_width * b + shape.heads * shape.value_width * b
    each += 2 * shape.width * (norm_saved(job) + b)
    if shape.head_norms:
        each += turned * norm_saved(job)
    if len(shape.keys_values) == 3:
        each += (sum(shape.keys_values[1:]) + sum(shape.queries[1:-1])) * b
    return each


def mlp_saved(job: Job, width: int) -> float:
    """Bytes for each token of one dense MLP, beside its input."""
    return (job.shape.gates + (2 if job.eager else 0)) * width * job.cluster.device.element


def experts_saved(job: Job, plan: Candidate, tokens: float, slots: float) -> float:
    """Bytes that the experts of one layer keep: rows X and what comes before the activation, H. Without ranks X is what
    the norm before has kept already; rows that came from other ranks are one for each of their slots here."""
    shape, b = job.shape, job.cluster.device.element
    rows = slots * shape.width * b if plan.expert > 1 else 0.0
    before = slots * shape.gates * shape.expert_width
    hidden = {"default": before * b, "fp8": before * 33 / 32, "recompute": 0.0}[plan.save]
    routing = slots * 12 + tokens * shape.experts * 4
    return rows + hidden + routing


def layers_saved(job: Job, plan: Candidate, tokens: float, slots: float) -> float:
    """Bytes that all layers keep for one microbatch, as if none ran again."""
    shape = job.shape
    found = shape.layers * tokens * attention_saved(job)
    found += shape.dense_layers * tokens * mlp_saved(job, shape.dense_width)
    found += shape.moe_layers * (tokens * mlp_saved(job, shape.shared_width) + experts_saved(job, plan, tokens, slots))
    return found


def memory(job: Job, plan: Candidate, tokens: float, slots: float, arrived: float) -> Memory:
    """tokens: of a rank's microbatch. slots, arrived: slots of the busiest rank's experts, rows that come to it."""
    shape, b, wide = job.shape, job.cluster.device.element, WEIGHTS[job.weights]
    whole, states = split(job, plan, "all"), split(job, plan, "optimizer")
    others, experts = held_weights(job, plan)
    copies = (others + experts) * b if wide > b else 0.0
    working = slots * (3 * shape.expert_width + 2 * shape.width) * b + BUCKET
    if plan.expert > 1:
        working += arrived * shape.width * (2 * b + 4)
    if plan.shard == "all":  # weights and gradients of two layers at a time are whole
        layer = (others - shape.embedding_parameters + experts) / shape.layers
        copies = 0.0
        working += 2 * layer * (b + wide)
    inside = plan if plan.save != "layers" else Candidate(plan.data, plan.expert, plan.microbatch, plan.precision)
    saved = layers_saved(job, inside, tokens, slots)
    if plan.save == "layers":
        working += saved / shape.layers
        saved = shape.layers * tokens * shape.width * b
    saved += tokens * shape.width * (norm_saved(job) + b)  # the last norm, and what the head takes
    loss = tokens * shape.vocabulary * ((b + 8 + (4 if b < 4 else 0)) if job.eager else 2 * b)
    return Memory(whole * wide, whole * wide, states * wide * OPTIMIZERS[job.optimizer], copies, saved, loss, working,
                  job.cluster.device.reserved)

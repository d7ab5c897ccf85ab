"""What one rank computes for one microbatch: products, and the bytes that everything between them moves.

Each function returns Work: floating point operations, bytes through memory and calls, all of the busiest rank. A
product takes as long as its operations at the share of the peak that such products reach, or as its bytes, whichever is
more; everything else takes as long as its bytes, or as starting its operators.

Letters: T tokens of a rank's microbatch, K slots a token, R slots of the busiest rank's experts, U rows that arrive
there, D, n widths, E experts, b bytes of a number.
"""
from __future__ import annotations

from dataclasses import dataclass

from moebius.lowering.planner.hardware import Device
from moebius.lowering.planner.plans import WEIGHTS, Candidate, Job

# Calls of operators in one layer's forward, by whether a compiler has fused them: attention with its norms; a gated MLP
# or the experts with their router; the exchange around the experts.
CALLS = {True: (45, 25, 30), False: (15, 12, 12)}
BACKWARD = 2  # times forward: a gradient of the input and one of the weights
ATTENTION_BACKWARD = 2.5  # of the attention itself: five products for two, as its scores are computed again
# Passes over all weights of one optimizer step and of clipping, as torch's foreach forms make them, and as fused ones.
PASSES = {"adamw": {True: 21, False: 7}, "sgd": {True: 3, False: 3}}
CLIP_PASSES = 3
AVERAGE_PASSES = 6  # to a bucket, divided, back (lowering/distribution/reduce.py)


@dataclass(frozen=True)
class Work:
    """flops, at the share ``kind`` of the rate ("dense", "grouped", "attention"); moved: bytes; calls of operators;
    rows: of an expert, where products are grouped and the device was measured by rows."""

    kind: str
    flops: float = 0.0
    moved: float = 0.0
    calls: float = 0.0
    rows: float = 0.0

    def computing(self, device: Device, precision: str) -> float:
        """Seconds of the products alone."""
        if not self.flops:
            return 0.0
        reached = device.reached
        share = reached.grouped_at(self.rows) if self.rows else getattr(reached, self.kind)
        return self.flops / (device.rate(precision) * share)

    def moving(self, device: Device) -> float:
        """Seconds of the bytes, or of starting operators."""
        reached = device.reached
        return max(self.moved / (device.memory_rate * reached.memory), self.calls * reached.launch)

    def seconds(self, device: Device, precision: str) -> float:
        reached = device.reached
        computing, moving = self.computing(device, precision), self.moving(device)
        return max(computing, moving) if reached.overlaps else computing + moving


def base_precision(device: Device) -> str:
    """Of all products but the experts': the first that the device has."""
    return next(iter(device.rates))


def product(rows: float, parameters: float, wide: float, b: int, kind: str = "dense") -> Work:
    """rows through matrices of so many parameters; wide: numbers read and written for each row."""
    return Work(kind, 2 * rows * parameters, (parameters + rows * wide) * b, 1)


def attention_products(job: Job, tokens: float) -> list[Work]:
    """One layer, forward: what leads to queries, keys and values and out again, and the attention itself."""
    shape, b = job.shape, job.cluster.device.element
    inner = shape.heads * shape.query_width + shape.key_value_heads * (shape.query_width + shape.value_width)
    out = shape.heads * shape.value_width
    looked = 2 * tokens * job.shape.attended(job.sequence) * shape.heads * (shape.query_width + shape.value_width)
    return [
        product(tokens, shape.attention_parameters, 2 * shape.width + inner + out, b),
        Work("attention", looked, tokens * (inner + out) * b, 1),
    ]


def mlp_products(job: Job, tokens: float, width: int) -> list[Work]:
    """One dense MLP of this width, forward."""
    shape, b = job.shape, job.cluster.device.element
    if not width:
        return []
    return [product(tokens, (shape.gates + 1) * shape.width * width, 2 * shape.width + (shape.gates + 2) * width, b)]


def expert_product(job: Job, plan: Candidate, slots: float, part: float = 1.0) -> Work:
    """The experts of one layer, forward; part: of it, where only some of the products run again."""
    shape, device = job.shape, job.cluster.device
    b = device.element if plan.precision == base_precision(device) else 1
    local = plan.local_experts(shape)
    filled = slots + plan.chunks * local * (device.reached.tile - 1) / 2  # rows of whole tiles, half of one lost each
    wide = 2 * shape.width + (shape.gates + 2) * shape.expert_width
    moved = (plan.chunks * local * shape.expert_parameters + slots * wide) * b
    return Work("grouped", 2 * filled * shape.expert_parameters * part, moved * part, 2)


def norm_bytes(b: int, eager: bool) -> float:
    """Bytes for each number that an RMSNorm takes, forward: read and written once; or, operator by operator, to
    float32, squared, averaged, scaled, back, times the weight."""
    if not eager:
        return 2 * b
    return (2 * (b + 4) if b < 4 else 0) + 20 + 2 * b


def attention_moves(job: Job, tokens: float) -> Work:
    """Between the products of one layer's attention, forward: two norms of the layer, positions, sums, and norms of
    queries and keys where the model has them."""
    shape, b = job.shape, job.cluster.device.element
    turned = shape.heads * shape.query_width + shape.key_value_heads * shape.query_width
    each = 2 * shape.width * (norm_bytes(b, job.eager) + 3 * b)
    each += turned * (12 * b if job.eager else 2 * b)
    if shape.head_norms:
        each += turned * (norm_bytes(b, True) if job.eager else 0)
    return Work("moves", moved=tokens * each, calls=CALLS[job.eager][0])


def mlp_moves(job: Job, tokens: float, width: int) -> Work:
    """The activation of one MLP, forward."""
    b = job.cluster.device.element
    return Work("moves", moved=tokens * width * b * (5 if job.eager else 3), calls=CALLS[job.eager][1])


def expert_moves(job: Job, plan: Candidate, tokens: float, slots: float, arrived: float) -> Work:
    """Around the experts of one layer, forward: router, activation, rows to their experts and back to their tokens;
    with ranks, copies into and out of what is sent, added up in float32."""
    shape, b, D = job.shape, job.cluster.device.element, job.shape.width
    moved = tokens * shape.experts * 4 * 6 + slots * 3 * shape.expert_width * b + slots * D * b + tokens * D * b
    calls = CALLS[job.eager][1]
    if plan.expert > 1:
        calls += CALLS[job.eager][2]
        if job.eager:
            sent, gathered = 2 * arrived * D * b, 2 * slots * D * b
            added = slots * D * (b + 16) + arrived * D * (2 * b + 24) + tokens * D * (b + 8)
            moved += sent + gathered + added
        else:
            moved += 2 * slots * D * b + (slots + arrived) * D * b
    return Work("moves", moved=moved, calls=calls)


def head_product(job: Job, tokens: float) -> Work:
    return product(tokens, job.shape.vocabulary * job.shape.width, job.shape.width + job.shape.vocabulary,
                   job.cluster.device.element)


def head_moves(job: Job, tokens: float) -> Work:
    """The embedding and the loss, forward and backward: logits to float32, their softmax, and the way back."""
    b, V = job.cluster.device.element, job.shape.vocabulary
    each = (12 + 12 + (2 * (b + 4) if b < 4 else 0)) if job.eager else 3 * b
    return Work("moves", moved=tokens * (V * each + 4 * job.shape.width * b), calls=20)


def weights_moves(job: Job, held: float, first: bool) -> Work:
    """What a microbatch does with all weights of a rank: 16-bit copies and their gradients back, where weights are
    held in float32; gradients added to those of the microbatch before."""
    wide, b = WEIGHTS[job.weights], job.cluster.device.element
    each = 2.0 * (wide + b) if wide > b else 0.0
    each += 0 if first else 3 * wide
    return Work("moves", moved=held * each)


def optimizer_moves(job: Job, held: float) -> Work:
    """The optimizer's step and clipping, on so many weights."""
    passes = PASSES[job.optimizer][job.eager] + CLIP_PASSES
    return Work("moves", moved=held * passes * WEIGHTS[job.weights])

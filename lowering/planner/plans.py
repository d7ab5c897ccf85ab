"""What is planned (Job), one way to run it (Candidate), and which of these moebius runs today."""
from __future__ import annotations

from dataclasses import dataclass

from moebius.lowering.planner.errors import PlannerError
from moebius.lowering.planner.hardware import Cluster
from moebius.lowering.planner.routing import Routing
from moebius.lowering.planner.shapes import ModelShape

SHARDS = ("none", "optimizer", "all")
SAVES = ("default", "fp8", "recompute", "layers")
MOST = 1 << 30  # sequences of a step, tokens of one
WEIGHTS = {"fp32": 4, "bf16": 2}
OPTIMIZERS = {"adamw": 2, "sgd": 0}  # numbers of state for each weight


@dataclass(frozen=True)
class Job:
    """One training step. batch: sequences in a step, on all ranks together; sequence: tokens of each.

    weights: how parameters are held, with gradients and optimizer state of the same type; "fp32" means that products
    take 16-bit copies of them, as autocast does, where the device has 16-bit products. eager: operators between
    products run one by one, as a captured graph does today, and not fused by a compiler.
    """

    shape: ModelShape
    cluster: Cluster
    batch: int
    sequence: int
    routing: Routing
    weights: str = "fp32"
    optimizer: str = "adamw"
    eager: bool = True

    @property
    def local_batch(self) -> int:
        """Sequences of one rank in a step."""
        return self.batch // self.cluster.ranks

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        return self.batch * self.sequence

    def check(self) -> None:
        """Raise PlannerError for what cannot be."""
        ranks = self.cluster.ranks
        if not 1 <= self.sequence <= MOST:
            raise PlannerError(f"--seq {self.sequence}: at least one token, at most {MOST}")
        if self.batch > MOST:
            raise PlannerError(f"--batch {self.batch}: at most {MOST} sequences")
        if self.batch < 1 or self.batch % ranks:
            below = self.batch // ranks * ranks
            hint = f"{below} or {below + ranks}" if below else str(ranks)
            raise PlannerError(f"--batch {self.batch}: a step's sequences are divided evenly over {ranks} GPUs: {hint}")


@dataclass(frozen=True)
class Candidate:
    """One way to run a job: a mesh of ``data`` × ``expert`` ranks, expert ranks next to one another.

    shard: what is split over the ranks that have it alike: nothing; the optimizer's state (ZeRO-1); weights and
    gradients too (FSDP). level: a token travels once to each rank that has an expert of it, once to each node (and on
    from there), or once for each of its K slots. save: what experts keep for backward, as capture(save=...); "layers":
    each layer keeps its input alone and runs again (torch's checkpoint). precision: of the experts' products.
    microbatch: sequences that a rank takes at once. once: gradients are averaged once a step, not at the end of each
    backward. chunks: the exchange of one chunk of the tokens runs while another's experts compute; 1: nothing overlaps.
    replicas: experts are placed by their load, and a rank has so many more for replicas of busy ones; None: in order.
    """

    data: int
    expert: int
    microbatch: int
    precision: str
    save: str = "default"
    level: str = "rank"
    shard: str = "none"
    once: bool = False
    chunks: int = 1
    replicas: int | None = None

    @property
    def mesh(self) -> str:
        placed = "" if self.replicas is None else f", by load{f' +{self.replicas}' if self.replicas else ''}"
        return f"dp={self.data} × ep={self.expert}{placed}"

    def local_experts(self, shape: ModelShape) -> int:
        """Of the rank that has most."""
        return -(-shape.experts // self.expert) + (self.replicas or 0)

    def missing(self) -> tuple[str, ...]:
        """What moebius does not do yet that this plan needs; empty: it runs."""
        found = []
        if self.shard == "optimizer":
            found.append("optimizer state split over the data ranks (ZeRO-1)")
        if self.shard == "all":
            found.append("weights, gradients and optimizer state split over the data ranks (FSDP with mesh=)")
        if self.level == "node":
            found.append("one copy of a token for each node")
        if self.level == "slot":
            found.append("one copy of a token for each slot")
        if self.replicas is not None:
            found.append("experts placed by their load" + f", {self.replicas} more on each rank" * (self.replicas > 0))
        if self.once:
            found.append("gradients averaged once a step")
        return tuple(found)

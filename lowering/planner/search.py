"""All plans of a job, the best of them, and why the next-best lose."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from moebius.lowering.planner.costs import Cost, Predictor
from moebius.lowering.planner.hardware import Cluster, divisors
from moebius.lowering.planner.links import all_to_all, expert_group
from moebius.lowering.planner.plans import OPTIMIZERS, SAVES, SHARDS, WEIGHTS, Candidate, Job
from moebius.lowering.planner.work import base_precision

LARGEST = 65536  # GPUs, of a search for how many a model needs
CHUNKS = (1, 2, 4)
REPLICAS = (0, 1)  # on each rank, where experts are placed by a recorded load


@dataclass(frozen=True)
class Found:
    """Plans of a job, fastest first: those that moebius runs; those that fit and need what it does not do yet; and the
    fastest of all that do not fit, which says what memory costs. tried: how many."""

    job: Job
    running: tuple[Cost, ...]
    later: tuple[Cost, ...]
    too_large: tuple[Cost, ...]
    tried: int


def meshes(job: Job) -> Iterator[tuple[int, int]]:
    """(data, expert) ranks. No more expert ranks than experts, and each has as many but the last."""
    for expert in divisors(job.cluster.ranks):
        if expert <= job.shape.experts:
            yield job.cluster.ranks // expert, expert


def candidates(job: Job, precisions: Sequence[str] = ()) -> Iterator[Candidate]:
    """Every plan that is looked at."""
    batches = [n for n in divisors(job.local_batch) if n & (n - 1) == 0 or n == job.local_batch]
    for data, expert in meshes(job):
        for microbatch in batches:
            for precision in precisions or (base_precision(job.cluster.device),):
                first = Candidate(data, expert, microbatch, precision)
                levels = ["rank"] + (["node"] if expert_group(job.cluster, first).nodes > 1 and expert > 1 else [])
                many = microbatch < job.local_batch
                for save in SAVES:
                    for level in levels:
                        for shard in SHARDS if job.cluster.ranks > 1 else ("none",):
                            for once in (False, True) if many and shard != "all" else (False,):
                                for chunks in CHUNKS if expert > 1 else (1,):
                                    yield replace(first, save=save, level=level, shard=shard, once=once, chunks=chunks)
                for replicas in REPLICAS if job.routing.odds and expert > 1 else ():
                    if -(-job.shape.experts // expert) + replicas <= job.shape.experts:
                        for save, shard, chunks in product(SAVES, SHARDS, CHUNKS):
                            yield replace(first, save=save, shard=shard, chunks=chunks, replicas=replicas)


def search(job: Job, precisions: Sequence[str] = ()) -> Found:
    """Costs of all candidates. Raises PlannerError where the job cannot be."""
    predictor = Predictor(job)
    costs = [predictor.cost(plan) for plan in candidates(job, precisions)]
    costs.sort(key=lambda cost: (cost.step, len(cost.plan.missing()), cost.memory.total))
    running = tuple(cost for cost in costs if cost.runs)
    later = tuple(cost for cost in costs if cost.fits and cost.plan.missing())
    large = tuple(cost for cost in costs if not cost.fits)
    return Found(job, running, later, large, len(costs))


def simplest(costs: Sequence[Cost], within: float = 0.01) -> list[Cost]:
    """The fastest plan of each mesh that needs least beside: of those within a share of it."""
    best: dict[str, Cost] = {}
    for cost in costs:
        place = cost.plan.mesh
        if place not in best:
            best[place] = cost
        elif cost.step <= best[place].step * (1 + within) and _needs(cost) < _needs(best[place]):
            best[place] = cost
    return sorted(best.values(), key=lambda cost: cost.step)


def _needs(cost: Cost) -> tuple[int, int, int, float]:
    return len(cost.plan.missing()), cost.plan.chunks, SAVES.index(cost.plan.save), cost.memory.total


def lightest(job: Job, running: bool, precisions: Sequence[str] = ()) -> Cost:
    """The plan that takes least memory. running: of those that moebius runs."""
    predictor = Predictor(job)
    plans = (plan for plan in candidates(replace(job, batch=job.cluster.ranks), precisions)
             if not (running and plan.missing()))
    return min((predictor.cost(plan) for plan in plans), key=lambda cost: cost.memory.total)


def smallest(job: Job, running: bool) -> Cluster | None:
    """The smallest cluster of this device on which some plan fits; None if that is none up to LARGEST."""
    size = job.cluster.device.per_node
    nodes = [n for power in range(17) for n in ((1 << power), 3 * (1 << power) // 2) if n == 1 << power or power > 0]
    tried = [Cluster(job.cluster.device, 1, n) for n in divisors(size)]
    tried += [Cluster(job.cluster.device, n, size) for n in sorted(set(nodes)) if n > 1 and n * size <= LARGEST]
    for cluster in tried:
        small = replace(job, cluster=cluster, batch=cluster.ranks)
        ends = [e for e in divisors(cluster.ranks) if e <= job.shape.experts][-1:]
        for expert in ends:  # as many expert ranks as can be take least memory
            for save in SAVES:
                for shard in ("none",) if running else ("all",):
                    plan = Candidate(cluster.ranks // expert, expert, 1, base_precision(cluster.device), save, "rank",
                                     shard)
                    if Predictor(small).cost(plan).fits:
                        return cluster
    return None


@dataclass(frozen=True)
class Balance:
    """How even ranks are with experts placed so. replicas: as a plan has them. highest: slots of the busiest rank over
    the mean, mean over layers. moved, seconds: bytes that come to the rank that gets most when experts go there from
    their order, with gradients' and optimizer's state, and how long that takes."""

    replicas: int | None
    highest: float
    moved: float
    seconds: float


def balances(job: Job, expert: int) -> list[Balance]:
    """Of each placement on so many expert ranks, in order first; of a recorded load."""
    plan = Candidate(job.cluster.ranks // expert, expert, 1, base_precision(job.cluster.device))
    group, found = expert_group(job.cluster, plan), []
    before = job.routing.placements(expert, group.nodes, None)
    each = job.shape.expert_parameters * WEIGHTS[job.weights] * (1 + OPTIMIZERS[job.optimizer])
    for replicas in (None, *REPLICAS):
        if replicas and -(-job.shape.experts // expert) + replicas > job.shape.experts:
            continue
        placed = job.routing.placements(expert, group.nodes, replicas)
        came = sum(now.arrivals(then) for now, then in zip(placed, before, strict=True)) / len(placed)
        moved = came * job.shape.moe_layers * each
        here = (group.per_node - 1) / max(1, group.ranks - 1)
        seconds = all_to_all(job.cluster, group, moved * here, moved * (1 - here)) if moved else 0.0
        found.append(Balance(replicas, job.routing.spread(expert, group.nodes, replicas).busiest, moved, seconds))
    return found


def why(worse: Cost, better: Cost) -> str:
    """What the one loses by against the other: the terms that differ most, in milliseconds."""
    names = {term.name: term.kind for cost in (worse, better) for term in cost.terms}

    def of(cost: Cost, name: str) -> float:
        return sum(term.seconds for term in cost.terms if term.name == name)

    more = sorted(((of(worse, name) - of(better, name), name) for name in names), reverse=True)
    hidden = worse.exposed - worse.seconds("communication") - better.exposed + better.seconds("communication")
    parts = [f"{name} {1e3 * gain:+.1f} ms" for gain, name in more if gain > 0.05 * abs(worse.step - better.step)][:3]
    less = [f"{name} {1e3 * gain:+.1f} ms" for gain, name in reversed(more)
            if gain < -0.2 * abs(worse.step - better.step)][:1]
    if hidden > 0.05 * abs(worse.step - better.step):
        parts.append(f"{1e3 * hidden:+.1f} ms that is not hidden")
    return ", ".join(parts + less) or "nothing but memory"


def limit(cost: Cost, found: Found) -> str:
    """What binds a plan: the largest part of its step; and memory, where a faster plan of its kind does not fit."""
    kinds = {"products": cost.seconds("products"), "memory bandwidth": cost.seconds("memory"),
             "communication": cost.exposed}
    kind = max(kinds, key=lambda name: kinds[name])
    inside = {"products": "products", "memory bandwidth": "memory", "communication": "communication"}[kind]
    top = max((term for term in cost.terms if term.kind == inside), key=lambda term: term.seconds)
    text = f"{kind}, {100 * kinds[kind] / cost.step:.0f} % of the step, most of it {top.name}"
    faster = [other for other in found.too_large if other.step < 0.95 * cost.step
              and other.plan.missing() == cost.plan.missing() and other.plan.precision == cost.plan.precision]
    if faster:
        other = max(faster, key=lambda one: one.spare)
        text += (f"; memory too: {describe_change(other.plan, cost.plan)} would take "
                 f"{100 * (1 - other.step / cost.step):.0f} % less time and {-other.spare / 1e9:.1f} GB more "
                 f"than there are")
    return text


def describe_change(other: Candidate, plan: Candidate) -> str:
    """How one plan differs from another, in words."""
    parts = []
    if (other.data, other.expert) != (plan.data, plan.expert):
        parts.append(other.mesh)
    if other.microbatch != plan.microbatch:
        parts.append(f"{other.microbatch} sequences at once")
    if other.save != plan.save:
        parts.append({"default": "saving X and H", "fp8": "H in fp8", "recompute": "saving X alone",
                      "layers": "each layer run again"}[other.save])
    if other.chunks != plan.chunks:
        parts.append(f"{other.chunks} chunk{'s' if other.chunks > 1 else ''}")
    if other.precision != plan.precision:
        parts.append(other.precision)
    return ", ".join(parts) or "the same plan"

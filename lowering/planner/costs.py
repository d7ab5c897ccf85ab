"""What a plan costs: seconds of a step, term by term, and bytes at its peak."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moebius.lowering.planner import links, schedule, work
from moebius.lowering.planner.hardware import Device
from moebius.lowering.planner.memory import Memory, held_weights, memory
from moebius.lowering.planner.plans import WEIGHTS, Candidate, Job
from moebius.lowering.planner.schedule import Task
from moebius.lowering.planner.traffic import RegionShape, bytes_for

INDEX_BYTES, WEIGHT_BYTES = 8, 4  # of an expert's number and a routing weight, as routers make them


@dataclass(frozen=True)
class Term:
    """Seconds of a step that one thing takes. hidden: so many of them run beside products."""

    name: str
    kind: str
    seconds: float
    hidden: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Of one plan. Seconds are of one step, all its microbatches."""

    job: Job
    plan: Candidate
    terms: tuple[Term, ...]
    memory: Memory
    flops: float  # that the model asks for, without what runs again: one rank, one step
    layer: tuple[list[Task], list[Task]]  # forward and backward of one layer's experts and one microbatch

    @property
    def device(self) -> Device:
        cluster = self.job.cluster
        return cluster.device

    def seconds(self, kind: str) -> float:
        return sum(term.seconds for term in self.terms if term.kind == kind)

    @property
    def exposed(self) -> float:
        """Seconds of communication during which nothing else runs."""
        beside = self.seconds("products") + self.seconds("memory")
        return self.seconds("communication") - min(beside, sum(term.hidden for term in self.terms))

    @property
    def step(self) -> float:
        return self.seconds("products") + self.seconds("memory") + self.exposed

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.job.local_batch * self.job.sequence / self.step

    @property
    def utilization(self) -> float:
        """The model's operations over what the device could do in the step (MFU)."""
        return self.flops / self.step / self.device.rate(work.base_precision(self.device))

    @property
    def spare(self) -> float:
        """Bytes that are left; below 0: it does not fit."""
        return self.device.usable - self.memory.total

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def runs(self) -> bool:
        """Whether moebius does all of it today, and it fits."""
        return self.fits and not self.plan.missing()


class Predictor:
    """Costs of the plans of one job; what plans have in common is computed once."""

    def __init__(self, job: Job):
        job.check()
        self.job, self.device = job, job.cluster.device

    def cost(self, plan: Candidate) -> Cost:
        job = self.job
        shape = job.shape
        tokens = float(plan.microbatch * job.sequence)
        count = job.local_batch // plan.microbatch
        group = links.expert_group(job.cluster, plan)
        spread = job.routing.spread(group.ranks, group.nodes, plan.replicas)
        busy = spread.busiest
        rows = links.rows(job.cluster, plan, spread.ranks, spread.nodes, shape.top_k, tokens)
        slots, arrived = tokens * shape.top_k * busy, rows.here * min(busy, shape.top_k)
        layer = self._layer(plan, tokens, slots, arrived, rows, busy)
        terms = [
            *self._products(plan, tokens, slots, count),
            *self._moves(plan, tokens, slots, arrived, count),
            *self._exchanges(plan, layer, count),
            *self._weights(plan, count),
        ]
        held = memory(job, plan, tokens, slots, arrived)
        return Cost(job, plan, tuple(term for term in terms if term.seconds), held, self._asked(), layer)

    def _seconds(self, works: Iterable[work.Work], precision: str | None = None) -> float:
        device = self.device
        return sum(one.seconds(device, precision or work.base_precision(device)) for one in works)

    def _asked(self) -> float:
        """Operations of the model for one rank and step: three times those of forward, nothing filled up or again."""
        job = self.job
        shape = job.shape
        tokens = float(job.local_batch * job.sequence)
        layer = sum(one.flops for one in work.attention_products(job, tokens))
        found = shape.layers * layer + work.head_product(job, tokens).flops
        found += shape.dense_layers * sum(one.flops for one in work.mlp_products(job, tokens, shape.dense_width))
        moe = sum(one.flops for one in work.mlp_products(job, tokens, shape.shared_width))
        moe += 2 * tokens * (shape.width * shape.experts + shape.top_k * shape.expert_parameters)
        return 3 * (found + shape.moe_layers * moe)

    def _products(self, plan: Candidate, tokens: float, slots: float, count: int) -> list[Term]:
        job = self.job
        shape = job.shape
        again = 1 if plan.save == "layers" else 0
        times = (1 + work.BACKWARD + again) * count
        around, itself = (self._seconds([one]) for one in work.attention_products(job, tokens))
        attention = around * times + itself * (1 + work.ATTENTION_BACKWARD + again) * count
        router = work.product(tokens, shape.width * shape.experts, shape.width + shape.experts, 4)
        dense = shape.dense_layers * self._seconds(work.mlp_products(job, tokens, shape.dense_width))
        shared = self._seconds([router, *work.mlp_products(job, tokens, shape.shared_width)])
        experts = self._seconds([work.expert_product(job, plan, slots)], plan.precision)
        extra = 0.0
        if plan.save == "recompute":  # the products that lead to H once more
            part = shape.gates / (shape.gates + 1)
            extra = self._seconds([work.expert_product(job, plan, slots, part)], plan.precision)
        head = self._seconds([work.head_product(job, tokens)]) * (1 + work.BACKWARD) * count
        return [
            Term("attention", "products", shape.layers * attention),
            Term("dense and shared MLPs, routers", "products", (dense + shape.moe_layers * shared) * times),
            Term("experts", "products", shape.moe_layers * (experts * times + extra * count)),
            Term("head", "products", head),
        ]

    def _moves(self, plan: Candidate, tokens: float, slots: float, arrived: float, count: int) -> list[Term]:
        job = self.job
        shape = job.shape
        times = (1 + work.BACKWARD + (plan.save == "layers")) * count
        attention = self._seconds([work.attention_moves(job, tokens)])
        mlps = shape.dense_layers * self._seconds([work.mlp_moves(job, tokens, shape.dense_width)])
        if shape.shared_width:
            mlps += shape.moe_layers * self._seconds([work.mlp_moves(job, tokens, shape.shared_width)])
        experts = self._seconds([work.expert_moves(job, plan, tokens, slots, arrived)])
        others, held = held_weights(job, plan)
        own = others + held
        updated = own if plan.shard == "none" else others / job.cluster.ranks + held / plan.data
        casts = self._seconds([work.weights_moves(job, own, True)])
        casts += (count - 1) * self._seconds([work.weights_moves(job, own, False)])
        return [
            Term("norms, positions, sums", "memory", shape.layers * attention * times),
            Term("activations", "memory", mlps * times),
            Term("rows to experts and back", "memory", shape.moe_layers * experts * times),
            Term("loss", "memory", self._seconds([work.head_moves(job, tokens)]) * count),
            Term("copies of weights", "memory", casts),
            Term("optimizer", "memory", self._seconds([work.optimizer_moves(job, updated)])),
        ]

    def _layer(self, plan: Candidate, tokens: float, slots: float, arrived: float, rows: links.Rows,
               busy: float) -> tuple[list[Task], list[Task]]:
        """Tokens to their experts and back, forward and backward, and what the device does meanwhile: one layer."""
        job = self.job
        shape, cluster = job.shape, job.cluster
        group = links.expert_group(cluster, plan)
        region = RegionShape(0, shape.top_k, shape.experts, shape.width, cluster.device.element, WEIGHT_BYTES,
                             INDEX_BYTES)
        each = bytes_for(region, group.ranks, 1.0, 1.0)  # of one row, out and back, forward and backward
        there, back = (plan.chunks * links.all_to_all(cluster, group, rows.near * part / plan.chunks,
                                                      rows.far * part / plan.chunks)
                       for part in (each.dispatch / 2 * busy, each.combine / 2 * busy))
        experts = self._seconds([work.expert_product(job, plan, slots)], plan.precision)
        experts += self._seconds([work.expert_moves(job, plan, tokens, slots, arrived)])
        shared = self._seconds([*work.mlp_products(job, tokens, shape.shared_width),
                                work.mlp_moves(job, tokens, shape.shared_width)]) if shape.shared_width else 0.0
        return (schedule.forward(plan.chunks, there, experts, back, shared),
                schedule.backward(plan.chunks, there, work.BACKWARD * experts, back, work.BACKWARD * shared))

    def _exchanges(self, plan: Candidate, layer: tuple[list[Task], list[Task]], count: int) -> list[Term]:
        """What a layer's schedule sends, in all of them; and how much of it runs beside the layer's products."""
        shape, cluster = self.job.shape, self.job.cluster
        group = links.expert_group(cluster, plan)
        if group.ranks == 1:
            return []
        times = [shape.moe_layers * count * (2 if plan.save == "layers" else 1), shape.moe_layers * count]
        sent = {name: sum(n * task.seconds for n, tasks in zip(times, layer, strict=True) for task in tasks
                          if task.on == schedule.LINK and task.name.startswith(starts))
                for name, starts in (("dispatch", ("dispatch", "results")), ("combine", ("combine", "tokens")))}
        hidden = sum(n * schedule.hidden(tasks) for n, tasks in zip(times, layer, strict=True))
        counts = links.all_to_all(cluster, group, 0.0, 0.0) * times[0]  # before forward; backward needs none
        return [
            *(Term(name, "communication", own, hidden * own / sum(sent.values())) for name, own in sent.items()),
            Term("counts", "communication", counts),
        ]

    def _weights(self, plan: Candidate, count: int) -> list[Term]:
        """Gradients averaged; weights gathered where they are split."""
        job = self.job
        cluster = job.cluster
        others, experts = held_weights(job, plan)
        wide, b = WEIGHTS[job.weights], cluster.device.element
        data, ep, everyone = (links.data_group(cluster, plan), links.expert_group(cluster, plan),
                              links.all_ranks(cluster))
        if plan.shard == "all":
            gathered = links.gather(cluster, everyone, others * min(wide, b)) + links.gather(
                cluster, data, experts * min(wide, b))
            reduced = links.gather(cluster, everyone, others * wide) + links.gather(cluster, data, experts * wide)
            return [Term("weights gathered", "communication", 2 * gathered * count, 2 * gathered * count),
                    Term("gradients averaged", "communication", reduced * count, reduced * count)]
        times = 1 if plan.once else count
        group = links.expert_group(cluster, plan)
        spread = job.routing.spread(group.ranks, group.nodes, plan.replicas)
        shared = spread.shared * job.shape.moe_layers * job.shape.expert_parameters * wide
        if plan.shard == "optimizer":
            each = links.gather(cluster, everyone, others * wide) + links.gather(cluster, data, experts * wide)
            return [Term("gradients averaged", "communication", each * times),
                    Term("weights gathered", "communication", each)]
        # one axis of the mesh after the other, as lowering/distribution/reduce.py does it
        seconds = sum(links.all_reduce(cluster, group, others * wide) for group in (data, ep))
        seconds += links.all_reduce(cluster, data, experts * wide)
        passes = (others if cluster.ranks > 1 else 0.0) + (experts if plan.data > 1 else 0.0)
        moved = self._seconds([work.Work("moves", moved=passes * wide * work.AVERAGE_PASSES)])
        return [Term("gradients averaged", "communication", seconds * times),
                Term("replicas' gradients", "communication", links.all_reduce(cluster, ep, shared) * times),
                Term("gradients to buckets and back", "memory", moved * times)]

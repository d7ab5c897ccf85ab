"""What a search found, as text for a terminal and as JSON. Both come from the same records."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moebius.lowering.planner import schedule, search
from moebius.lowering.planner.costs import Cost
from moebius.lowering.planner.errors import PlannerError
from moebius.lowering.planner.memory import Memory
from moebius.lowering.planner.work import base_precision

GB = 1e9
HEADINGS = ("mesh", "at once", "saved", "experts in", "step ms", "products", "memory", "exposed", "(all)",
            "tokens/s/GPU", "MFU", "peak GB")
SAVED = {"default": "X, H", "fp8": "X, H in fp8", "recompute": "X", "layers": "layers' inputs"}


def record(cost: Cost) -> dict[str, Any]:
    """One plan as plain data: seconds, bytes, and what moebius lacks for it."""
    plan = cost.plan
    return {
        "mesh": {"dp": plan.data, "ep": plan.expert}, "microbatch": plan.microbatch, "save": plan.save,
        "precision": plan.precision, "level": plan.level, "shard": plan.shard, "average_once": plan.once,
        "chunks": plan.chunks, "replicas": plan.replicas, "runs": cost.runs, "missing": list(plan.missing()),
        "fits": cost.fits,
        "seconds": {
            "step": cost.step, "products": cost.seconds("products"), "memory": cost.seconds("memory"),
            "communication": cost.seconds("communication"), "exposed": cost.exposed,
            "terms": {term.name: term.seconds for term in cost.terms},
        },
        "tokens_per_second": cost.tokens_per_second, "utilization": cost.utilization,
        "bytes": {**vars(cost.memory), "total": cost.memory.total, "spare": cost.spare},
    }


def as_data(found: search.Found, top: int) -> dict[str, Any]:
    """The whole answer."""
    job, shape = found.job, found.job.shape
    running, later = search.simplest(found.running)[:top], search.simplest(found.later)[:top]
    data: dict[str, Any] = {
        "model": {"name": shape.name, "parameters": shape.parameters, "of_one_token": shape.active_parameters,
                  "experts": shape.experts, "top_k": shape.top_k, "layers": shape.layers},
        "cluster": {"device": job.cluster.device.name, "nodes": job.cluster.nodes, "per_node": job.cluster.per_node},
        "batch": job.batch, "sequence": job.sequence, "weights": job.weights, "optimizer": job.optimizer,
        "operators": "eager" if job.eager else "fused", "tried": found.tried,
        "running": [record(cost) for cost in running], "later": [record(cost) for cost in later],
    }
    if job.routing.shares and (ranks := shared_by(found)) > 1:
        data["balance"] = {"ranks": ranks, "placements": [vars(one) for one in search.balances(job, ranks)]}
    if running:
        data["limit"] = search.limit(running[0], found)
        if len(running) > 1:
            data["next_loses_by"] = search.why(running[1], running[0])
    else:
        data["smallest"] = {kind: None if (cluster := search.smallest(job, kind == "running")) is None else
                            cluster.ranks for kind in ("running", "later")}
    return data


def as_trace(found: search.Found) -> dict[str, Any]:
    """One layer of the fastest plan that fits, for Perfetto. Raises PlannerError where none does."""
    fit = [*found.running[:1], *found.later[:1]]
    if not fit:
        raise PlannerError("no plan fits: there is nothing to trace")
    best = min(fit, key=lambda cost: cost.step)
    return schedule.trace(zip(("forward", "backward"), best.layer, strict=True),
                          f"{best.plan.mesh}, chunks: {best.plan.chunks}")


def render(found: search.Found, top: int) -> str:
    """The answer for a terminal."""
    job, shape = found.job, found.job.shape
    lines = [
        f"{shape.name}: {shape.parameters / 1e9:.1f} billion parameters, {shape.active_parameters / 1e9:.1f} of one "
        f"token; {shape.layers} layers, {shape.experts} experts, {shape.top_k} a token",
        f"{job.cluster}; {job.batch} sequences of {job.sequence} tokens in a step; weights in {job.weights}, "
        f"{job.optimizer}, {'operators one by one' if job.eager else 'operators fused'}; {found.tried} plans compared",
        "",
    ]
    running = search.simplest(found.running)[:top]
    if running:
        lines += ["Plans that moebius runs", *table(running), ""]
        lines += best(running[0], found)
        if len(running) > 1:
            second = running[1]
            lines += [f"Next: {second.plan.mesh}, {1e3 * (second.step - running[0].step):+.1f} ms: "
                      f"{search.why(second, running[0])}."]
        lines.append("")
    else:
        lines += [*too_large(found), ""]
    later = [cost for cost in search.simplest(found.later) if not running or cost.step < running[0].step][:top]
    if later:
        lines += ["Not run by moebius yet", *table(later)]
        lines.append(f"The first of these needs {', and '.join(later[0].plan.missing())}.")
        if running:
            lines.append(f"Against the best above: {search.why(running[0], later[0])} there.")
        lines.append("")
    lines += balance(found)
    lines.append("Predictions, not measurements: docs/plan.md says what they rest on and how far off they have been.")
    return "\n".join(lines)


def shared_by(found: search.Found) -> int:
    """Ranks that share the experts in the first plan where several do; 1 where none."""
    plans = [cost.plan.expert for cost in (*found.running, *found.later) if cost.plan.expert > 1]
    return plans[0] if plans else 1


def balance(found: search.Found) -> list[str]:
    """How even the ranks are under a recorded load, as experts stand and as they could, with bars."""
    ranks = shared_by(found)
    if not found.job.routing.shares or ranks == 1:
        return []
    rows = search.balances(found.job, ranks)
    lines = [f"Recorded load on {ranks} expert ranks: slots of the busiest rank over the mean, mean of the layers"]
    lines += bars([("in order" if one.replicas is None else f"by load, {one.replicas or 'no'} more on each rank",
                    one.highest, f"{one.moved / GB:.1f} GB to move, {1e3 * one.seconds:.0f} ms" if one.moved else "")
                   for one in rows])
    return [*lines, ""]


def bars(rows: Sequence[tuple[str, float, str]]) -> list[str]:
    """A line for each (name, number above 0, note)."""
    most = max((number for _, number, _ in rows), default=1.0)
    return [f"  {name:<32}{number:>6.2f}  {'█' * max(1, round(40 * number / max(most, 1e-9)))}  {note}".rstrip()
            for name, number, note in rows]


def columns(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Lines of cells. left: the columns that are flush left."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) if i in left else cell.rjust(width)
                             for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
            for line in rows]


def table(costs: Sequence[Cost]) -> list[str]:
    return columns([HEADINGS, *map(row, costs)], (0, 2, 3))


def row(cost: Cost) -> tuple[str, ...]:
    plan = cost.plan
    return (
        plan.mesh, str(plan.microbatch), SAVED[plan.save], plan.precision, f"{1e3 * cost.step:.1f}",
        f"{1e3 * cost.seconds('products'):.1f}", f"{1e3 * cost.seconds('memory'):.1f}", f"{1e3 * cost.exposed:.1f}",
        f"({1e3 * cost.seconds('communication'):.1f})", f"{cost.tokens_per_second:,.0f}",
        f"{100 * cost.utilization:.1f} %", f"{cost.memory.total / GB:.1f}",
    )


def best(cost: Cost, found: search.Found) -> list[str]:
    """The best plan in full: how to ask for it, where its time goes, what it holds, what binds it."""
    lines = [f"Best: {cost.plan.mesh}", "  " + how(cost)]
    for kind in ("products", "memory", "communication"):
        terms = sorted((t for t in cost.terms if t.kind == kind), key=lambda t: -t.seconds)
        if terms:
            parts = ", ".join(f"{t.name} {1e3 * t.seconds:.1f}" for t in terms)
            lines.append(f"  {kind}, ms: {parts}")
    held = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "copies": "16-bit copies",
            "saved": "saved for backward", "loss": "loss", "working": "at work", "reserved": "runtime"}
    parts = ", ".join(f"{word} {getattr(cost.memory, name) / GB:.1f}" for name, word in held.items()
                      if getattr(cost.memory, name) >= 5e7)
    device = cost.job.cluster.device
    lines.append(f"  peak, GB: {parts}; {cost.memory.total / GB:.1f} of {device.memory_bytes / GB:.0f}")
    lines.append(f"  bound by {search.limit(cost, found)}")
    return lines


def how(cost: Cost) -> str:
    """The call that runs a plan."""
    job, plan = cost.job, cost.plan
    options = []
    if job.cluster.ranks > 1:
        options.append(f'mesh=init_device_mesh("cuda", ({plan.data}, {plan.expert}), mesh_dim_names=("dp", "ep"))')
    if plan.chunks > 1:
        options.append(f'plan=Plan("ep", chunks={plan.chunks})')
    if plan.save in ("fp8", "recompute"):
        options.append(f'save="{plan.save}"')
    if plan.precision != base_precision(job.cluster.device):
        options.append(f'precision="{plan.precision}"')
    count = job.local_batch // plan.microbatch
    text = f"@capture({', '.join(options)})" if options else "@capture"
    text += f"; each rank {plan.microbatch} sequence{'s' if plan.microbatch > 1 else ''} at once"
    if count > 1:
        text += f", {count} backward passes a step"
    if plan.save == "layers":
        text += "; torch.utils.checkpoint around each layer"
    return text


def too_large(found: search.Found) -> list[str]:
    """Nothing that moebius runs fits: by how much, and on how many devices it would."""
    job = found.job
    lightest = search.lightest(job, running=True)
    held: Memory = lightest.memory
    device = job.cluster.device
    lines = [f"No plan that moebius runs fits: the lightest ({lightest.plan.mesh}, 1 sequence at once, saving "
             f"{SAVED[lightest.plan.save]}) needs {held.total / GB:.1f} GB on a rank, and {device.usable / GB:.1f} of "
             f"{device.memory_bytes / GB:.0f} GB can be used."]
    fits, split = search.smallest(job, running=True), search.smallest(job, running=False)
    if fits is not None and fits.ranks != job.cluster.ranks:
        lines.append(f"The smallest cluster that it fits: {fits}.")
    elif fits is None:
        floor = job.shape.other_parameters / 1e9
        lines.append(f"On no number of them: the {floor:.1f} billion parameters that are no expert's are whole on each "
                     f"rank.{' Try --weights bf16.' if job.weights == 'fp32' else ''}")
    if split is not None:
        lines.append(f"With weights, gradients and optimizer state split over data ranks (not run by moebius yet): "
                     f"{split.ranks} of them.")
    return lines

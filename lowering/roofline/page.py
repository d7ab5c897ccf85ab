"""The answer of ``moebius explain --roofline`` as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from moebius.lowering.planner.hardware import Device
from moebius.lowering.planner.page import columns
from moebius.lowering.planner.work import Work, base_precision
from moebius.lowering.roofline.experts import Layer, variants
from moebius.lowering.roofline.meter import Count, Operation

NAMES = {"dense": "other products", "attention": "attention", "moves": "everything else"}
HEADINGS = ("", "GFLOP", "MB", "FLOP/byte", "ms", "of the step", "bound by")


def render(counts: Iterable[Count], device: Device, here: bool = False) -> str:
    """What each graph needs on a device. here: whether it is the machine that ran it."""
    precision = base_precision(device)
    ridge = device.rate(precision) / device.memory_rate
    rate = f"{device.rate(precision) / 1e12:,.4g} TFLOP/s ({precision})"
    lines = [
        f"On {device.name}: {rate}, {device.memory_rate / 1e9:,.4g} GB/s; from {ridge:,.0f} FLOP a byte on products "
        f"bound it, below that memory.",
        "Each operator alone, at the share of the peak that such operators reach (docs/plan.md); numbers have the size "
        "that they had in the step.",
    ]
    most: dict[tuple[str, int, str], Count] = {}
    ran = [count for count in counts if count.operations]
    for count in ran:
        key = count.file, count.line, count.name
        if key not in most or count.calls >= most[key].calls:
            most[key] = count
    for key, count in most.items():
        others = sum((other.file, other.line, other.name) == key for other in ran) - 1
        lines += ["", *of_graph(count, device, here, others)]
    if not most:
        lines += ["", "No graph ran: put @moebius.capture on the step; moebius explain SCRIPT.py says more."]
    return "\n".join(lines)


def seconds(operation: Operation, device: Device) -> float:
    layer, reached = operation.layer, device.reached
    if layer is None:
        return operation.work.seconds(device, base_precision(device))
    work = layer.backward(reached) if "backward" in operation.name else layer.forward(reached)
    return work.seconds(device, layer.precision or base_precision(device))


def bound(operations: list[Operation], device: Device) -> str:
    """What most of the time of some operators goes to."""
    spent = dict.fromkeys(("products", "memory", "starting operators"), 0.0)
    for one in operations:
        spent[binding(one.work, device, one.layer)] += seconds(one, device)
    return max(spent, key=lambda name: spent[name])


def binding(work: Work, device: Device, layer: Layer | None) -> str:
    reached = device.reached
    precision = (layer.precision if layer is not None else "") or base_precision(device)
    moving = work.moving(device)
    if work.flops and work.computing(device, precision) >= moving:
        return "products"
    return "memory" if moving > work.calls * reached.launch else "starting operators"


def of_graph(count: Count, device: Device, here: bool, others: int = 0) -> list[str]:
    """One graph: a line for each place of experts and each kind of operator, then what would change the experts."""
    groups: dict[str, list[Operation]] = {}
    layers: dict[str, list[Operation]] = {}
    for one in count.operations:
        if one.layer is None:
            groups.setdefault(NAMES[one.work.kind], []).append(one)
        else:
            layers.setdefault(place_of(count, one), []).append(one)
    every = [*layers.items(), *sorted(groups.items(), key=lambda item: -sum(seconds(o, device) for o in item[1]))]
    total = sum(seconds(one, device) for one in count.operations)
    rows = [HEADINGS, *(row(name, own, device, total) for name, own in every)]
    rows.append(row("the step", count.operations, device, total))
    also = f"; it was captured {others + 1} times, and this one ran most" if others else ""
    found = [f"{count.name} ({count.file}:{count.line}), {count.calls} calls{also}"]
    if count.foreign:
        found.append("  A backend's own code runs it and shows few of its operators: leave out backend= for this.")
    found += columns(rows, (0, 6))
    if here and count.seconds:
        took = statistics.median(count.seconds)
        found.append(f"  measured: {took * 1e3:.4g} ms of CPU time, median of {len(count.seconds)} calls, which is "
                     f"{took / total:.2f} of what is predicted")
    for name, own in layers.items():
        found += ["", *what_if(name, own, device)]
    return found


def place_of(count: Count, operation: Operation) -> str:
    lowered = [region for region in count.regions if region.lowered]
    if not 0 <= operation.place < len(lowered):
        return "experts"
    region = lowered[operation.place]
    return f"experts, {region.file.rpartition('/')[2]}:{region.line}"


def row(name: str, operations: list[Operation], device: Device, total: float) -> tuple[str, ...]:
    flops, moved = (sum(getattr(one.work, what) for one in operations) for what in ("flops", "moved"))
    took = sum(seconds(one, device) for one in operations)
    return (name, f"{flops / 1e9:,.2f}", f"{moved / 1e6:,.1f}", f"{flops / moved:,.1f}" if moved else "–",
            f"{took * 1e3:,.3f}", f"{took / total:.0%}" if total else "–", bound(operations, device))


def what_if(name: str, operations: list[Operation], device: Device) -> list[str]:
    """A place's layers with other options: time of the experts, and bytes kept for backward."""
    forward = [one.layer for one in operations if one.layer is not None and "backward" not in one.name]
    trains = len(forward) < len(operations)
    now = sum(layer.seconds(device, trains) for layer in forward)
    first = forward[0]
    rows: list[tuple[str, ...]] = [("with", "ms", "", "kept MB"),
                                   ("as it is", f"{now * 1e3:,.3f}", "", f"{kept(forward) / 1e6:,.1f}")]
    for label, _ in variants(first, device):
        changed = [layer for one in forward for text, layer in variants(one, device) if text == label]
        if len(changed) == len(forward):
            took = sum(layer.seconds(device, trains) for layer in changed)
            rows.append((label, f"{took * 1e3:,.3f}", f"{took / now:.2f}×", f"{kept(changed) / 1e6:,.1f}"))
    many = f"{len(forward)} layer{'s' * (len(forward) > 1)}"
    routed = f"{first.tokens:,} tokens, top-{first.top_k} of {first.experts}"
    return [f"  {name}: {many}: {routed}, {first.width} wide, experts {first.inner}", *columns(rows, (0,))]


def kept(layers: list[Layer]) -> float:
    return sum(layer.kept for layer in layers)

"""Figures of devices and of the links between them: the published table, and files that a calibration wrote.

Peaks are the makers' (dense, without structured sparsity). What a program reaches of a peak is apart from it, in
``Reached``: round assumptions, none of them fitted to a training run, so that runs can be compared with predictions
(docs/plan.md).
"""
from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from moebius.lowering.planner.errors import PlannerError
from moebius.lowering.planner.files import read_json

PRECISIONS = ("bf16", "fp8", "mxfp8")
MOST = 1 << 20  # GPUs of a cluster
MAY_BE_ZERO = {"reserved", "launch", "near_start", "far_start", "peer_start"}  # of a device's figures and shares


def above_zero(value: Any, or_zero: bool = False) -> bool:
    """Whether a value is a number that can be counted with."""
    return type(value) in (int, float) and math.isfinite(value) and (value > 0 or (or_zero and value == 0))


@dataclass(frozen=True)
class Reached:
    """Shares of a peak that programs reach, and what starting costs.

    dense, grouped, attention: of the rate of products. tile: rows that a grouped product works on at once: each
    expert's rows are filled up to whole tiles. memory, near, far: of the bandwidths. launch: seconds that an operator
    takes at least. near_start, far_start: seconds of a collective with nothing to send; peer_start: more for each
    other rank that it speaks to. kept: of the memory, what a step can use.

    by_rows: in the place of ``grouped``, where it was measured: (rows of an expert, share), by rows. overlaps: whether
    bytes move while products run. fresh: of the bandwidth, at which a tensor of more than ``large`` bytes is written
    for the first time, since the system gives its memory anew each time.
    """

    dense: float = 0.70
    grouped: float = 0.50
    attention: float = 0.50
    tile: int = 128
    memory: float = 0.80
    near: float = 0.80
    far: float = 0.90
    launch: float = 4e-6
    near_start: float = 10e-6
    far_start: float = 25e-6
    peer_start: float = 0.5e-6
    kept: float = 0.94
    by_rows: tuple[tuple[int, float], ...] = ()
    overlaps: bool = True
    fresh: float = 1.0
    large: float = 32 * 2**20

    def grouped_at(self, rows: float) -> float:
        """The share of a grouped product with so many rows an expert, between what was measured in equal steps."""
        if not self.by_rows:
            return self.grouped
        known = [(math.log(r), share) for r, share in self.by_rows]
        at = math.log(max(rows, 1.0))
        for (low, first), (high, second) in itertools.pairwise(known):
            if at <= high:
                part = max(0.0, at - low) / (high - low)
                return first + part * (second - first)
        return known[-1][1]

    def written(self, sizes: Iterable[float]) -> float:
        """Bytes that take as long to move as it takes to get memory for tensors of these sizes."""
        return sum(size for size in sizes if size > self.large) * (1 / self.fresh - 1)


@dataclass(frozen=True)
class Device:
    """One accelerator. rates: FLOP/s by precision of the operands. memory_bytes, memory_rate: bytes, bytes/s.
    near_rate, far_rate: bytes/s in one direction, to ranks of the same node (all of them together) and of other nodes.
    per_node: as they are sold. element: bytes of a number that products take where no precision is asked for.
    reserved: bytes that the runtime and the communication library hold."""

    name: str
    rates: dict[str, float]
    memory_bytes: float
    memory_rate: float
    near_rate: float
    far_rate: float
    per_node: int = 8
    reserved: float = 3e9
    reached: Reached = field(default_factory=Reached)
    source: str = ""
    element: int = 2

    @property
    def usable(self) -> float:
        """Bytes that a step can use."""
        reached = self.reached
        return self.memory_bytes * reached.kept

    def rate(self, precision: str) -> float:
        """FLOP/s of products in this precision. Raises PlannerError where the device has none."""
        if precision not in self.rates:
            raise PlannerError(f"{self.name} has no rate for {precision}; it has {', '.join(self.rates)}")
        return self.rates[precision]


def _rates(bf16: float, fp8: float, blocks: bool) -> dict[str, float]:
    return {"bf16": bf16, "fp8": fp8, **({"mxfp8": fp8} if blocks else {})}


# 400 Gb/s InfiniBand NDR for each GPU, as in the makers' own clusters of these machines.
NDR = 50e9

DEVICES: dict[str, Device] = {
    "h100": Device("H100 SXM", _rates(989.4e12, 1978.9e12, False), 80e9, 3.35e12, 450e9, NDR,
                   source="NVIDIA H100 datasheet: SXM5; NVLink 900 GB/s in both directions together"),
    "h200": Device("H200 SXM", _rates(989.4e12, 1978.9e12, False), 141e9, 4.8e12, 450e9, NDR,
                   source="NVIDIA H200 datasheet: SXM; NVLink 900 GB/s in both directions together"),
    "b200": Device("B200 (HGX)", _rates(2250e12, 4500e12, True), 180e9, 8e12, 900e9, NDR,
                   reached=Reached(dense=0.60, grouped=0.35, attention=0.40),  # after B200's runs in docs/plan.md
                   source="NVIDIA DGX B200 datasheet, an eighth of 1,440 GB, 64 TB/s, 72 PFLOP/s FP8 with sparsity; "
                          "NVLink 1.8 TB/s in both directions together"),
    "mi300x": Device("MI300X", _rates(1307.4e12, 2614.9e12, False), 192e9, 5.3e12, 448e9, NDR,
                     reached=Reached(dense=0.50, grouped=0.35, attention=0.35, near=0.70),
                     source="AMD Instinct MI300X data sheet; 7 Infinity Fabric links of 64 GB/s in each direction"),
}


@dataclass(frozen=True)
class Cluster:
    """Equal devices, ``per_node`` of them on each of ``nodes`` machines. Ranks are numbered node by node."""

    device: Device
    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.ranks} × {self.device.name}, {self.nodes} node{'s' if self.nodes > 1 else ''} of {self.per_node}"


def device(name: str) -> Device:
    """A device of the table, or of a file that ``moebius plan --calibrate`` wrote. Raises PlannerError."""
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if Path(name).suffix == ".json" or Path(name).is_file():
        return read(name)
    raise PlannerError(f"there is no device {name!r}; there are {', '.join(DEVICES)}, and files that "
                       f"`moebius plan --calibrate FILE.json` writes")


def divisors(number: int) -> list[int]:
    """Of a whole number above 0, in order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def cluster(chosen: Device, gpus: int, nodes: int | None = None) -> Cluster:
    """``gpus`` devices on so many nodes (None: as few as hold them). Raises PlannerError where they do not divide."""
    if not 1 <= gpus <= MOST:
        raise PlannerError(f"--gpus {gpus}: at least one, at most {MOST}")
    if nodes is None:
        nodes = -(-gpus // chosen.per_node)
    if nodes < 1:
        raise PlannerError(f"--nodes {nodes}: at least one")
    if gpus % nodes:
        close = sorted(sorted(divisors(gpus), key=lambda n: abs(n - nodes))[:3])
        raise PlannerError(f"{gpus} GPUs do not divide into {nodes} equal nodes; --nodes {' or '.join(map(str, close))}"
                           f" does, and --gpus {gpus // nodes * nodes or nodes} with {nodes} nodes")
    return Cluster(chosen, nodes, gpus // nodes)


def with_network(found: Device, rate: float) -> Device:
    """The device with so many bytes/s between nodes. Raises PlannerError for what is no rate."""
    if not above_zero(rate):
        raise PlannerError(f"--network {rate / 1e9:g}: a number above 0")
    return replace(found, far_rate=rate)


def check(found: Device) -> None:
    """Raises ValueError where a figure of a device is none."""
    figures = {**vars(found), **vars(found.reached), **{f"rates[{p}]": rate for p, rate in found.rates.items()},
               **{f"by_rows[{rows}]": share for rows, share in found.reached.by_rows}}
    for name in ("name", "source", "rates", "reached", "by_rows", "overlaps"):
        del figures[name]
    wrong = [f"{name}={value!r}" for name, value in figures.items() if not above_zero(value, name in MAY_BE_ZERO)]
    if wrong or not found.rates:
        raise ValueError(", ".join(wrong) or "no rates")
    if not all(type(value) is int for value in (found.per_node, found.element, found.reached.tile)):
        raise ValueError("per_node, element and tile are whole numbers")


def write(found: Device, path: str | Path) -> None:
    Path(path).write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def read(path: str | Path) -> Device:
    """A device that :func:`write` wrote. Raises PlannerError where the file is none."""
    held = read_json(path)
    try:
        reached = Reached(**{f.name: held["reached"][f.name] for f in fields(Reached) if f.name in held["reached"]})
        reached = replace(reached, by_rows=tuple((int(rows), float(share)) for rows, share in reached.by_rows))
        found = replace(Device(**{**held, "reached": reached}), name=str(held["name"]))
        check(found)
        return found
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise PlannerError(f"{path} is no file of a device ({type(error).__name__}: {error}); "
                           f"`moebius plan --calibrate {path}` writes one") from None

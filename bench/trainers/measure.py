"""One script of the gallery, plain and captured: what differs, what was captured, how long it takes."""

from __future__ import annotations

import contextlib
import io
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from moebius import capture, stats
from moebius.api import captured_of, report_of

from .script import SCRIPTS, Script

TIMED = 20  # steps at the end, without the last, whose batch is short
CLOSE = 5e-3  # of parameters after training with the default backend, beside their norm: rounding, step after step
AS_ROUNDING = 4  # times as far as plain training goes from a start that is changed by one rounding


@dataclass
class Row:
    """What the table shows of a script. Times are the processor's, in seconds: other programs count little."""

    name: str
    family: str
    backend: str
    difference: str = ""
    steps: int = 0
    graphs: int = 0
    breaks: list[str] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)  # numbers of the steps in which something was captured
    recompiles: list[str] = field(default_factory=list)
    regions: int = 0
    lowered: int = 0
    first: float = 0.0
    step: float = 0.0
    plain: float = 0.0
    warned: list[str] = field(default_factory=list)
    native: bool = False

    @property
    def hit_rate(self) -> float:
        """Of the steps after the third one."""
        late = self.steps - 3
        return 1 - sum(number >= 3 for number in self.misses) / late

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": round(self.hit_rate, 3)}


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def go_on_from(of_torch: torch.Tensor, of_python: tuple, of_numpy: Any) -> None:
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def training(script: Script, step: Any, steps: int, row: Row | None = None) -> Iterator[tuple[Any, float]]:
    """What each step gives, and how long it takes. The last batch is always among them. Its random numbers are its
    own, whatever runs between two steps."""
    seed()
    states = random_states()
    chosen = [*script.batches[: steps - 1], script.batches[-1]] if steps < len(script.batches) else script.batches
    for number, batch in enumerate(chosen):
        go_on_from(*states)
        before = 0 if row is None else stats(step).misses
        started = time.process_time()
        result = step(*batch)
        took = time.process_time() - started
        states = random_states()
        if row is not None and stats(step).misses > before:
            row.misses.append(number)
        yield result, took


def measure(name: str, backend: str = "eager", steps: int = 50) -> Row:
    """Train plain and captured, from one seed each, a step of each in turns: what else the machine does, both meet."""
    family, build = SCRIPTS[name]
    row = Row(name, family, backend)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        seed()
        plain = build()
        seed()
        script = build()
        captured = capture(script.step, backend=backend)
        turns = zip(training(plain, plain.step, steps), training(script, captured, steps, row), strict=True)
        wanted, plain_times, found, times = map(list, zip(*((*a, *b) for a, b in turns), strict=True))
    row.warned = [str(w.message) for w in warned if "moebius" in str(w.message)]
    row.native = any("natively" in text for text in row.warned)
    row.steps = len(times)
    row.first, row.step, row.plain = times[0], late(times), late(plain_times)
    counted, known = stats(captured), captured_of(captured)
    assert known is not None
    report = report_of(known)
    row.graphs = counted.graphs
    row.breaks = [f"{b.reason}: {b.detail} ({b.file.rsplit('/', 1)[-1]}:{b.line})" for b in report.breaks]
    again = counted.recompiles
    row.recompiles = [f"{r.guard}: {r.old} → {r.new} ({r.file.rsplit('/', 1)[-1]}:{r.line})" for r in again]
    row.regions = len(report.expert_regions)
    row.lowered = sum(region.lowered for region in report.expert_regions)
    row.difference = difference(wanted, found, backend) or difference(plain.state(), script.state(), backend)
    if row.difference and backend != "eager" and close_as_rounding(build, steps, plain.state(), script.state()):
        row.difference = ""
    return row


def close_as_rounding(build: Callable[[], Script], steps: int, want: list, got: list) -> bool:
    """Whether training that is far from plain is no farther than plain training from another rounding of its start:
    Adam makes steps of the sign of a gradient that is rounding alone, and bfloat16 rounds much."""
    seed()
    script = build()
    shaken = [one for one in script.trained if isinstance(one, torch.nn.Module)]
    with torch.no_grad():
        for weight in {p for module in shaken for p in module.parameters() if p.is_floating_point()}:
            weight.mul_(1 + torch.finfo(weight.dtype).eps)
    with contextlib.redirect_stdout(io.StringIO()):
        list(training(script, script.step, steps))
    away = [torch.dist(a.double(), b.double()).item() for a, b in zip(want, script.state(), strict=True)]
    found = [torch.dist(a.double(), b.double()).item() for a, b in zip(want, got, strict=True)]
    return math.hypot(*found) <= AS_ROUNDING * math.hypot(*away)


def late(times: list[float]) -> float:
    """The median of a step once all is captured."""
    return statistics.median(times[-TIMED - 1 : -1] or times)


def difference(want: Any, got: Any, backend: str) -> str:
    """"" where the two are equal: to the bit with backend "eager", up to rounding with another."""
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or want.shape != got.shape or want.dtype != got.dtype:
            return f"{want} against {got}"
        if backend == "eager":
            same = torch.equal(want.isnan(), got.isnan()) and torch.equal(want.nan_to_num(), got.nan_to_num())
            return "" if same else "bits"
        far = (want.double() - got.double()).norm() / want.double().norm().clamp(min=1.0)
        return "" if far < CLOSE else f"off by {far:.1e}"
    if isinstance(want, list | tuple):
        if len(want) != len(got):
            return f"{len(want)} items against {len(got)}"
        return next((text for a, b in zip(want, got, strict=True) if (text := difference(a, b, backend))), "")
    if isinstance(want, dict):
        return difference([*want.items()], [*got.items()], backend)
    if isinstance(want, float) and want != want and got != got:
        return ""
    if isinstance(want, float) and type(want) is type(got) and backend != "eager":
        return "" if math.isclose(want, got, rel_tol=0.05, abs_tol=0.05) else f"{want} against {got}"
    same = type(want) is type(got) and want == got
    return "" if same or (backend != "eager" and isinstance(want, int | str)) else f"{want!r:.60} against {got!r:.60}"

"""Routed experts, forward and backward: moebius.kernels.experts against the plain loop, grouped_mm and the peers.

On a GPU (bfloat16): TFLOP/s forward, backward and both, per cent of the matrix rate measured on that card in the same
run, and how many times faster moebius is than each contender, at five shapes; peers that are not installed are named.
On a CPU: milliseconds, and ratios to the same GEMMs alone, run between the others.

Every contender is given the same weights and routing, and checked against the plain loop before it is timed. Needs
torch, and on a GPU Triton; a checkout that is not installed will do. Stops starting contenders after --minutes.

    moebius bench experts --plot experts.png
    python bench/experts.py --threads 2 --shape small --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from _peers import (
    Gemms,
    Problem,
    Shape,
    Unavailable,
    compiled_grouped_mm,
    eager_loop,
    grouped_mm,
    interleaved,
    liger,
    make_problem,
    moebius_default,
    moebius_recompute,
    scattermoe,
    sonicmoe,
)
from torch import Tensor

GPU_SHAPES = {
    "moe": Shape(32768, 2048, 768, 128, 8),
    "fine": Shape(24576, 1536, 256, 128, 8),
    "finest": Shape(32768, 4096, 256, 256, 16),
    "wide": Shape(32768, 4096, 1024, 128, 8),
    "mixtral": Shape(4096, 4096, 14336, 8, 2),
}
CPU_SHAPES = {"small": Shape(1024, 512, 256, 16, 4), "many": Shape(1024, 512, 256, 64, 8)}
LOOSEST = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of the check, relative
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Row:
    """One contender on one problem. Seconds are medians; peak: bytes above what lay there, None where not known."""

    shape: str
    dtype: str
    contender: str
    forward: float = float("nan")
    backward: float = float("nan")
    peak: int | None = None
    note: str = ""

    @property
    def both(self) -> float:
        return self.forward + self.backward


class Clock:
    """Seconds of calls: CUDA events on a GPU, with the L2 cache overwritten between them; on a CPU the wall clock, or
    with ``cpu_time`` processor time over the threads, which other load disturbs less."""

    def __init__(self, device: str, cpu_time: bool) -> None:
        self.device, self.cpu_time = device, cpu_time
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if device == "cuda" else None

    def time(self, *calls: Callable[[], object]) -> list[float]:
        """Seconds of each of the calls, made in this order."""
        if self.flush is None:
            now = time.process_time if self.cpu_time else time.perf_counter
            share = torch.get_num_threads() if self.cpu_time else 1
            marks = [now()]
            for call in calls:
                call()
                marks.append(now())
            return [(b - a) / share for a, b in zip(marks, marks[1:], strict=False)]
        self.flush.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        events[0].record()
        for call, event in zip(calls, events[1:], strict=True):
            call()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


class Wrong(Exception):
    """A contender's result or gradients are not the plain loop's."""


class Contender:
    """Something to time: forward, then backward of what forward made, all gradients. layout: of the gate_up that it
    takes, made from the problem's, whose gradient is compared in that layout."""

    def __init__(self, name: str, problem: Problem, make: Callable[[], Callable[[Problem], Tensor]],
                 layout: Callable[[Tensor], Tensor] | None = None) -> None:
        self.run = make()
        self.name, self.layout = name, layout
        self.problem = problem if layout is None else replace(
            problem, gate_up=layout(problem.gate_up.detach()).requires_grad_())
        self.out: Tensor | None = None

    def forward(self) -> None:
        self.out = self.run(self.problem)

    def backward(self) -> None:
        assert self.out is not None
        self.grads = torch.autograd.grad(self.out, self.problem.leaves, self.problem.grad)
        self.out = None

    def verify(self, want: list[Tensor]) -> None:
        """Raise Wrong where result or a gradient differs from the plain loop's: a fast wrong answer is no result."""
        self.forward()
        assert self.out is not None
        got = [self.out.detach()]
        self.backward()
        names = ("result", "dx", "d gate_up", "d down", "d weight")
        for name, a, b in zip(names, [*got, *self.grads], want, strict=True):
            if self.layout is not None and name == "d gate_up":
                b = self.layout(b)
            if not error(a, b) < LOOSEST[b.dtype]:
                raise Wrong(f"{name} is {error(a, b):.1e} off")


def contenders(problem: Problem, device: str) -> dict[str, Callable[[], Contender]]:
    def add(name: str, make: Callable[[], Callable[[Problem], Tensor]],
            layout: Callable[[Tensor], Tensor] | None = None) -> None:
        found[name] = lambda: Contender(name, problem, make, layout)

    found: dict[str, Callable[[], Contender]] = {}
    add("moebius", lambda: moebius_default)
    add("moebius, recompute", lambda: moebius_recompute)
    add("grouped_mm", lambda: grouped_mm)
    if device == "cuda":
        add("Liger", liger)
        add("SonicMoE", sonicmoe, interleaved)
        add("ScatterMoE", scattermoe)
    add("eager loop", lambda: eager_loop)
    add("compiled grouped_mm", compiled_grouped_mm)
    return found


def peak_of(call: Callable[[], object], device: str) -> int | None:
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(name: str, shape: Shape, dtype: torch.dtype, device: str, clock: Clock, rounds: int, deadline: float,
            chosen: list[str] | None) -> list[Row]:
    """All contenders on one problem, one after the other in every round, so that what disturbs the machine disturbs
    all of them alike."""
    problem = make_problem(shape, dtype, device)
    label = str(dtype).removeprefix("torch.")
    loop = Contender("eager loop", problem, lambda: eager_loop)
    loop.forward()
    want = [loop.out.detach()] if loop.out is not None else []
    loop.backward()
    want += loop.grads
    rows: list[Row] = []
    running: list[tuple[Row, Callable[[], object], Callable[[], object]]] = []
    for contender_name, make in contenders(problem, device).items():
        if chosen and contender_name not in chosen:
            continue
        row = Row(name, label, contender_name)
        rows.append(row)
        if time.monotonic() > deadline:
            row.note = "not run: out of time"
            continue
        try:
            contender = make()
            contender.verify(want)

            def once(contender: Contender = contender) -> None:
                contender.forward()
                contender.backward()

            row.peak = peak_of(once, device)
            running.append((row, contender.forward, contender.backward))
        except Unavailable as reason:
            row.note = str(reason)
        except torch.OutOfMemoryError:
            row.note = "out of memory"
            torch.cuda.empty_cache()
        except Exception as failure:  # a peer's failure is a line of the result
            if contender_name.startswith("moebius"):
                if isinstance(failure, Wrong):
                    raise SystemExit(f"{contender_name}, {shape}: {failure}") from None
                raise
            row.note = f"{type(failure).__name__}: {str(failure).splitlines()[0][:90] if str(failure) else ''}"
    if device == "cpu":
        alone = Gemms(problem)
        row = Row(name, label, "GEMMs alone")
        rows.append(row)
        running.append((row, alone.forward, alone.backward))
    times: dict[int, list[list[float]]] = {id(row): [] for row, _, _ in running}
    for number in range(rounds + 1):
        if number > 2 and time.monotonic() > deadline:
            break
        for row, forward, backward in running[number % len(running):] + running[: number % len(running)]:
            measured = clock.time(forward, backward)
            if number:
                times[id(row)].append(measured)
    for row, _, _ in running:
        row.forward, row.backward = (statistics.median(part) for part in zip(*times[id(row)], strict=True))
    return rows


def matrix_rate(device: str, dtype: torch.dtype, clock: Clock, enough: float = 0.02) -> float:
    """FLOP/s of torch.mm on square matrices: what this machine's library reaches. On a CPU the squares grow until a
    product takes ``enough`` seconds: one without instructions for a dtype needs 13 s for what another does in 0.05."""
    size, largest = (8192, 8192) if device == "cuda" else (256, 2048)
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = clock.time(*[lambda: torch.mm(a, b, out=out)] * 3)[1:]  # noqa: B023 (called at once)
        if size == largest or min(seconds) > enough:
            break
        size *= 2
    seconds += clock.time(*[lambda: torch.mm(a, b, out=out)] * 5)
    return 2 * size**3 / min(seconds)


def show(rows: list[Row], shapes: dict[str, Shape], rates: dict[str, float]) -> None:
    for case in dict.fromkeys((row.shape, row.dtype) for row in rows):
        group = [row for row in rows if (row.shape, row.dtype) == case]
        flops, rate = shapes[case[0]].forward_flops, rates[case[1]]
        ours = next((row.both for row in group if row.contender == "moebius"), float("nan"))
        alone = next((row.both for row in group if row.contender == "GEMMs alone"), None)
        print(f"\n{case[0]}: {shapes[case[0]]}, {case[1]}; torch.mm reaches {rate / 1e12:.3g} TFLOP/s")
        print(f"  {'':<22}{'forward':>12}{'backward':>12}{'both':>12}{'% of mm':>9}{'time':>11}"
              f"{'of GEMMs' if alone else 'peak':>10}")
        for row in group:
            if row.note:
                print(f"  {row.contender:<22}{row.note}")
                continue
            parts = ((row.forward, flops), (row.backward, 2 * flops), (row.both, 3 * flops))
            cells = [f"{s * 1e3:.1f} ms" if alone else f"{f / s / 1e12:.0f} TFLOP/s" for s, f in parts]
            last = f"{row.both / alone:.2f}×" if alone else f"{row.peak / 2**30:.2f} GiB" if row.peak else ""
            print(f"  {row.contender:<22}{cells[0]:>12}{cells[1]:>12}{cells[2]:>12}"
                  f"{300 * flops / row.both / rate:>8.0f}%{row.both / ours:>10.2f}×{last:>10}")


def draw(rows: list[Row], shapes: dict[str, Shape], title: str, path: Path) -> None:
    """Bars of TFLOP/s, forward and backward together, grouped by shape."""
    try:
        import matplotlib
    except ImportError:
        print("\n  no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = [row for row in rows if not row.note]
    cases = list(dict.fromkeys((row.shape, row.dtype) for row in good))
    names = list(dict.fromkeys(row.contender for row in good))
    figure, axis = plt.subplots(figsize=(2 + 2.2 * len(cases), 4.4), layout="constrained")
    width = 0.84 / len(names)
    colors = ["#6a43d9", "#a993ea", "#e08a3c", "#3c9a8f", "#c94f6d", "#7a7f91", "#b9bcc8", "#d8c24a", "#444444"]
    for place, (name, color) in enumerate(zip(names, colors, strict=False)):
        for row in good:
            if row.contender == name:
                rate = 3 * shapes[row.shape].forward_flops / row.both / 1e12
                axis.bar(cases.index((row.shape, row.dtype)) + (place - (len(names) - 1) / 2) * width, rate,
                         width * 0.92, color=color, label=name)
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axis.legend(unique.values(), unique.keys(), frameon=False, fontsize=8)
    axis.set_xticks(range(len(cases)), [f"{shape}\n{dtype}" for shape, dtype in cases])
    axis.set_ylabel("TFLOP/s, forward and backward")
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"\n  {path}")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = GPU_SHAPES if device == "cuda" else CPU_SHAPES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each shape (default: %(default)s)")
    parser.add_argument("--shape", choices=list(shapes), action="append", help="only these")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append")
    parser.add_argument("--contender", action="append", help="only these, by name")
    parser.add_argument("--minutes", type=float, default=7.0, help="no contender starts later (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU (default: %(default)s)")
    parser.add_argument("--cpu-time", action="store_true", help="on a CPU: processor time over threads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows")
    parser.add_argument("--plot", type=Path, nargs="?", const=Path("experts.png"), metavar="FILE", help="also draw")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    if device == "cpu":
        torch.set_num_threads(args.threads)
    deadline = time.monotonic() + 60 * args.minutes
    clock = Clock(device, args.cpu_time)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    title = f"Routed experts · {machine} · torch {torch.__version__} · Python {sys.version.split()[0]}"
    print(title + (" · processor time" if args.cpu_time else ""))
    rows: list[Row] = []
    rates: dict[str, float] = {}
    for dtype_name in args.dtype or (["bfloat16"] if device == "cuda" else ["float32", "bfloat16"]):
        dtype = DTYPES[dtype_name]
        rates[dtype_name] = matrix_rate(device, dtype, clock)
        for name in args.shape or shapes:
            rows += measure(name, shapes[name], dtype, device, clock, args.rounds, deadline, args.contender)
            if device == "cuda":
                torch.cuda.empty_cache()
    show(rows, shapes, rates)
    if args.json:
        args.json.write_text(json.dumps({"title": title, "matrix_rate": rates, "rows": [asdict(r) for r in rows]},
                                        indent=1))
    if args.plot:
        draw(rows, shapes, title, args.plot)


if __name__ == "__main__":
    main()

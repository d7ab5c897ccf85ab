"""What the benchmarks share: interleaved timing, medians with spread, one table, one plot."""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

COLORS = {"plain": "#b9bcc8", "torch.compile": "#e08a3c", "moebius": "#6a43d9"}


@dataclass
class Sample:
    """Times of one contender in one case, in seconds, one a round."""

    case: str
    contender: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile; the only value twice where there is one round."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third


def interleave(case: str, contenders: dict[str, Callable[[], object]], rounds: int, calls: int) -> list[Sample]:
    """Seconds a call, every contender once a round, so that what disturbs the machine disturbs all of them alike."""
    samples = {name: Sample(case, name, []) for name in contenders}
    for call in contenders.values():
        for _ in range(3):
            call()
    for number in range(rounds):
        order = list(contenders.items())
        for name, call in order[number % len(order) :] + order[: number % len(order)]:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].seconds.append((time.perf_counter() - start) / calls)
    return list(samples.values())


def arguments(description: str | None, rounds: int) -> argparse.Namespace:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of each case (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the result as a PNG")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    return args


def machine() -> str:
    """The machine and the versions, in one line."""
    return f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def scaled(seconds: float) -> str:
    """A time with a fitting unit."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"


def show(title: str, samples: Sequence[Sample]) -> None:
    """One line for each case and contender: median and quartiles."""
    print(f"{title}\n{machine()}\n")
    print(f"  {'case':<22}{'contender':<16}{'median':>10}   quartiles")
    for sample in samples:
        low, high = sample.spread
        print(f"  {sample.case:<22}{sample.contender:<16}{scaled(sample.median):>10}   {scaled(low)} – {scaled(high)}")


def draw(title: str, samples: Sequence[Sample], path: Path) -> None:
    """Bars of medians with quartiles on a logarithmic axis, grouped by case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(sample.case for sample in samples))
    contenders = list(dict.fromkeys(sample.contender for sample in samples))
    figure, axis = plt.subplots(figsize=(1.2 + 1.9 * len(cases), 4.2), layout="constrained")
    width = 0.8 / len(contenders)
    for place, contender in enumerate(contenders):
        chosen = {sample.case: sample for sample in samples if sample.contender == contender}
        spots = [cases.index(case) + (place - (len(contenders) - 1) / 2) * width for case in chosen]
        medians = [sample.median for sample in chosen.values()]
        errors = [
            [sample.median - sample.spread[0] for sample in chosen.values()],
            [sample.spread[1] - sample.median for sample in chosen.values()],
        ]
        axis.bar(spots, medians, width * 0.92, yerr=errors, color=COLORS[contender], label=contender, capsize=2)
        for spot, median in zip(spots, medians, strict=True):
            axis.annotate(scaled(median), (spot, median), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    axis.set_yscale("log")
    axis.set_xticks(range(len(cases)), cases)
    axis.set_ylabel("seconds")
    axis.margins(y=0.15)
    axis.set_title(f"{title}\n{machine()}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"\n  {path}")

"""Loss curves of the demo's small Mixtral with its experts' GEMMs in 8 bits, against bfloat16.

Every run has the same weights, the same batches and bfloat16 autocast; only ``precision=`` (or ``save=``) of the
captured step differs. Formats are emulated on a CPU, exactly: what is measured is what they do to training, not speed.

    moebius bench precision                                     # about twelve minutes on one core
    moebius bench precision --steps 20 --run bfloat16 --run mxfp8
    python bench/precision.py --json curves.json --plot docs/precision-loss.png --table docs/precision.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_mixtral import make_batches, make_training

import moebius
from moebius.kernels import Budget, chosen_precisions

RUNS: dict[str, dict[str, Any] | None] = {
    "bfloat16": {},
    "mxfp8": {"precision": "mxfp8"},
    "fp8": {"precision": "fp8"},
    "bfloat16, other sums": None,  # plain Python: how far two runs of the same arithmetic come apart
    "fp8_block": {"precision": "fp8_block"},
    "Budget(5e-2)": {"precision": Budget(5e-2)},
    "H in MXFP8": {"save": "fp8"},
}
LAST = 50  # steps whose mean is compared
BEGIN, END = "<!-- losses: written by bench/precision.py -->", "<!-- end of losses -->"


@dataclass
class Curve:
    """One run. losses: one a step. chosen: what a budget chose, layer by layer."""

    name: str
    losses: list[float] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    @property
    def last(self) -> float:
        """The mean over the last steps."""
        part = self.losses[-LAST:]
        return sum(part) / len(part)


def train_step(model, optimizer, scheduler, batch):
    """One training step under autocast."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss.detach()


def train(name: str, seed: int, steps: int) -> Curve:
    options = RUNS[name]
    step: Callable = train_step if options is None else moebius.capture(train_step, **options)
    model, optimizer, scheduler = make_training(seed, steps)
    curve = Curve(name)
    for batch in make_batches(seed, steps):
        curve.losses.append(float(step(model, optimizer, scheduler, batch)))
    if options is not None and "precision" in options:
        curve.chosen = [str(precision) for _, precision in chosen_precisions()]
    print(f"  {name:<22} loss {curve.losses[0]:.3f} → {curve.last:.4f}", flush=True)
    return curve


def difference(curve: Curve, base: Curve) -> tuple[float, float]:
    """(of the last steps' mean, the largest of any step), relative to bfloat16's."""
    pairs = list(zip(curve.losses, base.losses, strict=True))
    return curve.last / base.last - 1, max(abs(a / b - 1) for a, b in pairs)


def table(curves: list[Curve]) -> str:
    """Markdown."""
    base = curves[0]
    lines = [f"| experts | first loss | mean of the last {LAST} steps | against bfloat16 | most of any step |",
             "|---|---|---|---|---|"]
    for curve in curves:
        mean, largest = difference(curve, base)
        lines.append(f"| {curve.name} | {curve.losses[0]:.3f} | {curve.last:.4f} | "
                     + ("– | – |" if curve is base else f"{mean:+.2%} | {largest:.1%} |"))
    return "\n".join(lines)


def draw(curves: list[Curve], path: Path) -> None:
    """The losses, and below them each run's running difference from bfloat16."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = ["#222222", "#6a43d9", "#e08a3c", "#b0b3bd", "#3c9a8f", "#c94f6d", "#4a86c9"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6.4), sharex=True, layout="constrained",
                                         gridspec_kw={"height_ratios": [3, 2]})
    base = smooth(curves[0].losses)
    for curve, color in zip(curves, colors, strict=False):
        line = smooth(curve.losses)
        width = 2.2 if curve is curves[0] else 1.1
        top.plot(line, color=color, linewidth=width, label=curve.name, zorder=1 if curve is curves[0] else 2)
        if curve is not curves[0]:
            bottom.plot([100 * (a / b - 1) for a, b in zip(line, base, strict=True)], color=color, linewidth=1.1)
    bottom.axhline(0, color="#222222", linewidth=0.8)
    top.set_ylabel("loss, mean of 10 steps")
    bottom.set_ylabel("against bfloat16, %")
    bottom.set_xlabel("step")
    top.legend(frameon=False, fontsize=9)
    top.set_title("Small Mixtral, 4 layers of 8 experts: formats of the experts' GEMMs", fontsize=10)
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"\n  {path}")


def smooth(losses: list[float], width: int = 10) -> list[float]:
    """Each step's mean with the steps before it, at most ``width`` of them."""
    return [sum(losses[max(0, i + 1 - width):i + 1]) / min(i + 1, width) for i in range(len(losses))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", choices=list(RUNS), action="append", help="only these (bfloat16 always)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the curves here; those there are not run again")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write the table between its marks in FILE")
    parser.add_argument("--plot", type=Path, nargs="?", const=Path("precision.png"), metavar="FILE", help="also draw")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps is at least 1")
    names = [name for name in RUNS if name == "bfloat16" or not args.run or name in args.run]
    done: dict[str, Curve] = {}
    if args.json and args.json.exists():
        done = {each["name"]: Curve(**each) for each in json.loads(args.json.read_text())}
        if any(len(curve.losses) != args.steps for curve in done.values()):
            parser.error(f"{args.json} has runs of another number of steps")
    for name in names:
        if name not in done:
            done[name] = train(name, args.seed, args.steps)
        if args.json:
            args.json.write_text(json.dumps([asdict(curve) for curve in done.values()]))
    curves = [done[name] for name in names]
    print("\n" + table(curves))
    for curve in curves:
        if curve.chosen:
            print(f"  {curve.name} chose " + "; ".join(curve.chosen))
    if args.table:
        text = args.table.read_text()
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        args.table.write_text(f"{head}{BEGIN}\n{table(curves)}\n{END}{tail}")
    if args.plot:
        draw(curves, args.plot)


if __name__ == "__main__":
    main()

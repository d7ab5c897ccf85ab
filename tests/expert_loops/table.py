"""Runs every spelling of an expert layer with @capture and plainly, and writes what became of it to a page.

``python tests/expert_loops/table.py --docs docs/expert-loops.md``. Compared in float64: the result and the gradient of
everything that the layer uses, over several batches (one of them sends all tokens to the same experts).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import gathered_spellings  # noqa: F401 (adds to MODULES)
from module_layers import Layer
from module_spellings import MODULES
from spellings import BROKEN, CAPTURED, LOWERED, PROJECTED, SPELLINGS, D, E, N, T

import moebius
from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.lowering.experts.rows_written import KERNEL

EVERY = ChainMap(MODULES, SPELLINGS)
SEEDS = range(4)
UNSEEN = "no experts were found"
PUBLIC = "\n## Layers of public repositories\n"  # what the page says from there on is not made here
EXPERTS = "(the experts; the lookups and sums around them stay)"


@dataclass
class Outcome:
    """What became of one spelling. faults: where it differs from plain PyTorch. why: the first refusal or break."""

    name: str
    says: str
    outcome: str
    graphs: int
    breaks: int
    faults: list[str]
    why: str

    def row(self) -> str:
        equal = "no" if self.faults else "yes"
        return f"| {self.says} | {equal} | {self.graphs} | {self.outcome} | {self.why} |"


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((T, D), (E, D), (E, 2 * N, D), (E, D, N))
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    if seed == SEEDS[-1]:
        made[0] = made[0][:1] + 0.001 * made[0]  # all tokens go the same way: experts without rows
    return [t.requires_grad_() for t in made]


def layer() -> Layer:
    torch.manual_seed(0)
    made = Layer().double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


class Runner:
    """One spelling, its captured form, and their two sets of weights."""

    def __init__(self, name: str, backend: str = "moebius"):
        self.name, self.with_modules = name, name in MODULES
        self.spelling = EVERY[name]
        self.function: Callable = self.spelling.function
        self.captured = capture(self.function, backend=backend)
        self.layers = (layer(), layer()) if self.with_modules else ()

    def inputs(self, which: int, seed: int) -> tuple[list, list[tuple[str, torch.Tensor]]]:
        """Arguments of a call, and what gets gradients, by name. which: 0 the captured one's, 1 the plain one's."""
        values = tensors(seed)
        if not self.with_modules:
            return values, list(zip(("x", "router", "gate_up", "down"), values, strict=True))
        module = self.layers[which]
        module.zero_grad()
        return [values[0], module], [("x", values[0]), *module.named_parameters()]

    def call(self, seed: int, exact: bool = False) -> list[str]:
        """Where the captured call differs from the plain one. exact: in any bit."""
        mine, my_leaves = self.inputs(0, seed)
        plain, leaves = self.inputs(1, seed)
        pairs = [("the result", self.captured(*mine), self.function(*plain))]
        for _, mine_out, plain_out in pairs[:1]:
            mine_out.square().sum().backward()
            plain_out.square().sum().backward()
        faults = []
        for (name, a), (_, b) in zip(my_leaves, leaves, strict=True):
            if (a.grad is None) != (b.grad is None):
                faults.append(f"gradient of {name}: {'none' if a.grad is None else 'one'}, not as in eager")
            elif a.grad is not None:
                pairs.append((f"gradient of {name}", a.grad, b.grad))
        for what, a, b in pairs:
            same = torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-10, atol=1e-11)
            if not same:
                faults.append(f"{what}: off by {(a - b).abs().max().item():.1e} (batch {seed})")
        return faults

    def report(self) -> tuple[str, str]:
        """(outcome, the first reason why it is not better)."""
        report = report_of(captured_of(self.captured))
        if report.breaks:
            first = report.breaks[0]
            detail = first.detail.splitlines()[0][:120]
            return BROKEN, f"{first.reason}: {detail} (line {line_of(first.stack, first.line)})"
        regions = report.expert_regions
        if regions and all(region.lowered for region in regions):
            outcome = PROJECTED if any(region.kernel == KERNEL for region in regions) else LOWERED
            return outcome, EXPERTS if any("rows of its own" in region.idiom for region in regions) else ""
        refusals = [region.refusal for region in regions if not region.lowered and region.refusal]
        return CAPTURED, shortened(refusals[0]) if refusals else UNSEEN


def line_of(stack: tuple, line: int) -> int:
    """The innermost line in the spelling itself."""
    own = [place[1] for place in stack if "spellings.py" in place[0]]
    return own[-1] if own else line


def shortened(refusal: str) -> str:
    """A refusal without the folder of its file."""
    head, _, place = refusal.rpartition("(")
    return f"{head}({Path(place).name}" if place.endswith(")") else refusal


def measure(name: str) -> Outcome:
    """Runs one spelling on every batch."""
    moebius.reset()
    runner = Runner(name)
    faults = [fault for seed in SEEDS for fault in runner.call(seed)]
    outcome, why = runner.report()
    counted = stats(runner.captured)
    says = runner.spelling.says
    return Outcome(name, says, outcome, counted.graphs, counted.breaks, faults, why.replace("|", "\\|"))


MADE = "Made by `python"  # above it, the page is its own
TABLE = """\
Made by `python tests/expert_loops/table.py --docs docs/expert-loops.md` on {date}, torch {torch}. Each spelling is
written out in tests/expert_loops (spellings.py and what ends in _spellings.py) and runs with `@capture`
and plainly, in float64.
*Equal*: the result and every gradient, a missing one included, on {batches} batches.

{counts}

| spelling | equal | graphs | becomes | why not one operator |
|---|---|---|---|---|
"""


def page(outcomes: list[Outcome]) -> str:
    words = (LOWERED, PROJECTED, CAPTURED, BROKEN)
    counts = [f"- {word}: {sum(o.outcome == word for o in outcomes)}" for word in words]
    around = sum(o.why == EXPERTS for o in outcomes if o.outcome == LOWERED)
    counts[0] += f", of which {around} with lookups and sums left around the experts"
    equal = f"- Equal to plain PyTorch: **{sum(not o.faults for o in outcomes)} of {len(outcomes)}**"
    head = TABLE.format(
        date=datetime.datetime.now(datetime.UTC).date(),
        torch=torch.__version__,
        batches=len(SEEDS),
        counts="\n".join([equal, *counts]),
    )
    return head + "".join(f"{outcome.row()}\n" for outcome in outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="spellings; all of them if none is named")
    parser.add_argument("--docs", type=Path, help="the page to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    for name in given.names or EVERY:
        outcomes.append(measure(name))
        done = outcomes[-1]
        equal = "; ".join(done.faults[:3]) or "equal"
        print(f"{name:32} {equal:8} {done.graphs:3} {done.outcome:13} {done.why}", flush=True)
    if given.docs:
        above, _, made = given.docs.read_text().partition(MADE)
        _, mark, kept = made.partition(PUBLIC)
        given.docs.write_text(above + page(outcomes) + mark + kept)


if __name__ == "__main__":
    main()

"""What the first call costs: moebius against ``torch.compile``, both with backend "eager".

Each round forgets all, captures again and takes the CPU time of the first call (other work on the machine does not
count). The models are transformers' own, tiny, with the experts as a Python loop.
Backend "eager" compiles nothing, so this is the time of capturing alone. It says how many graphs each ended with, since
a tool that breaks the graph has less to do. Then the same Mixtral with more and more equal layers, moebius alone: a
layer that was seen before is not interpreted again.

    moebius bench cold --plot cold.png
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Sample, arguments, draw, show
from models import tiny_mixtral
from zoo.tiny import build, forward_inputs

import moebius

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
DEPTHS = (2, 8, 64)


class Counting:
    """A torch.compile backend that runs each graph as it is and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
        self.graphs += 1
        return gm.forward


def first_call(function: Callable, *args: Any) -> float:
    start = time.process_time()
    function(*args)
    return time.process_time() - start


def forward(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).logits


def against_the_peer(family: str, rounds: int) -> tuple[list[Sample], str]:
    """The samples of one model, and the verdict in a line."""
    model, inputs = build(family)
    inputs = forward_inputs(inputs)
    plain, peer, ours = (Sample(family, name, []) for name in ("plain", "torch.compile", "moebius"))
    for number in range(rounds + 1):
        torch.compiler.reset()
        moebius.reset()
        backend = Counting()
        captured = moebius.capture(forward, backend="eager")
        times = [
            first_call(forward, model, inputs),
            first_call(torch.compile(forward, backend=backend), model, inputs),
            first_call(captured, model, inputs),
        ]
        if number:  # the first round also imports what both tools import late
            for sample, seconds in zip((plain, peer, ours), times, strict=True):
                sample.seconds.append(seconds)
    graphs = f"{backend.graphs} and {moebius.stats(captured).graphs} graphs"
    return [plain, peer, ours], f"  {family:<22}{peer.median / ours.median:.1f}× ({graphs})"


def growth(rounds: int, backend: str) -> list[str]:
    """Lines on what a deeper model of equal layers costs: the first call, and what of it was not running the graph."""
    first, capturing = {}, {}
    models = {depth: tiny_mixtral(depth) for depth in DEPTHS}
    times: dict[int, list[tuple[float, float]]] = {depth: [] for depth in DEPTHS}
    for _ in range(rounds + 1):
        for depth, (model, tokens) in models.items():  # in turns: what disturbs the machine disturbs all of them
            moebius.reset()
            captured = moebius.capture(lambda m, x: m(x).logits, backend=backend)
            cold = first_call(captured, model, tokens)
            times[depth].append((cold, cold - min(first_call(captured, model, tokens) for _ in range(3))))
    for depth, found in times.items():
        first[depth], capturing[depth] = (statistics.median(column) for column in zip(*found[1:], strict=True))
    least = DEPTHS[0]
    return [
        f"  {depth:>3} layers   first call {first[depth]:>6.2f} s {first[depth] / first[least]:>5.1f}×   "
        f"capturing {capturing[depth]:>6.2f} s {capturing[depth] / capturing[least]:>5.1f}×"
        for depth in DEPTHS
    ]


def main() -> None:
    args = arguments(__doc__, rounds=5)
    samples: list[Sample] = []
    verdicts: list[str] = []
    for family in FAMILIES:
        found, verdict = against_the_peer(family, args.rounds)
        samples += found
        verdicts.append(verdict)
    show("First call, backend eager, CPU time", samples)
    print("\n  torch.compile's first call takes this many times as long as moebius':")
    print("\n".join(verdicts))
    for backend in ("eager", "moebius"):
        print(f"\n  A Mixtral of equal layers, moebius, backend {backend}; capturing: without running the graph")
        with torch.no_grad():
            print("\n".join(growth(args.rounds, backend)))
    if args.plot:
        draw("First call, backend eager", samples, args.plot)


if __name__ == "__main__":
    main()

"""What the first call costs: moebius against ``torch.compile``, both with backend "eager".

Each round forgets all, captures again and times the first call; the tiny Mixtral has its experts as a Python loop.
Backend "eager" compiles nothing, so this is the time of capturing alone. It says how many graphs each ended with, since
a tool that breaks the graph has less to do.

    moebius bench cold --plot cold.png
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import Sample, arguments, draw, show
from models import Chain, tiny_mixtral

import moebius


class Counting:
    """A torch.compile backend that runs each graph as it is and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
        self.graphs += 1
        return gm.forward


def first_call(function: Callable, x: torch.Tensor) -> float:
    start = time.perf_counter()
    function(x)
    return time.perf_counter() - start


def main() -> None:
    args = arguments(__doc__, rounds=5)
    samples: list[Sample] = []
    verdicts: list[str] = []
    mixtral, tokens = tiny_mixtral()
    with torch.no_grad():
        for case, model, x in (("100 tensors", Chain(100), torch.ones(4)), ("tiny Mixtral", mixtral, tokens)):
            plain, peer, ours = (Sample(case, name, []) for name in ("plain", "torch.compile", "moebius"))
            for number in range(args.rounds + 1):
                torch.compiler.reset()
                moebius.reset()
                backend = Counting()
                captured = moebius.capture(model, backend="eager")
                times = [
                    first_call(model, x),
                    first_call(torch.compile(model, backend=backend), x),
                    first_call(captured, x),
                ]
                if number:  # the first round also imports what both tools import late
                    for sample, seconds in zip((plain, peer, ours), times, strict=True):
                        sample.seconds.append(seconds)
            samples += [plain, peer, ours]
            graphs = f"{backend.graphs} and {moebius.stats(captured).graphs} graphs"
            verdicts.append(f"  {case:<22}{peer.median / ours.median:.1f}× ({graphs})")
    show("First call, backend eager", samples)
    print("\n  torch.compile's first call takes this many times as long as moebius':")
    print("\n".join(verdicts))
    if args.plot:
        draw("First call, backend eager", samples, args.plot)


if __name__ == "__main__":
    main()

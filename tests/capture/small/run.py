"""`make small`: small generated programs, plain and captured; what differs is printed."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "interpreter"))

KINDS = ["breaks", "names", "sides", "values"]


def main() -> int:
    import torch
    from fuzz.choices import SeededChoices

    from moebius.trace import native_pieces
    from small import breaks, names, sides, values

    native_pieces.knows_no_torch = lambda *_: False  # as in the tests: programs go on after a break, as a step does
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="programs of each kind to run")
    parser.add_argument("--seed", type=int, default=None, help="of the first program (default: a fresh one, printed)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    torch.set_num_threads(1)
    differing = 0
    for kind in options.kind or KINDS:
        graphs, decided, undone, started, differ = 0, 0, 0, time.monotonic(), 0
        for seed in range(first, first + options.count):
            choices = SeededChoices(seed)
            if kind == "breaks":
                source = breaks.generate(choices)
                found, made, _ = breaks.difference(source)
            elif kind in ("sides", "values"):
                source = (sides if kind == "sides" else values).generate(choices)
                outcome = values.difference(source)
                found, made = outcome.differs, outcome.graphs
                decided, undone = decided + outcome.decided, undone + outcome.undone
            else:
                source = names.generate(choices)
                found, made = names.difference(source, choices)
            graphs += made
            if found:
                differ += 1
                print(f"{kind}, seed {seed}: {found}\n{source}", flush=True)
        seconds = time.monotonic() - started
        print(f"{kind}: {options.count} programs from seed {first}, {graphs} graphs, {differ} differ, {seconds:.0f} s")
        if kind in ("sides", "values"):
            print(f"{decided} with a loop or branch in a graph; {undone} calls not compared (their note says why)")
        differing += differ
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())

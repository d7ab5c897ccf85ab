"""What a warm call costs: moebius against ``torch.compile``, in one run.

1. With a backend that computes nothing, on 8, 64 and 256 modules of one parameter each: what is timed is the tool
   alone (find the compiled call, check its guards, call the backend's function).
2. The same 8 modules in a model with 256 and 1,024 more that the call does not touch.
3. With backend "eager", which runs the captured graph as it is, on a tiny Mixtral whose experts are a Python loop.

Each ratio is torch.compile's median over moebius', from rounds in which all contenders run one after the other. An
empty Python function's time is taken from both in 1 and 2: the overhead of a call is what is left.

    moebius bench warm --plot warm.png
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Sample, arguments, draw, interleave, scaled, show
from models import Stack, tiny_mixtral

import moebius

STACKS = ((8, 0), (64, 0), (256, 0), (8, 256), (8, 1024))  # modules that a call runs through, and others


def compute_nothing(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
    """A backend for :class:`Stack`: whatever the inputs, the one output is a constant."""
    (outputs,) = next(iter(reversed(gm.graph.nodes))).args
    if len(outputs) != 1:
        raise ValueError(f"one output was expected of a stack, the graph has {len(outputs)}")
    result = (torch.zeros(4),)
    return lambda *inputs: result


def compare(case: str, model: torch.nn.Module, x: torch.Tensor, backend: Any, rounds: int, calls: int) -> list[Sample]:
    """One case: plain, torch.compile and moebius, from nothing captured."""
    torch.compiler.reset()
    moebius.reset()
    compiled = torch.compile(model, backend=backend)
    captured = moebius.capture(model, backend=backend)
    contenders: dict[str, Callable[[], object]] = {
        "plain": lambda: model(x),
        "torch.compile": lambda: compiled(x),
        "moebius": lambda: captured(x),
    }
    if backend is compute_nothing:
        contenders["plain"] = lambda: empty(x)
    samples = interleave(case, contenders, rounds, calls)
    if backend is not compute_nothing:
        torch.testing.assert_close(captured(x).logits, model(x).logits)  # a fast wrong answer is no result
    if not moebius.stats(captured).graphs:
        raise SystemExit(f"{case}: moebius captured nothing, so there is nothing to compare")
    return samples


def empty(x: torch.Tensor) -> torch.Tensor:
    """What a call with an empty graph is held against."""
    return x


def medians(samples: list[Sample]) -> dict[str, float]:
    return {sample.contender: sample.median for sample in samples}


def overheads(samples: list[Sample]) -> str:
    median = medians(samples)
    peer, own = median["torch.compile"] - median["plain"], median["moebius"] - median["plain"]
    return f"torch.compile {scaled(peer)}, moebius {scaled(own)}: {peer / own:.1f}×"


def ratio(samples: list[Sample]) -> str:
    median = medians(samples)
    said = f"torch.compile's call takes {median['torch.compile'] / median['moebius']:.1f}× as long as moebius'"
    said += f"   (against plain: torch.compile {median['torch.compile'] / median['plain']:.2f}×,"
    said += f" moebius {median['moebius'] / median['plain']:.2f}×)"
    return said


def main() -> None:
    args = arguments(__doc__, rounds=30)
    mixtral, tokens = tiny_mixtral()
    results: list[list[Sample]] = []
    with torch.no_grad():
        for used, unused in STACKS:
            case = f"{used} modules" + (f" of {used + unused:,}" if unused else "")
            model = Stack(used, unused)
            results.append(compare(case, model, torch.ones(4), compute_nothing, args.rounds, 200))
        results.append(compare("tiny Mixtral", mixtral, tokens, "eager", args.rounds, 5))
    samples = [sample for result in results for sample in result]
    title = "Warm call"
    show(title, samples)
    print("\n  What a warm call costs above an empty function:")
    for result in results[: len(STACKS)]:
        print(f"  {result[0].case:<22}{overheads(result)}")
    print(f"\n  {results[-1][0].case}: {ratio(results[-1])}")
    if args.plot:
        draw(title, samples, args.plot)


if __name__ == "__main__":
    main()

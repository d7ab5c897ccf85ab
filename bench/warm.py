"""What a warm call costs: moebius against ``torch.compile``, in one run.

1. With a backend that computes nothing, on functions that check 1, 10 and 100 parameters: what is timed is the tool
   alone (find the compiled call, check its guards, call the backend's function).
2. With backend "eager", which runs the captured graph as it is, on a tiny Mixtral whose experts are a Python loop.

Each ratio is torch.compile's median over moebius', from rounds in which all contenders run one after the other.

    moebius bench warm --plot warm.png
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Sample, arguments, draw, interleave, show
from models import Chain, tiny_mixtral

import moebius

CHAINS = (1, 10, 100)


def compute_nothing(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
    """A backend for :class:`Chain`: whatever the inputs, the one output is a constant."""
    (outputs,) = next(iter(reversed(gm.graph.nodes))).args
    if len(outputs) != 1:
        raise ValueError(f"one output was expected of a chain, the graph has {len(outputs)}")
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
        del contenders["plain"]  # it computes
    samples = interleave(case, contenders, rounds, calls)
    if "plain" in contenders:
        torch.testing.assert_close(captured(x).logits, model(x).logits)  # a fast wrong answer is no result
    if not moebius.stats(captured).graphs:
        raise SystemExit(f"{case}: moebius captured nothing, so there is nothing to compare")
    return samples


def ratio(samples: list[Sample]) -> str:
    median = {sample.contender: sample.median for sample in samples}
    said = f"{median['torch.compile'] / median['moebius']:.1f}×"
    if "plain" in median:
        said += f"   (against plain: torch.compile {median['torch.compile'] / median['plain']:.2f}×,"
        said += f" moebius {median['moebius'] / median['plain']:.2f}×)"
    return said


def main() -> None:
    args = arguments(__doc__, rounds=30)
    mixtral, tokens = tiny_mixtral()
    results: list[list[Sample]] = []
    with torch.no_grad():
        for count in CHAINS:
            case = f"{count} parameter{'s' if count > 1 else ''}"
            results.append(compare(case, Chain(count), torch.ones(4), compute_nothing, args.rounds, 500))
        results.append(compare("tiny Mixtral", mixtral, tokens, "eager", args.rounds, 5))
    samples = [sample for result in results for sample in result]
    title = "Warm call"
    show(title, samples)
    print("\n  torch.compile's warm call takes this many times as long as moebius':")
    for result in results:
        print(f"  {result[0].case:<22}{ratio(result)}")
    if args.plot:
        draw(title, samples, args.plot)


if __name__ == "__main__":
    main()

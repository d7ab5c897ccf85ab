"""How far ``moebius explain --roofline`` is from what this CPU takes for a layer of experts.

One layer of gated experts, float32, one thread, forward and backward, from few large experts to many small ones. The
prediction knows shapes, and how many experts have rows; the CPU is measured first, by other products than these.

    OMP_NUM_THREADS=1 moebius bench roofline
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch
from common import machine

from moebius.kernels import experts
from moebius.lowering.planner.calibrate import measure, seconds
from moebius.lowering.roofline.experts import Layer

WIDTH, INNER = 256, 128


def made(experts_: int, top_k: int, tokens: int) -> tuple[Layer, list[torch.Tensor]]:
    """A layer of random weights with random routing."""
    torch.manual_seed(0)
    x_TD = torch.randn(tokens, WIDTH, requires_grad=True)
    gate_up_EMD = torch.randn(experts_, 2 * INNER, WIDTH).mul_(0.05).requires_grad_()
    down_EDN = torch.randn(experts_, WIDTH, INNER).mul_(0.05).requires_grad_()
    weight_TK, index_TK = torch.rand(tokens, experts_).topk(top_k)
    busy = int(index_TK.unique().numel())
    layer = Layer(tokens, top_k, WIDTH, INNER, 2 * INNER, experts_, busy, 4)
    return layer, [x_TD, gate_up_EMD, down_EDN, index_TK, weight_TK.contiguous()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", default="8,32,128,256", help="(default: %(default)s)")
    parser.add_argument("--top-k", default="1,2,8,16", help="(default: %(default)s)")
    parser.add_argument("--tokens", default="256,2048,16384", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts (default: %(default)s)")
    args = parser.parse_args()
    choices = [[int(word) for word in text.split(",")] for text in (args.experts, args.top_k, args.tokens)]
    torch.set_num_threads(1)
    print(f"Predicted and measured time of a layer of experts, {WIDTH} wide, experts {INNER}\n{machine()}\n")
    device, errors = measure(link=(0.0, 1e9)), []
    print(f"  {'experts':>7} {'top-k':>5} {'tokens':>6} {'rows/expert':>11} {'predicted':>10} {'measured':>10}  ratio")
    for e, k, t in itertools.product(*choices):
        if k > e:
            continue
        layer, (x_TD, gate_up, down, index_TK, weight_TK) = made(e, k, t)

        def both(x_TD=x_TD, gate_up=gate_up, down=down, index_TK=index_TK, weight_TK=weight_TK) -> None:
            torch.autograd.grad(experts(x_TD, gate_up, down, index_TK, weight_TK).sum(), (x_TD, gate_up, down))

        predicted, took = layer.seconds(device), seconds(both, args.rounds)
        errors.append(took / predicted)
        rows = layer.rows / layer.busy
        print(f"  {e:>7} {k:>5} {t:>6} {rows:>11.1f} {predicted * 1e3:>7.2f} ms {took * 1e3:>7.2f} ms"
              f"  {took / predicted:.2f}", flush=True)
    off = sorted(abs(one - 1) for one in errors)
    near = sum(one <= 0.15 for one in off)
    print(f"\n  {near} of {len(off)} within 15 %, median off by {statistics.median(off):.0%}")


if __name__ == "__main__":
    main()

"""What all ranks say when one of them does otherwise, and after how many seconds; and what it costs that they compare.

Two layers of experts on 2 x 2 ranks, each its own batch, after three steps that are the same on all. Then the last
rank does otherwise. Seconds are from the beginning of that call, for which all ranks wait, to each rank's error. Ends
with 1 where a rank does not say what differs and on which rank, or has written a weight.

The cost is processor time of warm steps of the Mixtral of examples/train_mixtral.py on 2 ranks, with what ranks compare
and without it, in turns in one process: the median of the ratios.

    moebius bench disagree
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import demo_mixtral
from rank_processes import add_arguments, join, run_on_ranks, tell
from torch import nn

import moebius
from moebius.lowering.distribution import Sharded, exchange, reduce, sharded

RANKS = 4
E, D, N, K, T = 8, 16, 8, 2, 12


class Layer(nn.Module):
    """A loop over the experts that were hit."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.up, self.down = nn.Parameter(torch.randn(E, N, D) / 4), nn.Parameter(torch.randn(E, D, N) / 4)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight_TK, index_TK = self.router(x_TD).softmax(-1).topk(K)
        out_TD, mask_EKT = x_TD.clone(), nn.functional.one_hot(index_TK, E).permute(2, 1, 0)
        for e in mask_EKT.sum((1, 2)).nonzero().flatten():
            slot, token = torch.where(mask_EKT[e])
            h = nn.functional.silu(x_TD[token] @ self.up[e].T) @ self.down[e].T
            out_TD.index_add_(0, token, h * weight_TK[token, slot, None])
        return out_TD


class Other(Layer):
    """Another version of its code."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_TD) * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(D, 3)

    def forward(self, x_TD: torch.Tensor, backwards: bool = False) -> torch.Tensor:
        for layer in self.layers[::-1] if backwards else self.layers:
            x_TD = layer(x_TD)
        return self.head(x_TD)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> torch.Tensor:
    optimizer.zero_grad()
    if batch.get("bad"):
        refuse(batch)
    loss = model(batch["x"], batch.get("backwards", False)).square().mean()
    if "more" in batch:
        loss = loss + model(batch["more"]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@moebius.disable
def refuse(batch: dict[str, Any]) -> None:
    raise ValueError("a bad batch")


def wait_for_all() -> float:
    dist.barrier()
    return time.monotonic()


def call(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:  # whatever it is, it is what the user sees
        return f"{type(error).__name__}: {error}"
    return ""


WAYS = {  # what the last rank has, and what every rank is to be told
    "one more call of the model": "reading parameter",
    "another batch key": "captured again as batch['more'] was missing",
    "a recompile": "captured again as batch['backwards'] was missing",
    "a native fallback": "reading parameter",
    "another option": "the option save",
    "another version of the code": "Other.forward (disagree.py:",
    "an exception in user code": "ValueError: a bad batch",
    "another order of layers": "layers.1.up",
}
CHANGES: dict[str, dict[str, Any]] = {  # of its batch
    "a recompile": {"backwards": 1}, "another order of layers": {"backwards": True},
    "an exception in user code": {"bad": True},
}


def disagree(way: str) -> dict[str, Any]:
    """The error on this rank, after how long, and whether a weight is another one."""
    torch.manual_seed(0)
    wrong, model = dist.get_rank() == RANKS - 1, Model()
    if wrong and way == "another version of the code":
        model.layers[1] = Other().requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    option: dict[str, Any] = {"save": "recompute"} if wrong and way == "another option" else {}
    run, generator = moebius.capture(step, mesh=mesh, **option), torch.Generator().manual_seed(dist.get_rank())
    batch = {"x": torch.randn(T, D, generator=generator)}
    if way not in ("another option", "another version of the code"):
        for _ in range(3):
            run(model, optimizer, batch)
    before, start, error = held(model), wait_for_all(), ""
    if wrong and way == "one more call of the model":
        error = call(lambda: model(batch["x"]))
    if wrong:
        batch |= {"more": batch["x"]} if way == "another batch key" else CHANGES.get(way, {})
    function = step if wrong and way == "a native fallback" else run
    error = error or call(lambda: function(model, optimizer, batch))
    seconds = time.monotonic() - start
    return {"error": error, "seconds": seconds, "same": all(map(torch.equal, before, held(model)))}


def held(model: nn.Module) -> list[torch.Tensor]:
    return [(p.local if isinstance(p, Sharded) else p).detach().clone() for p in model.parameters()]


OFF: list[tuple[Any, str, Callable[..., Any]]] = [  # what only compares; headers that carry counts go on
    (exchange, "header", lambda group, numbers_P, *rest: torch.stack([numbers_P, torch.zeros_like(numbers_P)], 1)),
    (exchange, "compare", lambda group, received, *rest: (received.cpu()[:, 0], True)),
    (reduce, "agree", lambda *args, **kwargs: True),
    (sharded, "agree", lambda *args, **kwargs: True),
    (reduce.Reducer, "digests", lambda *args: {}),
    (reduce.Reducer, "trouble", lambda *args: ""),
    (reduce.Reducer, "sampled", lambda *args: []),
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens_BT: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(input_ids=tokens_BT, labels=tokens_BT).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def compare_costs(pairs: int) -> dict[str, float]:
    model, tokens_BT = demo_mixtral()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = moebius.capture(train, mesh=dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    for _ in range(3):
        run(model, optimizer, tokens_BT)
    ratios, seconds = [], []
    for number in range(pairs):
        spent = {}
        for off in (False, True) if number % 2 else (True, False):
            with contextlib.ExitStack() as stack:
                for place in OFF if off else ():
                    stack.enter_context(mock.patch.object(*place))
                start = time.process_time()
                run(model, optimizer, tokens_BT)
                spent[off] = time.process_time() - start
        ratios.append(spent[False] / spent[True])
        seconds.append(spent[True])
    return {"ratio": statistics.median(ratios), "seconds": statistics.median(seconds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="of warm steps; 0: no costs (default: %(default)s)")
    parser.add_argument("--costs", action="store_true", help=argparse.SUPPRESS)
    add_arguments(parser)
    args = parser.parse_args()
    if args.rank is not None and args.costs:
        join(args.rank, 2, args.store)
        tell(compare_costs(args.pairs))
        dist.destroy_process_group()
        return 0
    if args.rank is not None:
        for number, way in enumerate(WAYS):  # a process for each: it is of no use afterwards
            if not (child := os.fork()):
                join(args.rank, RANKS, f"{args.store} {number}")
                tell(disagree(way))
                os._exit(0)
            os.waitpid(child, 0)
        return 0
    print("| the last of 4 ranks has | seconds until each rank has an error | all say so, no weight is written |")
    print("|---|---|---|")
    good = True
    for way, told in zip(WAYS, zip(*run_on_ranks(__file__, RANKS, []), strict=True), strict=True):
        said = all(
            re.search(f"rank {RANKS - 1}|ValueError", one["error"]) and WAYS[way] in one["error"] and one["same"]
            for one in told
        )
        good = good and said
        seconds = ", ".join(f"{one['seconds']:.1f}" for one in told)
        print(f"| {way} | {seconds} | {'yes' if said else 'NO'} |", flush=True)
        for one in told if not said else ():
            print(one["error"], file=sys.stderr)
    if args.pairs:
        (costs, *_) = zip(*run_on_ranks(__file__, 2, ["--costs", "--pairs", str(args.pairs)]), strict=True)
        words = ", ".join(f"{one['ratio'] - 1:+.1%} of {one['seconds'] * 1e3:.0f} ms" for one in costs)
        print(f"\nProcessor time of a warm step, by rank: {words}")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())

"""Optimizers of other packages: each trains a small model twice, plain and with its step captured, and is compared.

    python tests/suites/optimizers.py pytorch_optimizer torch.optim … [--only TEXT] [--steps 8] [--experts]

Compared to the bit: losses, weights, gradients, the optimizer's state and groups, and where torch's random numbers
stand. Told as well: graphs, breaks, calls that were captured again, seconds of the first calls beside plain ones.
--experts: the model has a mixture of experts, gradients are clipped, and one batch in four is short. A package must be
installed; pure Python ones are the most of them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import once
import torch
from describe import described
from run import in_a_child
from torch import nn
from tqdm import tqdm

from moebius import capture, stats

LR = 1e-2


def optimizers_of(module: types.ModuleType, only: str) -> Iterator[tuple[str, type[torch.optim.Optimizer]]]:
    for name, cls in sorted(vars(module).items()):
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            if only in name:
                yield name, cls


def made(cls: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, by the first of the ways that people's constructors allow; the last says why not."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    ways: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: cls([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]),
        lambda: cls(model.parameters(), lr=LR),
        lambda: cls(model.parameters()),
        lambda: cls(matrices, lr=LR),
        lambda: cls(torch.optim.AdamW(model.parameters(), lr=LR)),
    ]
    for way in ways[0 if "Muon" in cls.__name__ else 1 :]:
        try:
            return way()
        except Exception as error:
            last = error
    raise last


class Experts(nn.Module):
    """Each token goes through two of four experts."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 12), nn.SiLU(), nn.Linear(12, width)) for _ in range(experts)
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight_TK, index_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        y_TD = torch.zeros_like(x_TD)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index_TK == e)
            y_TD.index_add_(0, token, expert(x_TD[token]) * weight_TK[token, slot, None])
        return y_TD


def trained(cls: Any, steps: int, captured: bool, experts: bool = False) -> once.Record:
    """What each step gives and leaves, in words; an exception is an outcome, too."""
    torch.manual_seed(0)
    middle = [Experts()] if experts else []
    ends = nn.Linear(8, 4), nn.Linear(4, 4, bias=False)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), *middle, *ends)
    try:
        optimizer = made(cls, model)
    except Exception as error:
        return {"state": "not made", "error": f"{type(error).__name__}: {error}"[:100], "record": [], "internal": []}
    if callable(getattr(optimizer, "train", None)):  # those without schedules have two modes
        optimizer.train()  # type: ignore[attr-defined]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if experts:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    run, record, raised, seconds = capture(step, backend="eager") if captured else step, [], "", []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for iteration in range(steps):
            generator = torch.Generator().manual_seed(iteration)
            rows = 5 if experts and iteration % 4 == 3 else 9
            x, y = torch.randn(rows, 6, generator=generator), torch.randn(rows, 4, generator=generator)
            began = time.perf_counter()
            try:
                outcome: Any = run(x, y)
            except Exception as error:
                outcome = raised = f"{type(error).__name__}: {error}"[:300]
            seconds.append(time.perf_counter() - began)
            weights = [*model.parameters()]
            states = [optimizer.state.get(p) for p in weights] if hasattr(optimizer, "state") else []
            groups = [{k: v for k, v in g.items() if k != "params"} for g in getattr(optimizer, "param_groups", [])]
            left = (outcome, weights, [p.grad for p in weights], states, groups, torch.get_rng_state())
            record.append(described(left))
    seen = stats(run) if captured else None
    return {
        "state": "" if seen is None else f"{seen.graphs} graphs, {seen.breaks} breaks, {len(seen.recompiles)} captured "
        f"again, {seen.hits} hits, {sum(seconds):.1f} s",
        "error": raised,
        "record": record,
        "internal": [str(w.message)[:200] for w in warned if "please report" in str(w.message)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help="names of modules that hold optimizers, as torch.optim")
    parser.add_argument("--only", default="", help="those whose name holds this text")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--experts", action="store_true", help="a model with a mixture of experts, and short batches")
    parser.add_argument("--seconds", type=int, default=300, help="for one optimizer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    classes = {}
    for name in options.modules:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            parser.error(f"{name} cannot be imported ({error}); install the package that has it")
        classes.update({f"{name}.{n}": cls for n, cls in optimizers_of(module, options.only)})
    counts = {"equal": 0, "raise the same": 0, "differ": 0, "not made": 0}
    for name, cls in tqdm(classes.items(), disable=None):
        plain = in_a_child(lambda c=cls: trained(c, options.steps, False, options.experts), options.seconds)
        if plain["state"] == "not made":
            print(f"{name}: not made: {plain['error']}", flush=True)
            counts["not made"] += 1
            continue
        ours = in_a_child(lambda c=cls: trained(c, options.steps, True, options.experts), options.seconds)
        pairs = [*zip(plain["record"], ours["record"], strict=False)]
        if len(pairs) == options.steps and all(a == b for a, b in pairs) and not ours["internal"]:
            kind = "raise the same" if plain["error"] else "equal"
            told = f"{kind} ({plain['error'][:80]})" if plain["error"] else f"equal; {ours['state']}"
        else:
            kind, iteration = "differ", next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            told = f"DIFFERS from step {iteration} on; {ours['state']} {ours['error']} {ours['internal']}"
        counts[kind] += 1
        print(f"{name}: {told}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return min(counts["differ"], 1)


if __name__ == "__main__":
    sys.exit(main())

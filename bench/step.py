"""What a whole training step costs: plain PyTorch, its peers and moebius, in one run.

Cases: "demo", the Mixtral of ``make demo``, and "qwen3", a Qwen3-MoE of 64 experts; both four layers on 1,024 tokens,
and "plain" their experts as a Python loop. "tiny" and "written" are small: a Mixtral, and an MoE of plain PyTorch.
Peers: "grouped_mm", transformers' own grouped experts, run eagerly; and backends of ``torch.compile``, each of which
runs twice: under ``torch.compile`` on grouped experts (where the model has them), and under moebius on the loop.

Times are CPU time of the process, one step of each a round in turns, so that other programs do not count; several runs
are several ratios. *Until warm* is what the first calls cost beyond as many warm ones, C compilers included, nothing
kept from earlier processes. Memory is what torch's profiler sees allocated: the highest sum in one step, above what was
there before it. Kept for backward are the bytes that autograd saves, each storage once, parameters left out.

    OMP_NUM_THREADS=1 moebius bench step --peers all    # torch.compile takes minutes to compile
    moebius bench step --peers none --cases tiny
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import machine, scaled
from models import PlainMoE, demo_mixtral, qwen3_moe, tiny_mixtral
from peaks import peak_bytes
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import moebius

FIRST = 3  # calls of each that are not timed with the others: the second and third still compile, under torch.compile
CHECKED = 8  # steps whose losses have to agree; later ones differ by what training makes of roundings


@dataclass
class Contender:
    """One way to run the same training.

    seconds: CPU time of each timed step, a list a run; first: CPU seconds of the calls before; peak, saved: bytes.
    """

    name: str
    step: Callable[[], torch.Tensor]
    model: nn.Module
    seconds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first: float = 0.0
    peak: int = 0
    saved: int = 0

    @property
    def median(self) -> float:
        return statistics.median(second for run in self.seconds for second in run)

    @property
    def until_warm(self) -> float:
        return max(0.0, self.first - FIRST * self.median)

    def ratios(self, other: Contender) -> str:
        """Of the other's median, one for each run."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return " ".join(f"{statistics.median(mine) / statistics.median(theirs):.2f}" for mine, theirs in pairs)


def train_step(model, optimizer, tokens, labels):
    """An ordinary training step."""
    optimizer.zero_grad()
    logits = model(tokens)
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def written(seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """An MoE of plain PyTorch, its experts a loop, and tokens, int64 [4, 128]."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, 256, (4, 128))
    return PlainMoE(), tokens


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "demo": demo_mixtral,
    "qwen3": qwen3_moe,
    "tiny": tiny_mixtral,
    "written": written,
}


def contenders(model: nn.Module, tokens: torch.Tensor, peers: list[str]) -> list[Contender]:
    """Plain first, then the peers, then moebius, each on a copy of the model."""
    has_groups, found = hasattr(model, "set_experts_implementation"), []
    compiled = "torch.compile + grouped_mm" if has_groups else "torch.compile"
    ways: list[tuple[str, Callable, bool]] = [("plain", train_step, False)]
    for peer in peers:
        if peer != "grouped_mm":
            ways.append((f"{compiled}, {peer}", torch.compile(train_step, backend=peer), has_groups))
        elif has_groups:
            ways.append((peer, train_step, True))
    ways.append(("moebius", moebius.capture(train_step), False))
    for peer in peers:
        if peer != "grouped_mm":
            ways.append((f"moebius, {peer}", moebius.capture(train_step, backend=peer), False))
            parts = moebius.capture(train_step, backend=peer, whole_step=False)
            ways.append((f"moebius, {peer}, whole_step=False", parts, False))
    labels = tokens.roll(-1, -1)
    for name, function, grouped in ways:
        own: Any = copy.deepcopy(model).train()
        if grouped:
            own.set_experts_implementation("grouped_mm")
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)

        def step(function=function, own=own, optimizer=optimizer) -> torch.Tensor:
            return function(own, optimizer, tokens, labels)

        found.append(Contender(name, step, own))
    return found


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has started and that are done."""
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + below.ru_utime + below.ru_stime


def warm_up(way: Contender) -> None:
    """The first calls, with no code of an earlier process or contender at hand."""
    start = cpu_seconds()
    with fresh_cache():
        way.losses = [way.step().item() for _ in range(FIRST)]
    way.first = cpu_seconds() - start


def time_in_turns(ways: list[Contender], rounds: int) -> None:
    """One run: one step of each a round, another one first each time."""
    for way in ways:
        way.seconds.append([])
    for number in range(rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            start = time.process_time()
            loss = way.step()
            way.seconds[-1].append(time.process_time() - start)
            way.losses.append(loss.item())


def saved_bytes(step: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd keeps for backward in one step."""
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        alive.append(storage)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for address, size in storages.items() if address not in own)


def measure(case: str, peers: list[str], rounds: int, runs: int) -> None:
    """Print one case's table."""
    torch.compiler.reset()
    moebius.reset()
    ways = contenders(*CASES[case](), peers)
    for way in ways:
        warm_up(way)
    for _ in range(runs):
        time_in_turns(ways, rounds)
    plain = ways[0]
    for way in ways:
        # a fast wrong answer is no result
        both = [torch.tensor(one.losses[:CHECKED]) for one in (way, plain)]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
        way.peak = peak_bytes(way.step)
        # the hooks would be one more thing to compile for: torch.compile's own backward is not to be seen by them
        way.saved = saved_bytes(way.step, way.model) if way.name in ("plain", "grouped_mm", "moebius") else 0
    for way in ways:
        kept = f"{way.saved / 2**20:.1f} MiB" if way.saved else "–"
        print(
            f"  {case:<9}{way.name:<38}{scaled(way.median):>9}   {way.ratios(plain)} ×"
            f"{scaled(way.until_warm):>12}{way.peak / 2**20:>10.1f} MiB{kept:>13}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each in a run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs, one ratio for each (default: %(default)s)")
    parser.add_argument("--cases", default="demo,qwen3", help=f"of {', '.join(CASES)} (default: %(default)s)")
    parser.add_argument(
        "--peers", default="grouped_mm", help="all, none, or of grouped_mm and backends (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.rounds < 1 or args.runs < 1:
        parser.error("--rounds and --runs are at least 1")
    cases = args.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}")
    peers = {"all": ["grouped_mm", "inductor"], "none": []}.get(args.peers, args.peers.split(","))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in this process: another's time is not seen
    torch._inductor.config.compile_threads = 1
    print(f"Whole training step\n{machine()}\n")
    print(
        f"  {'case':<9}{'contender':<38}{'CPU time':>9}   {'of plain':<{5 * args.runs}} "
        f"{'until warm':>12}{'peak':>14}{'kept':>13}"
    )
    for case in cases:
        measure(case, peers, args.rounds, args.runs)


if __name__ == "__main__":
    main()

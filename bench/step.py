"""What a whole training step costs: plain PyTorch, ``torch.compile`` and moebius, in one run.

Times are CPU time of the process (all threads), one step a round in turns, so that other programs do not count. Memory
is what torch's profiler sees allocated: the highest sum in one step, above what was there before it. Kept for backward
are the bytes that autograd saves, each storage once, parameters left out.

    moebius bench step
    moebius bench step --rounds 5 --peer none     # without torch.compile, which takes minutes to compile
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import machine, scaled
from models import PlainMoE, tiny_mixtral
from peaks import peak_bytes
from torch import nn
from torch.nn import functional as F

import moebius


@dataclass
class Contender:
    """One way to run the same training. seconds: CPU time of each timed step; peak, saved: bytes in one step."""

    name: str
    step: Callable[[], torch.Tensor]
    model: nn.Module
    seconds: list[float]
    losses: list[float]
    peak: int = 0
    saved: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


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


def contenders(model: nn.Module, tokens: torch.Tensor, peer: str) -> list[Contender]:
    """Plain, torch.compile (unless ``peer`` is "none") and moebius, each on a copy of the model."""
    ways: dict[str, Callable] = {"plain": train_step}
    if peer != "none":
        ways["torch.compile"] = torch.compile(train_step, backend=peer)
    ways["moebius"] = moebius.capture(train_step)
    labels = tokens.roll(-1, -1)
    found = []
    for name, function in ways.items():
        own = copy.deepcopy(model).train()
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)

        def step(function=function, own=own, optimizer=optimizer) -> torch.Tensor:
            return function(own, optimizer, tokens, labels)

        found.append(Contender(name, step, own, [], []))
    return found


def time_in_turns(ways: list[Contender], rounds: int) -> None:
    """One step of each a round, after two that nobody times."""
    for number in range(2 + rounds):
        for way in ways:
            start = time.process_time()
            loss = way.step()
            if number >= 2:
                way.seconds.append(time.process_time() - start)
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


def measure(case: str, model: nn.Module, tokens: torch.Tensor, peer: str, rounds: int) -> None:
    """Print one case's table."""
    ways = contenders(model, tokens, peer)
    time_in_turns(ways, rounds)
    plain = ways[0]
    for way in ways:
        # a fast wrong answer is no result
        torch.testing.assert_close(torch.tensor(way.losses), torch.tensor(plain.losses), rtol=1e-4, atol=1e-5)
        way.peak, way.saved = peak_bytes(way.step), saved_bytes(way.step, way.model)
    for way in ways:
        print(
            f"  {case:<16}{way.name:<16}{scaled(way.median):>10}{way.median / plain.median:>9.2f}×"
            f"{way.peak / 2**20:>11.1f} MiB{way.saved / 2**20:>11.1f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--peer", default="inductor", help="torch.compile's backend, or none (default: %(default)s)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    print(f"Whole training step\n{machine()}\n")
    print(f"  {'case':<16}{'contender':<16}{'CPU time':>10}{'of plain':>10}{'peak':>15}{'kept':>15}")
    mixtral, tokens = tiny_mixtral()
    measure("tiny Mixtral", mixtral, tokens, args.peer, args.rounds)
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (4, 128))
    measure("plain MoE", PlainMoE(), tokens, args.peer, args.rounds)


if __name__ == "__main__":
    main()

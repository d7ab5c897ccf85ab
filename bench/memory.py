"""Whether memory grows: over calls with changing inputs, and over captures and resets.

*Calls*: one process, one captured training step of two linear layers with AdamW; each batch has one of seven sizes and
numbers of its own, every hundredth call breaks the graph, and every tenth gets arguments that no later call gets.
*Captures*: another process; each time a new class, a model of it, an optimizer and a step of their own, calls of two
batch sizes and with a graph break, then ``moebius.reset()``. After a garbage collection are counted: resident memory,
the blocks that Python has allocated, the objects that its collector knows, and how many of the models, optimizers,
functions and batches that the program has let go of are still there (by weak references).

    moebius bench memory --calls 10000 --captures 1000
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from common import machine

import moebius

SIZES = (2, 3, 5, 8, 4, 13, 7)
HEAD = "| | MiB | blocks | objects | alive, of those let go |\n|---|---:|---:|---:|---:|"
SHOWN = (20, 100, 200, 300, 500, 700, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)  # after so many a row is printed


class Net(torch.nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = torch.nn.Linear(16, 32), torch.nn.Linear(32, 1), 0

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(torch.relu(self.first(x_BD)))


def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., float]:
    """A training step; ``tell`` is not captured (its kind is unknown) and breaks the graph."""

    def step(x_BD: torch.Tensor, notes: list, tell: Any = None) -> float:
        optimizer.zero_grad()
        loss = model(x_BD).square().mean()
        if tell is not None:
            tell(x_BD.shape)
        loss.backward()
        optimizer.step()
        notes.append(loss.detach())
        return loss.item()

    return step


def resident() -> float:
    """MiB of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def row(words: str, released: list[weakref.ref]) -> None:
    gc.collect()
    gc.collect()  # the second sees what finalizers of the first let go
    alive = sum(reference() is not None for reference in released)
    blocks, objects = sys.getallocatedblocks(), len(gc.get_objects())
    print(f"| {words} | {resident():.1f} | {blocks:,} | {objects:,} | {alive} of {len(released)} |", flush=True)


def calls(count: int) -> None:
    """One captured step, called ``count`` times."""
    model = Net()
    step = moebius.capture(make_step(model, torch.optim.AdamW(model.parameters())))
    released: list[weakref.ref] = []
    write = open(os.devnull, "w").write
    for number in range(1, count + 1):
        x_BD, notes = torch.randn(SIZES[number % 7], 16), ListOfNotes()
        if number % 10 == 0:
            notes.extend((number, f"call {number}"))
        step(x_BD, notes, *([lambda shape: write(str(shape))] if number % 100 == 0 else []))
        released = [r for r in released if r() is not None] if number % 500 == 0 else released
        released += [weakref.ref(x_BD), weakref.ref(notes)]
        del x_BD, notes
        if number in SHOWN or number == count:
            row(f"{number:,} calls", released)
    seen = moebius.stats(step)
    print(f"\n{seen.graphs} graphs, {seen.breaks} of them with a break, {seen.hits:,} hits\n")


class ListOfNotes(list):
    """A list that can be referred to weakly."""


def captures(count: int) -> None:
    """So many models of so many classes, captured and forgotten."""
    released: list[weakref.ref] = []

    def one(number: int) -> None:
        cls = type(f"Net{number}", (Net,), {"forward": Net.forward, "number": number})
        model = cls()
        optimizer = torch.optim.AdamW(model.parameters())
        plain = make_step(model, optimizer)
        step = moebius.capture(plain)
        for size in (4, 6, 4):
            step(torch.randn(size, 16), ListOfNotes())
        step(torch.randn(4, 16), ListOfNotes(), lambda shape: print(end="", flush=True))
        released.extend(map(weakref.ref, (cls, model, model.first.weight, optimizer, plain, step)))

    for number in range(1, count + 1):
        one(number)
        moebius.reset()
        if number in SHOWN or number == count:
            row(f"{number:,} captures and resets", released)
            released[:] = [r for r in released if r() is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--captures", type=int, default=1_000)
    args = parser.parse_args()
    if args.calls and args.captures:  # each in a process of its own
        print(f"{machine()}\n\n{HEAD}", flush=True)
        for calls_made, captures_made in ((args.calls, 0), (0, args.captures)):
            chosen = ["--calls", str(calls_made), "--captures", str(captures_made)]
            subprocess.run([sys.executable, __file__, *chosen], check=True)
    elif args.calls:
        calls(args.calls)
    elif args.captures:
        captures(args.captures)


if __name__ == "__main__":
    main()

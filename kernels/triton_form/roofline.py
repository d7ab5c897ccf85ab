"""What each kernel of a forward and a backward is, before it has ever run: its configuration, what the compiler made of
it, the bytes that it moves, its arithmetic intensity against a card's roofline, and what bounds it.

    moebius explain --kernels
    moebius explain --kernels --shape mixtral --target sm_100
    moebius explain --kernels --sizes 8192,2048,1024,64,8 --gate interleaved --bias

Nothing here is measured: registers, spills, shared memory and matrix instructions are the compiler's report. Of the
loop that multiplies, from the machine code: how it reads memory (TMA, asynchronous copies, plain loads into
registers), its barriers, and how many groups of copies and products its waits leave under way. Bytes are counted from
the arguments, every tensor once, a row that is gathered for K slots counted K times; the bound follows from the card's
published rates (Williams et al. 2009, "Roofline").
"""
from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moebius.kernels.contract import SAVES, Options
from moebius.kernels.triton_form.aot import SHAPES, TARGETS, CompilerReport, Shape, compile_launch, plan
from moebius.kernels.triton_form.launch import Launch

WARP = {"sm_90": 32, "sm_100": 32, "gfx942": 64}


@dataclass(frozen=True)
class Card:
    """Published figures of one card. Dense matrix rate in bfloat16 and float32 (TF32) FLOP/s; bandwidth in bytes/s."""

    name: str
    rate: float
    rate_tf32: float
    bandwidth: float
    registers: int  # of a multiprocessor, 32 bits each
    shared_bytes: int  # of a multiprocessor
    warps: int  # of a multiprocessor

    def balance(self, dtype: torch.dtype) -> float:
        """FLOP a byte above which compute bounds."""
        return (self.rate if dtype.itemsize == 2 else self.rate_tf32) / self.bandwidth


# NVIDIA H100 and Blackwell datasheets and CUDA C++ Programming Guide, table of compute capabilities; AMD MI300X
# datasheet. A compute unit of MI300X has 4 x 512 vector registers of 64 lanes, 64 KiB of LDS and 32 waves.
CARDS = {
    "sm_90": Card("H100 SXM", 989e12, 495e12, 3.35e12, 65536, 228 << 10, 64),
    "sm_100": Card("B200", 2250e12, 1125e12, 8.0e12, 65536, 228 << 10, 64),
    "gfx942": Card("MI300X", 1307e12, 654e12, 5.3e12, 4 * 512 * 64, 64 << 10, 32),
}
# Arguments that a kernel reads by token: one row for every slot. grad_act and weight_grad name them differently.
GATHERED = {"up": ("x",), "grad_act": ("grad",), "weight_grad_gathered_left": ("left",),
            "weight_grad_gathered_right": ("right",)}


def bytes_moved(launch: Launch) -> int:
    """Bytes of a launch's tensors, each once; rows that are read by token once a slot."""
    gathered = GATHERED.get(launch.label, ())
    total = 0
    for name, value in launch.arguments.items():
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(tensor, Tensor):
            times = launch.arguments["top_k"] if name in gathered else 1
            total += tensor.numel() * tensor.itemsize * times
    return total


@dataclass(frozen=True)
class Line:
    """One kernel: its launches together, and the compiler's report of it."""

    report: CompilerReport
    launches: int
    flops: int
    bytes: int
    dtype: torch.dtype
    card: Card
    warp: int

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.bytes if self.bytes else math.inf

    @property
    def occupancy(self) -> tuple[int, str]:
        """Blocks that a multiprocessor holds at once, and what limits them."""
        threads = self.report.warps * self.warp
        limits = {
            "registers": self.card.registers // max(1, self.report.registers * threads),
            "shared memory": self.card.shared_bytes // (self.report.shared_bytes + 1024),  # 1 KiB a block is CUDA's
            "warps": self.card.warps // self.report.warps,
        }
        name = min(limits, key=lambda each: limits[each])
        return limits[name], name

    @property
    def bound(self) -> str:
        """What bounds it: the card's arithmetic, its memory, or first of all what the compiler lost."""
        if self.report.spill_bytes:
            return "spills"
        if self.report.tensor_cores and not self.report.sound:
            return "no matrix instructions"
        if not self.flops:
            return "memory"
        if not self.report.tensor_cores:
            return "arithmetic without tensor cores"
        if self.report.waits_for:
            return f"waits for {self.report.waits_for}"
        return "compute" if self.intensity >= self.card.balance(self.dtype) else "memory"


def describe_kernels(shape: Shape, target: str, dtype: torch.dtype, options: Options, bias: bool) -> list[Line]:
    """Every kernel of a forward and a backward, compiled once, its launches counted together."""
    launches: dict[str, list[Launch]] = {}
    for launch in plan(shape, dtype, options, bias):
        launches.setdefault(launch.label, []).append(launch)
    return [
        Line(compile_launch(same[0], target), len(same), sum(each.flops for each in same),
             sum(map(bytes_moved, same)), dtype, CARDS[target], WARP[target])
        for same in launches.values()]


def table(lines: list[Line]) -> str:
    """Text, one kernel a line."""
    head = (f"{'kernel':<27}{'block':>12}{'warps':>6}{'stages':>7}{'regs':>6}{'spills':>7}{'shared':>9}{'matrix':>7}"
            f"  {'loads in loop':<18}{'barriers':>8}  {'left under way':<22}"
            f"{'launches':>8}{'GiB':>8}{'FLOP/B':>8}  {'blocks an SM':<20}bound by")
    rows = [head, "─" * len(head)]
    for line in lines:
        r = line.report
        blocks, why = line.occupancy
        intensity = f"{line.intensity:.0f}" if line.flops else "–"
        loads, barriers, left = (r.loop.loads, str(r.loop.barriers), r.loop.under_way) if r.loop else ("–", "", "")
        rows.append(
            f"{r.label:<27}{'×'.join(map(str, r.block)):>12}{r.warps:>6}{r.stages:>7}{r.registers:>6}{r.spill_bytes:>7}"
            f"{r.shared_bytes / 1024:>5.0f} KiB{r.matrix_ops:>7}  {loads:<18}{barriers:>8}  {left:<22}"
            f"{line.launches:>8}{line.bytes / 2**30:>8.2f}"
            f"{intensity:>8}  {f'{blocks} ({why})':<20}{line.bound}")
    return "\n".join(rows)


def sizes(text: str) -> Shape:
    try:
        numbers = [int(part) for part in text.split(",")]
        if len(numbers) != 5 or min(numbers) < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: five sizes T,D,N,E,K, for example 32768,2048,768,128,8") from None
    return Shape(*numbers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="moebius explain --kernels", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=list(SHAPES), default="moe")
    which.add_argument("--sizes", type=sizes, metavar="T,D,N,E,K")
    parser.add_argument("--target", choices=list(TARGETS), default="sm_90")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--activation", default="silu", help="a name, or an expression of g and u")
    parser.add_argument("--gate", choices=["concat", "interleaved", "none"], default="concat")
    parser.add_argument("--save", choices=SAVES, default="default")
    parser.add_argument("--bias", action="store_true")
    given = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set; unset it to compile")
    options = Options(given.activation, given.gate, given.save)
    try:
        options.check()
    except ValueError as error:
        parser.error(str(error))
    shape, dtype, card = given.sizes or SHAPES[given.shape], getattr(torch, given.dtype), CARDS[given.target]
    lines = describe_kernels(shape, given.target, dtype, options, given.bias)
    print(f"T={shape.tokens} D={shape.width} N={shape.narrow} E={shape.experts} K={shape.top_k}, {given.dtype}, "
          f"{given.activation}, gate {given.gate}; Triton {triton.__version__} for {given.target}")
    print(f"{card.name}: compute bounds from {card.balance(dtype):.0f} FLOP a byte (published rates)\n")
    print(table(lines))
    print("\nForward, then backward, in order of the first launch. Compiled, not run: no time here is a measurement.")
    return int(any(line.report.spill_bytes for line in lines))

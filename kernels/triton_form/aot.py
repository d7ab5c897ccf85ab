"""Compiles the default kernels ahead of time, without a GPU, and reads the compiler's own report.

    python -m moebius.kernels.triton_form.aot              # the table for sm_90
    python -m moebius.kernels.triton_form.aot --target sm_100 --shape demo
    python -m moebius.kernels.triton_form.aot --target gfx942
    python -m moebius.kernels.triton_form.aot --docs docs/kernels.md    # all tables there, minutes

The launches are those of the host code itself, walked over tensors on the meta device, with the argument specialisation
that a launch on a GPU would make (16-byte alignment, ones folded). For NVIDIA targets: registers, stack and spills from
ptxas and cuobjdump, HGMMA from the disassembly. For AMD: registers and scratch from the assembly's metadata. For both:
how the loop that multiplies reads its operands (machine_code.py).
"""
from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from moebius.kernels.contract import SAVES, Needs, Options, Weights
from moebius.kernels.precision import NAMED
from moebius.kernels.triton_form import backward, forward
from moebius.kernels.triton_form.launch import Launch, recording
from moebius.kernels.triton_form.machine_code import MainLoop, main_loop

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32), "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Shape:
    """One problem: T tokens, D model width, N expert width, E experts, K slots a token."""

    tokens: int
    width: int
    narrow: int
    experts: int
    top_k: int


SHAPES = {
    "moe": Shape(32768, 2048, 768, 128, 8),
    "fine": Shape(24576, 1536, 256, 128, 8),
    "finest": Shape(32768, 4096, 256, 256, 16),
    "wide": Shape(32768, 4096, 1024, 128, 8),
    "mixtral": Shape(4096, 4096, 14336, 8, 2),
    "few": Shape(256, 2048, 768, 128, 8),
    "rows": Shape(32768, 2048, 768, 128, 1),
    "demo": Shape(1024, 256, 512, 8, 2),
}

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
         torch.uint8: "u8"}


def plan(shape: Shape, dtype: torch.dtype = torch.bfloat16, options: Options | None = None,
         bias: bool = False) -> list[Launch]:
    """Every launch of a forward and a backward with all gradients, in order."""
    options = options or Options()
    t, d, n, e, k = shape.tokens, shape.width, shape.narrow, shape.experts, shape.top_k
    m = n if options.gate == "none" else 2 * n

    def meta(*size: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=of, device="meta")

    weights = Weights(meta(e, m, d), meta(e, d, n), meta(e, m) if bias else None, meta(e, d) if bias else None)
    x, order, offsets = meta(t, d), meta(t * k, of=torch.int32), meta(e + 1, of=torch.int32)
    weight = meta(t, k, of=torch.float32)
    with recording() as launches:
        _, h = forward(x, weights, order, offsets, weight, k, options)
        backward(meta(t, d), x, h, weights, order, offsets, weight, k, options,
                 Needs(True, True, True, True, bias, bias))
    return launches


def specialise(launch: Launch) -> ASTSource:
    """What the just-in-time compiler would compile for this launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    for position, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants:
            signature[name], constants[name] = "constexpr", launch.constants[name]
            continue
        value = launch.arguments[name]
        if isinstance(value, TensorDescriptor):
            block = ",".join(str(size) for size in value.block_shape)
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}[{block}]>"
        elif isinstance(value, Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


@dataclass(frozen=True)
class CompilerReport:
    """What the compiler said of one kernel.

    spill_bytes: local memory a thread. matrix_ops: HGMMA (sm_90), UTC*MMA (sm_100) or MFMA (AMD) instructions.
    tensor_cores: whether it is to have them (it multiplies matrices, and not in exact float32). matrix_kind: the
    instruction, HGMMA for 16 bits, QGMMA for 8. loop: the one that multiplies matrices; operand_bytes: what one
    iteration reads of the smaller operand, a thread's share.
    """

    label: str
    block: tuple[int, ...]
    warps: int
    stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix_ops: int
    tensor_cores: bool
    notes: str = ""
    matrix_kind: str = ""
    loop: MainLoop | None = None
    operand_bytes: float = 0.0

    @property
    def waits_for(self) -> str:
        """What the loop waits for where it could go on: operands that it loads into registers first, or wgmma that is
        waited for before the next one begins (ptxas says "serialized", C7510 and C7511). Empty: neither.

        Loads of less than an operand are of tokens' numbers. AMD's kernels load through registers by design.
        """
        if self.loop is None or self.matrix_kind in ("", "MFMA"):
            return ""
        if self.loop.plain_bytes >= self.operand_bytes:
            return "loads"
        return "wgmma" if self.loop.products_left == 0 else ""

    @property
    def sound(self) -> bool:
        """No spills, and matrix instructions (and no older HMMA) where the kernel is to use tensor cores."""
        return self.spill_bytes == 0 and (not self.tensor_cores or (self.matrix_ops > 0 and "HMMA" not in self.notes))


def nvidia_tool(name: str) -> str:
    """Path of a CUDA binary tool that the Triton wheel carries."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def compile_launch(launch: Launch, target: str = "sm_90") -> CompilerReport:
    """Compile one launch for a target ("sm_90", "sm_100", "gfx942") and read the report."""
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    log = io.StringIO()
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        compiled = triton.compile(specialise(launch), target=TARGETS[target], options=options)
    block = tuple(value for name, value in launch.constants.items() if name.startswith("BLOCK"))
    read = read_amd if target.startswith("gfx") else read_nvidia
    registers, spills, matrix_ops, notes, kind, code = read(compiled.asm)
    operand = min(block[:2]) * block[2] * launch.dtype.itemsize if len(block) == 3 else 0
    return CompilerReport(launch.label, block, compiled.metadata.num_warps, launch.stages, registers, spills,
                          compiled.metadata.shared, matrix_ops, launch.tensor_cores, notes, kind, main_loop(code),
                          operand / compiled.metadata.num_warps / TARGETS[target].warp_size)


def read_nvidia(asm: dict[str, Any]) -> tuple[int, int, int, str, str, str]:
    """(registers, local-memory bytes a thread, matrix instructions, older ones, their kind, the code) of a cubin.

    A kernel without arrays of its own has local memory for one reason: spilled registers.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(asm["cubin"])
        usage = subprocess.run([nvidia_tool("cuobjdump"), "--dump-resource-usage", str(path)],
                               capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([nvidia_tool("nvdisasm"), "-c", str(path)],
                              capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+)", usage)
    local = re.search(r"STACK:(\d+)", usage)
    spills = int(local[1]) if local else 0
    matrix = re.findall(r"\b(?:HGMMA|QGMMA|UTC\w*MMA)\b", sass)
    other = len(re.findall(r"\b(?:HMMA)\b", sass))
    return (int(found[1]) if found else -1, spills, len(matrix), f"HMMA {other}" if other else "",
            " ".join(sorted(set(matrix))), sass)


def read_amd(asm: dict[str, Any]) -> tuple[int, int, int, str, str, str]:
    """(vector registers, scratch bytes a lane, matrix instructions, notes, kind, code) from the assembly's metadata.

    Scratch is what goes to memory, as local memory does on NVIDIA. Scalar registers that do not fit are kept in lanes
    of a vector register (v_writelane), which costs instructions and no memory: they are a note.
    """
    text = asm["amdgcn"]

    def value(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    scratch = max(value("private_segment_fixed_size"), 4 * value("vgpr_spill_count"))
    return (value("vgpr_count"), scratch, len(re.findall(r"\bv_mfma", text)),
            f"{value('sgpr_spill_count')} scalars in vector lanes", "MFMA", text)


def table(reports: list[CompilerReport]) -> str:
    """Markdown."""
    head = ("kernel", "block", "warps", "stages", "registers", "spill bytes", "shared KiB", "matrix instructions",
            "loads in the loop", "barriers", "left under way", "notes")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in reports:
        loop = (r.loop.loads, r.loop.barriers, r.loop.under_way) if r.loop else ("", "", "")
        cells = (r.label, "×".join(map(str, r.block)), r.warps, r.stages, r.registers, r.spill_bytes,
                 f"{r.shared_bytes / 1024:.0f}", f"{r.matrix_ops} {r.matrix_kind}".strip(), *loop, r.notes)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


BENCHED = ("moe", "fine", "finest", "wide", "mixtral")
BEGIN, END = "<!-- compiler's report: written by python -m moebius.kernels.triton_form.aot --docs -->", "<!-- end -->"


def reports_of(shape: str, target: str, dtype: torch.dtype = torch.bfloat16, options: Options | None = None,
               bias: bool = False) -> list[CompilerReport]:
    """Of every kernel of a forward and a backward, once each (panels and sums come several times)."""
    once = {launch.label: launch for launch in plan(SHAPES[shape], dtype, options, bias)}
    return [compile_launch(launch, target) for launch in once.values()]


def documentation() -> str:
    """Markdown: every kernel at the first shape on every target, the other shapes and the 8-bit formats in short."""
    first = SHAPES["moe"]
    parts = [f"Triton {triton.__version__}, bfloat16, T={first.tokens} D={first.width} N={first.narrow} "
             f"E={first.experts} K={first.top_k}."]
    for target in TARGETS:
        parts += [f"**{target}**", table(reports_of("moe", target))]
    short = ["| shape | precision | kernels | most registers | spill bytes | most shared KiB | matrix instructions |",
             "|---|---|---|---|---|---|---|"]
    cases = [(shape, "bfloat16", Options()) for shape in BENCHED[1:]]
    cases += [("moe", "bfloat16, H in MXFP8", Options(save="fp8"))]
    cases += [("moe", name, Options(precision=NAMED[name])) for name in NAMED]
    for shape, name, options in cases:
        found = reports_of(shape, "sm_90", options=options)
        kinds = sorted({report.matrix_kind for report in found if report.tensor_cores})
        sizes = SHAPES[shape]
        short.append(
            f"| T={sizes.tokens} D={sizes.width} N={sizes.narrow} E={sizes.experts} K={sizes.top_k} | "
            f"{name} | {len(found)} | {max(r.registers for r in found)} | "
            f"{sum(r.spill_bytes for r in found)} | {max(r.shared_bytes for r in found) / 1024:.0f} | "
            f"{', '.join(kinds) if all(r.sound for r in found) else 'MISSING'} |")
    return "\n\n".join([*parts, "**sm_90, other shapes and formats**", "\n".join(short)])


def write_documentation(path: Path) -> None:
    """Put the tables between their marks in a Markdown file."""
    tables = documentation()
    head, rest = path.read_text().split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END, 1)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--target", choices=list(TARGETS), default="sm_90")
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    parser.add_argument("--gate", default="concat")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--save", choices=SAVES, default="default")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the tables of docs/kernels.md, all targets")
    given = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set; unset it to compile")
    if given.docs:
        write_documentation(given.docs)
        return 0
    print(f"Triton {triton.__version__}, {given.target}, {given.dtype}, gate {given.gate}, save {given.save}"
          f"{', biases' * given.bias}\n")
    sound = True
    for name in given.shape or ["moe"]:
        shape = SHAPES[name]
        reports = reports_of(name, given.target, getattr(torch, given.dtype), Options(gate=given.gate, save=given.save),
                             given.bias)
        sound = sound and all(report.sound for report in reports)
        print(f"{name}: T={shape.tokens} D={shape.width} N={shape.narrow} E={shape.experts} K={shape.top_k}\n")
        print(table(reports) + "\n")
    return 0 if sound or given.dtype == "float32" else 1


if __name__ == "__main__":
    sys.exit(main())

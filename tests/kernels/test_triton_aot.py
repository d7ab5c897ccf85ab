"""The default kernels, compiled for sm_90 without a GPU: the compiler's own report has no spills and has wgmma, and the
loop that multiplies waits neither for its operands nor for each product."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from allocations import Allocations

pytest.importorskip("triton")

from moebius.kernels.contract import Options  # noqa: E402
from moebius.kernels.precision import NAMED  # noqa: E402
from moebius.kernels.quantize import packed_width  # noqa: E402
from moebius.kernels.triton_form import aot, configs  # noqa: E402
from moebius.kernels.triton_form.launch import Config, Launch  # noqa: E402

MULTIPLIES = {"up", "down", "grad_act", "grad_x", "weight_grad_gathered_left", "weight_grad_gathered_right"}


CLAMPED = "clamp(g, None, 7) * sigmoid(1.702 * clamp(g, None, 7)) * (clamp(u, -7, 7) + 1)"  # gpt-oss


def compile_all(launches: list[Launch]) -> list[aot.CompilerReport]:
    """Reports of the distinct kernels among the launches (combine and row_sum come twice)."""
    seen: dict[str, aot.CompilerReport] = {}
    for launch in launches:
        if launch.label not in seen:
            seen[launch.label] = aot.compile_launch(launch)
    assert set(seen) >= MULTIPLIES
    return list(seen.values())


def check(reports: list[aot.CompilerReport], tensor_cores: bool = True) -> None:
    print("\n" + aot.table(reports))
    assert [r.label for r in reports if not r.sound] == []
    for report in reports:
        assert report.tensor_cores == (tensor_cores and report.label in MULTIPLIES)
        assert 0 < report.registers <= 255
        assert report.shared_bytes <= 227 * 1024  # a block's shared memory on sm_90


def check_loops(reports: list[aot.CompilerReport]) -> None:
    """16-bit operands: they arrive while the loop multiplies. Each comes by descriptor or asynchronous copy, copies for
    the step after the next are under way, as is a product while the next one is begun."""
    for report in reports:
        if report.label in MULTIPLIES:
            assert report.waits_for == "", (report.label, report.loop)
            assert report.loop is not None and report.loop.tma + report.loop.copies > 0
            assert report.loop.copies_left != 0 and report.loop.products_left, (report.label, report.loop)
            assert report.loop.spills == 0 and report.loop.matrix == report.matrix_ops


@pytest.mark.share(1)
@pytest.mark.parametrize("shape", ["moe", "few", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_defaults(shape: str, dtype: torch.dtype) -> None:
    reports = compile_all(aot.plan(aot.SHAPES[shape], dtype))
    check(reports)
    check_loops(reports)


@pytest.mark.share(1)
@pytest.mark.parametrize("gate, activation", [("concat", "gelu"), ("interleaved", "silu"), ("none", "relu2")])
@pytest.mark.parametrize("shape", ["moe", "few"])
def test_other_gates_with_biases(shape: str, gate: str, activation: str) -> None:
    reports = compile_all(aot.plan(aot.SHAPES[shape], options=Options(gate=gate, activation=activation), bias=True))
    check(reports)
    check_loops(reports)


@pytest.mark.share(1)
@pytest.mark.parametrize("gate", ["interleaved", "none"])
@pytest.mark.parametrize("save", ["default", "recompute"])
def test_up_of_other_gates_without_biases(gate: str, save: str) -> None:
    """With A stored before H, ptxas serialised wgmma in one of these."""
    launches = aot.plan(aot.SHAPES["moe"], options=Options(gate=gate, save=save))
    reports = [aot.compile_launch(launch) for launch in launches if launch.label == "up"]
    check(reports)
    check_loops(reports)


@contextmanager
def allowing_tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.share(1)
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("shape", ["moe", "few"])
def test_float32_defaults(shape: str, tf32: bool) -> None:
    with allowing_tf32(tf32):
        check(compile_all(aot.plan(aot.SHAPES[shape], torch.float32)), tensor_cores=tf32)


@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "mxfp8"])
def test_formats(name: str) -> None:
    """No spills; E4M3 operands are multiplied as such (QGMMA), those of MXFP8 in bfloat16 (HGMMA)."""
    reports = compile_all(aot.plan(aot.SHAPES["moe"], options=Options(precision=NAMED[name])))
    check(reports)
    own = ("weight_grad_gathered_left", "weight_grad_gathered_right") if name == "fp8" else ()
    for report in reports:
        if report.label in MULTIPLIES:
            want = "HGMMA" if name == "mxfp8" or report.label in own else "QGMMA"
            assert report.matrix_kind == want, report.label


def packed(shape: str, dtype: torch.dtype = torch.bfloat16, bias: bool = False, **options) -> list[Launch]:
    """The kernels that write and read packed H."""
    launches = aot.plan(aot.SHAPES[shape], dtype, Options(save="fp8", **options), bias)
    found = [launch for launch in launches if "h" in launch.arguments]
    assert [launch.label for launch in found] == ["up", "grad_act"]
    assert all(launch.arguments["h"].dtype == torch.uint8 for launch in found)
    return found


@pytest.mark.share(1)
@pytest.mark.parametrize("gate, activation, bias", [
    ("concat", "silu", False), ("concat", "gelu", True), ("interleaved", CLAMPED, True), ("none", "relu2", False)])
@pytest.mark.parametrize("shape", ["moe", "few"])
def test_packed_h(shape: str, gate: str, activation: str, bias: bool) -> None:
    reports = [aot.compile_launch(each) for each in packed(shape, bias=bias, gate=gate, activation=activation)]
    check(reports)
    check_loops(reports)


@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "mxfp8"])
def test_packed_h_and_formats(name: str) -> None:
    check([aot.compile_launch(each) for each in packed("moe", precision=NAMED[name])])


@pytest.mark.parametrize("shape", ["moe", "few"])
def test_packed_h_in_tf32(shape: str) -> None:
    with allowing_tf32(True):
        check([aot.compile_launch(each) for each in packed(shape, torch.float32)])


@pytest.mark.parametrize("gate", ["concat", "interleaved", "none"])
def test_h_is_never_there_unpacked(gate: str) -> None:
    """Of S x M in the tensors' dtype there is dH alone, and in forward nothing. A concat whose halves do not begin a
    block of 32 is the exception: its H is packed by torch's operators."""
    def made(shape: aot.Shape, save: str) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        with Allocations() as watched:
            aot.plan(shape, options=Options(gate=gate, save=save))
        slots, width_h = shape.tokens * shape.top_k, shape.narrow * (1 if gate == "none" else 2)
        return [each for each in watched.made if each[1] in ((slots, width_h), (slots, packed_width(width_h)))]

    shape = aot.SHAPES["moe"]
    slots, width_h = shape.tokens * shape.top_k, shape.narrow * (1 if gate == "none" else 2)
    plain, small = (torch.bfloat16, (slots, width_h)), (torch.uint8, (slots, packed_width(width_h)))
    others = [plain, plain] if gate == "none" else []  # A and s*A are as wide there
    assert sorted(made(shape, "default"), key=str) == [plain, plain, *others]
    assert sorted(made(shape, "fp8"), key=str) == [plain, *others, small]
    kept = [size for dtype, size in made(replace(shape, narrow=776), "fp8") if dtype == torch.bfloat16]
    assert (len(kept) == 1 + len(others)) == (gate != "concat")


def test_a_grid_that_is_not_persistent_has_no_loop_around_its_product() -> None:
    """That loop made the compiler hold the epilogue's addresses in registers during the product: 255 of them."""
    launch = one("up")
    registers = {}
    for persistent in (False, True):
        launch.constants["PERSISTENT"] = persistent
        registers[persistent] = aot.compile_launch(launch).registers
    assert registers[False] < registers[True] - 16


def test_weights_travel_by_descriptor_at_every_benchmark_shape() -> None:
    for shape in aot.SHAPES.values():
        for launch in aot.plan(shape):
            if launch.label in ("up", "down", "grad_act", "grad_x"):
                assert launch.constants["DESCRIBED"], launch.label
            if launch.label in ("down", "grad_x"):
                assert launch.constants["LEFT_DESCRIBED"], launch.label


@pytest.mark.parametrize("shape", ["moe", "fine", "wide"])
def test_outputs_of_slots_exist_a_panel_at_a_time(shape: str) -> None:
    """The host code's own allocations, walked on the meta device: nothing of T*K x D in forward or backward."""
    sizes = aot.SHAPES[shape]
    slots = sizes.tokens * sizes.top_k
    kept = slots * 2 * sizes.narrow
    with Allocations() as made:
        launches = aot.plan(sizes)
    weights = 3 * sizes.experts * sizes.narrow * sizes.width  # the plan makes them as well, and their gradients
    assert made.largest <= max(weights, kept, slots * sizes.width // 2)
    panels = [launch for launch in launches if launch.label == "down"]
    assert len(panels) > 1
    assert sum(launch.flops for launch in panels) == 2 * slots * sizes.narrow * sizes.width


@pytest.mark.share(1)
@pytest.mark.parametrize("target", ["sm_100", "gfx942"])
def test_the_other_cards_at_the_first_shape(target: str) -> None:
    reports = aot.reports_of("moe", target)
    assert all(report.sound for report in reports), reports


@pytest.mark.parametrize(("target", "crowded"), [("sm_90", Config(128, 256, 64, 4, 3)),
                                                 ("gfx942", Config(256, 512, 64, 4, 3))])
def test_the_check_notices_a_spill(target: str, crowded: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(configs.HALF, "down", (crowded, crowded))
    report = aot.compile_launch(one("down"), target)
    assert report.spill_bytes > 0 and not report.sound


def test_the_check_notices_lost_wgmma() -> None:
    """16 rows are too few for wgmma (64): the compiler falls back to mma.sync, HMMA in the machine code."""
    launch = one("down")
    block = launch.arguments["left"].block_shape
    launch.arguments["left"] = replace(launch.arguments["left"], block_shape=[16, block[1]])
    launch.constants = {**launch.constants, "BLOCK_M": 16}
    report = aot.compile_launch(launch)
    assert report.matrix_ops == 0 and "HMMA" in report.notes and not report.sound


def one(label: str, shape: str = "moe") -> Launch:
    return next(launch for launch in aot.plan(aot.SHAPES[shape]) if launch.label == label)


def test_the_check_notices_operands_read_through_registers() -> None:
    """Elements of a row that lie apart can be copied by neither descriptor nor 16-byte copies."""
    launch = one("up")
    launch.arguments["x_col"], launch.arguments["x_row"] = launch.arguments["x"].shape[0], 1
    report = aot.compile_launch(launch)
    assert report.sound and report.waits_for == "loads" and report.loop is not None
    assert report.loop.plain_bytes >= report.operand_bytes == 64


def test_the_check_notices_wgmma_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(configs.HALF, "down", (Config(128, 128, 64, 8, 1), Config(128, 128, 64, 8, 1)))
    report = aot.compile_launch(one("down"))
    assert report.sound and report.waits_for == "wgmma"


def test_the_check_notices_serialised_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ptxas does where registers do not suffice (C7511): it waits for each one."""
    crowded = Config(128, 256, 64, 4, 3)
    monkeypatch.setitem(configs.HALF, "down", (crowded, crowded))
    report = aot.compile_launch(one("down"))
    assert report.waits_for == "wgmma" and report.loop is not None and report.loop.spills > 0


def test_the_check_notices_copies_of_one_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    double = Config(128, 128, 64, 8, 2)
    monkeypatch.setitem(configs.HALF, "grad_act", (double, double))
    loop = aot.compile_launch(one("grad_act")).loop
    assert loop is not None and loop.copies == 4 and loop.copies_left == 0


def test_the_documented_tables_are_of_these_kernels() -> None:
    """docs/kernels.md: its configurations are today's, its sm_90 rows are sound. The registers are the compiler's."""
    text = (Path(__file__).parent.parent.parent / "docs" / "kernels.md").read_text()
    made = text.split(aot.BEGIN)[1].split(aot.END)[0]
    tables = {part.split("**")[0]: part.split("**")[1] for part in made.split("\n**")[1:]}
    assert [name for name in tables if name in aot.TARGETS] == list(aot.TARGETS)
    once = {launch.label: launch for launch in aot.plan(aot.SHAPES["moe"])}
    for target in aot.TARGETS:
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables[target].splitlines()
                if line.startswith("| ")][1:]
        assert [row[0] for row in rows] == list(once)
        for row, launch in zip(rows, once.values(), strict=True):
            block = [str(value) for name, value in launch.constants.items() if name.startswith("BLOCK")]
            assert row[1] == "×".join(block) and row[3] == str(launch.stages)
            assert row[5] == "0", (target, row)
            assert (row[7].split()[0] != "0") == launch.tensor_cores == (row[8] != ""), (target, row)
    assert "MISSING" not in made and made.count("T=32768 D=4096") == 2


def test_command() -> None:
    done = subprocess.run([sys.executable, "-m", "moebius.kernels.triton_form.aot", "--shape", "few"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "few: T=256 D=2048 N=768 E=128 K=8" in done.stdout and "| grad_act | 64×128×64 |" in done.stdout

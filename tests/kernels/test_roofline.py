"""`moebius explain --kernels`: bytes and FLOPs counted by hand, bounds that follow the card, the compiler's report."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from moebius.kernels.contract import Options  # noqa: E402
from moebius.kernels.triton_form import aot, roofline  # noqa: E402

SMALL = aot.Shape(512, 256, 128, 8, 2)


@pytest.fixture(scope="module")
def lines() -> dict[str, roofline.Line]:
    found = roofline.describe_kernels(SMALL, "sm_90", torch.bfloat16, Options(), False)
    return {line.report.label: line for line in found}


def test_bytes_and_flops(lines: dict[str, roofline.Line]) -> None:
    t, d, n, e, k = SMALL.tokens, SMALL.width, SMALL.narrow, SMALL.experts, SMALL.top_k
    rows = t * k
    up = lines["up"]
    assert up.flops == 2 * rows * d * 2 * n and up.launches == 1
    tensors = 2 * (rows * d + e * 2 * n * d + rows * 2 * n + rows * n)  # gathered X, weights, H, A
    assert tensors <= up.bytes <= 1.05 * tensors  # and order, tiles, offsets
    combine = lines["combine"]
    assert combine.launches == lines["down"].launches + lines["grad_x"].launches
    tensors = 2 * 2 * (rows * d + t * d)
    assert combine.flops == 0 and tensors <= combine.bytes <= 1.05 * tensors
    multiplied = sum(line.flops for line in lines.values())
    assert multiplied == 3 * 6 * rows * d * n  # forward, and twice that in backward


def test_bounds(lines: dict[str, roofline.Line]) -> None:
    up = lines["up"]
    assert up.bound == ("compute" if up.intensity >= 989e12 / 3.35e12 else "memory")
    assert replace(up, bytes=1).bound == "compute" and replace(up, flops=1).bound == "memory"
    assert replace(up, report=replace(up.report, spill_bytes=8)).bound == "spills"
    assert replace(up, report=replace(up.report, matrix_ops=0)).bound == "no matrix instructions"
    assert up.report.loop is not None
    waiting = replace(up.report, loop=replace(up.report.loop, plain_bytes=64))
    assert replace(up, report=waiting).bound == "waits for loads"
    assert lines["combine"].bound == "memory"
    exact = replace(up, report=replace(up.report, tensor_cores=False))
    assert exact.bound == "arithmetic without tensor cores"


def test_occupancy(lines: dict[str, roofline.Line]) -> None:
    report = replace(lines["up"].report, warps=8, registers=128, shared_bytes=0)
    assert replace(lines["up"], report=report).occupancy == (2, "registers")
    assert replace(lines["up"], report=replace(report, shared_bytes=150 << 10)).occupancy == (1, "shared memory")
    assert replace(lines["up"], report=replace(report, registers=16)).occupancy == (8, "warps")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    main = pytest.importorskip("moebius.cli", reason="moebius is not installed").main
    assert main(["explain", "--kernels", "--sizes", "512,256,128,8,2", "--gate", "interleaved"]) == 0
    said = capsys.readouterr().out
    assert "T=512 D=256 N=128 E=8 K=2, bfloat16, silu, gate interleaved" in said and "weight_grad" in said
    assert "2 TMA, 4 async" in said and "1 copies, 2 products" in said


@pytest.mark.parametrize("options, text", [
    (["--sizes", "1,2,3"], "five sizes"), (["--activation", "swish"], "swish"),
    (["--shape", "none"], "invalid choice")])
def test_bad_options(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = pytest.importorskip("moebius.cli", reason="moebius is not installed").main
    with pytest.raises(SystemExit):
        main(["explain", "--kernels", *options])
    assert text in capsys.readouterr().err

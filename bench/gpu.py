"""Everything that needs a GPU, in one call: are the Triton kernels right on this card, which tile shapes are fastest,
how fast are they. Needs Python, torch and Triton, and nothing else: a checkout that is not installed will do.

    python bench/gpu.py                        # under eight minutes; writes out/gpu/
    TRITON_INTERPRET=1 python bench/gpu.py --dry      # the same steps on a CPU, tiny: does this script run?

1. Each case below: forward and every gradient against the float64 reference on the same card, in bfloat16, float16 and
   float32; 8-bit formats against their emulation in torch on the CPU; twice, for the same bits; H packed in MXFP8, bit
   for bit against torch's operators. A failure ends the run.
2. Tile shapes of the five benchmark shapes, measured and kept (tuning.py); --no-tune leaves the defaults.
3. bench/experts.py with a plot. Results: out/gpu/checks.json, tuned.json, experts.json, experts.png.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import experts as benchmark
import torch
from _peers import Shape, make_problem

from moebius.kernels import experts
from moebius.kernels.contract import Needs, Options, Weights
from moebius.kernels.quantize import pack, unpack
from moebius.kernels.routing import sort_rows

# Relative errors against float64: of the inputs' rounding apart from each dtype's own arithmetic, and of sums of a few
# hundred products. In 8 bits: against the emulation, whose A and dH are sums in another order, so that a few elements
# round the other way.
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FORMAT_LIMIT = 1e-2

CASES = {  # tokens, width, expert width, experts, top_k; options
    "plain": (Shape(300, 256, 192, 8, 2), {}),
    "odd widths": (Shape(77, 136, 72, 5, 3), {}),
    "one slot a token": (Shape(200, 128, 64, 4, 1), {}),
    "most experts empty": (Shape(20, 128, 64, 64, 2), {}),
    "every expert": (Shape(50, 128, 64, 4, 4), {}),
    "one token": (Shape(1, 64, 32, 8, 2), {}),
    "interleaved": (Shape(300, 256, 192, 8, 2), {"gate": "interleaved"}),
    "no gate": (Shape(300, 256, 384, 8, 2), {"gate": "none", "activation": "relu2"}),
    "recomputed": (Shape(300, 256, 192, 8, 2), {"save": "recompute"}),
    "long": (Shape(4096, 512, 256, 16, 4), {}),
}
FORMATS = ("fp8", "fp8_block", "mxfp8")


def gradients(problem, device: str, dtype: torch.dtype, gate_up: torch.Tensor, **options) -> list[torch.Tensor]:
    """Result and gradients on a device in a dtype."""
    leaves = [t.detach().to(device, dtype).requires_grad_() for t in (problem.x, gate_up, problem.down, problem.weight)]
    x, up, down, weight = leaves
    out = experts(x, up, down, problem.index.to(device), weight, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.grad.to(device, dtype))]


def check(name: str, shape: Shape, options: dict, dtype: torch.dtype, device: str) -> dict:
    """One case in one dtype: its error, and whether it is right."""
    problem = make_problem(shape, torch.float64, device)
    for tensor in (problem.x, problem.gate_up, problem.down, problem.weight, problem.grad):
        tensor.data = tensor.data.to(dtype).double()  # the same values for both
    gate_up = problem.gate_up
    if options.get("gate") == "none":
        gate_up = gate_up[:, : shape.narrow]
    if "precision" in options:
        want = gradients(problem, "cpu", dtype, gate_up, backend="cpu", **options)
    else:
        want = gradients(problem, device, torch.float64, gate_up, backend="reference", **options)
    first, second = (gradients(problem, device, dtype, gate_up, backend="triton", **options) for _ in range(2))
    error = max(benchmark.error(a.to(b.device), b) for a, b in zip(first, want, strict=True))
    limit = max(FORMAT_LIMIT if "precision" in options else 0.0, LIMITS[dtype])
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return {"case": name, "dtype": str(dtype), "error": error, "limit": limit, "same bits": same,
            "right": error < limit and same}


def check_packed(gate: str, shape: Shape, dtype: torch.dtype, device: str) -> dict:
    """H in MXFP8 as the kernels write and read it, beside torch's operators: the same bits, and the same gradients."""
    from moebius.kernels import triton_form

    problem = make_problem(shape, dtype, device)
    x, up, down, weight, grad = (t.detach() for t in (
        problem.x, problem.gate_up, problem.down, problem.weight, problem.grad))
    weights = Weights(up[:, : shape.narrow].contiguous() if gate == "none" else up, down, None, None)
    order, offsets = sort_rows(problem.index, shape.experts)
    rest, plain, fp8 = (order, offsets, weight, shape.top_k), Options(gate=gate), Options(gate=gate, save="fp8")
    out, h = triton_form.forward(x, weights, *rest, plain)
    same_out, packed = triton_form.forward(x, weights, *rest, fp8)
    same = torch.equal(out, same_out) and torch.equal(pack(h), packed)
    needs = Needs(True, True, True, True, False, False)
    kept = unpack(packed, h.shape[1], dtype)
    want = triton_form.backward(grad, x, kept, weights, *rest, plain, needs)
    got = triton_form.backward(grad, x, packed, weights, *rest, fp8, needs)
    error = max(benchmark.error(a, b) for a, b in zip(got, want, strict=True) if a is not None and b is not None)
    return {"case": f"packed H, {gate}", "dtype": str(dtype), "error": error, "limit": LIMITS[dtype],
            "same bits": same, "right": error < LIMITS[dtype] and same}


def check_all(device: str, dry: bool) -> list[dict]:
    dtypes = [torch.float32] if dry else list(LIMITS)  # Triton's interpreter computes bfloat16 wrongly
    cases = dict(list(CASES.items())[5:6]) if dry else dict(CASES)
    for name in FORMATS:
        cases[name] = (Shape(1, 64, 32, 2, 1) if dry else Shape(300, 256, 192, 8, 2), {"precision": name})
    found = []
    for name, (shape, options) in cases.items():
        for dtype in dtypes:
            found.append(check(name, shape, options, dtype, device))
            show(found[-1])
    small = Shape(2, 32, 32, 2, 1)
    for gate in ("concat", "interleaved", "none"):
        for dtype in dtypes:
            found.append(check_packed(gate, small if dry else CASES["plain"][0], dtype, device))
            show(found[-1])
    return found


def show(check: dict) -> None:
    mark = "right" if check["right"] else "WRONG"
    print(f"  {check['case']:<22}{check['dtype']:<16}{check['error']:.1e}  {mark}", flush=True)


def tune_all(device: str, deadline: float) -> dict[str, dict]:
    """The configurations that won, by problem."""
    from moebius.kernels.triton_form import tune

    chosen: dict[str, dict] = {}
    for name, shape in benchmark.GPU_SHAPES.items():
        if time.monotonic() > deadline:
            print(f"  {name:<10}not tuned: out of time")
            continue
        problem = make_problem(shape, torch.bfloat16, device)
        order, offsets = sort_rows(problem.index, shape.experts)
        weights = Weights(problem.gate_up.detach(), problem.down.detach(), None, None)
        with torch.no_grad():
            won = tune(problem.x.detach(), weights, order, offsets, problem.weight.detach(), shape.top_k, Options())
        chosen |= {str(each): asdict(config) for each, config in won.items()}
        blocks = (f"{each.kernel} {c.block_m}×{c.block_n}×{c.block_k}" for each, c in won.items())
        print(f"  {name:<10}" + ", ".join(blocks), flush=True)
        del problem, weights
        torch.cuda.empty_cache()
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=7.0, help="of all steps; what is left goes to the benchmark")
    parser.add_argument("--no-tune", action="store_true", help="time the default tile shapes")
    parser.add_argument("--dry", action="store_true", help="on a CPU under Triton's interpreter: only that it runs")
    args = parser.parse_args()
    began = time.monotonic()
    device = "cpu" if args.dry else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --dry runs the steps on a CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    import triton

    card = "CPU, interpreted" if args.dry else torch.cuda.get_device_name()
    print(f"{card} · torch {torch.__version__} · Triton {triton.__version__} · Python {sys.version.split()[0]}\n")
    print("Right?")
    checks = check_all(device, args.dry)
    (args.out / "checks.json").write_text(json.dumps({"card": card, "triton": triton.__version__, "checks": checks}))
    if not all(each["right"] for each in checks):
        print("\nWrong results above: nothing is timed.")
        return 1
    if args.dry:
        print("\nThe steps run; tuning and the benchmark want a GPU.")
        return 0
    if not args.no_tune:
        print("\nTile shapes")
        tuned = tune_all(device, began + 60 * args.minutes * 0.4)
        (args.out / "tuned.json").write_text(json.dumps(tuned, indent=1))
    left = args.minutes - (time.monotonic() - began) / 60
    sys.argv = ["experts.py", "--minutes", f"{max(left, 0.5):.2f}", "--json", str(args.out / "experts.json"),
                "--plot", str(args.out / "experts.png")]
    benchmark.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A process in which Triton interprets: reads a case a line (JSON), runs the Triton form on it, answers a line.

Started by test_triton_interpreter.py with TRITON_INTERPRET=1. A case: make_layer's arguments as ``layer``; ``index``;
``options`` of the operator; ``dtype``; ``strided`` (transposed weights and tokens, odd strides) and ``grad`` ("normal",
"scalar", "row": the latter two expanded, stride 0).
"""
from __future__ import annotations

import json
import sys
import traceback

import torch
from experts_oracle import Layer, make_layer, oracle, plain_error, relative_error, run, worst_error


def restride(layer: Layer) -> None:
    """The same values behind strides that no descriptor can address."""
    for name in ("x", "gate_up", "down", "weight", "up_bias", "down_bias"):
        tensor = getattr(layer, name)
        if tensor is not None:
            setattr(layer, name, tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_())


def answer(case: dict) -> dict:
    dtype = getattr(torch, case.get("dtype", "float32"))
    index = torch.tensor(case["index"], dtype=torch.int64) if "index" in case else None
    if index is not None:
        index = index.reshape(case["layer"]["tokens"], case["layer"]["top_k"])
    layer = make_layer(**case["layer"], index=index, dtype=dtype)
    if case.get("spread"):  # columns of x from 2**-40 to 2**40, the same down the weights the other way
        with torch.no_grad():
            powers = torch.exp2(torch.linspace(-40, 40, layer.x.shape[1]).round())
            layer.x.mul_(powers)[:, 3:9] = 0
            layer.gate_up.div_(powers)
    if case.get("strided"):
        restride(layer)
    shape = layer.x.shape
    grad = {"normal": None, "scalar": torch.tensor(0.5, dtype=dtype).expand(shape),
            "row": torch.linspace(-1, 1, shape[1], dtype=dtype).expand(shape)}[case.get("grad", "normal")]
    options = dict(case.get("options", {}), backend="triton")
    check = case.get("check", "error")
    if check == "error":
        return {"error": worst_error(layer, grad, **options), "plain": plain_error(layer, grad)}
    if check == "bits":
        def once() -> list[torch.Tensor]:
            out = run(layer, **options)
            return [out, *torch.autograd.grad(out.square().sum(), layer.leaves())]
        return {"same": all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))}
    if check == "form":  # against the CPU form: the same formats, emulated in torch
        def both(backend: str) -> list[torch.Tensor]:
            out = run(layer, **{**options, "backend": backend})
            up = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
            return [out, *torch.autograd.grad(out, layer.leaves(), up)]
        errors = [relative_error(a, b) for a, b in zip(both("triton"), both("cpu"), strict=True)]
        return {"error": max(errors), "errors": errors}
    if check == "opcheck":
        torch.library.opcheck(torch.ops.moebius.experts.default, (
            layer.x, layer.gate_up, layer.down, layer.index, layer.weight, layer.up_bias, layer.down_bias,
            layer.activation, layer.gate, "default", "triton", case.get("precision", "")))
        return {"same": True}
    if check == "nan":  # one token is NaN: only its own row may be, whatever tile its neighbours share with it
        with torch.no_grad():
            layer.x[1] = float("nan")
        out = run(layer, **options)
        return {"same": torch.equal(out.isfinite(), oracle(layer)[0].isfinite())}
    if check == "single":
        names = ("x", "gate_up", "down", "weight", "up_bias", "down_bias")
        want = dict(zip(names, oracle(layer, torch.ones(shape))[1], strict=True))
        errors = []
        for name in names:
            for other in names:
                getattr(layer, other).requires_grad_(other == name)
            (got,) = torch.autograd.grad(run(layer, **options).sum(), [getattr(layer, name)])
            errors.append(relative_error(got, want[name]))
        return {"error": max(errors)}
    raise ValueError(check)


for line in sys.stdin:
    try:
        result = answer(json.loads(line))
    except Exception:
        result = {"exception": traceback.format_exc()}
    print(json.dumps(result), flush=True)

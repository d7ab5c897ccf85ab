"""A process in which Triton interprets: reads a case a line (JSON), runs the Triton form on it, answers a line.

Started by test_triton_interpreter.py with TRITON_INTERPRET=1. A case: make_layer's arguments as ``layer``; ``index``;
``options`` of the operator; ``dtype``; ``strided`` (transposed weights and tokens, odd strides) and ``grad`` ("normal",
"scalar", "row": the latter two expanded, stride 0).
"""
from __future__ import annotations

import json
import sys
import traceback
import warnings

import torch
from experts_oracle import Layer, make_layer, oracle, plain_error, relative_error, run, worst_error

from moebius.kernels import reference, triton_form
from moebius.kernels.contract import Needs, Options, Weights
from moebius.kernels.quantize import pack, unpack
from moebius.kernels.routing import sort_rows
from moebius.kernels.triton_form import tuning
from moebius.kernels.triton_form.launch import Launch


def restride(layer: Layer) -> None:
    """The same values behind strides that no descriptor can address."""
    for name in ("x", "gate_up", "down", "weight", "up_bias", "down_bias"):
        tensor = getattr(layer, name)
        if tensor is not None:
            setattr(layer, name, tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_())


def packed_h(layer: Layer) -> dict:
    """save="fp8": forward's bits beside those of save="default" and quantize.pack, and its gradients beside the
    reference's in float64, from the H that was kept. Memory that nothing wrote holds NaN, and the packed rows of
    sentinel slots all ones."""
    x, *tensors, weight = (None if t is None else t.detach() for t in (
        layer.x, layer.gate_up, layer.down, layer.up_bias, layer.down_bias, layer.weight))
    weights, (order, offsets) = Weights(*tensors), sort_rows(layer.index, layer.gate_up.shape[0])
    plain, top_k = Options(layer.activation, layer.gate), layer.index.shape[1]
    fp8, needs = Options(layer.activation, layer.gate, "fp8"), Needs(True, True, True, *(
        t is not None for t in (weight, layer.up_bias, layer.down_bias)))
    rows = int(offsets[-1])
    torch.use_deterministic_algorithms(True)  # fills new_empty's memory with NaN
    try:
        out, h = triton_form.forward(x, weights, order, offsets, weight, top_k, plain)
        same_out, packed = triton_form.forward(x, weights, order, offsets, weight, top_k, fp8)
        packed[rows:] = 255
        grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x.dtype)
        got = triton_form.backward(grad, x, packed, weights, order, offsets, weight, top_k, fp8, needs)
    finally:
        torch.use_deterministic_algorithms(False)
    kept = unpack(packed, h.shape[1], h.dtype)
    want = reference.backward(
        grad.double(), x.double(), kept.double(), Weights._make(None if w is None else w.double() for w in weights),
        order, offsets, None if weight is None else weight.double(), top_k, plain, needs)
    called = run(layer, backend="triton", save="fp8")
    by_call = torch.autograd.grad(called, layer.leaves(), grad)
    found = [a for a in (got.x_TD, got.gate_up_E2ND, got.down_EDN, got.weight_TK, got.gate_up_bias_EM,
                         got.down_bias_ED) if a is not None]
    exact = [b for b in (want.x_TD, want.gate_up_E2ND, want.down_EDN, want.weight_TK, want.gate_up_bias_EM,
                         want.down_bias_ED) if b is not None]

    def bits(a: torch.Tensor, b: torch.Tensor) -> bool:
        integers = {2: torch.int16, 4: torch.int32}[a.itemsize]
        return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))

    return {
        "out": bits(out, same_out) and bits(out, called.detach()),
        "packed": packed.dtype == torch.uint8 and torch.equal(pack(h[:rows]), packed[:rows]),
        "call": all(bits(a, b) for a, b in zip(found, by_call, strict=True)),
        "nan": all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, exact, strict=True)),
        "bad_blocks": int((packed[:rows, h.shape[1]:] == 255).sum()),
        "scales": len(packed[:rows, h.shape[1]:].unique()),
        "error": max(relative_error(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, exact, strict=True))}


def tuned(layer: Layer, spoilt: str | None) -> dict:
    """Tuning with the kernels themselves and a clock that likes the last configuration best, which leaves out the last
    row of one kernel's result. Which of the tried ones each kernel got, counted
    from the end (0: the default), and what was warned of."""
    def seconds_of(launch: Launch) -> float:
        launch.run()
        now = tuning.trial.get()
        last = launch.problem is not None and now.number == len(tuning.TRIED[launch.problem.kernel])
        if last and launch.label == spoilt and now.only in (None, launch.problem):
            launch.arguments["a" if launch.label == "up" else "out"][:, -1] = 0
        return max(launch.flops, 1) / (1 + now.number)  # a kernel's panels are launches of their own

    order, offsets = sort_rows(layer.index, layer.gate_up.shape[0])
    tensors = (None if t is None else t.detach() for t in (layer.gate_up, layer.down, layer.up_bias, layer.down_bias))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        chosen = triton_form.tune(
            layer.x.detach(), Weights(*tensors), order, offsets, layer.weight.detach(), layer.index.shape[1],
            Options(layer.activation, layer.gate), seconds_of)
    numbers = {each.kernel: tuning.TRIED[each.kernel].index(config) - len(tuning.TRIED[each.kernel])
               if config in tuning.TRIED[each.kernel] else 0 for each, config in chosen.items()}
    return {"numbers": numbers, "warnings": [str(each.message) for each in caught if each.category is UserWarning]}


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
    if case.get("magnitudes"):  # rows of H from below float32's normal numbers to beyond its largest
        with torch.no_grad():
            layer.gate_up.mul_(torch.exp2(torch.linspace(-140, 126, layer.gate_up.shape[1])[:, None].round()))
    if case.get("bad"):
        with torch.no_grad():
            layer.x[1, 0] = float(case["bad"])
    if case.get("strided"):
        restride(layer)
    shape = layer.x.shape
    grad = {"normal": None, "scalar": torch.tensor(0.5, dtype=dtype).expand(shape),
            "row": torch.linspace(-1, 1, shape[1], dtype=dtype).expand(shape)}[case.get("grad", "normal")]
    options = dict(case.get("options", {}), backend="triton")
    check = case.get("check", "error")
    if check == "tuned":
        return tuned(layer, case.get("spoilt"))
    if check == "packed":
        return packed_h(layer)
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

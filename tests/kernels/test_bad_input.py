"""Bad input is a clear error of the package's own, a ValueError or TypeError, in eager and in the fake
implementation."""
from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from experts_oracle import Layer, loop, make_layer, relative_error, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from moebius.kernels import (
    BackendUnavailableError,
    ExpertsInputError,
    ExpertsTypeError,
    experts,
    experts_rows,
    saved_elements,
)

LAYER = make_layer(6, 5, 4, 3, 2)

SHAPES = {
    "x with three dimensions": (dict(x=torch.randn(2, 3, 5)), r"x_TD must be \[tokens, D\].*\(2, 3, 5\)"),
    "x of another width": (dict(x=torch.randn(6, 7)), "x_TD has width 7.*transpose"),
    "transposed weights": (dict(gate_up=torch.randn(3, 5, 8)), "transpose"),
    "rows without a gate": (dict(gate_up=torch.randn(3, 4, 5)), "4 rows an expert.*wants 8"),
    "other number of experts": (dict(down=torch.randn(4, 5, 4)), "3 experts and down_EDN 4"),
    "other number of tokens": (dict(index=torch.zeros(5, 2, dtype=torch.int64)), "5 tokens and x_TD 6"),
    "weights of another top_k": (dict(weight=torch.rand(6, 3)), r"weight_TK is \(6, 3\)"),
    "flat index": (dict(index=torch.zeros(6, dtype=torch.int64)), r"index_TK must be \[tokens, K\]"),
    "bias of another width": (dict(up_bias=torch.randn(3, 4)), r"gate_up_bias is \(3, 4\).*\[3, 8\]"),
    "down bias of another width": (dict(down_bias=torch.randn(3, 4)), r"down_bias is \(3, 4\).*\[3, 5\]"),
}
TYPES = {
    "x is a list": (dict(x=[[1.0]]), "x_TD must be a tensor, not list"),
    "no weights": (dict(down=None), "down_EDN must be a tensor, not NoneType"),
    "mixed dtypes": (dict(gate_up=LAYER.gate_up.detach().double()), "gate_up_E2ND has dtype torch.float64.*cast"),
    "bias dtype": (dict(down_bias=torch.randn(3, 5).half()), "down_bias has dtype"),
    "float index": (dict(index=LAYER.index.float()), "index_TK has dtype torch.float32"),
    "boolean index": (dict(index=LAYER.index > 0), "index_TK has dtype torch.bool"),
    "integer weights": (dict(weight=LAYER.index), "weight_TK has dtype torch.int64"),
    "integer tokens": (dict(x=torch.zeros(6, 5, dtype=torch.int64)), "x_TD has dtype torch.int64"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case: str) -> None:
    change, text = SHAPES[case]
    with pytest.raises(ExpertsInputError, match=text) as caught:
        run(replace(LAYER, **change))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_while_tracing(case: str) -> None:
    change, text = SHAPES[case]
    layer = replace(LAYER, **change)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ExpertsInputError, match=text):
        run(layer)


@pytest.mark.parametrize("weighting", ["hidden", "input"])
@pytest.mark.parametrize("case", [*SHAPES, *TYPES])
def test_other_weightings_check_as_much(case: str, weighting: str) -> None:
    change, _ = (SHAPES | TYPES)[case]
    with pytest.raises(ExpertsInputError):
        run(replace(LAYER, weighting=weighting, **change))


@pytest.mark.parametrize("case", TYPES)
def test_types(case: str) -> None:
    change, text = TYPES[case]
    with pytest.raises(ExpertsTypeError, match=text) as caught:
        run(replace(LAYER, **change))
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "option, value", [("activation", "swish"), ("gate", "halves"), ("save", "all"), ("backend", "gpu"),
                      ("weighting", "before")])
def test_options(option: str, value: str) -> None:
    with pytest.raises(ExpertsInputError, match=f"{option}='{value}' is not known; one of "):
        experts(LAYER.x, LAYER.gate_up, LAYER.down, LAYER.index, LAYER.weight, **{option: value})


@pytest.mark.parametrize("gate, text, said", [
    ("concat", "g ** 2 * u", r"'g \*\* 2' cannot be read"), ("concat", "silu(g) *", "invalid syntax"),
    ("concat", "silu(g) + 1", "does not use u"), ("none", "g * u", "uses u, and with gate='none'"),
    ("none", "1.0 + 2", "does not use g"), ("none", "clamp(g, 0)", "cannot be read"),
    ("none", "clamp(g, g, 1)", "'g' is not a number or None"), ("none", "g * 1e999", "not finite"),
    ("none", f"g * {10 ** 400}", "too large"), ("none", "-" * 1200 + "g", "too deeply"),
    ("none", "g + 1" * 1000, "at most"), ("none", "-" * 120 + "g", "too deeply"),
    ("none", "g if g else 1", "cannot be read"),
    ("none", "__import__('os').getpid() * g", "cannot be read"), ("none", "g * True", "cannot be read"),
    ("none", 3, "is a int"),
])
def test_expressions(gate: str, text: str, said: str) -> None:
    with pytest.raises(ExpertsInputError, match=said):
        experts(LAYER.x, LAYER.gate_up, LAYER.down, LAYER.index, LAYER.weight, text, gate=gate)


def test_devices() -> None:
    with pytest.raises(ExpertsInputError, match="down_EDN is on meta and x_TD on cpu"):
        run(replace(LAYER, down=LAYER.down.detach().to("meta")))


def test_triton_without_a_gpu() -> None:
    pytest.importorskip("triton")
    with pytest.raises(BackendUnavailableError, match="needs a GPU, or Triton's interpreter"):
        run(LAYER, backend="triton")
    with pytest.raises(BackendUnavailableError, match="float64"):
        run(make_layer(6, 5, 4, 3, 2, dtype=torch.float64), backend="triton")


def test_rows() -> None:
    x, gate_up, down = LAYER.x, LAYER.gate_up, LAYER.down
    with pytest.raises(ExpertsInputError, match="either expert_S .* or counts_E"):
        experts_rows(x, gate_up, down)
    with pytest.raises(ExpertsInputError, match="either expert_S .* or counts_E"):
        experts_rows(x, gate_up, down, torch.zeros(6, dtype=torch.int64), counts_E=torch.tensor([2, 2, 2]))
    with pytest.raises(ExpertsInputError, match=r"counts_E is \(2,\) and there are 3 experts"):
        experts_rows(x, gate_up, down, counts_E=torch.tensor([3, 3]))
    with pytest.raises(ExpertsInputError, match="one-dimensional"):
        experts_rows(x, gate_up, down, LAYER.index)


def test_saved_elements_options() -> None:
    with pytest.raises(ExpertsInputError, match="save='some'"):
        saved_elements(4, 4, 4, 2, save="some")


def test_import_needs_no_triton_and_nothing_else_of_ours() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
import moebius.kernels as kernels
for name in list(sys.modules):
    if name.startswith("moebius.kernels."):
        source = open(sys.modules[name].__file__, "rb").read()  # (one of them is an extension)
        assert b"moebius.lowering" not in source and b"moebius.interpreter" not in source, name
try:
    kernels.experts(torch.ones(1, 2), torch.ones(1, 2, 2), torch.ones(1, 2, 1), torch.zeros(1, 1, dtype=torch.int64),
                    None, backend="triton")
except kernels.BackendUnavailableError as error:
    print("error:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "error: backend='triton' needs the triton package" in done.stdout


# ----------------------------------------------------------------------------------------------------------------------
# Anything at once: the right result, or an error of ours
# ----------------------------------------------------------------------------------------------------------------------

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8]
LAYOUTS = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every other": lambda t: torch.stack([t, torch.full_like(t, 77)], -1).flatten(-2)[..., ::2],
    "one value": lambda t: t.flatten()[:1].expand(t.numel()).as_strided(t.shape, [0] * t.dim()) if t.numel() else t,
    "first row": lambda t: t[:1].expand(t.shape) if t.numel() else t,
    "shifted": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, bool]:
    """(a layer with odd arguments, whether the operator takes their dtypes)."""
    tokens, experts, top_k = draw(st.integers(0, 7)), draw(st.integers(0, 4)), draw(st.integers(0, 3))
    ids = st.integers(-3, experts + 3) if draw(st.booleans()) else st.integers(0, max(experts - 1, 0))
    index = torch.tensor(draw(st.lists(ids, min_size=tokens * top_k, max_size=tokens * top_k)), dtype=torch.int64)
    dtype = draw(st.sampled_from(FLOATS))
    layer = make_layer(tokens, draw(st.integers(1, 9)), draw(st.integers(1, 6)), experts, top_k,
                       gate=draw(st.sampled_from(["concat", "interleaved", "none"])), bias=draw(st.booleans()),
                       weighted=draw(st.booleans()), seed=draw(st.integers(0, 9)), dtype=dtype,
                       index=index.view(tokens, top_k).to(draw(st.sampled_from(INTEGERS))))
    mixed = draw(st.sampled_from(["", "", "", "gate_up", "down", "up_bias"]))
    for name in ("x", "gate_up", "down", "weight", "up_bias", "down_bias"):
        tensor = getattr(layer, name)
        if tensor is None:
            continue
        with torch.no_grad():
            tensor = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](tensor.detach())
            if tensor.numel() and draw(st.integers(0, 9)) == 0:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(
                    st.sampled_from([float("nan"), float("inf")]))
        if name == "weight" and draw(st.booleans()):
            tensor = tensor.float()  # routing weights may be wider than the rows
        if name == mixed:
            tensor = tensor.to(torch.float16 if dtype == torch.float32 else torch.float32)
        setattr(layer, name, tensor.requires_grad_(draw(st.booleans())))
    given_ = {t.dtype for t in (layer.x, layer.gate_up, layer.down, layer.up_bias, layer.down_bias) if t is not None}
    return layer, len(given_) == 1


@settings(max_examples=300, deadline=None)
@given(case=layers(), save=st.sampled_from(["default", "recompute"]), form=st.sampled_from(["auto", "reference"]))
def test_the_right_result_or_an_error(case: tuple[Layer, bool], save: str, form: str) -> None:
    """Odd strides, expanded tensors, indices outside of [0, E), NaN anywhere, no tokens, no experts, no slots."""
    layer, taken = case
    if not taken:
        with pytest.raises(ExpertsTypeError, match="cast one to the other's"):
            run(layer, save=save, backend=form)
        return
    out = run(layer, save=save, backend=form)
    assert out.dtype == layer.x.dtype and out.shape == layer.x.shape
    exact = layer.to(torch.float64)
    want = loop(exact)
    # what is not finite in the exact result is not finite here, and nothing else is (but for float16's range)
    assert not (out.isfinite() & ~want.isfinite()).any()
    if layer.x.dtype != torch.float16:
        assert not (~out.isfinite() & want.isfinite()).any()
    both = out.isfinite() & want.isfinite()
    assert relative_error(out[both], want[both]) < ROUNDING[layer.x.dtype] or float(want[both].norm()) < 1e-3
    leaves = [t for t in (layer.x, layer.gate_up, layer.down, layer.weight, layer.up_bias, layer.down_bias)
              if t is not None and t.requires_grad]
    if not leaves:
        assert not out.requires_grad
        return
    got = torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    if not want.isfinite().all():
        return  # a gradient of NaN is compared nowhere else either
    if want.requires_grad:
        wide = [t for t in (exact.x, exact.gate_up, exact.down, exact.weight, exact.up_bias, exact.down_bias)
                if t is not None]
        own = [t for t in (layer.x, layer.gate_up, layer.down, layer.weight, layer.up_bias, layer.down_bias)
               if t is not None]
        exact_grads = torch.autograd.grad(want, wide, torch.ones_like(want), allow_unused=True)
        right = dict(zip(map(id, own), exact_grads, strict=True))
    else:
        right = {}
    for leaf, grad in zip(leaves, got, strict=True):
        assert grad is not None and grad.shape == leaf.shape and grad.dtype == leaf.dtype
        exact_grad = right.get(id(leaf))
        exact_grad = torch.zeros_like(leaf, dtype=torch.float64) if exact_grad is None else exact_grad
        # a routing weight's own gradient is rounded to its own dtype, which may be narrower than the rows'
        rounding = max(ROUNDING[layer.x.dtype], ROUNDING[leaf.dtype])
        near = relative_error(grad, exact_grad) < rounding
        assert near or float((grad.double() - exact_grad).norm()) < 10 * rounding


def test_ids_that_require_gradients_cannot_be() -> None:
    """An index that requires gradients is floating point, and those are no index."""
    with pytest.raises(ExpertsTypeError, match="expert indices are integers"):
        run(replace(LAYER, index=LAYER.index.double().requires_grad_()))

"""The Triton form, forward and every gradient, against the float64 loop, under Triton's interpreter.

In a process of its own, since the interpreter is chosen when Triton is imported. float32 and float16 only: the
interpreter computes bfloat16 wrongly. A program costs about 10 ms there, so shapes are a few tiles.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from experts_oracle import activations
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples, some

pytest.importorskip("triton")

GATES = ["concat", "interleaved", "none"]
TOLERANCE = {"float32": 3e-6, "float16": 3e-3}


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., dict]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).parent / "triton_worker.py")
    worker = subprocess.Popen([sys.executable, "-W", "ignore::RuntimeWarning", script],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert worker.stdin and worker.stdout

    def exchange(**case) -> dict:
        worker.stdin.write(json.dumps(case) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
        assert line, f"the worker died on {case}"
        answer = json.loads(line)
        assert "exception" not in answer, answer["exception"]
        return answer

    yield exchange
    worker.stdin.close()
    worker.wait(timeout=30)


def layer(tokens: int, width: int, narrow: int, experts: int, top_k: int, **more) -> dict:
    return dict(tokens=tokens, width=width, narrow=narrow, experts=experts, top_k=top_k, **more)


@st.composite
def cases(draw: st.DrawFn) -> dict:
    experts, top_k, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 14))
    ids = st.integers(-1, experts) if draw(st.booleans()) else st.integers(0, experts - 1)
    size = st.sampled_from([1, 7, 16, 24, 33, 64])
    gate = draw(st.sampled_from(GATES))
    case = dict(
        layer=layer(tokens, draw(size), draw(size), experts, top_k, gate=gate,
                    activation=draw(st.sampled_from(activations(gate))), bias=draw(st.booleans()),
                    weighted=draw(st.booleans()), seed=draw(st.integers(0, 99))),
        index=draw(st.lists(ids, min_size=tokens * top_k, max_size=tokens * top_k)),
        strided=draw(st.booleans()), grad=draw(st.sampled_from(["normal", "scalar", "row"])),
        options=dict(save=draw(st.sampled_from(["default", "recompute"]))))
    return case


def test_equals_the_loop(ask: Callable[..., dict]) -> None:
    @settings(max_examples=examples(40), deadline=None)
    @given(case=cases())
    def check(case: dict) -> None:
        answer = ask(**case)
        # a result of one column may cancel to almost nothing: the plain loop in float32 is as far off then
        assert answer["error"] < max(TOLERANCE["float32"], 4 * answer["plain"]), case

    check()


@pytest.mark.share(7)
@pytest.mark.parametrize("gate, activation", [(gate, name) for gate in GATES for name in activations(gate)])
def test_every_activation(ask: Callable[..., dict], activation: str, gate: str) -> None:
    case = dict(layer=layer(9, 24, 40, 3, 2, gate=gate, activation=activation, bias=True))
    assert ask(**case)["error"] < TOLERANCE["float32"]


@pytest.mark.share(1)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_several_tiles_each_way(ask: Callable[..., dict], dtype: str, gate: str) -> None:
    """More than one tile in rows, columns and the contracted axis, with ragged ends on all of them."""
    case = dict(layer=layer(150, 272, 136, 2, 2, gate=gate), dtype=dtype)
    assert ask(**case)["error"] < TOLERANCE[dtype]


def test_panels_of_columns(ask: Callable[..., dict]) -> None:
    """Two panels, the last one narrower and not a whole block."""
    assert ask(layer=layer(6, 600, 16, 2, 2, bias=True))["error"] < TOLERANCE["float32"]


def test_all_tokens_to_one_expert_and_many_empty(ask: Callable[..., dict]) -> None:
    case = dict(layer=layer(70, 32, 16, 9, 1, bias=True), index=[6] * 70)
    assert ask(**case)["error"] < TOLERANCE["float32"]


def test_every_expert_for_every_token(ask: Callable[..., dict]) -> None:
    assert ask(layer=layer(5, 16, 16, 4, 4))["error"] < TOLERANCE["float32"]


@pytest.mark.parametrize("index", [[-1] * 6, [3] * 6, [-1, 0, 3, 1, 2, 2]])
def test_sentinels(ask: Callable[..., dict], index: list[int]) -> None:
    for top_k in (1, 2):
        case = dict(layer=layer(6 // top_k, 16, 16, 3, top_k, bias=True), index=index)
        assert ask(**case)["error"] < TOLERANCE["float32"]


def test_no_token_no_slot_no_expert(ask: Callable[..., dict]) -> None:
    for tokens, experts, top_k in ((0, 3, 2), (4, 3, 0), (4, 0, 2)):
        case = dict(layer=layer(tokens, 16, 16, experts, top_k, bias=True), index=[0] * (tokens * top_k))
        assert ask(**case)["error"] == 0


@pytest.mark.parametrize("save", ["default", "recompute"])
def test_only_the_gradients_asked_for(ask: Callable[..., dict], save: str) -> None:
    case = dict(layer=layer(9, 16, 16, 3, 2, bias=True), check="single", options=dict(save=save))
    assert ask(**case)["error"] < TOLERANCE["float32"]


def test_same_bits_run_for_run(ask: Callable[..., dict]) -> None:
    assert ask(layer=layer(40, 32, 32, 3, 2), check="bits")["same"]


def test_nan_stays_in_its_row(ask: Callable[..., dict]) -> None:
    for top_k in (1, 2):
        assert ask(layer=layer(12, 16, 16, 3, top_k), check="nan")["same"]


def test_opcheck(ask: Callable[..., dict]) -> None:
    assert ask(layer=layer(7, 16, 16, 3, 2, bias=True), check="opcheck")["same"]


FORMATS = ["fp8", "fp8_block", "mxfp8"]


@pytest.mark.share(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("gemm", ["up", "grad_act"])
def test_formats_of_given_operands(ask: Callable[..., dict], gemm: str, name: str) -> None:
    """Both operands are arguments of the operator: nothing but sums may differ from the CPU's emulation."""
    gate = {"fp8": "interleaved", "fp8_block": "concat", "mxfp8": "none"}[name]
    case = dict(layer=layer(40, 150, 40, 2, 2, gate=gate), check="form", options=dict(precision=f"{gemm}={name}"))
    assert ask(**case)["error"] < TOLERANCE["float32"]


@pytest.mark.share(5)
@pytest.mark.parametrize("gemm, name", [
    (gemm, name) for gemm in ("down", "grad_x", "grad_gate_up", "grad_down") for name in FORMATS
    if (gemm, name) not in (("grad_gate_up", "fp8"), ("grad_down", "fp8"))])
def test_formats_of_computed_operands(ask: Callable[..., dict], gemm: str, name: str) -> None:
    """A, dH or s*A is an operand. Computed with sums in another order, a few of its elements in a million round the
    other way, by an eighth of themselves; a format that is not there would be off by 2e-2 or more."""
    case = dict(layer=layer(70, 33, 40, 2, 2, bias=True), check="form", options=dict(precision=f"{gemm}={name}"))
    assert ask(**case)["error"] < 2e-3


@pytest.mark.parametrize("name", FORMATS)
def test_formats_over_odd_layers(ask: Callable[..., dict], name: str) -> None:
    """Narrow axes, empty experts, strides that no descriptor reads, recomputation, sentinels."""
    for tokens, width, narrow, index in ((1, 7, 3, None), (140, 20, 16, [2] * 140), (9, 33, 130, [-1, 0, 3] * 3)):
        given = {} if index is None else dict(index=index)
        case = dict(layer=layer(tokens, width, narrow, 3, 1), check="form", strided=True,
                    options=dict(precision=name, save="recompute"), **given)
        assert ask(**case)["error"] < 2e-3, case


@pytest.mark.parametrize("name", FORMATS)
def test_formats_over_many_magnitudes(ask: Callable[..., dict], name: str) -> None:
    """Blocks of tiny and of huge values, and zeros: every scale has its own block."""
    case = dict(layer=layer(16, 260, 16, 1, 1), check="form", spread=True, options=dict(precision=f"up={name}"))
    assert ask(**case)["error"] < TOLERANCE["float32"]


def test_formats_keep_nan_in_its_row(ask: Callable[..., dict]) -> None:
    for name in FORMATS:
        assert ask(layer=layer(12, 32, 32, 3, 1), check="nan", options=dict(precision=name))["same"], name


# H in MXFP8: fused where the blocks of 32 lie whole in a tile, by torch's operators where they do not (concat, N % 32).
WIDTHS = [1, 7, 16, 32, 40, 64, 96, 130, 160]


@pytest.mark.share(1)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_packed_h(ask: Callable[..., dict], dtype: str, gate: str) -> None:
    """The bits of pack(H) and of the result, and the gradients that the reference has from that H. Some slots have no
    expert, and some experts no slot; nothing reads the rows that nobody wrote."""
    for narrow in WIDTHS if dtype == "float32" else [7, 32, 40]:
        case = dict(layer=layer(8, 24, narrow, 4, 2, gate=gate, bias=narrow % 3 == 1, weighted=narrow != 40),
                    index=[-1, 3, 0, 3, 3, 9, 1, 3] * 2, dtype=dtype, check="packed")
        answer = ask(**case)
        assert answer["out"] and answer["packed"] and answer["call"] and answer["nan"], (case, answer)
        assert answer["bad_blocks"] == 0 and answer["error"] < TOLERANCE[dtype], (case, answer)


@pytest.mark.share(1)
@pytest.mark.parametrize("gate", GATES)
def test_packed_h_of_several_tiles(ask: Callable[..., dict], gate: str) -> None:
    case = dict(layer=layer(150, 40, 320, 2, 2, gate=gate, activation="gelu"), check="packed")
    answer = ask(**case)
    assert answer["out"] and answer["packed"] and answer["call"] and answer["error"] < TOLERANCE["float32"], answer


@pytest.mark.share(1)
@pytest.mark.parametrize("gate", GATES)
def test_packed_h_of_every_magnitude(ask: Callable[..., dict], gate: str) -> None:
    """Every kind of scale: of blocks below float32's normal numbers, of zeros, of numbers that overflow."""
    for narrow in (320, 330):
        answer = ask(layer=layer(4, 24, narrow, 2, 1, gate=gate, activation="relu"), check="packed", magnitudes=True)
        assert answer["out"] and answer["packed"] and answer["scales"] > 10, answer


@pytest.mark.share(1)
@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("gate", GATES)
def test_packed_h_keeps_what_is_not_finite_in_its_row(ask: Callable[..., dict], gate: str, bad: str) -> None:
    for narrow in (40, 64):
        answer = ask(layer=layer(9, 24, narrow, 3, 2, gate=gate), check="packed", bad=bad)
        assert answer["out"] and answer["packed"] and answer["nan"] and answer["bad_blocks"] > 0, answer
        assert answer["error"] < TOLERANCE["float32"], answer


def test_packed_h_of_no_slot_and_no_expert(ask: Callable[..., dict]) -> None:
    for tokens, experts, top_k in ((0, 3, 2), (4, 3, 0), (4, 0, 2)):
        answer = ask(layer=layer(tokens, 16, 32, experts, top_k), index=[0] * (tokens * top_k), check="packed")
        assert answer["out"] and answer["packed"] and answer["call"] and answer["error"] == 0, answer


def test_tuning_keeps_right_configurations_and_refuses_a_wrong_one(ask: Callable[..., dict]) -> None:
    """The kernels themselves, in float16: configurations differ by rounding alone, and a spoilt one by more."""
    case = dict(layer=layer(24, 136, 72, 3, 2, bias=True), dtype="float16", check="tuned")
    answer = ask(**case)
    assert set(answer["numbers"].values()) == {-1} and answer["warnings"] == [], answer
    for label in some(["up", "down"], 1, "spoilt"):
        answer = ask(**case, spoilt=label)
        assert answer["numbers"].pop(label) == -2 and set(answer["numbers"].values()) == {-1}, answer
        assert len(answer["warnings"]) == 1 and f"{label} is wrong with Config(" in answer["warnings"][0], answer

"""Which of a layer's GEMMs multiply 8-bit operands: the formats, a choice of one for each GEMM, and its text.

A format rounds both operands of a GEMM to E4M3 (OCP 8-bit Floating Point v1.0) in blocks, each with a power of two as
its scale (E8M0), rounded up so that nothing saturates. Products are accumulated in float32. Since scales are powers of
two, a GEMM in a format is the plain GEMM of the rounded operands, in exact arithmetic; so every form emulates it
exactly, up to the order of float32 sums.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from moebius.kernels.errors import ExpertsInputError


class Format(NamedTuple):
    """Blocks of a format, as (outer axis, contracted axis); 0: the whole contracted axis.

    rows: of the left operand, and of both in a weight gradient, which contracts over an expert's rows. matrix: of the
    expert's weights.
    """

    rows: tuple[int, int]
    matrix: tuple[int, int]


FORMATS: dict[str, Format] = {
    # One scale a row of the left side and a column of the right one (torchao's "rowwise", powers of two as there).
    "fp8": Format((1, 0), (1, 0)),
    # DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3: 1x128 for activations, 128x128 for weights.
    "fp8_block": Format((1, 128), (128, 128)),
    # OCP Microscaling Formats v1.0; scales rounded up after Mishra et al. 2025, "Recipes for Pre-training LLMs with
    # MXFP8".
    "mxfp8": Format((1, 32), (1, 32)),
}

OVER_ROWS = ("grad_gate_up", "grad_down")


@dataclass(frozen=True)
class Precision:
    """The format of each GEMM of a layer, or None for the tensors' own dtype.

    up: H from X. down: the result from A. grad_act: dA' from dO. grad_x: dX from dH. grad_gate_up: from dH and X.
    grad_down: from dO and s*A. The last two contract over an expert's rows, whose number the host does not know: they
    do not take "fp8", whose scales are of the whole contraction (torchao's recipe "rowwise_with_gw_hp" leaves them out
    as well).
    """

    up: str | None = None
    down: str | None = None
    grad_act: str | None = None
    grad_x: str | None = None
    grad_gate_up: str | None = None
    grad_down: str | None = None

    def __post_init__(self) -> None:
        for gemm, name in self.items():
            if name is not None and name not in FORMATS:
                raise ExpertsInputError(f"precision of {gemm} is {name!r}; one of None, {', '.join(FORMATS)}")
            if name is not None and gemm in OVER_ROWS and not FORMATS[name].rows[1]:
                raise ExpertsInputError(
                    f"precision of {gemm} is {name!r}, which has one scale for a whole contraction; a weight gradient "
                    "contracts over an expert's rows: use fp8_block or mxfp8, or None")

    def items(self) -> list[tuple[str, str | None]]:
        """(GEMM, format) in the order in which they run."""
        return [(each.name, getattr(self, each.name)) for each in fields(self)]

    def __bool__(self) -> bool:
        return any(name for _, name in self.items())

    def __str__(self) -> str:
        """``up=mxfp8,down=mxfp8``; empty where every GEMM is in the tensors' own dtype. parse() reads it."""
        return ",".join(f"{gemm}={name}" for gemm, name in self.items() if name)


GEMMS = tuple(each.name for each in fields(Precision))


@dataclass(frozen=True)
class Budget:
    """The largest relative error, against float64, of a layer's result and of each of its gradients.

    The format of each GEMM is then chosen by measuring on the layer's own tensors (calibrate.py), at a layer's first
    call and again every ``every`` calls. What the layer's own dtype loses counts: bfloat16 alone is off by about 4e-3,
    and one GEMM with E4M3 operands by about 3e-2, so that a smaller budget than that keeps every GEMM as it is.
    layer: a name for the layer whose choice it is, where the place of its weights in memory does not tell (under
    autocast they are copied at each call); lowering and the front door fill it in.
    """

    limit: float
    every: int = 100
    layer: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.limit, bool) or not isinstance(self.limit, float | int) or not (
                math.isfinite(self.limit) and self.limit > 0):
            raise ExpertsInputError(f"Budget({self.limit!r}): a relative error is a positive number, like 5e-2")
        if type(self.every) is not int or self.every < 1:
            raise ExpertsInputError(f"Budget(every={self.every!r}): it is a positive number of calls")

    def __str__(self) -> str:
        return f"budget={float(self.limit)!r}/{self.every}" + (f"@{self.layer}" if self.layer else "")


NAMED: dict[str, Precision] = {
    name: Precision(**{gemm: name for gemm in GEMMS if blocks.rows[1] or gemm not in OVER_ROWS})
    for name, blocks in FORMATS.items()}


TEXTS: dict[str, str] = {name: str(precision) for name, precision in NAMED.items()}


def text_of(given: object) -> str:
    """parse()'s text, by a look-up where that does: torch.compile reads this."""
    if given is None:
        return ""
    if isinstance(given, str) and given in TEXTS:
        return TEXTS[given]
    return str(parse(given))


def parse(given: object) -> Precision | Budget:
    """What the option ``precision`` may be: None, a format's name, a Precision, a Budget, or the text of one of these.

    Raises ExpertsInputError.
    """
    if given is None or given == "":
        return Precision()
    if isinstance(given, Precision | Budget):
        return given
    if isinstance(given, str):
        if given in NAMED:
            return NAMED[given]
        parts = dict(part.split("=", 1) for part in given.split(",") if "=" in part)
        if len(parts) == given.count(",") + 1:
            if set(parts) <= set(GEMMS):
                return Precision(**parts)
            limit, _, rest = parts.get("budget", "").partition("/")
            every, _, layer = rest.partition("@")
            try:
                return Budget(float(limit), int(every or 100), layer)
            except ValueError as error:
                if isinstance(error, ExpertsInputError):
                    raise
    raise ExpertsInputError(
        f"precision={given!r} is not known; None, {', '.join(map(repr, NAMED))}, a Precision or a Budget")

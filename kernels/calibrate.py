"""How far a layer's GEMMs are off, measured against float64 on its own tensors: a report, and a budget's choice.

Errors are relative, ||got - exact|| / ||exact||, expert by expert and over all of them: of each slot's result before
the sum over slots, and of every gradient. The exact values come from the float64 reference, one expert at a time.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebius.kernels import reference
from moebius.kernels.contract import Needs, Options, Weights
from moebius.kernels.dispatch import find_form
from moebius.kernels.precision import FORMATS, GEMMS, OVER_ROWS, Budget, Precision, parse
from moebius.kernels.quantize import pack, unpack
from moebius.kernels.routing import sort_rows

QUANTITIES = ("result", "dx", "d gate_up", "d down", "d weight")
SAMPLE_TOKENS, SAMPLE_EXPERTS = 256, 16  # of a budget's measurement
TRIES = 8  # combinations of formats that a budget measures, the cheapest first
# Work of each GEMM, in units of T*K*D*N multiply-adds (gated), and what an 8-bit one costs of it: half the time, by the
# published rates of every card that has them.
WORK = dict(up=2, down=1, grad_act=1, grad_x=2, grad_gate_up=2, grad_down=1)


class Layer(NamedTuple):
    """One call: its tensors, detached, and its rows in order of experts. grad_TD: of the result, or None."""

    x_TD: Tensor
    weights: Weights
    order_S: Tensor
    offsets: Tensor
    weight_TK: Tensor | None
    top_k: int
    grad_TD: Tensor | None = None


class OneExpert(NamedTuple):
    """An expert's rows as a layer of its own with one slot a token, and its exact quantities (QUANTITIES)."""

    number: int
    layer: Layer
    exact: list[Tensor]


def run_expert(layer: Layer, options: Options, exact: bool = False) -> list[Tensor]:
    """The result and, where there is its gradient, the gradients of one expert's rows, in QUANTITIES' order."""
    form = reference if exact else find_form(options.backend, layer.x_TD)
    inside = replace(options, save="default")
    arguments = (layer.weights, layer.order_S, layer.offsets, layer.weight_TK, layer.top_k, inside)
    out, h = form.forward(layer.x_TD, *arguments)
    if layer.grad_TD is None:
        return [out]
    if options.save == "fp8" and not exact:
        h = unpack(pack(h), h.shape[1], h.dtype)
    found = form.backward(layer.grad_TD, layer.x_TD, h, *arguments, Needs(True, True, True, True, False, False))
    return [out, *(t for t in (found.x_TD, found.gate_up_E2ND, found.down_EDN, found.weight_TK) if t is not None)]


def split_experts(layer: Layer, options: Options) -> Iterator[OneExpert]:
    """Every expert that has rows."""
    bounds = layer.offsets.tolist()
    token_S = layer.order_S.long() // max(layer.top_k, 1)
    weight_S = None if layer.weight_TK is None else layer.weight_TK.reshape(-1).index_select(0, layer.order_S)
    options = replace(options, precision=None)
    for number, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if low == high:
            continue
        token = token_S[low:high]
        weights = Weights._make(None if w is None else w[number:number + 1] for w in layer.weights)
        one = Layer(
            layer.x_TD[token], weights, torch.arange(high - low, dtype=torch.int32, device=token.device),
            layer.offsets.new_tensor([0, high - low]), None if weight_S is None else weight_S[low:high, None], 1,
            None if layer.grad_TD is None else layer.grad_TD[token])
        wide = one._replace(
            x_TD=one.x_TD.double(), weights=Weights._make(None if w is None else w.double() for w in weights),
            weight_TK=None if one.weight_TK is None else one.weight_TK.double(),
            grad_TD=None if one.grad_TD is None else one.grad_TD.double())
        yield OneExpert(number, one, run_expert(wide, options, exact=True))


@dataclass
class Errors:
    """Squares of errors and of exact values, for each quantity and expert: {quantity: {expert: [off, size]}}."""

    squares: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def add(self, expert: int, got: Sequence[Tensor], exact: Sequence[Tensor], first: int = 0) -> None:
        """first: the place in QUANTITIES of what got and exact begin with."""
        for name, a, b in zip(QUANTITIES[first:], got, exact, strict=False):
            cell = self.squares.setdefault(name, {}).setdefault(expert, [0.0, 0.0])
            cell[0] += float((a.double() - b).square().sum())
            cell[1] += float(b.square().sum())

    def total(self, name: str) -> float:
        """The relative error over all experts."""
        cells = self.squares[name].values()
        return ratio(sum(off for off, _ in cells), sum(size for _, size in cells))

    def worst(self, name: str) -> tuple[int, float]:
        """(the expert that is off the most, its relative error)."""
        each = {expert: ratio(off, size) for expert, (off, size) in self.squares[name].items()}
        expert = max(each, key=lambda number: each[number])
        return expert, each[expert]


def ratio(off: float, size: float) -> float:
    """Relative error from squares; a value that is no number counts as infinitely off."""
    if off == 0:
        return 0.0
    found = (off / size) ** 0.5 if size > 0 else float("inf")
    return found if found == found else float("inf")


def measure(experts: Sequence[OneExpert], options: Options) -> Errors:
    """How far the options' form and precision are off, on these experts."""
    errors = Errors()
    for each in experts:
        errors.add(each.number, run_expert(each.layer, options), each.exact)
    return errors


# ----------------------------------------------------------------------------------------------------------------------
# The report
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class LayerReport:
    """One layer: what it is, the precision that it ran in, and its errors so far."""

    title: str
    precision: Precision
    errors: Errors = field(default_factory=Errors)


@dataclass
class PrecisionReport:
    """The layers that ran, in the order of their first calls. str() is a table."""

    layers: dict[tuple, LayerReport] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{'layer':<7}{'quantity':<11}{'relative error':>15}{'worst expert':>14}{'its error':>11}"]
        for number, layer in enumerate(self.layers.values()):
            lines.append(f"{number:<7}{layer.title}; {layer.precision or 'own dtype'}")
            for name in layer.errors.squares:
                expert, worst = layer.errors.worst(name)
                lines.append(f"{'':<7}{name:<11}{layer.errors.total(name):>15.2e}{expert:>14}{worst:>11.2e}")
        return "\n".join(lines)


class Recorder:
    """Where the running operators find the report that is being made. Not a context variable: backward on a GPU runs in
    another thread."""

    report: PrecisionReport | None = None


@contextmanager
def precision_report() -> Iterator[PrecisionReport]:
    """Measures every layer of experts that runs inside, forward and backward, against float64: slow, and the same
    result.

        with precision_report() as report:
            step(model, optimizer, batch)
        print(report)

    Layers are told apart by their weights; further calls of one add to its line.
    """
    before, Recorder.report = Recorder.report, PrecisionReport()
    try:
        yield Recorder.report
    finally:
        Recorder.report = before


def note(layer: Layer, options: Options) -> None:
    """Add a call to the report being made: forward where layer.grad_TD is None, else backward."""
    report = Recorder.report
    if report is None:
        return
    num_experts, width, narrow = layer.weights.down_EDN.shape
    title = f"T={layer.x_TD.shape[0]} D={width} N={narrow} E={num_experts} K={layer.top_k} {layer.x_TD.dtype}"
    entry = report.layers.setdefault(key_of(layer, options), LayerReport(title, options.precision or Precision()))
    first = 0 if layer.grad_TD is None else 1
    for each in split_experts(layer, options):
        entry.errors.add(each.number, run_expert(each.layer, options)[first:], each.exact[first:], first)


# ----------------------------------------------------------------------------------------------------------------------
# A budget
# ----------------------------------------------------------------------------------------------------------------------


def cost(precision: Precision) -> float:
    """Work of a layer's GEMMs, those in 8 bits counted half."""
    return sum(WORK[gemm] * (0.5 if name else 1) for gemm, name in precision.items())


def choices(gemm: str) -> list[str | None]:
    """The formats that a GEMM can have."""
    return [None, *(name for name, blocks in FORMATS.items() if blocks.rows[1] or gemm not in OVER_ROWS)]


def choose(errors_of: Callable[[Precision], dict[str, float]], limit: float) -> Precision:
    """The cheapest precision whose errors, measured, are all within the limit.

    errors_of measures one. Each format of each GEMM is measured alone; errors of several add as squares, which says
    what to try; what is returned has been measured itself. Nothing within the limit: every GEMM in its own dtype.
    """
    base = errors_of(Precision())
    if max(base.values()) > limit:
        return Precision()
    excess: dict[tuple[str, str | None], dict[str, float]] = {}
    for gemm in GEMMS:
        for name in choices(gemm):
            alone = errors_of(Precision(**{gemm: name})) if name else base
            excess[gemm, name] = {what: max(0.0, alone[what] ** 2 - base[what] ** 2) for what in base}
    plans: list[tuple[float, float, Precision]] = []
    for names in itertools.product(*map(choices, GEMMS)):
        parts = [excess[pair] for pair in zip(GEMMS, names, strict=True)]
        expected = max((base[what] ** 2 + sum(part[what] for part in parts)) ** 0.5 for what in base)
        if expected <= limit:
            precision = Precision(*names)
            plans.append((cost(precision), expected, precision))
    plans.sort(key=lambda plan: plan[:2])
    for _, _, precision in plans[:TRIES]:
        if max(errors_of(precision).values()) <= limit:
            return precision
    return Precision()


def sample(layer: Layer, options: Options) -> list[OneExpert]:
    """Rows of tokens spread evenly over the batch, of the experts that have most of them, with a random gradient."""
    tokens, num_experts = layer.x_TD.shape[0], layer.weights.down_EDN.shape[0]
    whole: dict[str, Any] = {"dtype": torch.int64, "device": layer.x_TD.device}
    index = torch.full((tokens * layer.top_k,), num_experts, **whole)  # the table again, from its order
    counts = layer.offsets.diff().long()
    real = int(layer.offsets[-1])
    index[layer.order_S[:real].long()] = torch.arange(num_experts, **whole).repeat_interleave(counts)
    chosen = torch.linspace(0, tokens - 1, min(tokens, SAMPLE_TOKENS), **whole | {"dtype": torch.float32}).long()
    index_TK = index.view(tokens, layer.top_k)[chosen]
    found = torch.bincount(index_TK.flatten(), minlength=num_experts + 1)[:num_experts]
    keep = torch.zeros(num_experts + 1, dtype=torch.bool, device=index.device)
    keep[found.topk(min(num_experts, SAMPLE_EXPERTS)).indices] = True
    order_S, offsets = sort_rows(torch.where(keep[index_TK], index_TK, -1), num_experts)
    drawn = torch.Generator("cpu").manual_seed(0)
    grad = torch.randn((len(chosen), layer.x_TD.shape[1]), generator=drawn, dtype=torch.float32, device="cpu")
    weight = None if layer.weight_TK is None else layer.weight_TK[chosen]
    small = Layer(layer.x_TD[chosen], layer.weights, order_S, offsets, weight, layer.top_k, grad.to(layer.x_TD))
    return list(split_experts(small, options))


def key_of(layer: Layer, options: Options) -> tuple:
    """Tells layers apart: by where their weights lie, and by what they compute."""
    down = layer.weights.down_EDN
    return (down.data_ptr(), tuple(down.shape), down.dtype, options.activation, options.gate)


CHOSEN: dict[tuple, tuple[Precision, int]] = {}  # (budget, layer) -> choice, calls since it was made
MOST_CHOSEN = 4096  # entries; beyond it the oldest goes


def resolve(text: str, layer: Layer, options: Options, forward: bool) -> Precision:
    """The precision that a text (precision.parse) stands for, on this layer.

    A budget's choice is made in forward and held for its ``every`` calls; weights without a name that have come to lie
    where another layer's were have that one's choice until then. Backward takes what forward took, or nothing if it
    knows of none.
    """
    given = parse(text)
    if isinstance(given, Precision):
        return given
    assert isinstance(given, Budget)
    place, *rest = key_of(layer, options)
    key = (str(given), 0 if given.layer else place, *rest)
    held, calls = CHOSEN.get(key, (None, 0))
    if not forward:
        return held or Precision()
    if held is None or calls >= given.every:
        experts = sample(layer, options)

        def errors_of(precision: Precision) -> dict[str, float]:
            errors = measure(experts, replace(options, precision=precision))
            return {name: errors.total(name) for name in errors.squares}

        held, calls = choose(errors_of, given.limit) if experts else Precision(), 0
        if not experts:
            return held
    CHOSEN.pop(key, None)
    CHOSEN[key] = (held, calls + 1)
    if len(CHOSEN) > MOST_CHOSEN:
        del CHOSEN[next(iter(CHOSEN))]
    return held


def chosen_precisions() -> list[tuple[str, Precision]]:
    """(layer, precision) of every choice that a budget has made in this process, oldest first."""
    return [(f"E={key[2][0]} D={key[2][1]} N={key[2][2]} {key[3]} {key[0]}", held)
            for key, (held, _) in CHOSEN.items()]

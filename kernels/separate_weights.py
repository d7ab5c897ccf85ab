"""Experts whose weights are not one tensor, on a CPU: a parameter for each expert, or gate and up apart.

The CPU form multiplies expert by expert, so it takes the parts where they lie: nothing is joined, and each part gets a
gradient of its own instead of a view of one that is as large as all experts.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebius.kernels import cpu, products, reference, twice
from moebius.kernels.contract import Options, Weights
from moebius.kernels.experts_op import as_they_are
from moebius.kernels.routing import sort_rows
from moebius.kernels.unchanged import refuse_changed, sampled


class Block(NamedTuple):
    """Some rows of a weight, of all experts: one tensor [E, rows, …], or a tensor [rows, …] for each expert.

    turned: the two last axes of what is given lie the other way round.
    """

    turned: bool
    parts: Tensor | tuple[Tensor, ...]


Weight = Tensor | Sequence[Block] | None


def experts_apart(
    x_TD: Tensor, gate_up: Weight, down: Weight, index_TK: Tensor, weight_TK: Tensor | None, activation: str,
    *, gate: str = "concat", gate_up_bias: Weight = None, down_bias: Weight = None, save: str = "default",
    hit: Tensor | None = None,
) -> Tensor:
    """experts(…) on a CPU, in x's dtype, whose weights may each be blocks of rows, one after another.

    hit: integers of any shape; an expert with a parameter of its own that is not among them gets no gradient, where
    without hit it gets one of zeros. Tensors are not checked: the caller knows that they fit.
    """
    leaves: list[Tensor] = []
    layout = tuple(None if weight is None else numbered(weight, is_bias, leaves) for weight, is_bias in (
        (gate_up, False), (down, False), (gate_up_bias, True), (down_bias, True)))
    trained = (x_TD, weight_TK, *leaves)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)):
        save = "recompute"  # no backward: H is not kept
    unused = left_out(layout, hit)  # what has no gradient is no part of autograd's graph: its hooks do not run
    for place in unused:
        leaves[place] = leaves[place].detach()
    options = Options(activation, gate, save, "cpu")
    return SeparateExperts.apply(layout, options, hit, index_TK, x_TD, weight_TK, *leaves)


# Blocks of rows: which rows, whether turned, and the parts' places among the leaves.
Layout = tuple[tuple[slice, bool, "int | tuple[int, ...]"], ...]


def numbered(weight: Tensor | Sequence[Block], is_bias: bool, leaves: list[Tensor]) -> Layout:
    """The layout of a weight, whose parts are put at the end of leaves."""
    found: list[tuple[slice, bool, int | tuple[int, ...]]] = []
    row = 0
    for turned, parts in [(False, weight)] if isinstance(weight, Tensor) else weight:
        start = len(leaves)
        leaves += [parts] if isinstance(parts, Tensor) else parts
        rows = slice(row, row + leaves[start].shape[-1 if turned or is_bias else -2])
        found.append((rows, turned, start if isinstance(parts, Tensor) else tuple(range(start, len(leaves)))))
        row = rows.stop
    return tuple(found)


def placed(layout: Layout | None, leaves: Sequence[Tensor | None]) -> products.Blocks | None:
    """The weight with that layout, without blocks of which there is nothing; None where there is nothing at all."""
    found: list[tuple[slice, Tensor | Sequence[Tensor | None]]] = []
    for rows, turned, places in layout or ():
        if isinstance(places, int):
            whole = leaves[places]
            found += [] if whole is None else [(rows, whole.mT if turned else whole)]
            continue
        parts = [leaves[place] for place in places]
        if turned:
            parts = [None if part is None else part.mT for part in parts]
        if any(part is not None for part in parts):
            found.append((rows, parts))
    return products.Blocks(found) if found else None


def placed_all(layout: Sequence[Layout | None], leaves: Sequence[Tensor]) -> products.BlockWeights:
    gate_up, down, gate_up_bias, down_bias = (placed(part, leaves) for part in layout)
    assert gate_up is not None and down is not None
    return products.BlockWeights(gate_up, down, gate_up_bias, down_bias)


class SeparateExperts(torch.autograd.Function):
    """Keeps x, H, the routing weights, the sorted order and the parts themselves for backward."""

    @staticmethod
    def forward(ctx: Any, layout: tuple[Layout | None, ...], options: Options, hit: Tensor | None, index_TK: Tensor,
                x_TD: Tensor, weight_TK: Tensor | None, *leaves: Tensor) -> Tensor:
        weights = placed_all(layout, leaves)
        order_S, offsets = sort_rows(index_TK, weights.down_EDN.shape[0])
        out_TD, h_SM = cpu.forward(x_TD, weights, order_S, offsets, weight_TK, index_TK.shape[1], options)
        ctx.save_for_backward(hit, x_TD, h_SM, order_S, offsets, weight_TK, *as_they_are(leaves), *leaves)
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.options, ctx.top_k = layout, options, index_TK.shape[1]
        ctx.again = multiplied_again(layout, weight_TK, options.save)
        ctx.sample = sampled((x_TD, weight_TK, *(leaves[place] for place in ctx.again)))
        ctx.used_whole = [(leaves[place], leaves[place].data_ptr()) for place in used_whole(layout, leaves)]
        return out_TD

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        needs_x, needs_weight, *needs = ctx.needs_input_grad[4:]
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        hit, x_TD, h_SM, order_S, offsets, weight_TK, *leaves = ctx.saved_tensors
        leaves, themselves = leaves[: len(needs)], leaves[len(needs) :]
        kept = [h_SM]
        del h_SM
        if not torch.is_grad_enabled():
            release(ctx)
        refuse_other_data(ctx.used_whole)
        refuse_changed((x_TD, weight_TK, *(leaves[place] for place in ctx.again)), ctx.sample)
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, None, None, *differentiable(
                ctx, grad, (x_TD, weight_TK, *themselves), (x_TD, weight_TK, *leaves), order_S, offsets, hit)
        weights = placed_all(ctx.layout, leaves)
        rooms = LeafRooms(ctx.layout, leaves, needs, offsets, hit)
        grad_x, grad_weight = cpu.backward_into(
            cpu.Rooms(rooms.make), grad, x_TD, kept, weights, order_S, offsets, weight_TK, ctx.top_k, ctx.options,
            needs_x, needs_weight)
        return None, None, None, None, grad_x, grad_weight, *rooms.leaves


def differentiable(ctx: Any, grad: Tensor, inputs: Sequence[Any], data: Sequence[Any], order_S: Tensor, offsets: Tensor,
                   hit: Tensor | None) -> list[Tensor | None]:
    """As backward's, for x, the routing weights and the leaves, to be differentiated again."""
    options = Options(ctx.options.activation, ctx.options.gate, "recompute", "reference")

    def forward(each: Sequence[Any]) -> Tensor:
        x_TD, weight_TK, *leaves = each
        weights = Weights(*(joined(part, leaves) for part in ctx.layout))  # type: ignore[arg-type]
        return reference.forward(x_TD, weights, order_S, offsets, weight_TK, ctx.top_k, options)[0]

    needs_x, needs_weight, *needs = ctx.needs_input_grad[4:]
    needs = [needed and leaf not in left_out(ctx.layout, hit) for leaf, needed in enumerate(needs)]
    return twice.gradients(forward, grad, inputs, data, (needs_x, needs_weight, *needs))


def joined(layout: Layout | None, leaves: Sequence[Tensor]) -> Tensor | None:
    """The weight with that layout as one tensor."""
    blocks = []
    for _, turned, places in layout or ():
        block = leaves[places] if isinstance(places, int) else torch.stack([leaves[place] for place in places])
        blocks.append(block.mT if turned else block)
    return torch.cat(blocks, 1) if blocks else None


def left_out(layout: Sequence[Layout | None], hit: Tensor | None) -> set[int]:
    """The places of parameters of experts that are not hit."""
    if hit is None:
        return set()
    running = set(hit.unique().tolist())
    apart = (places for part in layout for _, _, places in part or () if not isinstance(places, int))
    return {leaf for places in apart for expert, leaf in enumerate(places) if expert not in running}


def release(ctx: Any) -> None:
    """Let go of what is saved unless backward may run again: it is then freed as soon as it was used, not after all.

    torch's own compiled functions do so. Checked on torch 2.13; where it is not there, the end of backward does it.
    """
    clear = getattr(ctx, "maybe_clear_saved_tensors", None)
    if clear is not None:
        clear()


def used_whole(layout: Sequence[Layout | None], leaves: Sequence[Tensor]) -> list[int]:
    """The places of parameters that a loop over experts multiplies with as they are (``x @ w``, no view of w)."""
    blocks = (block for part in layout[:2] if part is not None for block in part)
    return [place for _, turned, places in blocks if turned and not isinstance(places, int)
            for place in places if leaves[place].is_leaf]


def multiplied_again(layout: Sequence[Layout | None], weight_TK: Tensor | None, save: str) -> list[int]:
    """The places of parameters with which backward computes what autograd's loop has kept."""
    gate_up, down, gate_up_bias, down_bias = layout
    routed = weight_TK is not None and weight_TK.requires_grad
    looked_at = (*((down, down_bias) if routed else ()), *((gate_up, gate_up_bias) if save == "recompute" else ()))
    every = (places for part in looked_at for _, _, places in part or ())
    return [place for places in every for place in ([places] if isinstance(places, int) else places)]


def refuse_other_data(used: Iterable[tuple[Tensor, int]]) -> None:
    """RuntimeError where such a parameter was given other data since: autograd would compute with those in half of
    backward, and here is one formula for the whole of it."""
    for weight, address in used:
        if weight.data_ptr() != address:
            raise RuntimeError(
                f"an expert's weight of shape {tuple(weight.shape)} was given other data (weight.data = …) between "
                "forward and backward: set it after backward, or write into it"
            )


class LeafRooms:
    """Room for each leaf's gradient, zero for experts without rows; None where there will be no gradient."""

    def __init__(self, layout: Sequence[Layout | None], leaves: Sequence[Tensor], needs: Sequence[bool],
                 offsets: Tensor, hit: Tensor | None) -> None:
        self.layout, self.like, self.needs = layout, leaves, needs
        self.counts = offsets.diff().tolist()
        self.empty = [expert for expert, count in enumerate(self.counts) if not count]
        self.running = range(len(self.counts)) if hit is None else set(hit.unique().tolist())
        self.leaves: list[Tensor | None] = [None] * len(leaves)

    def make(self, place: int) -> products.Blocks | None:
        """The rooms of one of the weights."""
        for _, _, places in self.layout[place] or ():
            if isinstance(places, int):
                if self.needs[places]:
                    self.leaves[places] = cpu.clear(torch.empty_like(self.like[places]), self.empty)
                continue
            for expert, leaf in enumerate(places):
                if self.needs[leaf] and expert in self.running:
                    make = torch.empty_like if self.counts[expert] else torch.zeros_like
                    self.leaves[leaf] = make(self.like[leaf])
        return placed(self.layout[place], self.leaves)

"""Experts on a CPU whose rows lie where they are needed: expert after expert, as many rows for each.

So people write experts in batches: rows dispatched to a buffer [E, C, D], one product for all experts. Nothing is
gathered or added up by token then, and one batched product does what the CPU form does expert by expert: with few rows
an expert, that is the faster. Kept are x and H, as the operator keeps them; A is computed again in backward.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebius.kernels import by_expert, twice
from moebius.kernels.activations import activate_halves, backward_halves, find_activation, split_gate
from moebius.kernels.contract import Options
from moebius.kernels.experts_op import as_they_are
from moebius.kernels.gating import gated, gated_backward
from moebius.kernels.panels import PANEL_ROWS
from moebius.kernels.separate_weights import Block, refuse_other_data, release

DTYPES = (torch.float32, torch.float64)  # 16 bits are multiplied in float32 elsewhere (widening.py)


Each = Tensor | list[Tensor]  # of all experts, or one an expert


class Layout(NamedTuple):
    """Of the leaves: gate_up's blocks, down, gate_up's biases (none, or as many), down's bias or none. turned: for each
    weight whether its last two axes lie the other way round than in F.linear. own: how many tensors each of these is,
    one an expert; 0 where it is one of all experts."""

    turned: tuple[bool, ...]
    biased_up: bool
    biased_down: bool
    own: int = 0

    @property
    def ups(self) -> int:
        return len(self.turned) - 1

    def each(self, leaves: Sequence[Any]) -> list[Any]:
        """What there is of the leaves, or of anything else that there is one of for each leaf."""
        own = self.own
        return [leaves[at : at + own] for at in range(0, len(leaves), own)] if own else list(leaves)

    def matrices(self, leaves: Sequence[Tensor]) -> list[Each]:
        """[E, in, out] of each weight."""
        pairs = zip(self.each(leaves), self.turned, strict=False)
        return [weight if turned else flipped(weight) for weight, turned in pairs]

    def biases(self, leaves: Sequence[Tensor]) -> list[Each | None]:
        """[E, 1, out] of each weight, or None."""
        rest = [list(bias) if self.own else bias[:, None] for bias in self.each(leaves)[len(self.turned) :]]
        ups = rest[: self.ups] if self.biased_up else [None] * self.ups
        return [*ups, rest[-1] if self.biased_down else None]


def flipped(weight: Each) -> Each:
    return weight.mT if isinstance(weight, Tensor) else [own.mT for own in weight]


def layout_of(gate_up: Sequence[Block], down: Sequence[Block], gate_up_bias: Sequence[Block] | None,
              down_bias: Sequence[Block] | None, gate: str) -> tuple[Layout, list[Tensor]] | None:
    """(the layout, the leaves) of such blocks of weights; None where some have a tensor for each expert and some have
    not, or where blocks are cut otherwise than into gate and up."""
    up_bias, bias = gate_up_bias or (), down_bias or ()
    parts = [block.parts for block in (*gate_up, *down, *up_bias, *bias)]
    if len(down) != 1 or len(bias) > 1 or len(up_bias) not in (0, len(gate_up)):
        return None
    if len(gate_up) > 1 and (len(gate_up) > 2 or gate != "concat"):
        return None
    counts = {0 if isinstance(part, Tensor) else len(part) for part in parts}
    if len(counts) > 1:
        return None
    turned = tuple(block.turned for block in (*gate_up, *down))
    widths = {part[0].shape[int(each)] for part, each in zip(parts[: len(gate_up)], turned, strict=False)}
    if len(widths) > 1:
        return None
    leaves = [leaf for part in parts for leaf in ([part] if isinstance(part, Tensor) else part)]
    return Layout(turned, bool(up_bias), bool(bias), counts.pop()), leaves


def takes(x_SD: Tensor, layout: Layout, options: Options) -> bool:
    """Whether this form is the faster one: not where C does all of a larger call at once."""
    if x_SD.device.type != "cpu" or x_SD.dtype not in DTYPES or options.save != "default":
        return False
    biased = layout.biased_up or layout.biased_down
    return len(x_SD) <= PANEL_ROWS or biased or not by_expert.knows(x_SD.dtype, options)


def experts_in_blocks(x_SD: Tensor, layout: Layout, leaves: Sequence[Tensor], experts: int, options: Options) -> Tensor:
    """[S, D]: expert e on the rows ``e · S/E : (e + 1) · S/E``. leaves: as the layout has them, x's dtype."""
    return EqualBlocks.apply(layout, options, experts, x_SD, *leaves)


def product(left: Tensor, right: Each, bias: Each | None = None, out: Tensor | None = None) -> Tensor:
    """[E, C, out] of rows [E, C, in]."""
    if isinstance(right, Tensor):
        if not isinstance(bias, Tensor):
            return torch.bmm(left, right, out=out)
        return torch.baddbmm(bias, left, right, out=out)
    made = left.new_empty((*left.shape[:2], right[0].shape[1])) if out is None else out
    for expert, (rows, to) in enumerate(zip(left.unbind(0), made.unbind(0), strict=True)):
        if bias is None:
            torch.mm(rows, right[expert], out=to)
        else:
            torch.addmm(bias[expert], rows, right[expert], out=to)
    return made


def add_product(total: Tensor, left: Tensor, right: Each) -> None:
    if isinstance(right, Tensor):
        total.baddbmm_(left, right)
    else:
        for to, rows, weight in zip(total.unbind(0), left.unbind(0), right, strict=True):
            to.addmm_(rows, weight)


def outer(left: Tensor, right: Tensor, turned: bool, needs: Any) -> list[Tensor | None]:
    """The gradients of a weight whose product was of rows ``right`` and gave ``left``, laid out as the weight is.
    needs: whether each is wanted, or that of all experts."""
    one, other = (right, left) if turned else (left, right)
    if isinstance(needs, bool):
        return [torch.bmm(one.mT, other) if needs else None]
    pairs = zip(one.unbind(0), other.unbind(0), needs, strict=True)
    return [torch.mm(rows.T, others) if need else None for rows, others, need in pairs]


def summed(rows: Tensor, needs: Any) -> list[Tensor | None]:
    """The gradients of a bias that was added to rows [E, C, out]."""
    if isinstance(needs, bool):
        return [rows.sum(1) if needs else None]
    return [total if need else None for total, need in zip(rows.sum(1).unbind(0), needs, strict=True)]


def halves(h: Sequence[Tensor], options: Options) -> tuple[Tensor, Tensor | None]:
    """Gate and up."""
    return (h[0], h[1]) if len(h) > 1 else split_gate(h[0], options.gate)


def activated(h: Sequence[Tensor], options: Options, width: int) -> Tensor:
    """A [E, C, N]. width: N."""
    if len(h) > 1:
        return activate_halves(*halves(h, options), find_activation(options.activation, options.gate))
    rows = h[0].flatten(0, 1)
    return gated(rows, None, options, rows.new_empty(len(rows), width)).view(*h[0].shape[:2], width)


def activated_backward(grad_a: Tensor, h: Sequence[Tensor], options: Options) -> tuple[Tensor, list[Tensor]]:
    """(A, dH in H's blocks)."""
    slopes = [torch.empty_like(block) for block in h]
    if len(h) > 1:
        activation = find_activation(options.activation, options.gate)
        return backward_halves(grad_a, h[0], h[1], activation, slopes[0], slopes[1]), slopes
    a = torch.empty_like(grad_a)
    gated_backward(grad_a.flatten(0, 1), h[0].flatten(0, 1), None, options, a.flatten(0, 1), slopes[0].flatten(0, 1),
                   None)
    return a, slopes


def used_whole(layout: Layout, leaves: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """The parameters that a loop over experts multiplies with as they are (``x @ w``), and where their numbers lie."""
    if not layout.own:
        return []
    pairs = zip(layout.each(leaves), layout.turned, strict=False)
    return [(leaf, leaf.data_ptr()) for each, turned in pairs if turned for leaf in each if leaf.is_leaf]


class EqualBlocks(torch.autograd.Function):
    """Keeps x, H and the weights."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, options: Options, experts: int, x_SD: Tensor, *leaves: Tensor) -> Tensor:
        x = x_SD.reshape(experts, -1, x_SD.shape[1])
        *ups, down = layout.matrices(leaves)
        *up_biases, bias = layout.biases(leaves)
        h = [product(x, up, each) for up, each in zip(ups, up_biases, strict=True)]
        ctx.used_whole = used_whole(layout, leaves)
        kept = h if any(ctx.needs_input_grad) else ()
        ctx.save_for_backward(x_SD, *kept, *as_they_are(leaves), *leaves)
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.options, ctx.experts = layout, options, experts
        out_SD = x_SD.new_empty(x_SD.shape)  # (a view of a product could not be written into)
        width = down.shape[1] if isinstance(down, Tensor) else down[0].shape[0]
        product(activated(h, options, width), down, bias, out=out_SD.view(x.shape))
        return out_SD

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor | None) -> Any:
        needs_x, *needs = ctx.needs_input_grad[3:]
        layout, options, experts = ctx.layout, ctx.options, ctx.experts
        if grad_SD is None:
            return (None,) * (4 + len(needs))
        x_SD, *saved = ctx.saved_tensors
        refuse_other_data(ctx.used_whole)
        h, leaves = saved[: layout.ups], saved[layout.ups : layout.ups + len(needs)]
        if torch.is_grad_enabled():  # create_graph=True
            found = twice.gradients(partial(in_torch, layout, options, experts), grad_SD,
                                    (x_SD, *saved[layout.ups + len(needs) :]), (x_SD, *leaves), [needs_x, *needs])
            return None, None, None, *found
        release(ctx)
        del saved
        x = x_SD.reshape(experts, -1, x_SD.shape[1])
        grad = by_expert.rowwise(grad_SD).reshape(x.shape)
        *ups, down = layout.matrices(leaves)
        wanted = layout.each(needs)
        a, slopes = activated_backward(product(grad, flipped(down)), h, options)
        del h
        grad_down = outer(grad, a, layout.turned[-1], wanted[layout.ups])
        del a
        grad_x = None
        if needs_x:
            grad_x = product(slopes[0], flipped(ups[0]))
            for slope, up in zip(slopes[1:], ups[1:], strict=True):
                add_product(grad_x, slope, flipped(up))
            grad_x = grad_x.view(x_SD.shape)
        cases = zip(slopes, layout.turned, wanted, strict=False)
        grads = [*(outer(slope, x, turned, need) for slope, turned, need in cases), grad_down]
        added = (slopes if layout.biased_up else []) + [grad]
        grads += [summed(rows, need) for rows, need in zip(added, wanted[len(layout.turned) :], strict=False)]
        return None, None, None, grad_x, *(leaf for each in grads for leaf in each)


def in_torch(layout: Layout, options: Options, experts: int, inputs: Sequence[Tensor]) -> Tensor:
    """The same in operators that autograd knows. inputs: x and the leaves."""
    x_SD, *leaves = inputs
    x = x_SD.reshape(experts, -1, x_SD.shape[1])
    if layout.own:
        leaves, layout = [torch.stack(each) for each in layout.each(leaves)], layout._replace(own=0)
    *ups, down = layout.matrices(leaves)
    *up_biases, bias = layout.biases(leaves)
    h = [product(x, up, each) for up, each in zip(ups, up_biases, strict=True)]
    a = activate_halves(*halves(h, options), find_activation(options.activation, options.gate))
    return product(a, down, bias).view(x_SD.shape)

"""The parameters of E experts, each with its own, as one tensor for the experts operator; and blocks of rows as one."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx


class StackOfExperts(torch.autograd.Function):
    """``torch.stack``; an expert that no slot of ``index`` goes to gets no gradient, as if its iteration had not
    run."""

    @staticmethod
    def forward(ctx: Any, index: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        return torch.stack(parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        (gradient,) = gradients
        hit = set(index.unique().tolist())
        return None, *(part if e in hit else None for e, part in enumerate(gradient.unbind(0)))


def stack_experts(index: torch.Tensor | None, *parameters: torch.Tensor) -> torch.Tensor:
    """[E, …]: the parameters stacked. index: the routing index, integers of any shape, where the iterations of experts
    without rows do not run: these then get no gradient rather than one of zeros."""
    if index is None:
        return torch.stack(parameters)
    if type(index) is torch.Tensor:  # (not while it is traced)
        ran = set(index.unique().tolist())
        parameters = tuple(p if e in ran else p.detach() for e, p in enumerate(parameters))  # nor do their hooks run
    return StackOfExperts.apply(index, *parameters)


def asks_which_ran(node: fx.Node) -> bool:
    """Whether its backward gives no gradient to an expert that no token chose, which the batch alone says: no graph of
    operators can hold it."""
    return node.target is stack_experts and node.args[0] is not None


def pick(stacked: torch.Tensor, e: Any) -> torch.Tensor:
    """One expert's own parameter."""
    return stacked[e]


def in_set_order(numbers: torch.Tensor) -> torch.Tensor:
    """[elements]: those of ``set(numbers.tolist())``, in the order in which Python iterates over that set."""
    return torch.tensor(list(set(numbers.tolist())), dtype=numbers.dtype, device=numbers.device)


def of_iterations_that_ran(rows: torch.Tensor, index: torch.Tensor, experts: int | None = None) -> torch.Tensor:
    """The rows; without history where no slot of ``index`` is there, as no iteration has run then: what they are
    computed of gets no gradient rather than zeros. experts: slots that go to none of so many are not there either."""
    if type(index) is not torch.Tensor:  # while it is traced
        return rows
    slots = index if experts is None else (index >= 0) & (index < experts)
    ran = slots.numel() > 0 if experts is None else bool(slots.any())
    return rows if ran else rows.detach()


def join_blocks(*rows: torch.Tensor) -> torch.Tensor:
    """[S, D]: blocks of rows, one after another."""
    return torch.cat(rows)


def rows_if(rows: torch.Tensor, skipped: Any) -> torch.Tensor:
    """[S, D]: the rows; none of them where their branch is skipped (a number, or a tensor of one element)."""
    return rows[:0] if bool(skipped) else rows


def is_left(*asked: Any) -> bool:
    """Whether the step is left at one of some branches: what each asks, and which truth of it goes on."""
    return any(bool(value) is not goes_on for value, goes_on in zip(asked[::2], asked[1::2], strict=True))


def experts_that_ran(*skipped: Any) -> torch.Tensor:
    """[experts]: the numbers of those that were not skipped."""
    return torch.tensor([e for e, skip in enumerate(skipped) if not bool(skip)], dtype=torch.int64, device="cpu")


def block_experts(*rows: torch.Tensor) -> torch.Tensor:
    """[S], int64: which block each of the joined rows is of."""
    sizes = [block.shape[0] for block in rows]
    sizes_B = torch.tensor(sizes, dtype=torch.int64, device=rows[0].device)
    return torch.repeat_interleave(sizes_B, output_size=sum(sizes))


def block_offsets(*rows: torch.Tensor) -> torch.Tensor:
    """[blocks + 1], int64: where each of the blocks begins when they are joined, and the end."""
    ends = itertools.accumulate(block.shape[0] for block in rows)
    return torch.tensor([0, *ends], dtype=torch.int64, device=rows[0].device)


def blocks_apart(joined: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The blocks of ``joined`` [S, D], which nobody else reads, of as many rows as ``rows`` have. Their gradients
    become one, a copy of each: of what they are views of, each would make one of the whole size."""
    return tuple(torch.unsafe_split_with_sizes(joined, [block.shape[0] for block in rows]))

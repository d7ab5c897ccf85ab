"""What the lowered graph calls around the local experts: ``dispatch`` before them, ``combine`` after them.

Between the two, the ordinary experts operator runs on the rows that arrived, one expert a row, with this rank's
weights. So backward gives those weights the gradient of the sum of all ranks' losses. A row's routing weight travels
with it, so the sum over a token's experts of one rank is taken there and one row a rank goes back. Both functions are
made of the exchange's operators and plain torch: any backend traces them.

Letters: T tokens, K slots a token, D model width, E experts, U rows (tokens) received, R their slots that are run here.
"""
from __future__ import annotations

import torch
from torch import Tensor

from moebius.lowering.distribution import exchange
from moebius.lowering.planner.traffic import chunk_span


@torch.library.custom_op("moebius::own_slots", mutates_args=())
def own_slots(index_UK: Tensor, num_experts: int, group_name: str) -> tuple[Tensor, Tensor]:
    """The slots that name an expert of this rank, by expert: (positions in U·K [R], the expert's local number [R])."""
    group = exchange.find_group(group_name)
    low, high = chunk_span(num_experts, group.size(), group.rank())
    flat = index_UK.reshape(-1).long()
    slot_R = ((flat >= low) & (flat < high)).nonzero()[:, 0]
    expert_R, order = torch.sort(flat[slot_R] - low, stable=True)
    return slot_R[order], expert_R


@own_slots.register_fake
def _(index_UK: Tensor, num_experts: int, group_name: str) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return index_UK.new_empty((rows,), dtype=torch.int64), index_UK.new_empty((rows,), dtype=torch.int64)


def dispatch(
    x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor | None, num_experts: int, group_name: str, place: str = "experts",
    backward: int = 0, owed: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Send this rank's tokens to their experts' ranks. Collective. place, backward, owed: as in
    :func:`exchange.route`.

    Returns x_RD, expert_R1 (this rank's own numbering), weight_R1 (None without weights), and for :func:`combine`:
    token_R (the received row that each slot belongs to), rows_S, source_U, splits_3P.
    """
    held = [x_TD, index_TK] if weight_TK is None else [x_TD, index_TK, weight_TK]
    form = ", ".join(f"{str(t.dtype)[6:]}{' with gradients' * t.requires_grad}" for t in held)
    where = f"{place}, rows of {form}"
    rows_S, source_U, splits_3P = exchange.route(index_TK, num_experts, group_name, where, backward, owed)
    x_UD, index_UK, *weights = exchange.send_rows(held, rows_S, source_U, splits_3P, group_name, "")
    slot_R, expert_R = own_slots(index_UK, num_experts, group_name)
    top_k = index_TK.shape[1]
    token_R, weight_R1 = slot_R // top_k, None
    for weight_UK in weights:
        weight_R1 = weight_UK.index_select(0, token_R).gather(1, (slot_R % top_k).unsqueeze(1))
    return x_UD.index_select(0, token_R), expert_R.unsqueeze(1), weight_R1, token_R, rows_S, source_U, splits_3P


def combine(
    y_RD: Tensor, token_R: Tensor, rows_S: Tensor, source_U: Tensor, splits_3P: Tensor, x_TD: Tensor, group_name: str,
    place: str = "experts",
) -> Tensor:
    """Send results home and add them up: out_TD, of this rank's tokens. Collective. x_TD: for their number."""
    wide = torch.float32 if y_RD.dtype in (torch.bfloat16, torch.float16) else y_RD.dtype
    y_UD = torch.zeros((source_U.shape[0], y_RD.shape[1]), dtype=wide, device=y_RD.device)
    y_UD = y_UD.index_add(0, token_R, y_RD.to(wide)).to(y_RD.dtype)
    return exchange.return_rows([y_UD], rows_S, source_U, splits_3P, x_TD.shape[0], group_name, place)[0]


def reached_experts(index: Tensor, num_experts: int, group_name: str) -> Tensor:
    """The experts that a token of any rank goes to: those whose parameters get a gradient. Collective."""
    return exchange.reached_experts(index, num_experts, group_name)


def own_experts(weight_E: Tensor, group_name: str) -> Tensor:
    """This rank's experts of a whole weight that every rank holds; of its gradient, the part that is known here."""
    return exchange.own_experts(weight_E, group_name)

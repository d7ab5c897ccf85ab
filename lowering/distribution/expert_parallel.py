"""What the lowered graph calls around the local experts: ``dispatch`` before them, ``combine`` after them.

Between the two, the ordinary experts operator runs on the rows that arrived, one expert a row, with this rank's
weights. So backward gives those weights the gradient of the sum of all ranks' losses. A row's routing weight travels
with it, so the sum over a token's experts of one rank is taken there and one row a rank goes back. Both functions are
made of the exchange's operators and plain torch: any backend traces them.

Letters: T tokens, K slots a token, D model width, E experts, U rows (tokens) received, R their slots that are run here.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moebius.lowering.distribution import exchange


def dispatch(
    x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor | None, num_experts: int, group_name: str, place: str = "experts",
    backward: int = 0, owed: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, exchange.Ticket]:
    """Send this rank's tokens to their experts' ranks. Collective. place, backward, owed: as in
    :func:`exchange.meet_to_send`.

    Returns x_RD, expert_R1 (this rank's own numbering), weight_R1 (None without weights), and for :func:`combine`:
    token_R (the received row that each slot belongs to), rows_S and the ticket.
    """
    held = [x_TD, index_TK] if weight_TK is None else [x_TD, index_TK, weight_TK]
    form = ", ".join(f"{str(t.dtype)[6:]}{' with gradients' * t.requires_grad}" for t in held)
    rows_S, ticket = exchange.route(index_TK, num_experts, group_name, place, form, backward, owed)
    x_UD, index_UK, *weights = exchange.send_rows(held, rows_S, ticket)
    ranks, top_k, flat = len(ticket.sent), index_TK.shape[1], index_UK.reshape(-1).long()
    slot_R = (exchange.owner_of(flat, num_experts, ranks) == ticket.own).nonzero().select(1, 0)
    expert_R, order = torch.sort(flat.index_select(0, slot_R) - ticket.own * -(-num_experts // ranks), stable=True)
    slot_R = slot_R.index_select(0, order)
    token_R, weight_R1 = slot_R // top_k, None
    for weight_UK in weights:
        weight_R1 = weight_UK.index_select(0, token_R).gather(1, (slot_R % top_k).unsqueeze(1))
    return x_UD.index_select(0, token_R), expert_R.unsqueeze(1), weight_R1, token_R, rows_S, ticket


def outline(x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor | None) -> tuple[Any, ...]:
    """What dispatch gives, as far as our own graphs want to know: of how many rows, the data decides. (On many ranks
    it takes long to reason about as many sizes of exchanges; a backend that traces dispatch has them.)"""
    slot_R, rows_S = (index_TK.reshape(-1).nonzero().select(1, 0) for _ in range(2))
    weight_R1 = None if weight_TK is None else weight_TK.reshape(-1).index_select(0, slot_R).unsqueeze(1)
    return x_TD.index_select(0, slot_R), slot_R.unsqueeze(1), weight_R1, slot_R, rows_S, None


def combine(y_RD: Tensor, token_R: Tensor, rows_S: Tensor, ticket: exchange.Ticket) -> Tensor:
    """Send results home and add them up: out_TD, of this rank's tokens. Collective."""
    wide = torch.float32 if y_RD.dtype in (torch.bfloat16, torch.float16) else y_RD.dtype
    y_UD = torch.zeros((sum(ticket.received), y_RD.shape[1]), dtype=wide, device=y_RD.device)
    return exchange.return_rows(y_UD.index_add(0, token_R, y_RD.to(wide)).to(y_RD.dtype), rows_S, ticket)


def own_experts(weight_E: Tensor, group_name: str) -> Tensor:
    """This rank's experts of a whole weight that every rank holds; of its gradient, the part that is known here."""
    return exchange.own_experts(weight_E, group_name)

"""What the lowered graph calls around the local experts: ``dispatch`` before them, ``combine`` after them.

Between the two, the ordinary experts operator runs on the rows that arrived, one expert a row, with this rank's
weights. So backward gives those weights the gradient of the sum of all ranks' losses. A row's routing weight travels
with it, so the sum over a token's experts of one rank is taken there and one row a rank goes back. Both functions are
made of the exchange's operators and plain torch: any backend traces them.

Letters: T tokens, K slots a token, D model width, E experts, U rows (tokens) received, R their slots that are run here.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moebius.lowering.distribution import exchange, in_flight


def dispatch(
    x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor | None, num_experts: int, group_name: str, place: str = "experts",
    backward: int = 0, owed: int = 0, skips: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, exchange.Ticket]:
    """Send this rank's tokens to their experts' ranks. Collective. place, backward, owed: as in
    :func:`exchange.begin_meeting`; skips: as in :func:`exchange.route`.

    Returns x_RD, expert_R1 (this rank's own numbering), weight_R1 (None without weights), and for :func:`combine`:
    token_R (the received row that each slot belongs to), rows_S and the ticket.
    """
    held = [x_TD, index_TK] if weight_TK is None else [x_TD, index_TK, weight_TK]
    rows_S, ticket = exchange.route(index_TK, num_experts, group_name, place, _form(held), backward, owed, skips)
    return *_by_expert(exchange.Send.apply(ticket, False, rows_S, *held), ticket, num_experts), rows_S, ticket


def _form(held: list[Tensor]) -> str:
    return ", ".join(f"{str(t.dtype)[6:]}{' with gradients' * t.requires_grad}" for t in held)


def _by_expert(
    arrived: Sequence[Tensor], ticket: exchange.Ticket, num_experts: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x_RD, expert_R1, weight_R1 and token_R of :func:`dispatch`, of the rows that arrived."""
    x_UD, index_UK, *weights = arrived
    ranks, top_k, flat = len(ticket.sent), index_UK.shape[1], index_UK.reshape(-1).long()
    slot_R = (exchange.owner_of(flat, num_experts, ranks) == ticket.own).nonzero().select(1, 0)
    expert_R, order = torch.sort(flat.index_select(0, slot_R) - ticket.own * -(-num_experts // ranks), stable=True)
    slot_R = slot_R.index_select(0, order)
    token_R, weight_R1 = slot_R // top_k, None
    for weight_UK in weights:
        weight_R1 = weight_UK.index_select(0, token_R).gather(1, (slot_R % top_k).unsqueeze(1))
    return x_UD.index_select(0, token_R), expert_R.unsqueeze(1), weight_R1, token_R


def outline(x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor | None) -> tuple[Any, ...]:
    """What dispatch gives, as far as our own graphs want to know: of how many rows, the data decides. (On many ranks
    it takes long to reason about as many sizes of exchanges; a backend that traces dispatch has them.)"""
    slot_R, rows_S = (index_TK.reshape(-1).nonzero().select(1, 0) for _ in range(2))
    weight_R1 = None if weight_TK is None else weight_TK.reshape(-1).index_select(0, slot_R).unsqueeze(1)
    return x_TD.index_select(0, slot_R), slot_R.unsqueeze(1), weight_R1, slot_R, rows_S, None


def combine(y_RD: Tensor, token_R: Tensor, rows_S: Tensor, ticket: exchange.Ticket) -> Tensor:
    """Send results home and add them up: out_TD, of this rank's tokens. Collective."""
    y_UD = exchange.sum_rows(y_RD, token_R, sum(ticket.received))  # of each received row
    (out_TD,) = exchange.Return.apply(ticket, rows_S, y_UD)
    return exchange.where_any_ran(out_TD, ticket)


# The same in chunks, with exchanges that are begun and waited for: overlap.py writes them into the graph.


def start_dispatch(
    x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor | None, num_experts: int, group_name: str, place: str,
    backward: int, owed: int, skips: bool, chunks: int,
) -> tuple[in_flight.Chunked, Tensor]:
    """Begin to send this rank's tokens to their experts' ranks, in so many exchanges; what the others take. Collective.
    Arguments are those of :func:`dispatch`."""
    held = [x_TD, index_TK] if weight_TK is None else [x_TD, index_TK, weight_TK]
    asked = (num_experts, group_name, place, _form(held), backward, owed, skips, chunks)
    rows_S, ticket = exchange.route(index_TK, *asked)
    layer = in_flight.Chunked(ticket, chunks, num_experts, held)
    coming = in_flight.StartDispatch.apply(layer, rows_S, *held)
    layer.coming = list(zip(coming[:chunks], coming[chunks:], strict=True))
    return layer, rows_S


def wait_dispatch(
    sent: tuple[in_flight.Chunked, Tensor], chunk: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x_RD, expert_R1, weight_R1 and token_R of a chunk: what :func:`dispatch` gives."""
    layer, _ = sent
    arrived = in_flight.WaitDispatch.apply(layer, chunk, *layer.coming[chunk])
    return _by_expert(arrived, layer.ticket, layer.num_experts)


def start_combine(
    sent: tuple[in_flight.Chunked, Tensor], chunk: int, y_RD: Tensor, token_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Begin to send a chunk's results home; what :func:`wait_combine` takes. Collective."""
    layer, _ = sent
    rows = sum(layer.part(layer.ticket.received, chunk))
    coming: tuple[Tensor, Tensor] = in_flight.StartCombine.apply(layer, chunk, exchange.sum_rows(y_RD, token_R, rows))
    return coming


def wait_combine(sent: tuple[in_flight.Chunked, Tensor], *coming: tuple[Tensor, Tensor]) -> Tensor:
    """out_TD, of this rank's tokens, once all chunks' results are here."""
    layer, rows_S = sent
    buffers, leads = zip(*coming, strict=True)
    return exchange.where_any_ran(in_flight.WaitCombine.apply(layer, rows_S, *buffers, *leads), layer.ticket)


def own_experts(weight_E: Tensor, group_name: str) -> Tensor:
    """This rank's experts of a whole weight that every rank holds; of its gradient, the part that is known here."""
    return exchange.own_experts(weight_E, group_name)

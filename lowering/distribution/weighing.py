"""Losses that are means over as many tokens as a rank has: weighted so that the mean over the ranks is that of all."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.reduce import averaging_mesh
from moebius.lowering.distribution.rendezvous import Call, group_of, headers


def share(tokens: Tensor, loss: Tensor, owed: int = 0) -> Tensor:
    """How many times more tokens this rank has than the ranks of the mesh have on average; 1 where no rank has any, and
    without a mesh: the running call's, or the one that averages what is trained outside of calls. Collective: a header
    over each axis. owed: as in :func:`rendezvous.headers`."""
    mine = tokens.double().reshape(())
    mine = torch.where((mine >= 0) & mine.isfinite(), mine, torch.nan)
    total, ranks, mesh = mine, 1, Call.mesh if Call.name else averaging_mesh()
    for axis in range(mesh.ndim if mesh is not None else 0):
        if (size := mesh.size(axis)) > 1:
            group = group_of(mesh.get_group(axis))
            told = headers(group, total.view(torch.int64).repeat(size), "the tokens of a loss", 0, owed)
            total, ranks = told.view(torch.float64).sum().to(mine.device), ranks * size
    if bool(total.isnan()):
        raise DistributionError(f"a loss has {tokens.item()} tokens on this rank: on each it is a number, 0 or more")
    return torch.where(total > 0, mine * ranks / total, 1.0).to(loss)


share_of_tokens = torch.library.custom_op("moebius::share_of_tokens", share, mutates_args=())


@share_of_tokens.register_fake
def _(tokens: Tensor, loss: Tensor, owed: int = 0) -> Tensor:
    return loss.new_empty(())


SHARE: Any = torch.ops.moebius.share_of_tokens.default


def weigh_by_tokens(loss: Tensor, tokens: Any) -> Tensor:
    """A loss that is a mean over ``tokens`` tokens of this rank, weighted so that its mean over the ranks, and that
    of its gradients, are those of the mean over all ranks' tokens. A rank may have none. Collective with ``mesh=``;
    without one it is the loss itself."""
    if not isinstance(tokens, Tensor):
        tokens = torch.full((), tokens, dtype=torch.float64, device=loss.device)
    share = SHARE(tokens, loss.detach())
    return torch.where(share > 0, loss * share, 0.0)  # (the mean over no tokens is no number)

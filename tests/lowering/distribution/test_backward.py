"""When backward's exchanges have no header of their own: where one graph has forward and backward, on all ranks."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import moebius
from moebius import capture
from moebius.lowering.distribution import traffic

D, LAYERS = 8, 2


def step(model, x, how):
    first, second = model
    y = checkpoint(first, x, use_reentrant=False) if how == "checkpoint" else first(x)
    y = second(y)
    if how == "norm":
        y = y + first.down.norm()
    if how == "break":
        apart()
    y.sum().backward()
    if how == "again":
        second(first(x)).sum().backward()


@moebius.disable
def apart():
    pass


HEADERS = {  # of one step: of layers forward and backward, and of the ends of backward
    "whole": LAYERS + 1, "again": 2 * (LAYERS + 1), "other sizes": LAYERS + 1,
    "break": 2 * LAYERS + 1, "checkpoint": 2 * LAYERS + 2,
}


def headers(how):
    torch.manual_seed(0)
    model = nn.ModuleList(Layer() for _ in range(LAYERS))
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    for number in range(4):
        traffic.reset()
        rows = 5 + number * dist.get_rank() if how == "other sizes" else 5  # the second rank alone captures again
        run(model, torch.randn(rows, D), how)
    return traffic.header


@pytest.mark.share(2)
@pytest.mark.parametrize("how", HEADERS)
def test_backward_has_no_header_where_all_ranks_know_it(on_ranks, how):
    for found in on_ranks(2, headers, how):
        assert found == 16 * HEADERS[how]


def gathered():
    """An expert parameter that ranks gather between forward and backward: they meet there, and promise nothing."""
    torch.manual_seed(0)
    model = nn.ModuleList(Layer() for _ in range(LAYERS))
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    for how in ("whole", "whole", "norm", "norm"):
        traffic.reset()
        run(model, torch.randn(5, D), how)
    return traffic.header


def test_ranks_that_meet_between_forward_and_backward_promise_nothing(on_ranks):
    for found in on_ranks(2, gathered):
        assert found > 16 * (2 * LAYERS + 1)

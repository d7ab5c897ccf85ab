"""Calls with mesh= that run as Python (under a debugger, or with moebius switched off) train what captured ones do: the
ranks' gradients are averaged in each of them. How a call runs x from which call on x the axes of the mesh."""
from __future__ import annotations

import contextlib
import itertools
import sys

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture, explain
from moebius.hook import disable, enable
from moebius.lowering.distribution import Sharded

CALLS = 4


def step(model, optimizer, x, fails=False):
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    if fails:
        raise ValueError("a bad batch")
    optimizer.step()
    return loss.detach()


@contextlib.contextmanager
def traced(seen):
    def see(frame, event, arg):
        if frame.f_back.f_code is train.__code__:
            seen.append(frame.f_code.co_name)

    sys.settrace(see)
    try:
        yield
    finally:
        sys.settrace(None)


@contextlib.contextmanager
def switched_off(seen):
    disable()
    try:
        yield
    finally:
        enable()


WAYS = {"captured": contextlib.nullcontext, "traced": traced, "switched off": switched_off}
AXES = {"ep": (2,), "dp": (2,)}


def train(way, first, axis):
    """The weights after some steps, those from ``first`` on in this way; what a trace function saw it call."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.Tanh(), Layer()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run = capture(step, mesh=init_device_mesh("cpu", AXES[axis], mesh_dim_names=(axis,)))
    torch.manual_seed(dist.get_rank())
    seen = []
    for call in range(CALLS):
        x = torch.randn(5, 8, dtype=torch.float64)
        with WAYS[way](seen) if call >= first else contextlib.nullcontext():
            run(model, optimizer, x)
    whole = [p.full_tensor() if isinstance(p, Sharded) else p for p in model.parameters()]
    return [p.tolist() for p in whole], seen


@pytest.mark.share(2)
@pytest.mark.parametrize("way, first, axis", [*itertools.product(("traced", "switched off"), (0, 2), AXES)])
def test_the_ranks_train_together(on_ranks, way, first, axis):
    expected = on_ranks(2, train, "captured", 0, axis)[0][0]
    for weights, seen in on_ranks(2, train, way, first, axis):
        for a, b in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-12, atol=1e-12)
        assert way != "traced" or seen.count("step") == CALLS - first
        assert {*seen} <= {"step", "__exit__"}  # none of ours stands between


def fail(way):
    """What a rank raises where the step fails on all of them, and whether the next call is in order."""
    model = nn.Sequential(Layer()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run = capture(step, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    x = torch.ones(5, 8, dtype=torch.float64)
    with WAYS[way]([]):
        try:
            run(model, optimizer, x=x, fails=True)
            raised = ""
        except ValueError as error:
            raised, frames = str(error), []
            tb = error.__traceback__
            while tb is not None:
                frames.append(tb.tb_frame.f_code.co_name)
                tb = tb.tb_next
        status = explain(run)(model, optimizer, x).status
    return raised, frames, status


@pytest.mark.parametrize("way", ("traced", "switched off"))
def test_what_fails_in_them_is_raised_as_in_plain_python(on_ranks, way):
    assert on_ranks(2, fail, way) == [("a bad batch", ["fail", "step"], "native")] * 2

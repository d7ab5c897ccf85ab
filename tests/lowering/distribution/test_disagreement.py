"""Ranks that do not do the same: each raises an error that says where each of them is, soon, and nothing is mixed."""
from __future__ import annotations

import functools
import io
import time

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moebius
from moebius import capture
from moebius.lowering.distribution import RanksDisagreeError

D, T = 8, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(D, 3)

    def forward(self, x, how=""):
        layers = self.layers[:1] if how == "one layer less" else self.layers
        for layer in (layers[::-1] if how == "another order" else layers):
            x = layer(x)
        return self.head(x)


def step(model, optimizer, x, how=""):
    optimizer.zero_grad()
    if how == "error":
        raise_one()
    loss = model(x, how).sum()
    if how == "no backward":
        return loss
    loss.backward()
    if how == "twice":
        model(x).sum().backward()
    optimizer.step()
    return loss


@moebius.disable
def raise_one():
    raise ValueError("a bad batch")


def disagree(what):
    """The error on this rank, after how long, and whether a weight is another one since the call began."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    x, wrong = torch.randn(T, D), dist.get_rank() == 1
    for how in ("", "", *(() if what in ("error", "natively") else (what,))):
        run(model, optimizer, x, "" if how == "one call more" else how)  # all ways are captured: no rank is slow below
    if what == "one call more" and wrong:
        error = call(lambda: model(x))
        if error is None:
            error = call(lambda: run(model, optimizer, x))
    before = [p.clone() for p in (model.head.weight, model.layers[0].router.weight)]
    started = time.perf_counter()
    if not (what == "one call more" and wrong):
        goes = step if wrong and what == "natively" else run
        error = call(lambda: goes(model, optimizer, x, what if wrong and what != "one call more" else ""))
    if error is None:  # what comes next tells
        before = [p.clone() for p in (model.head.weight, model.layers[0].router.weight)]
        error = call(lambda: run(model, optimizer, x))
    took = time.perf_counter() - started
    after = (model.head.weight, model.layers[0].router.weight)
    return error, took, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def call(function):
    try:
        function()
    except (RanksDisagreeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


WAYS = {
    "error": "rank 1 raised ValueError: a bad batch, in call 3 of step",
    "no backward": "call", "one layer less": "backward of experts", "twice": "experts of parameter",
    "one call more": "aten.select", "another order": "experts of parameter", "natively": "aten.select",
}


@pytest.mark.share(2)
@pytest.mark.parametrize("what", WAYS)
def test_ranks_say_where_they_are(on_new_ranks, what):
    (error, took, same), (other, late, unchanged) = on_new_ranks(2, disagree, what)
    print(f"{what}: {took:.2f} and {late:.2f} s")
    assert took < 10 and late < 10  # (half of it where nothing else runs here)
    assert same and unchanged
    if what == "error":
        assert other == "ValueError: a bad batch" and WAYS[what] in error
    else:
        for text in (error, other):
            assert "rank 0 is at" in text and "rank 1 is at" in text and WAYS[what] in text


READS = {
    "norm": lambda p: p.norm(), "mean": lambda p: p.mean(), "nan of the gradient": lambda p: torch.isnan(p.grad).any(),
    "norm of the gradient": lambda p: p.grad.norm(), "whole": lambda p: p.full_tensor(), "row": lambda p: p[1],
    "write": lambda p: p.detach().__setitem__(1, 0.0), "save": lambda p: torch.save({"p": p.detach()}, io.BytesIO()),
}


def read_alone():
    """What each rank raises where the first one alone reads an expert parameter, or saves it, and the other goes on."""
    torch.manual_seed(0)
    model, x, errors = Model(), torch.randn(T, D), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    run(model, optimizer, x)
    down = model.layers[0].down
    for read in READS.values():
        read(down)  # all ranks do it
        errors.append(call(functools.partial(read, down) if dist.get_rank() == 0 else lambda: model(x)) or "")
    run(model, optimizer, x)
    return errors


def test_reading_an_expert_parameter_on_one_rank_is_an_error_on_all(on_ranks):
    for errors in on_ranks(2, read_alone):
        for name, error in zip(READS, errors, strict=True):
            assert "different places: rank 0 is at" in error and "rank 1 is at" in error, name

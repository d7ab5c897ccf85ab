"""What steps of optimizers are asked on a mesh: that nothing was left out of the average, that ranks take as many of
them, and that weights stay equal. Where not: one error, on all ranks."""
from __future__ import annotations

import functools
import re
import threading

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moebius
from moebius import capture, explain
from moebius.errors import MeshError
from moebius.lowering.distribution import DistributionError, RanksDisagreeError
from moebius.lowering.distribution.exchange import axis_name
from moebius.lowering.step.optimizer_steps import TAKEN

D = 6
ERRORS = (DistributionError, MeshError, RanksDisagreeError)


class Slots:
    __slots__ = ("model", "optimizer")


@moebius.disable
def natively(function, *args):
    return function(*args)


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = (model(x) ** 2).sum()
    loss.backward()
    optimizer.step()
    return loss


def only_backward(model, optimizer, x):
    (model(x) ** 2).sum().backward()


def in_a_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes):])


def error_of(function, *args):
    try:
        function(*args)
    except ERRORS as error:
        return str(error)
    return ""


def hidden_model(way, where):
    """The errors of two calls whose model only native code reaches; the optimizer steps in them, or after them."""
    torch.manual_seed(0)
    held = Slots()
    held.model = nn.Linear(D, D)
    held.optimizer = torch.optim.SGD(held.model.parameters(), lr=0.1)
    part = train if where == "inside" else only_backward
    reached = functools.partial(part, held.model, held.optimizer)

    def generate():
        while True:
            reached((yield))

    if way == "generator":
        generator = generate()
        next(generator)
        send = generator.send

        def step(x):
            natively(send, x)
    elif way == "thread":
        def step(x):
            natively(in_a_thread, run, x)

        def run(x):
            errors.append(error_of(reached, x))
    else:
        def step(x):
            natively(train_slots, x)

        def train_slots(x):
            part(held.model, held.optimizer, x)
    errors = []
    captured = capture(step, mesh=mesh_of(dist.get_world_size()))
    before = held.model.weight.clone()
    errors.append(error_of(captured, torch.randn(3, D) + dist.get_rank()))
    if where == "outside" and not any(errors):
        held.optimizer.step()
    return [error for error in errors if error], torch.equal(before, held.model.weight)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("way", ["generator", "thread", "slots"])
def test_a_model_that_only_native_code_reaches(on_ranks, way, where):
    for errors, unchanged in on_ranks(2, hidden_model, way, where):
        assert errors and all("pass the model, or its optimizer" in error for error in errors)
        assert unchanged


def late_layer():
    """A layer that is added to a step that runs natively, with an optimizer that steps outside."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D))
    model.more = []
    run = capture(forward_natively, mesh=mesh_of(dist.get_world_size()))
    x = torch.randn(3, D) + dist.get_rank()
    run(model, x)
    added = nn.Linear(D, D)
    optimizer = torch.optim.SGD([*model.parameters(), *added.parameters()], lr=0.1)
    Late.layer = added
    run(model, x)
    Late.layer = None
    return error_of(optimizer.step)


class Late:
    layer = None


def forward_natively(model, x):
    natively(backward_natively, model, x)


def backward_natively(model, x):
    h = model(x)
    (h if Late.layer is None else Late.layer(h)).sum().backward()


def test_a_layer_that_is_added_later(on_ranks):
    assert all("2 parameters" in error for error in on_ranks(2, late_layer))


def uneven(how):
    """Ranks that accumulate over other numbers of batches; the last of them then comes to what comes next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), Layer(D=D, N=D))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = capture(only_backward, mesh=mesh_of(dist.get_world_size()))
    x = torch.randn(3, D) + dist.get_rank()
    for batches in (2, 2):
        for _ in range(batches):
            run(model, optimizer, x)
        optimizer.step()
        optimizer.zero_grad()
    late = dist.get_rank() == 1
    if how == "one batch less":
        work = [run, optimizer.step, run] if late else [run, run, optimizer.step]
    else:
        work = [run, optimizer.step, optimizer.step, run] if late else [run, optimizer.step, run]
    return next(filter(None, (error_of(w, *((model, optimizer, x) if w is run else ())) for w in work)), "")


@pytest.mark.parametrize("how", ["one batch less", "one step more"])
def test_other_numbers_of_backward_a_step(on_new_ranks, how):
    for error in on_new_ranks(2, uneven, how):
        counts = {int(number) for number in re.findall(r"after (\d+) optimizer steps", error)}
        assert "different places" in error and max(counts) - min(counts) == 1


def write_alone(what):
    """The error after one rank has written a weight alone, within as many backward passes as look at all weights."""
    torch.manual_seed(0)
    replicas = (2, 2) if what == "experts of a replica" else (dist.get_world_size(),)
    model = nn.Sequential(nn.Linear(D, D), Layer(D=D, N=D), nn.Linear(D, D))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = capture(train, mesh=mesh_of(*replicas))
    x = torch.randn(3, D) / 3
    run(model, optimizer, x)
    if dist.get_rank() == 1:
        with torch.no_grad():
            if what == "all of a weight":
                model[0].weight.mul_(1.1)
            elif what == "one number":
                model[2].bias.data[3] += 1
            elif what == "to nan":
                model[1].router.weight[0, 0] = torch.nan
            elif what == "rounding":
                model[0].weight.mul_(1 + 1e-6)
            else:
                model[1].down.mul_(1.1)
    before = [p.clone() for p in (model[0].bias, model[2].weight)]
    error = error_of(run, model, optimizer, x)
    if error:
        return error, all(torch.equal(a, b) for a, b in zip(before, (model[0].bias, model[2].weight), strict=True))
    return error, True


@pytest.mark.parametrize("what", ["all of a weight", "one number", "to nan", "rounding"])
def test_a_weight_that_one_rank_wrote(on_ranks, what):
    for error, unchanged in on_ranks(2, write_alone, what):
        assert unchanged and ("has other values on another rank" in error) == (what != "rounding"), error


def test_experts_that_one_replica_wrote(on_ranks):
    for error, unchanged in on_ranks(4, write_alone, "experts of a replica"):
        assert unchanged and "(4, 6, 6) has other values on another rank" in error


def count():
    """Steps that are counted; what the hook costs a step that no mesh trains."""
    torch.manual_seed(0)
    mesh, x = mesh_of(dist.get_world_size()), torch.randn(3, D)
    group, plain = axis_name(mesh, 0), nn.Linear(D, D)
    before = TAKEN[group]
    model = nn.Sequential(nn.Linear(D, D), Layer(D=D, N=D))
    optimizer, run = torch.optim.AdamW(model.parameters()), capture(train, mesh=mesh)
    counts = []
    for function in (run, run, train, run):
        function(model, optimizer, x)
        counts.append(TAKEN[group] - before)
    other = torch.optim.AdamW(plain.parameters())
    report = explain(train)(plain, other, x)
    train(plain, other, x)
    return counts, len(report.graphs), len(report.breaks), TAKEN[group] - before


def test_steps_are_counted_and_the_hook_breaks_no_graph(on_ranks):
    assert on_ranks(2, count) == [([1, 2, 3, 4], 1, 0, 4)] * 2

"""Ranks that do not do the same: each raises an error that says where each of them is, soon, and nothing is mixed."""
from __future__ import annotations

import copy
import functools
import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moebius
from moebius import capture
from moebius.errors import MeshError
from moebius.kernels import experts_op
from moebius.lowering.distribution import RanksDisagreeError, Sharded
from moebius.lowering.distribution.rendezvous import GROUPS, SLICE

D, T = 8, 5


HOW_MANY = {"one layer less": 1, "no layers": 0}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(D, 3)

    def forward(self, x, how=""):
        layers = self.layers[: HOW_MANY.get(how)]
        for layer in (layers[::-1] if how == "another order" else layers):
            x = layer(x)
        return self.head(x.detach() if how == "detached" else x)


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


def of_a_batch(model, optimizer, batch):
    """A step that some keys of the batch change."""
    optimizer.zero_grad()
    loss = model(batch["x"]).sum()
    if "again" in batch:
        loss = loss + model(batch["again"]).sum()
    loss.backward()
    optimizer.step()
    return loss


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
    except (RanksDisagreeError, MeshError, ValueError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return None


WAYS = {
    "error": "rank 1 raised ValueError: a bad batch, in call 3 of step",
    "no backward": "call", "one layer less": "backward of experts", "twice": "experts of parameter",
    "detached": "the end of backward()",
    "one call more": "reading parameter 0 (", "another order": "experts of parameter",
    "natively": "reading parameter 0 (",
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
        with torch.no_grad():
            down.add_(0.0)  # (what was gathered to be read is old then)
        errors.append(call(functools.partial(read, down) if dist.get_rank() == 0 else lambda: model(x)) or "")
    run(model, optimizer, x)
    return errors


def test_reading_an_expert_parameter_on_one_rank_is_an_error_on_all(on_ranks):
    for errors in on_ranks(2, read_alone):
        for name, error in zip(READS, errors, strict=True):
            assert "different places: rank 0 is at" in error and "rank 1 is at" in error, name


def wait_after_an_error():
    """What this rank reads after an error that both have caught, where the other one comes later."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(T, D)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    run(model, optimizer, x)
    down, first = model.layers[0].down, dist.get_rank() == 0
    error = call(down.norm if first else lambda: model(x))
    time.sleep(0 if first else 1.5 * SLICE.total_seconds())
    return error, down.norm().item()


def test_who_waits_does_not_hear_again_of_an_error_that_was_caught(on_new_ranks):
    (error, norm), (other, same) = on_new_ranks(2, wait_after_an_error)
    assert "different places" in error and "different places" in other
    assert norm == same


READS_OF_ANOTHER = {
    **READS, "of a result": lambda p: (p.detach() ** 2).sum(), "several": lambda p: torch._foreach_norm([p, p.grad]),
    "view": lambda p: p.detach().mT.tolist(), "whole gradient": lambda p: p.grad.full_tensor(),
}


def read_another():
    """The same where each rank reads the parameter of another layer, which has the same shape."""
    torch.manual_seed(0)
    model, x, errors = Model(), torch.randn(T, D), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    run(model, optimizer, x)
    for read in READS_OF_ANOTHER.values():
        with torch.no_grad():
            for layer in model.layers:
                layer.down.add_(0.0)  # (what was gathered to be read is old then)
        errors.append(call(functools.partial(read, model.layers[dist.get_rank()].down)) or "")
    run(model, optimizer, x)
    return errors


def test_reading_another_parameter_on_each_rank_is_an_error_that_names_both(on_ranks):
    for errors in on_ranks(2, read_another):
        for name, error in zip(READS_OF_ANOTHER, errors, strict=True):
            assert " (layers.0.down) of shape" in error, (name, error)
            assert " (layers.1.down) of shape" in error, (name, error)
            assert "test_disagreement.py:" in error or "rank_layers.py" in error, (name, error)


def begin_apart():
    """What this rank raises in its first call, where the second one's experts are not reached; and as above."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    how = "no layers" if dist.get_rank() == 1 else ""
    return timed(model, lambda: run(model, optimizer, torch.randn(T, D), how))


def test_ranks_of_which_one_moves_experts(on_new_ranks):
    """Nothing goes on natively on the rank whose capture this ends."""
    for error, took, same in on_new_ranks(2, begin_apart):
        assert error and "rank 0 is at moving the parameters" in error and took < 10 and same, error


def refuse_alone():
    """What this rank raises in its first call, which cannot be captured on the second one."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(T, D)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    return timed(model, lambda: run(model, optimizer, x.requires_grad_(dist.get_rank() == 1)))


def test_what_ends_a_capture_is_told_to_those_that_wait(on_new_ranks):
    (error, took, same), (own, _, _) = on_new_ranks(2, refuse_alone)
    assert own.startswith("MeshError: a tensor of shape (5, 8) requires a gradient")
    assert "rank 1 raised MeshError: a tensor of shape (5, 8) requires a gradient" in error and took < 20 and same


def test_the_command_says_on_all_of_four_ranks_which_one_differs():
    """Also on those that share no group with it, and where it was outside of a captured call."""
    command = [sys.executable, str(Path(__file__).resolve().parents[3] / "bench/disagree.py"), "--pairs", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


class OtherLayer(Layer):
    """Another version of a layer's code."""

    def forward(self, x):
        return super().forward(x) * 2


def start(what):
    """What this rank raises in its first call, where the second one has another program; and as above."""
    torch.manual_seed(0)
    wrong = what if dist.get_rank() == 1 else ""
    model = Model()
    if wrong == "layer":
        model.layers[1].__class__ = OtherLayer
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4 if wrong == "optimizer" else 1e-4)
    function = twice_the_loss if wrong == "code" else of_a_batch
    option = {"save": "recompute"} if wrong == "option" else {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    run, x = capture(function, mesh=mesh, **option), torch.randn(T, D)
    return timed(model, lambda: run(model, optimizer, {"x": x}))


def twice_the_loss(model, optimizer, batch):
    optimizer.zero_grad()
    loss = 2 * model(batch["x"]).sum()
    loss.backward()
    optimizer.step()
    return loss


twice_the_loss.__qualname__ = "of_a_batch"


def timed(model, function):
    before, started = held(model), time.perf_counter()
    error = call(function)
    return error, time.perf_counter() - started, all(map(torch.equal, before, held(model)))


def held(model):
    return [p.local.clone() if isinstance(p, Sharded) else p.detach().clone() for p in model.parameters()]


PROGRAMS = {
    "option": "the option save: rank 0 has 'default', rank 1 has 'recompute'",
    "code": "twice_the_loss (test_disagreement.py:",
    "layer": "OtherLayer.forward (test_disagreement.py:",
    "optimizer": "lr of group 0 of optimizer 0, SGD: rank 0 has 0.0001, rank 1 has 0.0002",
}


@pytest.mark.share(2)
@pytest.mark.parametrize("what", PROGRAMS)
def test_ranks_with_other_programs_do_not_begin(on_new_ranks, what):
    for error, took, same in on_new_ranks(2, start, what):
        assert "the ranks do not run the same program" in error and PROGRAMS[what] in error, error
        assert took < 10 and same  # (half of it where nothing else runs here)


def go_on(what):
    """A call in which the second rank alone does otherwise, after some in which none does; and as above. Then, where it
    did no harm, the weights, and those of one process."""
    torch.manual_seed(0)
    model = Model().double()
    alone = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=1e-4) for each in (model, alone))
    run = capture(of_a_batch, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    generator = torch.Generator().manual_seed(3)
    wrong = dist.get_rank() == 1

    def batches(keys, sizes=(T, T)):
        held = [torch.randn(size, D, generator=generator, dtype=torch.float64) for size in sizes]
        other.zero_grad()
        (sum(alone(x).sum() for x in held) / len(held)).backward()
        other.step()
        return {"x": held[dist.get_rank()], **{key: held[dist.get_rank()] for key in keys}}

    for _ in range(3):
        run(model, optimizer, batches(()))
    if what == "a key that changes the step":
        run(model, optimizer, {"x": (x := torch.ones(T, D, dtype=torch.float64)), "again": x})  # it is captured
        batch = batches(("again",) if wrong else ())
    elif what == "a key that changes nothing":
        batch = batches(("unread",) if wrong else ())
    else:
        batch = batches((), (T, T + 2))  # the second rank alone captures again
    found = timed(model, lambda: run(model, optimizer, batch))
    if found[0] is None:
        run(model, optimizer, batches(()))
    return found, [torch.as_tensor(p.full_tensor() if isinstance(p, Sharded) else p).detach()
                   for p in (model.parameters() if found[0] is None else ())], [*map(torch.detach, alone.parameters())]


@pytest.mark.share(1)
@pytest.mark.parametrize("what", ["a key that changes the step", "a key that changes nothing", "a size"])
def test_another_batch_on_one_rank(on_new_ranks, what):
    """Another capture on one rank is no harm by itself: what ranks exchange is."""
    for (error, took, same), weights, expected in on_new_ranks(2, go_on, what):
        assert took < 10
        if what == "a key that changes the step":
            assert "rank 0 is at" in error and "rank 1 is at" in error and same
            assert "captured again as" in error and "test_disagreement.py:" in error and "again" in error, error
        else:
            assert error is None
            for ours, theirs in zip(weights, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def run_out(layer, patience):
    """The second rank runs out of memory in backward of a layer, catches it, and goes on, after some seconds or none;
    what each raises until none does anything more."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = capture(of_a_batch, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    batch = {"x": torch.randn(T, D)}
    for _ in range(3):
        run(model, optimizer, batch)
    group = next(iter(GROUPS.values()))
    redeemed = [0]
    if dist.get_rank() == 1:
        forms = experts_op.find_form

        def fail(*args):
            redeemed[0] += 1
            if redeemed[0] == 4 - layer:  # two layers' forward were before
                experts_op.find_form = forms
                raise torch.OutOfMemoryError("no more")
            return forms(*args)

        experts_op.find_form = fail
    errors, before, started = [], held(model), time.perf_counter()
    for _ in range(2):
        errors.append(call(lambda: run(model, optimizer, batch)))
        if dist.get_rank() == 1:
            time.sleep(patience)
    return errors, time.perf_counter() - started, all(map(torch.equal, before, held(model))), len(group.promised)


@pytest.mark.share(1)
@pytest.mark.parametrize("patience", [0, 3])
@pytest.mark.parametrize("layer", [1, 0])
def test_an_error_that_one_rank_catches_within_backward(on_new_ranks, layer, patience):
    """No rank sends what another one takes for something else: backward's exchanges have no header of their own."""
    (waited, *first), (failed, *second) = on_new_ranks(2, run_out, layer, patience)
    assert failed[0] == "OutOfMemoryError: no more" and "RanksDisagreeError" in failed[1], failed
    assert "rank 1" in waited[0] and "RanksDisagreeError" in waited[0] and waited[1], waited
    for took, same, promised in (first, second):
        assert took < 20 and same and not promised

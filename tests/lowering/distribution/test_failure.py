"""A rank that fails, is stopped or killed: the others end, each with an error that names it and the step, long before
the group's timeout, and with the weights of the last whole step."""
from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moebius
from moebius import capture
from moebius.lowering.distribution import Sharded
from moebius.lowering.distribution.alive import condition, this_process

D, LOST = 8, 3


def step(model, optimizer, x):
    optimizer.zero_grad()
    strike("before forward")
    loss = model(x).sum()
    strike("before backward")
    loss.backward()
    strike("before the optimizer")
    optimizer.step()


SAID = {  # how a rank is lost; what the others say
    "stop": "the process of rank 3 is stopped", "kill": "the process of rank 3 has ended",
    "error": "rank 3 raised ValueError: a bad batch, in call 4 of step",
    "memory": "rank 3 raised OutOfMemoryError: no more, in call 4 of step",
}
WAYS = [*itertools.product(SAID, ("before forward", "before backward", "before the optimizer"))]
OVER_TCP = WAYS[::2]  # the store of torchrun's ranks; the others find one another through a file
struck = []  # when, and how, where: in the call that runs


@moebius.disable
def strike(where):
    if struck[1:] != [where] or dist.get_rank() != LOST:
        return
    how = struck[0]
    if how in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    raise ValueError("a bad batch") if how == "error" else torch.OutOfMemoryError("no more")


def held(model):
    return [p.local.clone() if isinstance(p, Sharded) else p.detach().clone() for p in model.parameters()]


def train(how, where):
    """The error of this rank; whether its weights are those of the last whole step; after how many steps; the sum of
    those that all ranks have; after how many seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.Tanh(), Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = capture(step, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))
    for _ in range(3):
        run(model, optimizer, torch.randn(5, D))
    dist.barrier()
    struck[:] = how, where
    began = time.perf_counter()
    steps = 3
    try:
        for _ in range(2):  # the last exchange of a step may be over
            before = held(model)
            run(model, optimizer, torch.randn(5, D))
            steps += 1
    except BaseException as error:
        same = all(torch.equal(a, b) for a, b in zip(before, held(model), strict=True))
        total = sum(float(p.detach().double().sum()) for p in model.parameters() if not isinstance(p, Sharded))
        took = time.perf_counter() - began
        return f"{type(error).__name__}: {error}", same, steps, total, took


@pytest.mark.share(1)
@pytest.mark.parametrize("way", WAYS, ids=", ".join)
def test_the_others_name_it_and_end(on_new_ranks, way):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if way in OVER_TCP else None
    told = on_new_ranks(4, train, *way, lost=LOST, port=server.port if server else None)
    print(*(f"{took:.2f} s: {error}" for error, _, _, _, took in told), sep="\n")
    for error, same, _, _, took in told:
        assert SAID[way[0]] in error and "of step" in error and same and took < 10
    assert len({(steps, total) for *_, steps, total, _ in told}) == 1


def test_what_the_system_says_of_a_process():
    child = subprocess.Popen([sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n"
                              "from moebius.lowering.distribution.alive import this_process\n"
                              "print(this_process(), flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    name = child.stdout.readline().strip()
    assert name and name != this_process()
    assert condition(name) == condition(this_process()) == ""
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert condition(name) == "is stopped"
    assert condition(f"elsewhere {name.partition(' ')[2]}") == condition("") == ""
    child.kill()
    child.communicate()
    assert condition(name) == "has ended"
    assert condition(this_process() + "1") == "has ended"  # another process, of the same number


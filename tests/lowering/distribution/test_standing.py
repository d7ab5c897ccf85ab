"""A rank that comes to a collective of the program's own while the others are in a captured step: all say so, soon. A
rank that is only slow is waited for. Every process ends within BOUND, whatever it waits for."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_layers import Layer
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture
from moebius.lowering.distribution import standing
from moebius.lowering.distribution.standing import never_meet

BOUND = 150  # seconds until all have ended; the group's timeout is longer
SOON = 10  # seconds until a rank that waits has an error
FIRST = 20  # seconds for the first captures of four ranks on one core, which count where no call was before
T, D = 5, 8


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def gathered(folder):
    dist.all_gather_object([None] * dist.get_world_size(), dist.get_rank())


COLLECTIVES = {
    "barrier": lambda folder: dist.barrier(),
    "the sum of a loss": lambda folder: dist.all_reduce(torch.ones(())),
    "work that is waited for": lambda folder: dist.all_reduce(torch.ones(()), async_op=True).wait(),
    "objects": lambda folder: dist.broadcast_object_list([dist.get_rank()]),
    "gathered": gathered,
    "a new group": lambda folder: dist.new_group(timeout=timedelta(seconds=30)),
    "monitored": lambda folder: dist.monitored_barrier(),
    "checkpoint": lambda folder: dcp.save({"x": torch.ones(3)}, checkpoint_id=os.path.join(folder, "saved")),
}
SLOW = {"sleeps": lambda: time.sleep(9), "computes": lambda: computes(9)}
SHAPES = {"2": (2,), "2x2": (2, 2)}


def computes(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(200, 200) @ torch.randn(200, 200)


def run(folder, shape, what, calls):
    """What this rank raises, and after how long; the last rank has fewer calls."""
    torch.manual_seed(0)
    names = ("dp", "ep")[-len(SHAPES[shape]):]
    model = Layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    captured = capture(step, mesh=init_device_mesh("cpu", SHAPES[shape], mesh_dim_names=names))
    last = dist.get_rank() == dist.get_world_size() - 1
    error, began = None, time.perf_counter()
    try:
        for _ in range(calls if last else 3):
            began = time.perf_counter()
            captured(model, optimizer, torch.randn(T, D))
        began = time.perf_counter()
        if what in SLOW and last:
            SLOW[what]()
            captured(model, optimizer, torch.randn(T, D))
        elif what in COLLECTIVES:
            COLLECTIVES[what](folder)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps([error, time.perf_counter() - began, standing.WATCHES[0].is_alive()]), flush=True)


def on_own_processes(tmp_path, shape, what, calls):
    """What each rank prints, and writes to stderr."""
    ranks = 4 if shape == "2x2" else 2
    command = [sys.executable, __file__, str(tmp_path), shape, what, str(calls)]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, **own}) for rank in range(ranks)]
    end = time.monotonic() + BOUND
    try:
        told = [rank.communicate(timeout=max(end - time.monotonic(), 0.1)) for rank in running]
    finally:
        for rank in running:
            rank.kill()
            rank.communicate()
    return [(*json.loads(out), err) for out, err in told]


@pytest.mark.share(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("what", COLLECTIVES)
def test_a_rank_in_a_collective_of_its_own_is_named_on_all(tmp_path, what, shape):
    is_named_on_all(tmp_path, what, shape, 2)


# Not in every run: before the first capture the last rank's collective may fail before the others, which capture on one
# core, have come to theirs; then they say that it has gone, and not where it was.
@pytest.mark.share(0)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("what", COLLECTIVES)
def test_before_any_call_it_is_named_too(tmp_path, what, shape):
    is_named_on_all(tmp_path, what, shape, 0)


def is_named_on_all(tmp_path, what, shape, calls):
    *others, (error, _, _, written) = on_own_processes(tmp_path, shape, what, calls)
    print(others, error, written)
    last = len(others)
    for found, took, _, _ in others:
        assert found and "RanksDisagreeError" in found or "MeshError" in found
        assert took < SOON + (0 if calls else FIRST)
        assert f"rank {last} is in a collective at test_standing.py:" in found
    assert error is None or "RuntimeError" in error  # the others are gone
    assert f"moebius: rank {last} waits for ranks that will not come: rank 0 is at" in written


@pytest.mark.share(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("what", SLOW)
def test_a_slow_rank_is_waited_for(tmp_path, what, shape):
    for error, _, watched, written in on_own_processes(tmp_path, shape, what, 2):
        assert error is None and watched and "moebius: rank" not in written


def test_who_will_never_meet():
    both = [0, 1]
    assert not never_meet([{"all": (both, 4, 9)}, {"all": (both, 4, 9)}])
    assert never_meet([{"all": (both, 5, 9)}, {"all": (both, 4, 9)}])  # one in ours, one in another
    assert never_meet([{"all": (both, 4, 9), "new": (both, 0, 0)}, {"all": (both, 4, 9)}])
    assert not never_meet([{"all": (both, 4, 9), "own": ([0], 0, 3)}, {"all": (both, 4, 9)}])


if __name__ == "__main__":
    folder, shape, what, calls, rank = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = 4 if shape == "2x2" else 2
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), ranks), rank=int(rank),
                            world_size=ranks, timeout=timedelta(seconds=2 * BOUND))
    run(folder, shape, what, int(calls))

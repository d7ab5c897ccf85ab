"""Models whose parameters are DTensors, on a mesh of one process: graph breaks with a hint, and plain Python's answers.

Losses, gradients, their placements and the parameters after each step are compared, and what is around is captured.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from plain_python import graph_breaks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from moebius import capture

if not dist.is_available():
    pytest.skip("torch without distribution", allow_module_level=True)


@pytest.fixture(scope="module")
def mesh():
    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    if begun:
        dist.destroy_process_group()


def build(mesh, place):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    if place == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(m, mesh=mesh)
    if place == "replicate":
        return distribute_module(m, mesh)

    def shard(name, module, mesh):
        for key, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))

    return distribute_module(m, mesh, shard)


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def step(m, optimizer, x):
    optimizer.zero_grad()
    scale = x.pow(2).mean().sqrt()
    given = (x / scale).detach()
    given = distribute_tensor(given, m[0].weight.device_mesh, [Replicate()]) if needs_mesh(m) else given
    loss = m(given).pow(2).sum()
    loss.backward()
    optimizer.step()
    return local(loss.detach()) * scale


def needs_mesh(m):
    return isinstance(m[0].weight, DTensor) and "FSDP" not in type(m).__name__


def seen_of(m):
    gradients = [(str(p.grad.placements), type(p.grad).__name__, local(p.grad).tolist()) for p in m.parameters()]
    return gradients, [(str(p.placements), local(p).tolist()) for p in m.parameters()]


@pytest.mark.filterwarnings("error:moebius")
@pytest.mark.parametrize("place", ["replicate", "shard", "fully_shard"])
@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_a_step_of_distributed_parameters(mesh, place, backend):
    runs = []
    for capturing in (lambda f: f, lambda f: capture(f, backend=backend)):
        m, run = build(mesh, place), capturing(step)
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
        results = []
        for rows in (3, 3, 5):
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
            results.append((run(m, optimizer, x).tolist(), seen_of(m)))
        runs.append(results)
    assert runs[0] == runs[1]
    breaks = graph_breaks(run)
    assert breaks and all(b.hint for b in breaks)
    assert any(b.reason == "tensor subclass" and "DTensor" in b.detail for b in breaks)


def test_the_local_part_of_a_parameter(mesh):
    w = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))

    def local_step(x):
        y = (x * 2).sin() @ w.to_local().t()
        y.sum().backward()
        return y.detach() * 3

    captured, x = capture(local_step), torch.randn(3, 4)
    for _ in range(3):
        got = captured(x)
        mine, w.grad = w.grad, None
        want = local_step(x)
        assert torch.equal(got, want) and torch.equal(local(mine), local(w.grad))
        assert mine.placements == w.grad.placements == (Shard(0),)
        w.grad = None


def test_an_error_of_mixed_tensors_is_torchs(mesh):
    m = build(mesh, "replicate")
    for f in (m.__call__, capture(lambda x: m(x))):
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            f(torch.ones(2, 4))

"""Parameters on ranks that code without capture reads: gathered once for what was written, however it was written."""
from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius.lowering.distribution import DistributionError, Plan, Sharded, place_parameters, traffic

E, D = 5, 3


def without_gradients(write):
    return torch.no_grad()(write)


def step(optimizer, **options):
    def write(model):
        model.weight.sum().backward()
        optimizer(model.parameters(), lr=0.1, **options).step()

    return write


def assign_data(model):
    model.weight.data = torch.ones(E, D)


def assign_item(model):
    with torch.no_grad():
        model.weight[1] = 5.0


def take_in_parts(model):
    nn.utils.vector_to_parameters(torch.ones(E * D), model.parameters())


WAYS = {
    "data.copy_": lambda m: m.weight.data.copy_(torch.ones(E, D)),
    "data.add_": lambda m: m.weight.data.add_(1),
    "data =": assign_data,
    "[i] =": assign_item,
    "add_": without_gradients(lambda m: m.weight.add_(1)),
    "detach().add_": lambda m: m.weight.detach().add_(1),
    "_foreach_add_": without_gradients(lambda m: torch._foreach_add_([m.weight], 1.0)),
    "lerp_": without_gradients(lambda m: m.weight.lerp_(torch.ones(E, D), 0.5)),
    "zeros_": lambda m: nn.init.zeros_(m.weight),
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.ones(E, D)}),
    "vector_to_parameters": take_in_parts,
    "SGD": step(torch.optim.SGD),
    "Adam, foreach": step(torch.optim.Adam, foreach=True),
    "Adam, one by one": step(torch.optim.Adam, foreach=False),
    "AdamW, fused": step(torch.optim.AdamW, fused=True),
}


def build(placed):
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(float(E * D)).reshape(E, D))
    if placed:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        place_parameters([model.weight], [], mesh, Plan(axis="ep"))
    return model


def read(weight):
    """Rows, as loops over experts and others read them; another number of them on each rank."""
    rows = range(dist.get_rank(), E)
    found = torch.zeros(E, D)
    for row in rows:
        found[row] = weight[row] if row % 2 else weight.unbind()[row]
    return found, weight[torch.tensor([dist.get_rank()])], torch.ones(2, E) @ weight


def write_and_read():
    wrong = []
    for way, write in WAYS.items():
        ours, theirs = build(True), build(False)
        for number in range(3):
            twin = copy.deepcopy(ours.weight)
            for weight in (ours.weight, twin, ours.weight.detach()):
                assert isinstance(weight, Sharded)
                pairs = zip(read(weight), read(theirs.weight), strict=True)
                if not all(torch.allclose(mine, other, atol=1e-6) for mine, other in pairs):
                    wrong.append((way, number))
            write(ours)
            write(theirs)
    return wrong


def test_what_is_read_is_what_was_written(on_ranks):
    assert on_ranks(2, write_and_read) == [[], []]


A, B = 3, 2
VIEWS = {  # of experts' weights [E, A * B]
    "itself": lambda w: w, "detach": lambda w: w.detach(), "view": lambda w: w.view(len(w), A, B),
    "flatten": lambda w: w.flatten(), "more rows": lambda w: w.view(len(w) * A, B),
    "reshape": lambda w: w.reshape(len(w), B, A), "unflatten": lambda w: w.unflatten(1, (A, B)),
    "transpose": lambda w: w.view(len(w), A, B).transpose(1, 2), "mT": lambda w: w.view(len(w), A, B).mT,
    "permute": lambda w: w.view(len(w), A, B).permute(2, 0, 1), "t": lambda w: w.t(),
    "[:, a:b]": lambda w: w.view(len(w), A, B)[:, 1:], "chunk": lambda w: w.chunk(2, 1)[1],
    "unsqueeze": lambda w: w.unsqueeze(0), "squeeze": lambda w: w.view(len(w), 1, A, B).squeeze(1),
    "expand": lambda w: w.view(len(w), 1, A, B).expand(len(w), 2, A, B), "diagonal": lambda w: w.diagonal(),
    "as other numbers": lambda w: w.view(torch.int32),
}
READS = {
    "[i]": lambda v: v[1], "[i, ...]": lambda v: v[1, ...], "narrow": lambda v: v.narrow(0, 0, 1),
    "unbind": lambda v: v.unbind()[1], "chunk": lambda v: v.chunk(len(v))[0], "split": lambda v: v.split(1)[1],
    "list": lambda v: list(v)[0], "matmul": lambda v: torch.ones(1, v.shape[-2]) @ v,
}


def weights_of(experts):
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(experts, A * B))
    theirs = nn.Parameter(ours.detach().clone())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    place_parameters([ours], [], mesh, Plan(axis="ep"))
    return ours, theirs


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def look_at_views(experts):
    """What is read of views otherwise than in one process, is gathered again, or gives another gradient."""
    wrong = []
    for (name, view), (way, read), grad in itertools.product(VIEWS.items(), READS.items(), (False, True)):
        ours, theirs = weights_of(experts)
        with torch.set_grad_enabled(grad):
            try:
                expected = read(view(theirs))
            except (RuntimeError, IndexError):
                continue
            read(ours)  # now it is there
            traffic.reset()
            found = read(view(ours))
            where = (name, way, grad)
            wrong += [(*where, "gathered")] * bool(traffic.collectives and (name, way) != ("expand", "matmul"))
            wrong += [(*where, "value")] * (not torch.equal(whole(found.detach()), expected.detach()))
            wrong += [(*where, "autograd")] * (found.requires_grad != expected.requires_grad)
            if grad and found.requires_grad and expected.requires_grad:
                (found * 2).sum().backward()
                (expected * 2).sum().backward()
                wrong += [(*where, "gradient")] * (not torch.equal(whole(ours.grad), theirs.grad))
    return wrong


@pytest.mark.parametrize("experts", [4, 5])
def test_a_view_is_of_what_was_gathered(on_ranks, experts):
    assert on_ranks(2, look_at_views, experts) == [[], []]


def write_through_views(experts):
    """Views through which a write did not reach the parameter: those are refused."""
    found = {}
    for name, view in VIEWS.items():
        ours, theirs = weights_of(experts)
        with torch.no_grad():
            ours[1]
            try:
                view(theirs).mul_(2)
            except RuntimeError:
                continue
            try:
                view(ours).mul_(2)
            except DistributionError as error:
                found[name] = "collect_parameters" in str(error)
            else:
                found[name] = torch.equal(ours[1], theirs[1]) and torch.equal(whole(ours.detach()), theirs)
    return found


@pytest.mark.parametrize("experts", [4, 5])
def test_what_is_written_through_a_view_is_there_or_refused(on_ranks, experts):
    for found in on_ranks(2, write_through_views, experts):
        assert len(found) > 12 and all(found.values()), found


def count():
    model, found = build(True), []
    for _ in range(2):
        for times in range(1, 3 + 2 * dist.get_rank()):
            traffic.reset()
            for _ in range(times):
                read(model.weight)
            found.append(traffic.collectives)
        with torch.no_grad():
            model.weight.add_(1)
    return found


def test_it_is_gathered_once_for_each_write(on_ranks):
    first, second = on_ranks(2, count)
    assert [bool(number) for number in first] == [True, False] * 2
    assert [bool(number) for number in second] == [True, False, False, False] * 2

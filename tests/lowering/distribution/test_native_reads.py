"""Parameters on ranks that code without capture reads: gathered once for what was written, however it was written."""
from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius.lowering.distribution import Plan, Sharded, place_parameters, traffic

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

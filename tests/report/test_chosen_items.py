"""Where data choose an item of a container, the graph break says so, and not what the container asks of the number."""

import itertools

import pytest
import torch
from torch import nn

import moebius

torch.manual_seed(0)
MODULES = [nn.Linear(4, 4) for _ in range(3)]


CONTAINERS = {"ModuleList": nn.ModuleList(MODULES), "Sequential": nn.Sequential(*MODULES)}
KEYS = {
    "item": lambda index: index.item(),
    "int": lambda index: int(index),
    "arithmetic": lambda index: (index.item() + 1) % 3,
    "a tensor": lambda index: index,
}


@pytest.mark.parametrize("container, key", [*itertools.product(CONTAINERS, KEYS)])
def test_a_container_of_modules(container, key):
    modules, number_of = CONTAINERS[container], KEYS[key]

    def step(x_TD):
        index_T = x_TD.argmax(-1) % 3
        return torch.stack([modules[number_of(index)](x_D) for x_D, index in zip(x_TD, index_T, strict=True)])

    captured, x_TD = moebius.capture(step, backend="eager"), torch.randn(3, 4)
    assert torch.equal(captured(x_TD), step(x_TD))
    breaks = [b for b in moebius.explain(captured)(x_TD).breaks if "modules[number_of" in b.excerpt.expression]
    assert breaks
    for found in breaks:
        assert found.detail == "which item this is follows from a number that only the running step knows"
        assert found.hint.startswith("loop over the items and give each its rows")

"""``with torch.device(...)`` and ``set_default_device`` in a step: where tensors are made, and nothing is left."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, explain
from moebius.python.methods import Methods


def model_without_memory(x):
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    return model.weight.device, x + 1


def state_assigned(x):
    model = torch.nn.Linear(2, 3)
    with torch.device("meta"):
        other = torch.nn.Linear(2, 3)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return other.weight.device, other(x).shape


def in_a_loop_and_out(x):
    with torch.device("cpu"):
        y = torch.ones(2)
    with torch.device("meta"):
        z = torch.ones(2)
        for _ in range(3):
            z = z + torch.zeros(2)
    return y, z.device, torch.ones(2) + x


def left_by_an_error(x):
    try:
        with torch.device("meta"):
            raise ValueError(str(torch.ones(2).device))
    except ValueError as error:
        return str(error), torch.ones(1).device, x + 1


def set_and_unset(x):
    torch.set_default_device("meta")
    y = torch.ones(2)
    torch.set_default_device(None)
    return y.device, torch.ones(2).device, x + 1


STEPS = [model_without_memory, state_assigned, in_a_loop_and_out, left_by_an_error, set_and_unset]


@pytest.mark.parametrize("backend", ["eager", None])
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_tensors_are_made_where_the_block_says(step, backend):
    captured = capture(step, backend=backend) if backend else capture(step)
    for _ in range(3):
        assert repr(captured(torch.ones(1, 2))) == repr(step(torch.ones(1, 2)))
        assert torch._C._len_torch_function_stack() == 0


def test_the_break_says_what_to_do():
    found = explain(model_without_memory)(torch.ones(1, 2)).breaks[0]
    assert found.reason == "default device" and "device=" in found.hint


def test_without_the_break_tensors_are_made_elsewhere(monkeypatch):
    method = Methods.atom_method

    def quiet(self, owner, name, bound, args, kwargs):
        return None if isinstance(owner, torch.device) else method(self, owner, name, bound, args, kwargs)

    monkeypatch.setattr(Methods, "atom_method", quiet)
    assert capture(model_without_memory, backend="eager")(torch.ones(1, 2))[0].type == "cpu"

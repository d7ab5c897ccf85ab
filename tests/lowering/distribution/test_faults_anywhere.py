"""One rank raises somewhere in a step, at any of its calls of functions: the others name it and the step within
seconds, and all of them have the weights of the same whole step."""
from __future__ import annotations

import itertools
import sys
import time

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture
from moebius.lowering.distribution import Sharded

D, WHOLE_STEPS, BOUND = 8, 4, 10
PLACES = {  # in a step: the function of moebius's, and which of its calls there
    "dispatch": ("exchange", 2), "combine": ("exchange", 3), "the next layer's header": ("meet", 2),
    "experts": ("experts_forward", 2), "backward of combine": ("exchange", 7), "backward of dispatch": ("exchange", 8),
    "experts' backward": ("experts_backward", 1), "the end of backward": ("finish", 1),
    "a reduction": ("all_reduce", 1), "the last reduction": ("average", 2), "clip": ("_summed_together", 1),
    "its sum": ("full_tensor", 1), "after its sum": ("_summed_together", 2), "the optimizer": ("count_step", 1),
}
SHARES = [n / 48 for n in range(1, 48)]  # of all calls in a step
CASES = [*itertools.product(PLACES, ("call", "return")), *((share, "call") for share in SHARES)]
HOMES = ("moebius.", "torch.distributed.tensor._api")


class Injected(Exception):
    pass


class Fault:
    """To be given to ``sys.setprofile``: raises at one event. place: of PLACES, or how many calls come before."""

    def __init__(self, place, event="call"):
        self.place, self.event, self.calls, self.met = place, event, 0, 0

    def __call__(self, frame, event, given):
        self.calls += event in ("call", "c_call")
        if isinstance(self.place, int):
            here = self.calls == self.place
        else:
            name, number = PLACES[self.place]
            here = False
            home = str(frame.f_globals.get("__name__"))
            if event == self.event and frame.f_code.co_name == name and home.startswith(HOMES):
                self.met += 1
                here = self.met == number
        if here:
            sys.setprofile(None)
            raise Injected("here")


def step(model, optimizer, x, clips):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def held(model):
    return [p.local.clone() if isinstance(p, Sharded) else p.detach().clone() for p in model.parameters()]


def watched(fault, run, *args):
    sys.setprofile(fault)
    try:
        return run(*args)
    finally:
        sys.setprofile(None)


def train(sizes, place, event, clips):
    """The error of this rank; whether its weights are those of the last whole step; after how many more steps; the sum
    of those that all ranks have; after how many seconds."""
    torch.manual_seed(0)
    lost = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Sequential(Layer(), nn.Tanh(), Layer(), nn.Linear(D, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = capture(step, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes):]))
    for _ in range(WHOLE_STEPS):
        run(model, optimizer, torch.randn(5, D), clips)
    fault = Fault(-1)
    watched(fault, run, model, optimizer, torch.randn(5, D), clips)
    if isinstance(place, float):
        place = int(place * fault.calls)
    dist.barrier()
    began, steps = time.perf_counter(), 0
    try:
        for number in range(2):  # the last exchange of a step may be over
            before = held(model)
            fault = Fault(place, event) if lost and not number else None
            watched(fault, run, model, optimizer, torch.randn(5, D), clips)
            steps += 1
    except BaseException as error:
        same = all(map(torch.equal, before, held(model)))
        total = sum(float(p.detach().double().sum()) for p in model.parameters() if not isinstance(p, Sharded))
        return f"{type(error).__name__}: {error}", same, (steps, total), time.perf_counter() - began
    return "no error", True, (steps, 0.0), 0.0


@pytest.mark.share(2)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=["2", "2x2"])
@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("place, event", CASES)
def test_a_rank_that_raises_anywhere_is_named_and_no_step_is_half_done(on_new_ranks, place, event, clips, sizes):
    *others, lost = on_new_ranks(torch.Size(sizes).numel(), train, sizes, place, event, clips)
    if lost[0] == "no error":  # torch has caught it, or the step has no such place
        assert {error for error, *_ in others} == {"no error"} and (isinstance(place, float) or not clips)
        return
    assert lost[0] == "Injected: here"
    for error, same, _, took in others:
        assert f"rank {len(others)} raised Injected: here, in call 6 of step" in error and same and took < BOUND
    assert len({where for _, _, where, _ in others}) == 1
    assert lost[1] or others[0][2][0] == 1  # its own weights are half written where the others have taken that step

"""Training loops as people write them, each with one choice of every feature below, on ranks with batches of their own:
losses, norms, parameters and optimizer state of 20 steps equal those of one process on the joined batch."""
from __future__ import annotations

import contextlib
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moebius
from moebius.lowering.distribution import traffic

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
import ranks  # noqa: E402

FEATURES = {
    "model": ("mixtral", "gpt_oss", "granitemoe", "dbrx"),
    "mesh": ("2", "2x2"),
    "captured": ("step", "model"),
    "checkpoint": ("no checkpoint", "reentrant", "not reentrant"),
    "accumulate": ("once", "twice", "twice without sync"),
    "scaler": ("no scaler", "scaler"),
    "autocast": ("no autocast", "autocast"),
    "clip": ("no clip", "norm", "value"),
    "rows": ("equal", "unequal"),
    "optimizer": ("AdamW", "AdamW in groups", "SGD", "RMSprop"),
    "besides": ("nothing", "schedule", "moving average", "gradients kept"),
}
DRAWN, STEPS, LENGTH = 144, 20, 16
SPIKE = 7  # the step in which the last rank's loss overflows, where there is a scaler


def drawn():
    """Cases in which each choice of a feature comes equally often, beside others of the others."""
    generator, columns = random.Random(26), []
    for choices in FEATURES.values():
        columns.append([choices[n % len(choices)] for n in range(DRAWN)])
        generator.shuffle(columns[-1])
    return sorted(zip(*columns, strict=True))


CASES = drawn()


def test_every_two_choices_meet():
    for a, b in itertools.combinations(range(len(FEATURES)), 2):
        every = itertools.product(*(choices for n, choices in enumerate(FEATURES.values()) if n in (a, b)))
        assert {*every} == {(case[a], case[b]) for case in CASES}


class Loop:
    """A model, its optimizer and what is besides, as a user's script has them."""

    def __init__(self, chosen, mesh):
        self.chosen, self.spread = chosen, mesh is not None
        self.model, _ = ranks.build(chosen["model"])
        if chosen["checkpoint"] != "no checkpoint":
            how = {"use_reentrant": chosen["checkpoint"] == "reentrant"}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        parameters = [*self.model.parameters()]
        self.optimizer = {
            "AdamW": lambda: torch.optim.AdamW(parameters, lr=1e-3),
            "AdamW in groups": lambda: torch.optim.AdamW([
                {"params": [p for p in parameters if p.ndim > 1]},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}], lr=1e-3, amsgrad=True),
            "SGD": lambda: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
            "RMSprop": lambda: torch.optim.RMSprop(parameters, lr=1e-4, eps=1e-3, momentum=0.5),
        }[chosen["optimizer"]]()
        scales = chosen["scaler"] == "scaler"
        self.scaler = torch.amp.GradScaler("cpu", enabled=scales, init_scale=8.0, growth_interval=4)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, total_iters=10)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        self.forward = self.model
        if mesh and chosen["captured"] == "model":
            self.forward = moebius.capture(self.model, mesh=mesh)
        elif mesh and chosen["accumulate"] == "twice without sync":
            self.forward = DistributedDataParallel(self.model)
        self.run = moebius.capture(step, mesh=mesh) if mesh and chosen["captured"] == "step" else step


def mean_loss(forward, tokens_BT):
    logits = forward(input_ids=tokens_BT).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


def step(loop, forward, model, optimizer, parts, factor):
    """The losses of all parts, and the norm."""
    chosen, losses, norm = loop.chosen, [], None
    if chosen["besides"] != "gradients kept":
        optimizer.zero_grad()
    for number, tokens_BT in enumerate(parts):
        without = number < len(parts) - 1 and hasattr(forward, "no_sync")
        with forward.no_sync() if without else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=chosen["autocast"] == "autocast"):
                loss = mean_loss(forward, tokens_BT)
            if chosen["rows"] == "unequal" and loop.spread:
                loss = moebius.weigh_by_tokens(loss, tokens_BT[:, 1:].numel())
            losses.append(loss.detach())
            loop.scaler.scale(loss * factor / len(parts)).backward()
    loop.scaler.unscale_(optimizer)
    if chosen["clip"] == "norm":
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif chosen["clip"] == "value":
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    loop.scaler.step(optimizer)
    loop.scaler.update()
    if chosen["besides"] == "gradients kept":
        optimizer.zero_grad(set_to_none=False)
    if chosen["besides"] == "schedule":
        loop.schedule.step()
    if chosen["besides"] == "moving average":
        loop.average.update_parameters(model)
    return torch.stack(losses), norm


def train(case, seed):
    """The largest difference of each kind from the first rank's run on the joined batch; whether tokens travelled."""
    chosen = dict(zip(FEATURES, case, strict=True))
    sizes, number, rank = tuple(map(int, chosen["mesh"].split("x"))), dist.get_world_size(), dist.get_rank()
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes):])
    loop, plain = Loop(chosen, mesh), Loop(chosen, None) if rank == 0 else None
    generator, far = torch.Generator().manual_seed(seed), {}
    traffic.reset()

    def compare(what, ours, theirs):
        far[what] = max(far.get(what, 0.0), ranks.apart(ours, theirs, 0))

    for count in range(STEPS):
        rows = [(1, 3, 2, 4)[(count // 8 + i) % 4] if chosen["rows"] == "unequal" else 2 for i in range(number)]
        parts = [[torch.randint(3, 128, (n, LENGTH), generator=generator) for n in rows]
                 for _ in range(1 if chosen["accumulate"] == "once" else 2)]
        spike = chosen["scaler"] == "scaler" and count == SPIKE
        factor = torch.tensor(torch.inf if spike and rank == number - 1 else 1.0, dtype=torch.float64)
        losses, norm = loop.run(
            loop, loop.forward, loop.model, loop.optimizer, [part[rank] for part in parts], factor)
        expected = expected_norm = None
        if plain:
            joined = torch.tensor(torch.inf if spike else 1.0, dtype=torch.float64)
            expected, expected_norm = step(
                plain, plain.model, plain.model, plain.optimizer, [torch.cat(part) for part in parts], joined)
        dist.all_reduce(losses)
        compare("losses", losses / number, expected)
        if norm is not None and not spike:
            compare("norms", norm, expected_norm)
    others = iter(plain.model.parameters()) if plain else itertools.repeat(None)
    averages = iter(plain.average.parameters()) if plain else itertools.repeat(None)
    for p, average in zip(loop.model.parameters(), loop.average.parameters(), strict=True):
        q, theirs = next(others), next(averages)
        compare("parameters", p, q)
        compare("averages", average, theirs)
        for key, value in loop.optimizer.state.get(p, {}).items():
            if value is not None:
                compare("state", value, plain.optimizer.state[q][key] if plain else None)
        assert plain is None or (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            compare("gradients", p.grad, None if plain is None else q.grad)
    if plain:
        assert loop.scaler.get_scale() == plain.scaler.get_scale()
    return far, bool(traffic.dispatch)


@pytest.mark.share(2)
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_training_loop_on_ranks_is_that_of_one_process(on_ranks, case):
    """Where parts of a model compute in float32 (norms), one number that is rounded otherwise is 1e-9: not twice."""
    fars = []
    for seed in (3, 4):
        told = on_ranks(4 if "2x2" in case else 2, train, case, seed)
        fars.append({kind: max(far[kind] for far, _ in told) for kind in told[0][0]})
        assert all(travelled for _, travelled in told)
        if max(fars[-1].values()) <= ranks.ALLOWED:
            return
    raise AssertionError(fars)

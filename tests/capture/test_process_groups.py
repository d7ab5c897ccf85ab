"""Ranks, sizes and names of process groups in a step: facts, asked again at each call."""

from __future__ import annotations

import gc
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture, stats
from moebius.python import attributes

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


def default() -> Any:
    return dist.distributed_c10d._get_default_group()


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "get_rank": lambda w: dist.get_rank(),
    "get_world_size": lambda w: dist.get_world_size(),
    "get_rank of a group": lambda w: dist.get_rank(w.group),
    "get_world_size of a group": lambda w: dist.get_world_size(w.group),
    "is_initialized": lambda w: dist.is_available() and dist.is_initialized(),
    "get_backend": lambda w: dist.get_backend(),
    "get_process_group_ranks": lambda w: len(dist.get_process_group_ranks(w.group)),
    "get_group_rank": lambda w: dist.get_group_rank(w.group, 0),
    "get_global_rank": lambda w: dist.get_global_rank(w.group, 0),
    "group.size": lambda w: w.group.size(),
    "group.rank": lambda w: w.group.rank(),
    "group.name": lambda w: w.group.name(),
    "group.group_name": lambda w: w.group.group_name,
    "group.group_desc": lambda w: w.group.group_desc,
    "default group": lambda w: default().size(),
    "WORLD": lambda w: dist.group.WORLD.rank(),
    "mesh.get_rank": lambda w: w.mesh.get_rank(),
    "mesh.get_local_rank": lambda w: w.mesh.get_local_rank(),
    "mesh.size": lambda w: w.mesh.size(),
    "mesh.get_group": lambda w: w.mesh.get_group().size(),
    "mesh[name]": lambda w: w.mesh["dp"].size(),
    "mesh.get_coordinate": lambda w: w.mesh.get_coordinate()[0],
    "RANK": lambda w: int(os.environ.get("RANK", "5")),
}


class World:
    """One process group, and what a trainer keeps of it."""

    def __init__(self, rank: int = 0, size: int = 1, port: int | None = None):
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0) if port else dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        os.environ["RANK"] = str(rank)
        self.group = dist.new_group(list(range(size)))
        self.mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def leave() -> None:
    os.environ.pop("RANK", None)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def world() -> Iterator[World]:
    yield World()
    leave()


def step_of(question: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(x, world):
        answer = question(world)
        scale = answer if isinstance(answer, int) else len(str(answer))
        if isinstance(answer, bool):
            scale = 3 if answer else 7
        return x * scale + 1, answer

    return step


def same(a: Any, b: Any) -> bool:
    return torch.equal(a[0], b[0]) and a[1] == b[1] and type(a[1]) is type(b[1])


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_fact(world: World, name: str) -> None:
    step, x = step_of(QUESTIONS[name]), torch.ones(3)
    captured = capture(step, backend="eager", fullgraph=True)
    for _ in range(3):
        assert same(captured(x, world), step(x, world))
    assert (stats(captured).graphs, stats(captured).hits) == (1, 2)


@pytest.mark.parametrize("name", ["get_rank", "get_world_size", "is_initialized"])
def test_groups_that_come_and_go(name: str) -> None:
    """Whether there is one at all: as Python says, also where that is an error."""
    step, x = step_of(QUESTIONS[name]), torch.ones(3)
    captured = capture(step, backend="eager")

    def outcome(function: Any) -> Any:
        try:
            return str(function(x, None))
        except ValueError as error:
            return type(error)

    for _ in range(2):
        assert outcome(captured) == outcome(step)
        world = World()
        assert outcome(captured) == outcome(step)
        assert outcome(captured) == outcome(step)
        del world
        leave()
    assert outcome(captured) == outcome(step)
    assert stats(captured).hits >= 2


@pytest.mark.share(8)
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_group_goes_when_it_is_destroyed(name: str) -> None:
    """What was captured does not keep it: its threads would still run when the interpreter has gone."""
    world, step = World(), step_of(QUESTIONS[name])
    captured = capture(step, backend="eager")
    captured(torch.ones(3), world)
    groups = [weakref.ref(world.group), weakref.ref(default()), weakref.ref(world.mesh)]
    leave()
    del world
    gc.collect()
    assert [group() for group in groups] == [None] * 3


def test_a_question_that_nobody_knows_is_a_break(world: World) -> None:
    def step(x, world):
        return x * (world.group._get_sequence_number_for_group() + 2)

    captured = capture(step, backend="eager")
    for _ in range(3):
        assert torch.equal(captured(torch.ones(3), world), torch.full((3,), 2.0))
    assert stats(captured).breaks


def test_switched_off_it_is_a_break(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "QUESTIONS", frozenset())
    captured = capture(step_of(QUESTIONS["get_world_size"]), backend="eager")
    captured(torch.ones(3), world)
    assert stats(captured).breaks


def in_ranks(rank: int, ports: list[int]) -> None:
    """Both ranks, then one alone, then both the other way round: one captured function each."""
    torch.set_num_threads(1)
    names = [name for name in QUESTIONS if not name.startswith("mesh")]
    steps = {name: step_of(QUESTIONS[name]) for name in names}
    captured = {name: capture(step, backend="eager", fullgraph=True) for name, step in steps.items()}
    x = torch.ones(3)
    for iteration, (port, here, size) in enumerate([(ports[0], rank, 2), (0, 0, 1), (ports[1], 1 - rank, 2)]):
        world = World(here, size, port)
        for name in names:
            for _ in range(2):
                got, expected = captured[name](x, world), steps[name](x, world)
                assert same(got, expected), (iteration, name, got, expected)
        summed = torch.ones(1) * dist.get_rank()
        dist.all_reduce(summed)
        assert summed.item() == (1 if size == 2 else 0)
        leave()
    for name in names:
        assert stats(captured[name]).hits >= 3, name


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_in_two_processes() -> None:
    mp.spawn(in_ranks, ([free_port(), free_port()],), nprocs=2)

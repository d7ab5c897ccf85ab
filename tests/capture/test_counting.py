"""Which instructions count is read off a code's bytes: what ``dis`` says, at a fraction of its time."""

from __future__ import annotations

import dis
import inspect
import types

import pytest
import torch

from moebius import capture
from moebius.bytecode import counting

MODULES = ["argparse", "ast", "asyncio.base_events", "dataclasses", "inspect", "typing", "torch.nn.functional"]


def codes_of(code: types.CodeType):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


@pytest.mark.parametrize("name", MODULES)
def test_places_are_what_dis_says(name):
    module = __import__(name, fromlist=["_"])
    found = [*codes_of(compile(inspect.getsource(module), module.__file__, "exec"))]
    assert len(found) > 20
    for code in found:
        assert list(counting.places(code)) == [(i.offset // 2, i.opcode) for i in dis.get_instructions(code)]


def test_a_long_function_has_prefixes():
    """An argument over 255 takes EXTENDED_ARG before the instruction, which is no instruction of its own."""
    lines = [f"    v{i} = x + {i + 1000}" for i in range(300)]
    names: dict = {}
    exec("\n".join(["def f(x):", *lines, "    return v299"]), names)
    code = names["f"].__code__
    said = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    assert len(said) < len(list(counting.places(code)))
    assert len(counting.weights_of(code)) == len(said)
    ran = {i.offset for i in said if i.opname not in ("RESUME",)}
    assert {offset for offset in ran if counting.counted(code)[offset >> 1]} >= ran - {said[0].offset}


def test_the_first_call_disassembles_nothing_for_its_counts(monkeypatch):
    def step(x):
        return x * 2 + 1

    def refused(*given, **options):
        raise AssertionError("dis takes ten times as long")

    monkeypatch.setattr(counting.dis, "get_instructions", refused)
    assert counting.counted(step.__code__)
    assert torch.equal(capture(step)(torch.ones(3)), torch.full((3,), 3.0))

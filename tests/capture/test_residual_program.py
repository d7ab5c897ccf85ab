"""The residual program is data: what it prints as Python does what export reads in it."""

from __future__ import annotations

import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius import capture
from moebius.api import captured_of
from moebius.export.world import part_of
from moebius.heap.records import raw_dict
from moebius.values.residual_program import LOADS, Build, Call, If, Literal, Load, Write, indented, method, tuple_of

OWNER: dict[str, tuple[Any, Any]] = {
    "dict_item": ({"a": 1.5}, "a"), "list_item": ([1.5, 2.5], 1), "tuple_item": ((1.5, 2.5), 0),
    "instance_dict": (SimpleNamespace(a=1.5), None), "attr": (torch.ones(1).requires_grad_(), "grad"),
    "cell": (types.CellType(1.5), None),
}  # fmt: skip


@pytest.mark.parametrize("operation", LOADS)
def test_a_load_is_the_part_that_export_says(operation):
    owner, key = OWNER[operation]
    text = str(Load(operation, "owner", Literal(key)))
    assert eval(text, {"owner": owner, "m_raw_dict": raw_dict}) is part_of(owner, operation, key)


@pytest.mark.parametrize(("built", "expected"), [
    (Build("tuple"), ()), (tuple_of([Literal(1)]), (1,)), (tuple_of([Literal(1), Literal("a")]), (1, "a")),
    (Build("list"), []), (Call("dict", (), (("a", Literal(1)),)), {"a": 1}), (method("text", "upper"), "TEXT"),
])  # fmt: skip
def test_what_is_built(built, expected):
    assert eval(str(built), {"text": "text"}) == expected


@pytest.mark.parametrize(("given", "expected"), [(None, {}), (1, {"a": (1,), "b": (1,)})])
def test_what_is_done_on_one_side(given, expected):
    made: dict[str, Any] = {}
    body = tuple(method("made", "__setitem__", Literal(key), tuple_of(["given"])) for key in "ab")
    exec(str(If("given", body)), {"given": given, "made": made})
    assert made == expected


def step(model, x, seen, *, scale):
    seen.append(len(seen))
    model.calls = model.calls + 1
    return {"out": x * scale, "parts": [x + 1, (x, model.calls)]}


def test_what_runs_is_what_the_program_prints():
    captured = capture(step)
    captured(SimpleNamespace(calls=0), torch.ones(2), [], scale=2.0)
    (segment,) = captured_of(captured).segments
    program, source = segment.run.residual_program, segment.run.residual_source.split("\n")
    where = source.index("    try:")
    assert source[where - len(program.loads) : where] == indented(program.loads)
    rest = [f"    {line}" for line in indented(program.body)]
    assert any(isinstance(statement, Write) for statement in program.body)
    assert source[source.index("    else:") + 1 :][: len(rest)] == rest

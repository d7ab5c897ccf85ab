"""What the tables of operators say of an operator is what torch's own schemas and tags say of it."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional

from moebius.lowering.aliasing import Storage, only_computes
from moebius.lowering.operators import CONTROL, FUNCTIONS, METHODS, Operator
from moebius.lowering.torch_private import draws_numbers, foreach_operators, only_reads, returns_new

TORCHS = {f: op for f, op in FUNCTIONS.items() if "torch" in str(getattr(f, "__module__", ""))}
SPELLINGS = [*((f.__name__, op) for f, op in TORCHS.items()), *METHODS.items()]
HOMES = (torch, torch.nn.functional)
SEEDED = [name for name in dir(torch.ops.aten) if not name.startswith("__") and draws_numbers(name)]


def schemas(name: str) -> list:
    packet = getattr(torch.ops.aten, name, None)
    found = [getattr(packet, one)._schema for one in packet.overloads()] if hasattr(packet, "overloads") else []
    of_tensors = [one for one in found if one.arguments and str(one.arguments[0].type) == "Tensor"]  # (not of lists)
    return [one for one in of_tensors if not any(argument.is_out for argument in one.arguments)]


@pytest.mark.parametrize(("name", "op"), SPELLINGS, ids=[name for name, _ in SPELLINGS])
def test_tables_say_what_schemas_say(name: str, op: Operator) -> None:
    found = schemas(name)
    if not found:
        return  # a name of Python's, or of this project's
    assert any(one.is_mutable for one in found) == op.inplace
    if any(returned.alias_info is not None for one in found for returned in one.returns):
        assert op.alias, "a view, of which the tables say that it is a new tensor"
    assert not draws_numbers(name) or op.name in CONTROL


def test_there_are_operators_that_draw() -> None:
    assert len(SEEDED) > 30


@pytest.mark.parametrize("name", SEEDED)
def test_what_draws_is_never_run_twice(name: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = [graph.call_method(name, (x,))]
    made += [graph.call_function(getattr(home, name), (x,)) for home in HOMES if hasattr(home, name)]
    assert not only_reads(name)
    assert not any(map(only_computes, made))


@pytest.mark.parametrize("name", ["cos", "baddbmm", "logaddexp", "index_fill", "masked_select", "tril", "floor",
                                  "_foreach_norm", "_foreach_sqrt", "_foreach_addcdiv", "unbind_copy"])  # fmt: skip
def test_new_by_schema(name: str) -> None:
    assert returns_new(name)


@pytest.mark.parametrize("name", ["reshape", "contiguous", "to", "einsum", "type_as", "view_as_real", "unsafe_split",
                                  "_unsafe_view", "dropout", "relu_", "no_such_operator", "_foreach_sqrt_",
                                  "split", "unbind", "meshgrid", "broadcast_tensors", "atleast_1d"])  # fmt: skip
def test_perhaps_not_new_by_schema(name: str) -> None:
    assert not returns_new(name)


LISTS = [name for name in foreach_operators() if returns_new(name)]


def results_of(name: str, given: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """What an operator on lists makes of one, with whatever else it takes; None where it takes something else."""
    others = [torch.rand(2) + 1.0 for _ in given]
    for rest in ((), (2.0,), (others,), (others, others), (others, 0.5), ([1.0] * len(given),)):
        with contextlib.suppress(TypeError, RuntimeError):
            return list(getattr(torch, name)(given, *rest))
    return None


def test_what_operators_on_lists_make_is_new() -> None:
    assert len(LISTS) > 40
    unknown = []
    for name in LISTS:
        given = [torch.rand(2) + 1.0, torch.rand(2) + 1.0]
        made = results_of(name, given)
        if made is None:
            unknown.append(name)
            continue
        storages = [one.untyped_storage().data_ptr() for one in (*given, *made)]
        assert len(set(storages)) == len(given) + len(made), name
    assert len(unknown) < 5, unknown


def test_each_tensor_of_a_new_list_has_a_storage_of_its_own() -> None:
    graph = fx.Graph()
    given = [graph.placeholder("x"), graph.placeholder("y")]
    made = graph.call_function(torch._foreach_sqrt, (given,))
    made.meta["val"] = [torch.ones(2), torch.ones(2)]
    first, second = (graph.call_function(operator.getitem, (made, i)) for i in range(2))
    written = graph.call_function(torch._foreach_mul_, ([first, given[1]], 2.0))
    storage = Storage(graph)
    assert not any(storage.share(one, other) for one in (first, second) for other in given)
    assert not storage.share(first, second)
    assert storage.writers[written] == [first, given[1]]


@pytest.mark.parametrize("activation", [functional.elu, functional.rrelu, functional.silu])
def test_an_argument_that_is_handed_back_shares_its_storage(activation: Any) -> None:
    graph = fx.Graph()
    x = graph.call_method("clone", (graph.placeholder("x"),))
    plain, written = (graph.call_function(activation, (x,), given) for given in ({}, {"inplace": True}))
    storage = Storage(graph)
    assert storage.share(x, written)
    assert activation is functional.rrelu or not storage.share(x, plain)


def test_backward_is_no_computation() -> None:
    graph = fx.Graph()
    made = graph.call_method("backward", (graph.placeholder("loss"),))
    assert not only_computes(made)

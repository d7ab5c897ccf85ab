"""An object and the dict that is its own, both alive: one dict, behind a graph break, in a result, in a recomputation.

Kinds of owners × ways in which the program holds the dict × where it matters; and arguments of which some share one.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moebius import capture, stats


class Plain:
    pass


class Slotted:
    __slots__ = ("__dict__", "other")


class OwnDict(dict):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__ = self


class OwnDictThatCounts(OwnDict):
    """Whose attributes are set by code of its own, which must not run once more."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self["set"] = self.get("set", 0) + 1


class Borg:
    shared: dict[str, Any] = {}

    def __init__(self) -> None:
        self.__dict__ = self.shared


def given(names: dict[str, Any]) -> Any:
    """As ``clone_module`` of learn2learn and pickle's ``__setstate__`` make a copy."""
    obj = Plain.__new__(Plain)
    obj.__dict__ = names
    return obj


def given_another() -> Any:
    obj = given({"k": 1})
    before = obj.__dict__
    obj.__dict__ = {"before": before}
    before["k"] = 3
    return obj


def given_what_it_holds() -> Any:
    names: dict[str, Any] = {"k": 2}
    obj = given(names)
    obj.names = names
    names["list"] = [obj]
    return obj


PROTOTYPE = given({"k": 1, "tensor": torch.ones(2)})


def a_function() -> Any:
    def inner(*, k: int = 0) -> int:
        return k

    return inner


def of_instance(obj: Any) -> dict:
    return obj.__dict__


# By name: makes the owner, its own dict, what is read through the owner.
Owner = tuple[Callable[[], Any], Callable[[Any], dict], Callable[[Any], Any]]
OWNERS: dict[str, Owner] = {
    name: (make, of_instance, lambda o: getattr(o, "k", 0) + getattr(o, "set", 0))
    for name, make in {
        "object": Plain, "slots": Slotted, "own dict": OwnDict, "borg": Borg,
        "own dict that counts": OwnDictThatCounts, "function": a_function,
        "module": torch.nn.Module, "exception": lambda: ValueError(1), "namespace": types.SimpleNamespace,
        "partial": lambda: functools.partial(dict), "ordered": collections.OrderedDict,
        "given": lambda: given({"k": 2}), "given a copy": lambda: given(vars(PROTOTYPE).copy()),
        "given another": given_another, "given what it holds": given_what_it_holds,
    }.items()
} | {
    "vars": (Plain, vars, lambda o: getattr(o, "k", 0)),
    "keywords": (lambda: functools.partial(dict, k=0), lambda o: o.keywords, lambda o: o()["k"]),
    "keyword defaults": (a_function, lambda o: o.__kwdefaults__, lambda o: o()),
    "annotations": (a_function, lambda o: o.__annotations__, lambda o: len(o.__annotations__)),
}  # fmt: skip
# By name: what the program keeps of the dict, and how it writes to it.
HELD: dict[str, tuple[Callable[[dict], Any], Callable[[Any], None]]] = {
    "itself": (lambda d: d, lambda d: d.__setitem__("k", 5)),
    "in a list": (lambda d: [d], lambda held: held[0].update(k=5)),
    "in a cell": (lambda d: lambda: d, lambda held: held().update({"k": 5})),
    "a method": (lambda d: d.update, lambda update: update(k=5)),
    "a proxy": (lambda d: (types.MappingProxyType(d), d), lambda held: held[1].update(k=len(held[0]) + 5)),
    "in itself": (lambda d: d.setdefault("me", d), lambda d: d.update(k=5)),
    "a generator": (lambda d: writing(d), next),
}


def writing(held: dict) -> Any:
    while True:
        held["k"] = 5
        yield


def steps(owner: Owner, how: str) -> dict[str, Callable[..., Any]]:
    make, own, read = owner
    keep, write = HELD[how]

    def behind_a_break(x_D: torch.Tensor) -> Any:
        obj = make()
        held = keep(own(obj))
        with open("/dev/null"):  # which runs natively
            pass
        write(held)
        return x_D * read(obj)

    def held_first(x_D: torch.Tensor) -> Any:
        (held, obj) = (lambda o: (keep(own(o)), o))(make())
        with open("/dev/null"):
            pass
        write(held)
        return x_D * read(obj)

    def of_the_result(x_D: torch.Tensor) -> Any:
        obj = make()
        return x_D * 2, keep(own(obj)), obj

    def recomputed(x_D: torch.Tensor) -> Any:
        obj = make()
        held = keep(own(obj))
        w_D = (x_D * 2).requires_grad_()
        y_D = checkpoint(lambda w_D: (w_D * (1 + read(obj))).sin(), w_D, use_reentrant=False)
        write(held)
        y_D.sum().backward()
        return w_D.grad

    return {s.__name__: s for s in (behind_a_break, held_first, of_the_result, recomputed)}


CASES = [(o, h, s) for o in OWNERS for h in HELD for s in steps(OWNERS["object"], "itself")]


def outcome(step: Callable[[], Any], owner: Owner, write: Callable[[Any], None]) -> Any:
    try:
        out = step()
    except Exception as error:
        return type(error), str(error)
    if not isinstance(out, tuple):
        return out.tolist()
    y_D, held, obj = out
    write(held)
    return y_D.tolist(), owner[2](obj), owner[1](obj).get("k")


@pytest.mark.share(4)
@pytest.mark.parametrize(("owner", "how", "where"), CASES, ids=["-".join(c) for c in CASES])
def test_an_object_and_its_own_dict_stay_one(owner: str, how: str, where: str):
    plain = steps(OWNERS[owner], how)[where]
    captured = capture(plain, backend="eager")
    x_D = torch.tensor([0.5, 2.0])
    for _ in range(3):
        Borg.shared.clear()
        expected = outcome(lambda: plain(x_D.clone()), OWNERS[owner], HELD[how][1])
        Borg.shared.clear()
        assert outcome(lambda: captured(x_D.clone()), OWNERS[owner], HELD[how][1]) == expected


@pytest.mark.parametrize("owner", ["given", "given a copy", "given another", "given what it holds"])
def test_a_dict_that_is_given_is_no_graph_break(owner: str):
    captured = capture(steps(OWNERS[owner], "itself")["of_the_result"], backend="eager")
    captured(torch.ones(2)), captured(torch.ones(2))
    assert (stats(captured).breaks, stats(captured).misses, stats(captured).hits) == (0, 1, 1)


def given_to_two(x_D: torch.Tensor) -> Any:
    names: dict[str, Any] = {"k": 1}
    a, b = given(names), given(names)
    a.k = 4
    return x_D * b.k, vars(a) is vars(b) is names


def given_behind_a_condition(x_D: torch.Tensor) -> Any:
    names: dict[str, Any] = {"k": 1}
    a, k = Plain(), x_D
    if x_D.sum() > 0:
        a.__dict__ = names
        a.k = 4
        k = x_D * 2
    return k * names["k"], vars(a) is names


@pytest.mark.parametrize("step", [given_to_two, given_behind_a_condition], ids=lambda step: step.__name__)
def test_a_dict_that_is_given_in_other_ways(step: Callable[..., Any]):
    captured = capture(step, backend="eager")
    for factor in (1, -1, 1, -1):
        (got, ours), (want, one) = captured(factor * torch.ones(2)), step(factor * torch.ones(2))
        assert torch.equal(got, want) and ours is one


def sets_first(a: Any, b: Any, x_D: torch.Tensor) -> torch.Tensor:
    a.k = 2
    return x_D * b.k


def sets_last(a: Any, b: Any, x_D: torch.Tensor) -> torch.Tensor:
    y_D = x_D * a.k
    b.k = 7
    return y_D * a.k


def asks(a: Any, b: Any, x_D: torch.Tensor) -> torch.Tensor:
    return x_D * (2 if vars(a) is vars(b) else 3)


def adds(a: Any, b: Any, x_D: torch.Tensor) -> torch.Tensor:
    a.new = 1
    return x_D * (2 if hasattr(b, "new") else 3)


def two(shared: bool) -> tuple[Any, Any]:
    a, b = Plain(), Plain()
    a.k = b.k = 1
    if shared:
        b.__dict__ = a.__dict__
    return a, b


def by_dict_first(a: dict, b: Any, x_D: torch.Tensor) -> torch.Tensor:
    a["k"] = 2
    return x_D * b.k


def by_dict_last(a: Any, b: dict, x_D: torch.Tensor) -> torch.Tensor:
    y_D = x_D * a.k
    b["k"] = 7
    return y_D * a.k


Pick = Callable[[Any, Any], tuple[Any, Any]]
SHARING: dict[Callable[..., Any], Pick] = {
    sets_first: lambda a, b: (a, b), sets_last: lambda a, b: (a, b), asks: lambda a, b: (a, b),
    adds: lambda a, b: (a, b), by_dict_first: lambda a, b: (vars(a), b), by_dict_last: lambda a, b: (a, vars(b)),
}  # fmt: skip


@pytest.mark.parametrize("step", SHARING)
@pytest.mark.parametrize("order", list(itertools.product((False, True), repeat=3)))
def test_whether_two_arguments_share_a_dict_is_a_fact(step: Callable[..., Any], order: tuple[bool, ...]):
    captured, x_D = capture(step, backend="eager"), torch.ones(2)
    for shared in order:
        results = []
        for call in (step, captured):
            a, b = two(shared)
            results.append((call(*SHARING[step](a, b), x_D).tolist(), vars(a), vars(b)))
        assert results[0] == results[1]


GLOBAL = 3


def sets_a_global(namespace: dict, x_D: torch.Tensor) -> torch.Tensor:
    namespace["GLOBAL"] = 8
    return x_D * GLOBAL


def reads_a_global(namespace: dict, x_D: torch.Tensor) -> torch.Tensor:
    y_D = x_D * GLOBAL
    namespace["GLOBAL"] = 8
    return y_D * GLOBAL


@pytest.mark.parametrize("step", [sets_a_global, reads_a_global])
@pytest.mark.parametrize("order", list(itertools.product((False, True), repeat=3)))
def test_whether_an_argument_is_the_globals_is_a_fact(step: Callable[..., Any], order: tuple[bool, ...]):
    captured, x_D = capture(step, backend="eager"), torch.ones(2)
    for mine in order:
        results = []
        for call in (step, captured):
            globals()["GLOBAL"] = 3
            results.append((call(globals() if mine else {"GLOBAL": 3}, x_D).tolist(), GLOBAL))
        globals()["GLOBAL"] = 3
        assert results[0] == results[1]

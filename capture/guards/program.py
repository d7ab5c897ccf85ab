"""From collected facts to the flat program that the C extension runs, and back from a failed check to its record."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moebius.interpreter.domain.core import MISSING, lookup

from ..hook import ABSENT, GuardProgram
from ..report.records import Guard
from ..torch_facts import torch_private
from .recorder import Fact, GuardRecorder, WatchedClass, describe, describe_tensor, same_constant, tensor_meta
from .sources import Source, from_arguments

TOLD = {"type", "dtype", "device", "shape", "stride", "requires_grad"}  # of a tensor, by ``describe_tensor``


class CompiledGuards:
    """A guard program together with the records of its checks.

    program: run by the C entry on each call. facts: one a check, in the program's order. slots: the program's. later:
    what a backward asks that the caller runs.
    """

    def __init__(self, recorder: GuardRecorder, n_positional: int, kwnames: tuple[str, ...]):
        self.facts = [*static_facts(recorder), *recorder.facts]
        self.program = GuardProgram(n_positional, kwnames, recorder.slots, [f.check for f in self.facts])
        self.roots, self.models = recorder.roots, recorder.models
        self.slots, self.later = recorder.slots, recorder.later

    def measure(self, args: tuple, kwargs: dict[str, Any], rounds: int = 200) -> None:
        """Time each check on these arguments, for which all hold, for the records."""
        for fact, cost in zip(self.facts, self.program.time(args, kwargs, rounds), strict=True):
            fact.record.cost_ns = cost

    def hold(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether all facts hold for these arguments."""
        return self.program.explain(args, kwargs) is None

    def failure(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Fact | None, str]:
        """The first fact that does not hold for these arguments, and what was met instead, in words."""
        index = self.program.explain(args, kwargs)
        if index is None:
            return None, ""
        if index < 0:
            return None, "another number or other names of arguments"
        fact = self.facts[index]
        return fact, met(fact, self, args, kwargs)


def static_facts(recorder: GuardRecorder) -> list[Fact]:
    """One fact for each watched dict, class and instance."""
    facts = []
    for the_dict, watched in recorder.dicts.values():
        check: tuple[Any, ...] = ("dict", the_dict, watched.entries, watched.keys)
        facts.append(Fact(check, watched, places=watched.places))
    for read in recorder.classes.values():
        check = ("class", read.cls, dict(read.entries), read.cls.__mro__)
        facts.append(Fact(check, functools.partial(class_record, read), places=read.places))
    for instance in recorder.instances.values():
        check = ("instance", instance.obj, type(instance.obj), instance.namespace)
        facts.append(Fact(check, instance))
    return facts


def class_record(watched: WatchedClass) -> Guard:
    """What reports show of a watched class."""
    cls, names = watched.cls, ", ".join(sorted(watched.entries)[:6])
    return Guard(f"{cls.__module__}.{cls.__qualname__}", f"class unchanged ({names})", *watched.where)


def look_up(cls: type, name: str) -> Any:
    """What ``name`` is along the class's method resolution order, not bound; ABSENT if nowhere."""
    found = lookup(cls, name)
    return ABSENT if found is MISSING else found


def changed_in_class(cls: type, entries: dict[str, Any]) -> str | None:
    """The first name that its method resolution order gives another object for, or none."""
    for name, then in entries.items():
        if look_up(cls, name) is not then:
            return name
    return None


def met(fact: Fact, guards: CompiledGuards, args: tuple, kwargs: dict[str, Any]) -> str:
    """What a failing check found, in words."""
    kind, *rest = fact.check
    if kind == "dict":
        the_dict, entries, keys = rest
        if (changed := changed_key(the_dict, entries)) is not None:
            return f"[{describe(changed)}] is {describe(dict.get(the_dict, changed, ABSENT))}"
        return other_keys(the_dict, keys) if keys is not None else "changed"
    if kind == "answers":
        return "another answer"  # (``differs`` says which)
    if kind == "static_tensor":
        return describe_beside(*rest)
    if fact.source is None:
        return "changed"
    try:
        found = fetch(fact.source, (*args, *kwargs.values()))
        return describe_beside(found, rest[1]) if kind == "tensor" else describe_object(found)
    except Exception as error:  # the path no longer leads anywhere; say so
        return f"cannot be reached ({type(error).__name__})"


def describe_beside(found: Any, meta: dict[str, Any]) -> str:
    """A tensor in the words that ``describe_tensor`` has for the metadata that another one had."""
    if type(found) is not meta["type"]:
        return describe_object(found)
    now = tensor_meta(found)
    same = all(now[key] == meta[key] for key in now if key in TOLD and meta.get(key) is not None)
    others = [name for name in now.keys() - TOLD if now[name] != meta.get(name, now[name])] if same else []
    text = describe_tensor({**now, "stride": now["stride"] if meta["stride"] else None})
    return ", ".join([text, *(f"another {name.replace('_', ' ')}" for name in others)])


def other_keys(the_dict: dict, keys: tuple) -> str:
    """Which keys came and went."""
    now, before = dict.fromkeys(dict.keys(the_dict)), dict.fromkeys(keys)  # (tensors as keys compare by their hash)
    came, went = [k for k in now if k not in before], [k for k in before if k not in now]
    words = [f"key {describe(k)} {verb}" for some, verb in ((came, "added"), (went, "removed")) for k in some[:3]]
    return ", ".join(words) or "keys in another order"


def changed_key(the_dict: dict, entries: dict[Any, Any]) -> Any:
    """The first key whose entry is not what was expected."""
    for key, expected in entries.items():
        if not same_constant(dict.get(the_dict, key, ABSENT), expected):
            return key
    return None


def describe_object(obj: Any) -> str:
    """What a recompile line says of the object that it met."""
    if issubclass(type(obj), torch.Tensor):  # no attribute is asked for: a user's object may notice
        return f"{str(obj.dtype).removeprefix('torch.')}{list(obj.shape)} on {obj.device}"
    if type(obj) in (list, tuple, dict, set, frozenset, collections.deque):
        return f"a {type(obj).__name__} of {len(obj)}"
    text = describe(obj)
    return text.replace("the same", "another", 1) if text == f"the same {type(obj).__name__}" else text


def differs(fact: Fact, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Of a failed check of what the step computes of its inputs, or of a switch of torch's: the expression, what it
    was, what it is and, where it is known by itself, the user's line that asked for it. None of any other check, and
    where an input is gone."""
    if fact.check[0] == "answers":
        return other_answers(fact.check[1], fact.record)
    tell = getattr(fact.check[1], "differs", None) if fact.check[0] == "python" else None
    if tell is None:
        return None
    try:
        return tell(tuple(fetch(from_arguments(s), (*args, *kwargs.values())) for s in fact.check[1].sources))
    except Exception:
        return None


def other_answers(asked: Iterable[tuple[Callable[[], Any], Any]], record: Guard) -> tuple[str, str, str] | None:
    """The same of callables that answer otherwise."""
    others = [(ask, then, ask()) for ask, then in asked]
    others = [one for one in others if one[1] != one[2]]
    switches = [change for ask, then, _ in others for change in torch_private.other_state(ask, then)]
    if len(switches) > 1:
        was, now = (", ".join(f"{one[0]} {one[n]}" for one in switches) for n in (1, 2))
        return "torch's state", was, now
    if switches:
        return f"torch's {switches[0][0]}", str(switches[0][1]), str(switches[0][2])
    if len(others) == 1 and describe(others[0][1]) in record.check:
        return record.source, describe(others[0][1]), describe(others[0][2])
    return None


KEPT_BY_C = {"instance_dict": "__dict__", "cell": "cell_contents", "attr": ""}


def kept_by_c(owner: Any, name: str) -> Any:
    """An attribute that C keeps. Whatever stands in this place by now, none of its own code is asked."""
    found = lookup(type(owner), name)
    if type(found) not in (types.GetSetDescriptorType, types.MemberDescriptorType):
        raise AttributeError(name)
    return found.__get__(owner)


def fetch(source: Source, arguments: tuple) -> Any:
    """Walk a source from the call's arguments (for messages; the hot path does this in C)."""
    operation, parents, *operands = source.slot()
    if operation == "const":
        return operands[0]
    if operation == "arg":
        return arguments[operands[0]]
    owner, *others = (fetch(parent, arguments) for parent in parents)
    if operation in KEPT_BY_C:
        return kept_by_c(owner, KEPT_BY_C[operation] or operands[0])
    if operation == "python":
        return operands[0](owner, *others)
    if operation == "dict_item":
        found = dict.get(owner, operands[0], ABSENT)  # (``owner[key]`` makes the entry of a defaultdict)
        if found is ABSENT:
            raise KeyError(operands[0])
        return found
    base = list if operation == "list_item" else tuple
    return base.__getitem__(owner, operands[0])

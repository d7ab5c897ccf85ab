"""What a failed guard teaches: which places, texts and sizes are left open when the callable is captured again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..guards.program import CompiledGuards, changed_key, fetch
from ..guards.recorder import Fact
from ..guards.sources import Part, Source
from ..heap.objects import may_be_replaced
from ..heap.varying import length_of
from ..hook import ABSENT
from ..trace.assumptions import Assumptions
from ..values.formulas import OfType
from ..values.numpy_numbers import NUMPY_FLOATS, NUMPY_NUMBERS
from ..values.values import ATOMS

OPENED = (int, float, complex, str, *NUMPY_NUMBERS)
NUMBERS = (int, float, complex, *NUMPY_NUMBERS, torch.Tensor)


def open_place(
    assumptions: Assumptions, fact: Fact, guards: CompiledGuards, args: tuple, kwargs: dict[str, Any]
) -> bool:
    """A place that changed becomes a place that may change, where that can be expressed.

    Returns whether what was captured is to go: it is for one object, which would live as long, and what is captured
    next is for any object at the place.
    """
    kind, *rest = fact.check
    if kind == "dict":
        return open_entry(assumptions, fact, guards)
    if kind == "contents" and fact.source is not None:
        return open_items(assumptions, fact, args, kwargs)
    if kind == "tensor":
        for other in guards.facts:  # one size often shows in several tensors: all of them at once
            open_sizes(assumptions, other, args, kwargs)
    elif kind in ("equal", "is", "is_weak") and fact.source is not None:
        texts = kind == "equal" and type(rest[1]) is str
        (assumptions.symbolic_strings if texts else assumptions.symbolic_places).add(fact.source.name)
        if kind == "equal":
            assumptions.symbolic_places.update(other_items(fact.source.name, rest[1], met(fact, args, kwargs)))
        if isinstance(fact.source, Part) and fact.source.operation == "list_item":
            open_floats(assumptions, fact.source.parent, args, kwargs)
    elif kind == "python" and (type(rest[0]) is OfType or type(getattr(rest[0], "expected", None)) is bool):
        if assumptions.runs_here:  # (for another backend a whole step with a branch would be two graphs)
            assumptions.deciding.update(source.name for source in rest[0].sources)
    elif kind == "length" and fact.source is not None:
        assumptions.symbolic_places.add(length_of(fact.source).name)
    elif kind == "class":
        open_class_attribute(assumptions, *rest[:2])
    return False


def other_items(name: str, then: Any, now: Any) -> list[str]:
    """The places of the items of a ``torch.Size`` that are others now."""
    if type(then) is not torch.Size or type(now) is not torch.Size:
        return []
    return [f"{name}[{i}]" for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b]


def open_entry(assumptions: Assumptions, fact: Fact, guards: CompiledGuards) -> bool:
    """``open_place`` of the entry that has changed in a dict."""
    _, the_dict, entries, _ = fact.check
    key = changed_key(the_dict, entries)
    now, then = dict.get(the_dict, key), None if key is None else entries[key]
    name = record_name(fact.record.source, key)
    numbers = isinstance(then, NUMBERS) and isinstance(now, NUMBERS)
    texts = type(then) is type(now) is str
    replaced = not texts and type(then) is type(now) and may_be_replaced(now)  # self.logs = []
    if texts:
        assumptions.symbolic_strings.add(name)
    elif numbers or replaced:
        assumptions.symbolic_places.add(name)
        if numbers:
            open_alike(assumptions, the_dict, key, guards)
    elif isinstance(then, tuple) and isinstance(now, tuple):  # an optimizer's betas
        assumptions.symbolic_places.update((name, *(f"{name}[{i}]" for i in range(len(now)))))
    return isinstance(then, torch.Tensor) if numbers else replaced


def open_alike(assumptions: Assumptions, the_dict: dict, key: Any, guards: CompiledGuards) -> None:
    """The same attribute of other objects of the class, where a number of one has varied: meters, counters."""
    kinds = {id(fact.check[3]): fact.check[2] for fact in guards.facts if fact.check[0] == "instance"}
    kind = kinds.get(id(the_dict))
    for fact in guards.facts if kind is not None and not issubclass(kind, torch.nn.Module) else ():
        if fact.check[0] == "dict" and kinds.get(id(fact.check[1])) is kind:
            if isinstance(fact.check[2].get(key), (int, float)) and type(fact.check[2][key]) is not bool:
                assumptions.symbolic_places.add(record_name(fact.record.source, key))


def open_items(assumptions: Assumptions, fact: Fact, args: tuple, kwargs: dict[str, Any]) -> bool:
    """``open_place`` of the items of a list that are others than they were."""
    then, now = fact.check[2], met(fact, args, kwargs)
    if type(now) is not list:
        return False
    if len(now) != len(then):
        assert fact.source is not None
        assumptions.symbolic_places.add(length_of(fact.source).name)
        return False
    places = [i for i, (a, b) in enumerate(zip(then, now, strict=True)) if a is not b]  # count[0] += 1
    assert fact.source is not None
    assumptions.symbolic_places.update((fact.source.name, *(f"{fact.source.name}[{i}]" for i in places)))
    for i in places:
        assumptions.symbolic_places.update(other_items(f"{fact.source.name}[{i}]", then[i], now[i]))
    open_floats(assumptions, fact.source, args, kwargs)
    return any(type(then[i]) not in ATOMS for i in places)


def open_numbers(assumptions: Assumptions, guards: CompiledGuards, args: tuple, kwargs: dict[str, Any]) -> None:
    """All numbers, sizes and tensors that are others than in the iteration of a loop that these guards were made in."""
    others: set[str] = set()  # sources of another type now: below these nothing is asked
    for fact in guards.facts:
        kind, *rest = fact.check
        if fact.source is not None and any(source.name in others for source in way_to(fact.source)):
            continue
        if kind == "type" and fact.source is not None:
            if type(met(fact, args, kwargs)) is not rest[1]:
                others.add(fact.source.name)
        elif kind == "tensor":
            open_sizes(assumptions, fact, args, kwargs)
        elif kind == "equal" and fact.source is not None:
            if is_another_number(rest[1], met(fact, args, kwargs)):
                assumptions.symbolic_places.add(fact.source.name)
        elif kind == "dict":
            the_dict, entries, _ = rest
            for key, then in entries.items():
                now = dict.get(the_dict, key)  # where one of the averaged weights was replaced, the others were
                replaced = isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor) and now is not then
                if replaced or is_another_number(then, now):
                    assumptions.symbolic_places.add(record_name(fact.record.source, key))
        elif kind == "contents" and fact.source is not None and has_others(rest[1], met(fact, args, kwargs)):
            open_floats(assumptions, fact.source, args, kwargs)  # (a table that stays is a constant of the graph)


def has_others(then: list, now: Any) -> bool:
    """Whether a list holds other items than it held."""
    return type(now) is list and (len(now) != len(then) or any(a is not b for a, b in zip(then, now, strict=True)))


def way_to(source: Source) -> Iterator[Source]:
    """The source and what it is a part of."""
    yield source
    while isinstance(source, Part):
        source = source.parent
        yield source


def is_another_number(then: Any, now: Any) -> bool:
    return type(then) in (bool, int, float, *NUMPY_NUMBERS) and type(now) is type(then) and bool(now != then)


def open_floats(assumptions: Assumptions, source: Source, args: tuple, kwargs: dict[str, Any]) -> None:
    """All places of a list of floats: where one of the last losses has changed, the others will."""
    now = found_at(source, args, kwargs)
    if type(now) is list and all(type(item) is float or type(item) in NUMPY_FLOATS for item in now):
        assumptions.symbolic_places.update(f"{source.name}[{i}]" for i in range(len(now)))


def open_class_attribute(assumptions: Assumptions, cls: type, entries: dict[str, Any]) -> None:
    """A number, text or tensor that a class holds, and another class in its order of resolution may now hide."""
    for name, then in entries.items():
        owner = next((base for base in cls.__mro__ if name in base.__dict__), None)
        now = ABSENT if owner is None else owner.__dict__[name]
        if owner is None or now is then or (type(now) is type(then) and isinstance(now, OPENED) and now == then):
            continue
        if isinstance(now, NUMBERS) and isinstance(then, NUMBERS):
            assumptions.symbolic_places.add(f"{owner.__qualname__}.{name}")
        elif type(now) is type(then) is str:
            assumptions.symbolic_strings.add(f"{owner.__qualname__}.{name}")


def open_sizes(assumptions: Assumptions, fact: Fact, args: tuple, kwargs: dict[str, Any]) -> None:
    """The axes of an input tensor that has another size than when the fact was noted."""
    tensor = met(fact, args, kwargs)
    if changed := other_sizes(fact, tensor):
        assert fact.source is not None
        # where one size varies the others will: batch and sequence; the last of real numbers counts features
        leading = tensor.dim() - tensor.is_floating_point()
        assumptions.dynamic_dims.setdefault(fact.source.name, set()).update(changed, range(leading))


def met(fact: Fact, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a fact's source leads to in this call; ABSENT: nothing, or the fact is not of one source."""
    return ABSENT if fact.source is None else found_at(fact.source, args, kwargs)


def found_at(source: Source, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a source leads to in this call, ABSENT for nothing."""
    try:
        return fetch(source, (*args, *kwargs.values()))
    except Exception:  # the path is gone: nothing to learn from it
        return ABSENT


def other_sizes(fact: Fact, now: Any) -> set[int]:
    """The axes along which an input tensor has another size than the fact's."""
    kind, *rest = fact.check
    shape = rest[1].get("shape") if kind == "tensor" else None  # (of a layout that is not followed, nothing is guarded)
    if shape is None or not isinstance(now, torch.Tensor) or now.is_nested or len(now.shape) != len(shape):
        return set()
    sizes = zip(shape, now.shape, strict=True)
    return {d for d, (a, b) in enumerate(sizes) if a is not None and a != b}


def record_name(owner: str, key: Any) -> str:
    """The name of a dict's entry as sources name it."""
    if owner.endswith(".__dict__"):
        return f"{owner.removesuffix('.__dict__')}.{key}"
    return f"{owner}[{key!r}]"

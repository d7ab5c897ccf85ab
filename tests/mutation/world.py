"""Worlds: a program and everything that it can reach, made afresh, addressed by paths, and compared with another one.

Two worlds that are made from one program file are equal and share nothing of the user's. A change is addressed by a
path (a tuple of steps from the program's function or arguments), so that the same change can be made in both.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PROGRAMS = Path(__file__).parent / "programs"
ABSENT = object()
Step = tuple[Any, ...]
ThePath = tuple[Step, ...]
LEAVES = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device, range, slice,
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ModuleType,
    torch.Size, torch.Generator,
)  # fmt: skip


@dataclasses.dataclass
class World:
    """One program's function and the objects of one call of it. ``call`` is what is called in the function's place."""

    name: str
    module: types.ModuleType
    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    call: Any = None


def make_world(name: str) -> World:
    """Run the program's file anew, so that its classes, globals and functions are nobody else's."""
    path = PROGRAMS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mutated_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    function, args, kwargs = module.make()
    return World(name, module, function, list(args), dict(kwargs), function)


# ----------------------------------------------------------------------------------------------------------------------
# Steps: reading and writing one part of an object
# ----------------------------------------------------------------------------------------------------------------------


def raw_dict(obj: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(obj, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def raw_items(sequence: Any) -> list[Any]:
    """The items, whatever a subclass says."""
    base = next(b for b in (list, tuple, collections.deque) if isinstance(sequence, b))
    return list(base.__iter__(sequence))


def read(world: World, owner: Any, step: Step) -> Any:
    """The part of ``owner`` that a step names."""
    kind, *rest = step
    key = rest[0] if rest else None
    if kind == "function":
        return world.function
    if kind == "arg":
        return world.args[key]
    if kind == "kwarg":
        return world.kwargs[key]
    if kind == "attribute":
        return object.__getattribute__(owner, "__dict__")[key]
    if kind == "slot":
        return getattr(owner, key)
    if kind == "item":
        return raw_items(owner)[key]
    if kind == "value":  # by position: keys may be objects of this world
        return list(dict.values(owner))[key]
    if kind == "cell":
        return owner.__closure__[key].cell_contents
    if kind == "global":
        return owner.__globals__[key]
    if kind == "default":
        return owner.__defaults__[key]
    if kind == "keyword default":
        return owner.__kwdefaults__[key]
    if kind == "class":
        return type(owner)
    if kind == "base":
        return owner.__bases__[key]
    if kind == "class attribute":
        return owner.__dict__[key]
    if kind == "part":  # fixed for the life of its owner
        return owner.__dict__ if key == "__dict__" else getattr(owner, key)
    raise ValueError(kind)


def write(world: World, path: ThePath, value: Any) -> None:
    """Put ``value`` at the path (ABSENT: remove it). Raises TypeError where plain Python cannot."""
    *front, step = path
    owner = follow(world, tuple(front)) if front else None
    kind, *rest = step
    key = rest[0] if rest else None
    if kind == "function":
        raise TypeError("the function itself stays")
    if kind == "arg":
        if value is ABSENT:
            raise TypeError("an argument stays")
        world.args[key] = value
    elif kind == "kwarg":
        put(world.kwargs, key, value)
    elif kind == "attribute":
        put(owner.__dict__, key, value)
    elif kind == "slot":
        delattr(owner, key) if value is ABSENT else setattr(owner, key, value)
    elif kind == "item":
        if isinstance(owner, tuple):
            if value is ABSENT:
                raise TypeError("an item of a tuple stays")
            items = (*owner[:key], value, *owner[key + 1 :])
            write(world, tuple(front), items if type(owner) is tuple else type(owner)._make(items))
        elif isinstance(owner, collections.deque) and value is ABSENT:
            del owner[key]
        else:
            owner.pop(key) if value is ABSENT else owner.__setitem__(key, value)
    elif kind == "value":
        put(owner, list(dict.keys(owner))[key], value)
    elif kind == "cell":
        cell = owner.__closure__[key]
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = value
    elif kind == "global":
        put(owner.__globals__, key, value)
    elif kind == "default":
        if value is ABSENT:
            raise TypeError("a default stays")
        defaults = owner.__defaults__
        owner.__defaults__ = (*defaults[:key], value, *defaults[key + 1 :])
    elif kind == "keyword default":
        put(owner.__kwdefaults__, key, value)
    elif kind == "class attribute":
        delattr(owner, key) if value is ABSENT else setattr(owner, key, value)
    else:
        raise TypeError(f"a {kind} cannot be written")


def put(where: Any, key: Any, value: Any) -> None:
    if value is ABSENT:
        del where[key]
    else:
        where[key] = value


def follow(world: World, path: ThePath) -> Any:
    owner: Any = None
    for step in path:
        owner = read(world, owner, step)
    return owner


def spell(path: ThePath) -> str:
    """A path as a person would write it."""
    text = ""
    for kind, *rest in path:
        key = rest[0] if rest else ""
        text += {
            "function": "f",
            "arg": f"arg{key}",
            "kwarg": f"{key}=",
            "item": f"[{key!r}]",
            "value": f"[key {key}]",
            "class": ".__class__",
            "cell": f".cell{key}",
            "base": f".__bases__[{key}]",
        }.get(kind, f".{key}")
    return text


# ----------------------------------------------------------------------------------------------------------------------
# What a program can reach
# ----------------------------------------------------------------------------------------------------------------------


def names_of(code: types.CodeType) -> set[str]:
    """The names that a code object, and the code inside it, looks up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names


def parts(world: World, obj: Any) -> Iterator[Step]:
    """Steps to the parts of an object that a program may depend on."""
    ours = world.module.__name__
    if isinstance(obj, LEAVES):
        return
    if isinstance(obj, types.FunctionType):
        for index, cell in enumerate(obj.__closure__ or ()):
            try:
                cell.cell_contents  # noqa: B018
            except ValueError:
                continue
            yield ("cell", index)
        if obj.__module__ != ours:
            return
        for name in sorted(names_of(obj.__code__)):
            if name in obj.__globals__:
                yield ("global", name)
        for index in range(len(obj.__defaults__ or ())):
            yield ("default", index)
        for name in obj.__kwdefaults__ or ():
            yield ("keyword default", name)
        return
    if isinstance(obj, types.MethodType):
        yield from (("part", "__func__"), ("part", "__self__"))
        return
    if isinstance(obj, functools.partial):
        yield from (("part", "func"), ("part", "args"), ("part", "keywords"))
        return
    if isinstance(obj, property):
        yield ("part", "fget")
        return
    if isinstance(obj, staticmethod | classmethod):
        yield ("part", "__func__")
        return
    if isinstance(obj, enum.Enum):
        return
    if isinstance(obj, type):
        if obj.__module__ == ours:
            for name in list(obj.__dict__):
                if name not in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__"):
                    yield ("class attribute", name)
            for index in range(len(obj.__bases__)):
                yield ("base", index)
        return
    if isinstance(obj, torch.Tensor):
        return
    if isinstance(obj, dict):
        yield from (("value", i) for i in range(dict.__len__(obj)))
    elif isinstance(obj, list | tuple | collections.deque):
        yield from (("item", i) for i in range(len(raw_items(obj))))
    namespace = raw_dict(obj)
    if namespace is not None:
        yield from (("attribute", name) for name in list(namespace))
    for base in type(obj).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield ("slot", name)
    if type(obj).__module__ == ours:
        yield ("class",)


def places(world: World) -> Iterator[ThePath]:
    """Paths to everything reachable, each object by the first path that leads to it; atoms by every path."""
    seen: set[int] = set()
    roots: list[ThePath] = [(("function",),)]
    roots += [(("arg", i),) for i in range(len(world.args))] + [(("kwarg", k),) for k in world.kwargs]
    queue = collections.deque(roots)
    while queue:
        path = queue.popleft()
        obj = follow(world, path)
        yield path
        if not isinstance(obj, LEAVES):
            if id(obj) in seen:
                continue
            seen.add(id(obj))
        queue.extend((*path, step) for step in parts(world, obj))


# ----------------------------------------------------------------------------------------------------------------------
# Comparing two worlds
# ----------------------------------------------------------------------------------------------------------------------


class Differ:
    """Compares objects of two worlds. Aliases count: what is one object here must be one object there."""

    def __init__(self, first: World, second: World):
        self.worlds = (first, second)
        self.twin: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.alive: list[Any] = []

    def compare(self, a: Any, b: Any, where: str) -> str | None:
        """The first difference in words, or None."""
        if a is b:  # something of a library's
            return None
        if type(a).__qualname__ != type(b).__qualname__ or type(a).__module__ != type(b).__module__:
            return f"{where}: {type(a).__qualname__} against {type(b).__qualname__}"
        if isinstance(a, float) and isinstance(b, float):
            same = (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
            return None if same else f"{where}: {a!r} against {b!r}"
        if isinstance(a, types.ModuleType | types.BuiltinFunctionType | types.CodeType):
            return None
        if isinstance(a, LEAVES):
            if isinstance(a, torch.Generator) or (isinstance(a, float) and a != a):
                return None
            return None if a == b else f"{where}: {a!r} against {b!r}"
        if id(a) in self.twin or id(b) in self.back:
            paired = self.twin.get(id(a)) == id(b) and self.back.get(id(b)) == id(a)
            return None if paired else f"{where}: other aliases"
        self.twin[id(a)], self.back[id(b)] = id(b), id(a)
        self.alive += [a, b]
        if isinstance(a, torch.Tensor):
            rounding = getattr(self.worlds[0].module, "ROUNDING", 0.0)
            if difference := tensor_difference(a, b, rounding):
                return f"{where}: {difference}"
            if a.is_leaf and (a.grad is not None or b.grad is not None):
                return self.compare(a.grad, b.grad, f"{where}.grad")
            return None
        if isinstance(a, enum.Enum):
            return None if a.name == b.name else f"{where}: {a} against {b}"
        if isinstance(a, set | frozenset):
            return None if sorted(map(repr, a)) == sorted(map(repr, b)) else f"{where}: {a!r} against {b!r}"
        if isinstance(a, dict):
            if dict.__len__(a) != dict.__len__(b):
                return f"{where}: keys {list(a)} against {list(b)}"
            for k, q in zip(dict.__iter__(a), dict.__iter__(b), strict=True):
                if difference := self.compare(k, q, f"{where}, its key {k!r}"):
                    return difference
        if isinstance(a, list | tuple | collections.deque) and len(raw_items(a)) != len(raw_items(b)):
            return f"{where}: {a!r} against {b!r}"
        if isinstance(a, BaseException):
            return self.compare(a.args, b.args, f"{where}.args")
        steps = list(parts(self.worlds[0], a))
        if steps != list(parts(self.worlds[1], b)):
            return f"{where}: other parts"
        for step in steps:
            if difference := self.compare(
                read(self.worlds[0], a, step), read(self.worlds[1], b, step), where + spell((step,))
            ):
                return difference
        return None


def tensor_difference(a: torch.Tensor, b: torch.Tensor, rounding: float = 0.0) -> str | None:
    """The first thing in which two tensors differ; numbers bit for bit (or up to a part of the largest), NaN is NaN."""
    for name in ("dtype", "device", "layout", "shape", "requires_grad", "is_leaf"):
        if getattr(a, name) != getattr(b, name):
            return f"{name} {getattr(a, name)} against {getattr(b, name)}"
    if a.layout is torch.strided and a.stride() != b.stride():
        return f"strides {a.stride()} against {b.stride()}"
    if a.is_meta:
        return None
    x, y = plain_numbers(a), plain_numbers(b)
    if not x.is_floating_point() or rounding and not x.numel():
        equal = torch.equal(x, y)
    elif rounding:
        largest = float(x.nan_to_num(0.0, 0.0, 0.0).abs().max())
        equal = torch.allclose(x, y, rtol=0.0, atol=rounding * largest, equal_nan=True)
    else:
        nan = x.isnan()
        equal = torch.equal(x.nan_to_num(7.25), y.nan_to_num(7.25)) and torch.equal(nan, y.isnan())
        equal = equal and torch.equal(torch.signbit(x) & ~nan, torch.signbit(y) & ~nan)
    return None if equal else "other numbers"


def plain_numbers(t: torch.Tensor) -> torch.Tensor:
    """The numbers of any tensor as a real dense one."""
    with torch.no_grad():
        t = t.detach()
        t = t.to_dense() if t.layout is not torch.strided else t.as_subclass(torch.Tensor)
        t = t.resolve_conj().resolve_neg()
        return torch.view_as_real(t) if t.is_complex() else t

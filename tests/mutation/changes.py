"""What can be changed between two calls: one reachable thing, or one of the process's switches, at a time.

Each change is applied to two worlds alike (the one that runs as plain Python, the one that is captured), so it may only
use the world that it is given.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from world import ABSENT, ThePath, World, follow, places, raw_dict, read, spell, write

Apply = Callable[[World], Any]  # it may return a context manager, in which both calls are then made


@dataclasses.dataclass
class Change:
    """One change. ``kind`` is its row in the table; ``where`` says which one of that kind, for messages."""

    kind: str
    where: str
    apply: Apply


class Int(int):
    def __mul__(self, other: Any) -> Any:
        return int(self) * other + 1

    __rmul__ = __mul__


class Float(float):
    def __mul__(self, other: Any) -> Any:
        return float(self) * other + 1

    __rmul__ = __mul__


class Str(str):
    def __eq__(self, other: object) -> bool:
        return not str.__eq__(self, other)

    __hash__ = str.__hash__


class List(list):
    def __len__(self) -> int:
        return list.__len__(self) + 1

    def __iter__(self) -> Iterator:
        return reversed(list(list.__iter__(self)))


class Dict(dict):
    def __getitem__(self, key: Any) -> Any:
        value = dict.__getitem__(self, key)
        return value * 2 if isinstance(value, float) else value


def atoms(value: Any) -> Iterator[tuple[str, Any]]:
    """Other values for a constant: (kind of change, new value)."""
    if value is None:
        yield "None: a number", 3.0
    elif isinstance(value, bool):
        yield "bool: the other", not value
        yield "bool: an int for it", int(value)
    elif type(value) is int:
        yield "int: another", value + 1
        yield "int: a float for it", float(value)
        yield "int: True for it", True
        yield "int: a subclass", Int(value)
    elif type(value) is float:
        yield "float: another", value + 0.5
        yield "float: NaN", float("nan")
        yield "float: an int for it", int(value) if value == value and abs(value) != float("inf") else 1
        yield "float: True for it", True
        yield "float: a subclass", Float(value)
        yield "float: the other sign", -value
        yield "float: zero", 0.0
        yield "float: minus zero", -0.0
    elif type(value) is str:
        yield "str: another", value + "x"
        yield "str: a subclass", Str(value)
        yield "str: None for it", None
    elif isinstance(value, torch.dtype):
        yield "dtype: another", torch.float64 if value is not torch.float64 else torch.float32
    elif isinstance(value, enum.Enum):
        members = list(type(value))
        yield "enum: another member", members[(members.index(value) + 1) % len(members)]


def at_place(path: ThePath, value: Callable[[World], Any]) -> Apply:
    def apply(world: World) -> None:
        write(world, path, value(world))

    return apply


def on_object(path: ThePath, action: Callable[..., Any], *operands: Any) -> Apply:
    def apply(world: World) -> None:
        action(follow(world, path), *operands)

    return apply


# ----------------------------------------------------------------------------------------------------------------------
# Containers
# ----------------------------------------------------------------------------------------------------------------------


def first_last(mapping: Any) -> None:
    key = next(iter(mapping))
    mapping[key] = mapping.pop(key)


def sequence_changes(value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    name = type(value).__name__
    if value:
        yield f"{name}: item removed", lambda xs: xs.pop()
        yield f"{name}: first item doubled", lambda xs: xs.insert(0, xs[0])
        yield f"{name}: emptied", lambda xs: xs.clear()
    if len(value) > 1:
        yield f"{name}: reversed", lambda xs: xs.reverse()
    yield f"{name}: item appended", lambda xs: xs.append(xs[-1] if xs else 2.0)


def dict_changes(value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    name = type(value).__name__
    if value:
        yield f"{name}: first key removed", lambda d: d.pop(next(iter(d)))
        yield f"{name}: emptied", lambda d: d.clear()
        yield f"{name}: key renamed", lambda d: d.__setitem__("renamed", d.pop(next(iter(d))))
    if len(value) > 1:
        yield f"{name}: order", first_last
    if isinstance(value, collections.OrderedDict) and len(value) > 1:
        yield f"{name}: move_to_end", lambda d: d.move_to_end(next(iter(d)))
    if value and all(isinstance(v, float) for v in value.values()):
        yield f"{name}: key added", lambda d: d.__setitem__("added", 2.0)


def set_changes(value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "set: item added", lambda s: s.add(77.0)
    if value:
        yield "set: item removed", lambda s: s.pop()
        yield "set: emptied", lambda s: s.clear()


# ----------------------------------------------------------------------------------------------------------------------
# Objects, classes, functions
# ----------------------------------------------------------------------------------------------------------------------


def other_function(function: Any) -> Any:
    """A function of the same signature that gives another answer."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result + 1 if isinstance(result, torch.Tensor | int | float) else result

    return changed


def other_class(obj: Any) -> type:
    """A subclass of the object's class that differs in one property, method or attribute."""
    cls = type(obj)
    namespace: dict[str, Any] = {"__slots__": ()} if raw_dict(obj) is None else {}
    for name, value in cls.__dict__.items():
        if isinstance(value, property) and value.fget is not None:
            getter = value.fget
            namespace[name] = property(other_function(getter))
        elif isinstance(value, types.FunctionType) and not name.startswith("__"):
            namespace[name] = other_function(value)
        elif type(value) in (int, float):
            namespace[name] = value + 3
    return type(cls.__name__, (cls,), namespace)


def new_class(obj: Any) -> None:
    obj.__class__ = other_class(obj)


def new_dict(obj: Any) -> None:
    obj.__dict__ = {k: v + 0.5 if type(v) is float else v for k, v in obj.__dict__.items()}


def shadow_method(obj: Any, name: str) -> None:
    obj.__dict__[name] = other_function(getattr(obj, name))


def new_code(function: Any) -> None:
    """The same code but for its first float constant."""
    code = function.__code__
    at = next(i for i, c in enumerate(code.co_consts) if type(c) is float)
    constants = (*code.co_consts[:at], code.co_consts[at] + 0.5, *code.co_consts[at + 1 :])
    function.__code__ = code.replace(co_consts=constants)


def object_changes(value: Any, ours: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    cls = type(value)
    if cls.__module__ == ours and not isinstance(value, enum.Enum | BaseException | tuple):
        yield "object: __class__", new_class
        if raw_dict(value) is not None:
            yield "object: __dict__", new_dict
            for name, member in cls.__dict__.items():
                if isinstance(member, types.FunctionType) and not name.startswith("__"):
                    yield "object: method on the instance", lambda o, name=name: shadow_method(o, name)
                elif type(member) in (int, float):
                    yield "object: attribute over the class's", lambda o, n=name, m=member: setattr(o, n, m + 2)


def class_changes(cls: Any, ours: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    if cls.__module__ != ours or issubclass(cls, enum.Enum):
        return
    for name, member in list(cls.__dict__.items()):
        if isinstance(member, types.FunctionType) and (not name.startswith("__") or name in ("__call__", "__len__")):
            yield "class: method", lambda c, n=name: setattr(c, n, other_function(c.__dict__[n]))
        elif isinstance(member, property):
            yield "class: property", lambda c, n=name: setattr(c, n, property(other_function(c.__dict__[n].fget)))
        elif isinstance(member, staticmethod):
            yield (
                "class: staticmethod",
                lambda c, n=name: setattr(c, n, staticmethod(other_function(c.__dict__[n].__func__))),
            )
        elif isinstance(member, classmethod):
            yield (
                "class: classmethod",
                lambda c, n=name: setattr(c, n, classmethod(other_function(c.__dict__[n].__func__))),
            )
    if "__getattribute__" not in cls.__dict__ and not issubclass(cls, BaseException | type):
        yield "class: __getattribute__ added", add_getattribute
    if len(cls.__mro__) > 2 and cls.__bases__[0].__module__ == ours:
        yield "class: __bases__", lambda c: setattr(c, "__bases__", (other_base(c.__bases__[0]), *c.__bases__[1:]))


def add_getattribute(cls: Any) -> None:
    before = cls.__getattribute__

    def changed(self: Any, name: str) -> Any:
        value = before(self, name)
        return value + 1 if type(value) is float else value

    cls.__getattribute__ = changed


def other_base(base: type) -> type:
    methods = [(n, m) for n, m in base.__dict__.items() if isinstance(m, types.FunctionType) and n[0] != "_"]
    members = {n: other_function(m) for n, m in methods}
    return type(base.__name__, (base,), members)


def function_changes(function: Any, ours: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    if function.__module__ == ours and any(type(c) is float for c in function.__code__.co_consts):
        yield "function: __code__", new_code


# ----------------------------------------------------------------------------------------------------------------------
# Tensors and modules
# ----------------------------------------------------------------------------------------------------------------------


def keep_kind(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    if isinstance(before, torch.nn.Parameter):
        return torch.nn.Parameter(after.detach(), before.requires_grad)
    return after.requires_grad_() if before.requires_grad and after.is_leaf and after.is_floating_point() else after


def larger(t: torch.Tensor, by: int) -> torch.Tensor:
    d = t.detach()
    return torch.cat([d, d[-by:]]) if d.dim() and d.shape[0] >= by else d


def offset(t: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(t.numel() + 3, dtype=t.dtype)
    base[3:] = t.detach().reshape(-1)
    return base[3:].view(t.shape)


def strided(t: torch.Tensor) -> torch.Tensor:
    return t.detach().t().contiguous().t() if t.dim() == 2 else torch.stack([t.detach()] * 2, -1)[..., 0]


class Sub(torch.Tensor):
    """A tensor subclass that computes something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in (torch.Tensor.mul, torch.mul) and isinstance(result, torch.Tensor):
            return result.as_subclass(torch.Tensor) + 1
        return result


# What is put in a tensor's place.
TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor: other numbers": lambda t: t.detach() + 0.5 if t.is_floating_point() else t.detach().flip(0),
    "tensor: the same numbers": lambda t: t.detach().clone(),
    "tensor: NaN": lambda t: torch.full_like(t.detach(), float("nan")) if t.is_floating_point() else t.detach(),
    "tensor: minus zero": lambda t: t.detach() * -0.0 if t.is_floating_point() else t.detach() * 0,
    "tensor: dtype": lambda t: t.detach().double() if t.is_floating_point() else t.detach().int(),
    "tensor: one row more": lambda t: larger(t, 1),
    "tensor: two rows more": lambda t: larger(t, 2),
    "tensor: one row": lambda t: t.detach()[:1].clone(),
    "tensor: no rows": lambda t: t.detach()[:0].clone(),
    "tensor: a dimension more": lambda t: t.detach().clone()[None],
    "tensor: strides": strided,
    "tensor: expanded": lambda t: t.detach()[:1].expand(t.shape),
    "tensor: storage offset": offset,
    "tensor: not a leaf": lambda t: t.detach().requires_grad_() * 1.5 if t.is_floating_point() else t.detach(),
    "tensor: a Parameter": lambda t: torch.nn.Parameter(t.detach().clone()) if t.is_floating_point() else t.detach(),
    "tensor: a subclass": lambda t: t.detach().clone().as_subclass(Sub),
    "tensor: on meta": lambda t: t.detach().to("meta"),
    "tensor: conjugate view": lambda t: torch.complex(t.detach(), t.detach()).conj() if t.is_floating_point() else t,
    "tensor: negative view": lambda t: torch._neg_view(t.detach()) if t.is_floating_point() else t,
    "tensor: sparse": lambda t: t.detach().to_sparse(),
    "tensor: a number for it": lambda t: 2.0,
    "tensor: None for it": lambda t: None,
}
# What is done to the tensor itself.
IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor in place: numbers": lambda t: t.detach().mul_(2),
    "tensor in place: requires_grad": lambda t: t.requires_grad_(not t.requires_grad),
    "tensor in place: .data": lambda t: setattr(t, "data", t.detach() + 0.5),
    "tensor in place: .data of another dtype": lambda t: setattr(t, "data", t.detach().double()),
    "tensor in place: .data of another size": lambda t: setattr(t, "data", larger(t, 1)),
    "tensor in place: .data of other strides": lambda t: setattr(t, "data", strided(t)),
    "tensor in place: transposed": lambda t: t.detach_().t_() if t.dim() == 2 else None,
    "tensor in place: set_": lambda t: t.detach().set_(t.detach() * 3),
    "tensor in place: .grad": lambda t: setattr(t, "grad", torch.ones_like(t)) if t.requires_grad else None,
    "tensor in place: resized": lambda t: t.detach().resize_(t.shape[0] + 1, *t.shape[1:]) if t.dim() else None,
}


def doubled_gradients(module: Any, grad_input: Any, grad_output: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in grad_input)


def module_changes(module: torch.nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "module: forward hook", lambda m: m.register_forward_hook(lambda m, args, out: out + 1)
    yield "module: forward pre-hook", lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
    yield "module: forward on the instance", lambda m: shadow_method(m, "forward")
    yield "module: train or eval", lambda m: m.train(not m.training)
    yield "module: backward hook", lambda m: m.register_full_backward_hook(doubled_gradients)
    yield "module: double()", lambda m: m.double()
    yield "module: requires_grad_(False)", lambda m: m.requires_grad_(False)
    yield "module: buffer added", lambda m: m.register_buffer("scale", torch.full((1,), 3.0))
    for name in list(module._modules):
        yield "module: child replaced", lambda m, n=name: setattr(m, n, copy.deepcopy(getattr(m, n)))
        yield "module: child removed", lambda m, n=name: m._modules.pop(n)


def first_parameter(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return optimizer.param_groups[0]["params"][0]


def another_parameter(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    new = torch.nn.Parameter(first_parameter(optimizer).detach() * 2)
    new.grad = torch.ones_like(new)
    return {"params": [new]}


def halve_rates(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


# What is done to an optimizer as a whole; its groups, state and hooks are reached as parts as well.
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "optimizer: state cleared": lambda o: o.state.clear(),
    "optimizer: state of one parameter gone": lambda o: o.state.pop(first_parameter(o), None),
    "optimizer: state loaded": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "optimizer: group added": lambda o: o.add_param_group(another_parameter(o)),
    "optimizer: group removed": lambda o: o.param_groups.pop(),
    "optimizer: maximize": lambda o: o.param_groups[0].__setitem__("maximize", True),
    "optimizer: foreach": lambda o: o.param_groups[0].__setitem__("foreach", True),
    "optimizer: a tensor as rate": lambda o: o.param_groups[0].__setitem__("lr", torch.tensor(0.05)),
    "optimizer: another default": lambda o: o.defaults.__setitem__("lr", 1.0),
    "optimizer: step pre-hook": lambda o: o.register_step_pre_hook(halve_rates),
    "optimizer: step post-hook": lambda o: o.register_step_post_hook(halve_rates),
    "optimizer: step on the instance": lambda o: setattr(o, "step", lambda: None),
    "optimizer: frozen parameter": lambda o: first_parameter(o).requires_grad_(False),
    "optimizer: gradient removed": lambda o: setattr(first_parameter(o), "grad", None),
    "optimizer: steps counted on": lambda o: [s["step"].add_(3) for s in o.state.values() if "step" in s],
}


# ----------------------------------------------------------------------------------------------------------------------
# Aliases
# ----------------------------------------------------------------------------------------------------------------------


def alias_changes(world: World, paths: list[ThePath]) -> Iterator[Change]:
    """Two places that hold two objects of one type hold one; and the other way round, a copy in one place."""
    by_type: dict[Any, list[ThePath]] = {}
    for path in paths:
        value = follow(world, path)
        ours = type(value).__module__ == world.module.__name__
        if ours or isinstance(value, list | dict | torch.Tensor | torch.nn.Module):
            if path[-1][0] in ("arg", "kwarg", "attribute", "item", "value", "global", "cell"):
                key = (type(value), tuple(value.shape) if isinstance(value, torch.Tensor) else None)
                by_type.setdefault(key, []).append(path)
    for (kind, _), same in by_type.items():
        for first, second in zip(same, same[1:], strict=False):
            name = "tensor" if issubclass(kind, torch.Tensor) else kind.__name__ if kind in (list, dict) else "object"

            def apply(world: World, first: ThePath = first, second: ThePath = second) -> None:
                write(world, second, follow(world, first))

            yield Change(f"alias: two {name}s become one", f"{spell(second)} = {spell(first)}", apply)
            if first[-1][0] == "arg":

                def back(world: World, first: ThePath = first, second: ThePath = second) -> None:
                    write(world, first, follow(world, second))

                yield Change(f"alias: two {name}s become one", f"{spell(first)} = {spell(second)}", back)


# ----------------------------------------------------------------------------------------------------------------------
# The process
# ----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def set_and_reset(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def global_module_hook() -> Iterator[None]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, args, out: out)
    try:
        yield
    finally:
        handle.remove()


class DoublingMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.relu, torch.nn.functional.relu) else result


def hostile_len(before: Any) -> Any:
    def changed(x: Any) -> int:
        n = before(x)
        return n + 1 if n and type(x) in (list, tuple) and all(type(v) is float for v in x) else n

    return changed


SWITCHES: dict[str, Callable[[], Any]] = {
    "switch: no_grad": lambda: torch.no_grad(),
    "switch: inference_mode": lambda: torch.inference_mode(),
    "switch: autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "switch: default dtype": lambda: set_and_reset(torch.set_default_dtype, torch.float64, torch.float32),
    "switch: deterministic": lambda: set_and_reset(torch.use_deterministic_algorithms, True, False),
    "switch: default device": lambda: torch.device("cpu"),
    "switch: function mode": lambda: DoublingMode(),
    "switch: module hook for all": global_module_hook,
    "switch: anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "library: torch.relu patched": lambda: patched(torch, "relu", other_function),
    "library: F.relu patched": lambda: patched(torch.nn.functional, "relu", other_function),
    "library: nn.Linear.forward patched": lambda: patched(torch.nn.Linear, "forward", other_function),
    "library: nn.Module.__call__ patched": lambda: patched(torch.nn.Module, "__call__", other_function),
    "library: builtins.len patched": lambda: patched(builtins, "len", hostile_len),
}
GRAD_HOOK = "tensor in place: gradient hook"


def all_changes(world: World) -> list[Change]:
    """Every change of a world, in a fixed order."""
    changes: list[Change] = []
    paths = list(places(world))
    ours = world.module.__name__
    for path in paths:
        value = follow(world, path)
        where = spell(path)
        front = follow(world, path[:-1]) if path[:-1] else None
        settable = path[-1][0] not in ("function", "class", "base", "part") and not isinstance(front, types.MethodType)
        foreign = path[-1][0] in ("global", "cell") and getattr(front, "__module__", ours) != ours

        def add(kind: str, apply: Apply, where: str = where) -> None:
            changes.append(Change(kind, where, apply))

        if settable and not foreign:
            for kind, new in atoms(value):
                add(kind, at_place(path, lambda world, new=new: new))
            if path[-1][0] not in ("arg", "default", "item"):
                add("place: removed", at_place(path, lambda world: ABSENT))
            if isinstance(value, types.FunctionType):
                add("function: another in its place", at_place(path, lambda w, p=path: other_function(follow(w, p))))
            if isinstance(value, tuple):
                if type(value) is tuple and value:
                    add("tuple: an equal copy", at_place(path, lambda w, p=path: tuple([*follow(w, p)])))
                add("tuple: longer", at_place(path, lambda w, p=path: longer(follow(w, p))))
            if isinstance(value, list | dict | set) or (type(value).__module__ == ours and not isinstance(value, type)):
                if not isinstance(value, enum.Enum):
                    add("object: an equal copy", at_place(path, lambda w, p=path: copy.copy(follow(w, p))))
            if type(value) is list:
                add("list: a subclass", at_place(path, lambda w, p=path: List(follow(w, p))))
            if type(value) is dict:
                add("dict: a subclass", at_place(path, lambda w, p=path: Dict(follow(w, p))))
            if isinstance(value, torch.Tensor):
                for kind, new in TENSORS.items():
                    add(kind, at_place(path, lambda w, p=path, new=new: keep(follow(w, p), new)))
        if isinstance(value, torch.Tensor):
            for kind, action in IN_PLACE.items():
                add(kind, on_object(path, action))
            add(GRAD_HOOK, on_object(path, lambda t: t.register_hook(lambda g: g * 2) if t.requires_grad else None))
        actions: Iterator[tuple[str, Callable[..., Any]]] = iter(())
        if isinstance(value, list | collections.deque):
            actions = sequence_changes(value)
        elif isinstance(value, dict):
            actions = dict_changes(value)
        elif isinstance(value, set):
            actions = set_changes(value)
        elif isinstance(value, type):
            actions = class_changes(value, ours)
        elif isinstance(value, types.FunctionType):
            actions = function_changes(value, ours)
        elif isinstance(value, torch.nn.Module):
            actions = module_changes(value)
        elif isinstance(value, torch.optim.Optimizer):
            actions = iter(OPTIMIZERS.items())
        for kind, action in actions:
            add(kind, on_object(path, action))
        if not isinstance(value, type | types.FunctionType):
            for kind, action in object_changes(value, ours):
                add(kind, on_object(path, action))
    changes += alias_changes(world, paths)
    changes += [Change(kind, kind, lambda world, make=make: make()) for kind, make in SWITCHES.items()]
    return changes


def longer(value: tuple) -> tuple:
    return (*value, value[-1] if value else 1.0)


def keep(before: Any, new: Callable[[torch.Tensor], Any]) -> Any:
    after = new(before)
    return keep_kind(before, after) if isinstance(after, torch.Tensor) and type(after) is torch.Tensor else after


__all__ = ["Change", "all_changes", "read"]

"""Python code that is interpreted in place of a library's function: the same meaning, in a form that a graph can hold.

Each entry says why the original cannot be interpreted as it is.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import enum
import functools
import math
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moebius.interpreter import is_kind

from ..heap.records import HEAP_TYPE
from ..torch_facts import torch_private

# What copy.copy() has a function of its own for (up to 3.14 a table), private names read on 3.11.7 to 3.15.0.
COPIED_IN_C = frozenset(getattr(copy, "_copy_dispatch", ())).union(
    getattr(copy, "_copy_atomic_types", ()), getattr(copy, "_copy_builtin_containers", ())
)


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """``Optimizer.zero_grad``: the original asks for each gradient whether it is there, which differs between the first
    step and the second, and then drops it in either case."""
    if set_to_none and hasattr(self, "_zero_grad_profile_name"):
        self.defaults.get("foreach", False)  # as the original does
        with torch.autograd.profiler.record_function(self._zero_grad_profile_name):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
    else:
        original_optimizer_zero_grad(self, set_to_none)


def module_zero_grad(self: Any, set_to_none: bool = True) -> None:
    """``Module.zero_grad``: for the same reason."""
    if set_to_none:
        for p in self.parameters():
            p.grad = None
    else:
        for p in self.parameters():
            if p.grad is not None:
                if p.grad.grad_fn is not None:
                    p.grad.detach_()
                else:
                    p.grad.requires_grad_(False)
                p.grad.zero_()


def group_tensors(lists: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
    """``_group_tensors_by_device_and_dtype`` (torch/csrc/utils/foreach_utils): the original is C and wants tensors."""
    if not lists[0]:  # as the original says; clip_grad_value_ asks where no parameter has a gradient
        raise RuntimeError(
            "Expected !nested_tensorlist[0].empty() to be true, but got false.  "
            "(Could this error message be improved?  If so, please report an enhancement request to PyTorch.)"
        )
    groups: dict[Any, Any] = {}
    if (key := shared_group(lists)) is not None:
        return {key: ([list(values) for values in lists], list(range(len(lists[0]))) if with_indices else [])}
    for i, first in enumerate(lists[0]):
        key = (first.device, first.dtype)
        if key not in groups:
            groups[key] = ([[] for _ in lists], [])
        grouped, indices = groups[key]
        for column, values in zip(grouped, lists, strict=True):
            if len(values):
                column.append(values[i])
        if with_indices:
            indices.append(i)
    if len(groups) > 1:  # the order is a hash table's: a norm over all groups is rounded by it
        keys = tuple(groups)
        groups = {keys[i]: groups[keys[i]] for i in torch_private.order_of_groups(keys)}
    return groups


def shared_group(lists: list[list[Any]]) -> Any:
    """The group of all tensors, None where they have several or it is not known (``TensorLists`` answers)."""


class Range(torch.autograd.profiler.record_function):
    """``record_function`` in a step: a name for the profiler around a part of it, which no graph has."""

    def __init__(self, name: str, args: str | None = None):
        if not is_kind(name, str) or not is_kind(args, str | None):
            raise RuntimeError("profiler::_record_function_enter_new(): the name of a range must be a str")
        self.name, self.args = name, args
        self.run_callbacks_on_exit = True
        self.record = None

    def __enter__(self) -> Range:
        return self

    def __exit__(self, *_: Any) -> None: ...


def no_range(name: str, args: str | None = None) -> Any:
    return Range(name, args)


def recreated(self: Any) -> Any:
    """``ContextDecorator._recreate_cm``, which ``@record_function`` asks for its context at each call."""
    return Range(self.name, self.args) if type(self) is torch.autograd.profiler.record_function else self


def copied(x: Any) -> Any:
    """``copy.copy``: the original copies objects as pickle would take them apart, in C."""
    cls: Any = type(x)
    if cls in COPY_IS_METHOD:
        return x.copy()
    if cls not in COPIED_IN_C and not issubclass(cls, type) and is_plain_object(cls):
        for name in COPY_PROTOCOL:
            if name in x.__dict__:  # (of most of them the object is asked, not its class)
                return original_copy(x)
        made = cls.__new__(cls)
        set_state(made, state_of(x))
        return made
    return original_copy(x)


def state_of(x: Any) -> Any:
    """What a copy is given of an object (``object.__reduce_ex__``)."""
    return (x.__dict__ or None) if type(x).__getstate__ is object.__getstate__ else x.__getstate__()


def set_state(made: Any, state: Any) -> None:
    """Gives it to the copy (``copy._reconstruct``)."""
    if state is None:
        return
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif type(state) is dict:
        made.__dict__.update(state)
    else:
        object.__reduce_ex__(made, 4)  # a graph break


def deep_copied(x: Any, memo: Any = None, _nil: Any = None) -> Any:
    """``copy.deepcopy``: the original keeps what it has copied by ``id()``, which differs from call to call."""
    return original_deepcopy(x, memo) if memo is not None else deep_copy(x, [])


def deep_copy(x: Any, done: list[tuple[Any, Any]]) -> Any:
    """done: what was copied before, and its copy (copy._deepcopy_list and its kin)."""
    cls: Any = type(x)
    if cls in COPIED_AS_THEMSELVES or is_kind(x, type | enum.Enum):
        return x
    for one, copied_one in done:
        if one is x:
            return copied_one
    made: Any
    if cls in (list, dict, OrderedDict, defaultdict):
        made = defaultdict(x.default_factory) if cls is defaultdict else cls()
        done.append((x, made))
        if cls is list:
            for item in x:
                made.append(deep_copy(item, done))
            return made
        if cls is OrderedDict:  # (copied, as a defaultdict is, by what __reduce_ex__ gives: copy._reconstruct)
            for key, value in x.__dict__.items():
                made.__dict__[key] = deep_copy(value, done)
        for key, value in x.items():
            made[deep_copy(key, done)] = deep_copy(value, done)
        return made
    if cls is torch.nn.Parameter:
        made = cls(x.data.clone(memory_format=torch.preserve_format), x.requires_grad)
    elif cls is torch.Tensor:
        made = copied_tensor(x, [one for one, _ in done])
    elif cls is set or cls is frozenset:
        made = cls([deep_copy(item, done) for item in x])
    elif cls is tuple:
        made = tuple([deep_copy(item, done) for item in x])
        for one, copied_one in done:
            if one is x:  # (it holds something that holds it)
                return copied_one
        for one, copied_one in zip(x, made, strict=True):
            if one is not copied_one:
                break
        else:
            return x
    elif is_plain_object(cls) and not hasattr(x, "__deepcopy__"):
        for name in COPY_PROTOCOL:
            if name in x.__dict__:
                return object.__reduce_ex__(x, 4)  # a graph break
        made = cls.__new__(cls)
        done.append((x, made))
        set_state(made, deep_copy(state_of(x), done))
        return made
    else:
        return object.__reduce_ex__(x, 4)  # a graph break
    done.append((x, made))
    return made


def copied_tensor(x: Any, before: list[Any]) -> Any:
    """``copy.deepcopy`` of a tensor; while tracing, where a clone is the same. before: what was copied before it."""
    return original_deepcopy(x)


def is_plain_object(cls: Any) -> bool:
    """Whether copying an instance is a new object that is given the old one's state: nothing else of pickle's protocol
    overridden (``object.__reduce_ex__``, Objects/typeobject.c), no slots, no base written in C."""
    return (
        all(getattr(cls, name, None) is getattr(object, name, None) for name in COPY_PROTOCOL if name not in STATE)
        and cls not in copyreg.dispatch_table
        and all(base is object or "__slots__" not in base.__dict__ for base in cls.__mro__)
        and all(base is object or base.__flags__ & HEAP_TYPE for base in cls.__mro__)
    )


def new_handle(self: Any, hooks_dict: Any, *, extra_dict: Any = None) -> None:
    """``RemovableHandle.__init__`` (torch/utils/hooks.py): the original counts in an attribute of its class."""
    self.hooks_dict_ref = weakref.ref(hooks_dict)
    self.id = next_number(hooks_dict)
    self.extra_dict_ref = ()
    if is_kind(extra_dict, dict):
        self.extra_dict_ref = (weakref.ref(extra_dict),)
    elif is_kind(extra_dict, list):
        self.extra_dict_ref = tuple(weakref.ref(d) for d in extra_dict)


class HandleNumber(int):
    """A handle's number while tracing. Where the hook or the handle lives on, each call takes the next one."""


def next_number(hooks_dict: Any) -> int:
    """The number of the next handle."""
    number = RemovableHandle.next_id
    RemovableHandle.next_id += 1
    return number


def no_module_hook(self: Any, fn: Any, args: Any) -> Any:
    """``BackwardHook._apply_on_tensors``: the original asks autograd's own records for the place of a module's hook."""
    if torch.is_grad_enabled():
        for arg in args:
            if is_kind(arg, torch.Tensor) and arg.requires_grad:
                module_hook()
    return args, None


def module_hook() -> None:
    """Stands where autograd would be told of a module's backward hook: a graph break (``hooks``)."""


def cached_value(self: Any, instance: Any, owner: Any = None) -> Any:
    """``cached_property.__get__`` (Lib/functools.py): before 3.12 the original computes the value under a lock."""
    if instance is None or self.attrname is None or not hasattr(instance, "__dict__"):
        return original_cached_value(self, instance, owner)
    cache = instance.__dict__
    if self.attrname not in cache:
        cache[self.attrname] = self.func(instance)
    return cache[self.attrname]


def forwards(sequence: Any) -> Any:
    """``iter`` of an array of numpy's (numpy/_core/src/multiarray/iterators.c): each item as its turn comes."""
    for position in range(len(sequence)):
        yield sequence[position]


def backwards(sequence: Any) -> Any:
    """``reversed`` of a sequence (Objects/enumobject.c): the original calls the class's methods from C."""
    return from_the_end(sequence, len(sequence))


def from_the_end(sequence: Any, length: int) -> Any:
    for position in range(length - 1, -1, -1):
        try:
            item = sequence[position]
        except (IndexError, StopIteration):
            return
        yield item


def product(iterable: Any, /, *, start: Any = 1) -> Any:
    """``math.prod``: C multiplies what it is given, sizes and tensors too."""
    for item in iterable:
        start = start * item
    return start


def cut(input: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.tensor_split``, which is the method's."""
    return input.tensor_split(*args, **kwargs)


def cut_at(input: Any, tensor_indices_or_sections: Any, dim: int = 0) -> Any:
    """``tensor_split`` at a tensor of places: how large the pieces are, its fake form cannot say."""
    before = (slice(None),) * (dim % input.dim())
    ends = tensor_indices_or_sections.tolist()
    return tuple(input[(*before, slice(a, b))] for a, b in zip([0, *ends], [*ends, None], strict=True))


def largest(first: Any, *others: Any) -> Any:
    """``max`` of keys and what each belongs to: C asks the same of each, and a branch inside of it has no side exit."""
    key, best = first
    for other, value in others:
        if other > key:
            key, best = other, value
    return best


def smallest(first: Any, *others: Any) -> Any:
    """``min`` of keys and what each belongs to."""
    key, best = first
    for other, value in others:
        if other < key:
            key, best = other, value
    return best


def nothing(*_: Any, **__: Any) -> None:
    """``torch._dynamo.graph_break`` asks torch.compile for a break, for reasons that do not hold here. The optimizers'
    health check warns of CUDA graphs."""


original_optimizer_zero_grad = torch_private.unwrapped(torch.optim.Optimizer.zero_grad)

COPY_PROTOCOL = (
    "__copy__",
    "__reduce_ex__",
    "__reduce__",
    "__getstate__",
    "__setstate__",
    "__getnewargs_ex__",
    "__getnewargs__",
)
STATE = ("__getstate__", "__setstate__")  # that of a copy, in and out
original_cached_value = types.FunctionType(
    functools.cached_property.__get__.__code__, functools.cached_property.__get__.__globals__, "__get__", (None,)
)
original_copy = types.FunctionType(copy.copy.__code__, copy.copy.__globals__, "copy")
original_deepcopy = types.FunctionType(copy.deepcopy.__code__, copy.deepcopy.__globals__, "deepcopy")
COPIED_AS_THEMSELVES = frozenset(
    {type(None), int, float, bool, complex, bytes, str, range, type(Ellipsis), type(NotImplemented), types.CodeType,
     types.FunctionType, types.BuiltinFunctionType, property, torch.dtype, torch.device, torch.layout}
)  # fmt: skip
COPY_IS_METHOD = frozenset({list, dict, set})

# Those that hold whether backward and the optimizer are in the graph or not.
ANYWHERE: dict[Any, Callable[..., Any]] = {
    copy.copy: copied,
    copy.deepcopy: deep_copied,
    math.prod: product,
    torch.tensor_split: cut,
    RemovableHandle.__init__: new_handle,
    functools.cached_property.__get__: cached_value,
    torch_private.module_hook_on_tensors: no_module_hook,
}
SUBSTITUTES: dict[Any, Callable[..., Any]] = ANYWHERE | {
    torch.optim.Optimizer.zero_grad: zero_grad,
    # torch keeps it out of graphs; it arranges lists and dicts of parameters
    torch.optim.Optimizer.add_param_group: torch_private.unwrapped(torch.optim.Optimizer.add_param_group),
    torch.nn.Module.zero_grad: module_zero_grad,
    torch_private.group_tensors_by_device_and_dtype: group_tensors,
    torch.autograd.profiler.record_function: no_range,
    contextlib.ContextDecorator._recreate_cm: recreated,
    torch_private.graph_break: nothing,
    torch_private.health_check: nothing,
}

"""What the user can do about a guard that failed, so that the next such call needs no capture."""

from __future__ import annotations

import types
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..hook import ABSENT
from .program import changed_key
from .recorder import Fact
from .sources import Part, Source, as_written

KEEP_OUT = "make it a tensor, or keep it out of the step"
TEXT = "keep it out of the step: what a text says is decided while capturing"
MADE_ANEW = "make models and optimizers before the step, or do what each call makes them for in a function of its own"
ARGUMENTS = "pass the same arguments in each call, by the same names"
# By the kind of check (``moebius.hook``); those of tensors, dicts and relations have hints of their own below.
HINTS = {
    "equal": KEEP_OUT,
    "contents": KEEP_OUT,
    "length": KEEP_OUT,
    "keys": KEEP_OUT,
    "absent": "set it before the first call, or not at all",
    "is": "pass the same object in each call: what it is was decided while capturing",
    "is_weak": "capture each of them by itself: what is captured belongs to one of them",
    "type": "give it the same type in each call",
    "same": "pass two objects in each call, or one in each: a clone where one tensor stands for two",
    "distinct": "pass two objects in each call, or one in each: a clone where one tensor stands for two",
    "none_of": "pass a clone: an argument is one of the tensors that the step holds, in some calls",
    "answers": "call it in the same state each time, or capture the two ways apart",
    "instance": "make another object instead of changing this one's class or __dict__",
    "class": "set it on an object, or pass it as an argument: what a class holds was decided while capturing",
    "function": "leave the function's code and defaults as they are: pass what changes as an argument",
    "python": "keep it as it was when the step was captured, or out of the step",
}
# By the entry of a tensor's metadata that differs, the first of them.
TENSORS = {
    "type": "pass tensors of one class",
    "dtype": "convert it before the call: each dtype is captured by itself",
    "device": "move it before the call: each device is captured by itself",
    "layout": "convert it before the call: each layout is captured by itself",
    "requires_grad": "leave requires_grad as it is between calls: each way is captured by itself",
    "shape": "pass it with the same number of dimensions",
    "stride": "call .contiguous() on it before the call",
    "storage_offset": "call .clone() on it before the call: it is a view into another tensor",
}
FLAG = "nothing to do where it stays: each of its values is captured once"
ALONE = "nothing to do: a size of 0 or 1 is captured by itself"
SIZES = "nothing to do: a size that varies becomes symbolic"
TRAINING = "each way is captured by itself: call train() or eval() outside of the step, or leave it"
GRADIENT = "with a gradient and without are captured each by itself: zero them in every step, or in none"
NUMBER = "the step decides on this number, and each way is captured by itself: let it take few ways"
RELATION = (
    "its sizes are dynamic already, and the step depends on this relation: pad to few sizes, or keep what needs a "
    "fixed number out of the step"
)


def hint(fact: Fact, now: Any, sizes: set[int]) -> str:
    """For a failed fact. now: what its source leads to in this call, or ABSENT. sizes: the axes of a tensor that have
    another size."""
    kind, *rest = fact.check
    if is_gradient(fact.source) and kind in ("equal", "tensor", "is"):
        return GRADIENT
    if sizes and kind == "tensor":
        if all(type(now.shape[d]) is int and now.shape[d] < 2 for d in sizes):
            return ALONE
        name = as_written(fact.record.source)
        return f"moebius.mark_dynamic({name}, {tuple(sorted(sizes))})" if "(" not in name else SIZES
    if kind in ("tensor", "static_tensor"):
        tensor, meta = (now, rest[1]) if kind == "tensor" else rest
        return of_tensor(tensor, meta)
    if kind == "dict":
        return of_dict(*rest)
    if kind == "python" and is_kind(now, torch.Tensor):
        return RELATION
    if kind == "python" and type(now) in (int, float):
        return NUMBER
    if kind == "equal" and type(now) in (bool, torch.dtype, torch.device):
        return FLAG
    if kind == "equal" and is_kind(now, torch.Tensor):
        return "pass a tensor in each call"
    if kind in ("is", "function") and is_kind(now, type | types.FunctionType) and "<locals>" in now.__qualname__:
        return "define it once, outside of the step: each definition makes another one"
    return TEXT if kind == "equal" and type(now) is str else HINTS[kind]


def is_gradient(source: Source | None) -> bool:
    """Whether a source is the ``.grad`` of a tensor (an attribute of an object of Python's is an entry of its dict)."""
    return is_kind(source, Part) and (source.operation, source.operand) == ("attr", "grad")


def of_tensor(tensor: Any, meta: dict[str, Any]) -> str:
    """By the first of its properties that is another one now."""
    if not is_kind(tensor, torch.Tensor):
        return "pass a tensor in each call" if tensor is not ABSENT else ARGUMENTS
    for name, text in TENSORS.items():
        if meta.get(name) is None:
            continue
        if name == "shape":
            wanted = meta["shape"]
            if len(wanted) != tensor.dim():
                return text
            if any(a is not None and a != b for a, b in zip(wanted, tensor.shape, strict=True)):
                return "leave its size as it is between calls"
        elif name == "type":
            if type(tensor) is not meta["type"]:
                return text
        elif name in ("stride", "storage_offset"):
            if tensor.layout is not torch.strided or getattr(tensor, name)() != meta[name]:
                return text
        elif getattr(tensor, name) != meta[name]:
            return text
    return "pass a plain tensor: no conjugate or negative view, and none made in inference mode"


def of_dict(the_dict: dict[Any, Any], entries: dict[Any, Any], keys: tuple | None) -> str:
    """By the first entry that changed: a module's attribute, a global, an item of a dict."""
    key = changed_key(the_dict, entries)
    if key is None:
        return "keep its keys as they were: the step has gone through all of them" if keys is not None else KEEP_OUT
    now, then = dict.get(the_dict, key, ABSENT), entries[key]
    if now is ABSENT or then is ABSENT:
        return HINTS["absent"]
    if issubclass(type(now), torch.Tensor):
        return "change the tensor in place: the step was captured with the one that was there"
    if type(now) is type(then) is str:
        return TEXT
    if key == "training" and type(now) is type(then) is bool:
        return TRAINING
    if type(now) in (bool, int, float, complex, str, bytes, tuple):
        return KEEP_OUT
    return HINTS["is"]

"""Guards from a file as checks that a loaded step runs before each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_facts.spans import firsts_of, has_memory, span
from .archive import each, fields, index, need
from .relations import read_number
from .values import decode, read_key

PLAIN = (bool, int, float, complex, str, list, tuple, dict, set)
TYPES: dict[str, type] = {"NoneType": type(None), **{t.__name__: t for t in PLAIN}}
TYPES |= {"Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "Buffer": torch.nn.Buffer, "Size": torch.Size}
PATH = ("dict_item", "list_item", "tuple_item", "attr")
ATTRIBUTES = ("grad",)
Fetch = Callable[[Sequence[Any]], Any]
MISSING = object()


class Check:
    """One guard: ``holds(objects)`` is None, or what was found instead. of: how its objects are reached."""

    def __init__(self, text: str, of: list[Fetch], holds: Callable[..., str | None]):
        self.text, self.of, self.holds = text, of, holds

    def failure(self, arguments: Sequence[Any]) -> str | None:
        """What was found in place of what the guard says; None where it holds."""
        objects = []
        for fetch in self.of:
            try:
                objects.append(fetch(arguments))
            except (LookupError, AttributeError, TypeError) as error:
                return f"nothing there ({type(error).__name__})"
        try:
            return self.holds(*objects)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            return f"{', '.join(map(describe, objects))} ({type(error).__name__})"


def describe(value: Any) -> str:
    """What was met, in a few words."""
    if isinstance(value, torch.Tensor):
        grad = ", requires grad" if value.requires_grad else ""
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)} on {value.device}, strides {value.stride()}{grad}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


class CheckReader:
    """Reads guards. arguments: how many there are. state, gradient: make a Fetch for a place in the state, and for the
    gradient of one of its tensors."""

    def __init__(self, arguments: int, state: Callable[[str], Fetch], gradient: Callable[[str], Fetch]):
        self.arguments, self.state, self.gradient = arguments, state, gradient

    def read(self, value: Any) -> Check:
        """One guard. Raises LoadError."""
        need(isinstance(value, dict), "a guard is no object")
        kind = value.get("check")
        reader = READERS.get(kind) if isinstance(kind, str) else None
        need(reader is not None, f"a guard of the kind {kind!r:.40}")
        assert reader is not None
        names, read = reader
        content = fields(value, "a guard", {"check": str, "of": (dict, list), "text": str}, **dict.fromkeys(names))
        places = content["of"] if isinstance(content["of"], list) else [content["of"]]
        of = [self.place(p) for p in places]
        need(len(of) <= 4096, "a guard about too many objects")
        need(kind in MANY or len(of) == 1 + (kind in PAIR), "a guard about another number of objects")
        return Check(content["text"], of, read(content, len(of)))

    def place(self, value: Any) -> Fetch:
        """How an argument's part or a place in the state is reached."""
        need(isinstance(value, dict), "a place is no object")
        if "state" in value:
            return self.state(fields(value, "a place", {"state": str})["state"])
        if "gradient" in value:
            return self.gradient(fields(value, "a place", {"gradient": str})["gradient"])
        content = fields(value, "a place", {"argument": int, "path": list})
        number = index(content["argument"], self.arguments, "an argument's number")
        steps = each(content["path"], "a path", self.step)
        need(len(steps) <= 32, "a path is too long")

        def fetch(arguments: Sequence[Any]) -> Any:
            found = arguments[number]
            for step in steps:
                found = step(found)
            return found

        return fetch

    def step(self, value: Any) -> Callable[[Any], Any]:
        need(isinstance(value, list) and len(value) == 2 and str(value[0]) in PATH, "a step of a path")
        operation = str(value[0])
        if operation == "dict_item":
            name = read_key(value[1])
            return lambda obj: dict.__getitem__(expect(obj, dict), name)
        key = decode(value[1])
        if operation == "attr":
            need(type(key) is str and key in ATTRIBUTES, f"the attribute {key!r:.40} in a path")
            return lambda obj: getattr(expect(obj, torch.Tensor), key)
        need(type(key) is int, "an index in a path")
        kind = list if operation == "list_item" else tuple
        return lambda obj: kind.__getitem__(expect(obj, kind), key)


def expect(obj: Any, kind: type) -> Any:
    if not isinstance(obj, kind):
        raise TypeError(f"a {kind.__name__} is expected")
    return obj


# ----------------------------------------------------------------------------------------------------------------------
# The kinds
# ----------------------------------------------------------------------------------------------------------------------

Holds = Callable[..., str | None]


def same(a: Any, b: Any) -> bool:
    """The same constant: type and value, item by item; NaN is NaN and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b) if type(a) in (float, complex) else bool(a == b)


def read_type(content: dict[str, Any], count: int) -> Holds:
    need(type(content["type"]) is str and content["type"] in TYPES, "a guard's type")
    kind = TYPES[content["type"]]
    return lambda obj: None if type(obj) is kind else describe(obj)


def read_equal(content: dict[str, Any], count: int) -> Holds:
    expected = decode(content["value"])
    return lambda obj: None if same(obj, expected) else describe(obj)


def read_absent(content: dict[str, Any], count: int) -> Holds:
    key = read_key(content["value"])
    return lambda obj: "it is there" if dict.__contains__(obj, key) else None


def read_length(content: dict[str, Any], count: int) -> Holds:
    expected = index(content["length"], 1 << 32, "a length")
    return lambda obj: None if len(obj) == expected else f"{len(obj)} items"


def read_keys(content: dict[str, Any], count: int) -> Holds:
    expected = each(content["items"], "keys", decode)
    return lambda obj: None if same(list(dict.keys(obj)), expected) else f"keys {list(obj)!r}"[:120]


def read_contents(content: dict[str, Any], count: int) -> Holds:
    expected = each(content["items"], "items", decode)
    return lambda obj: None if same(list(obj), expected) else "other items"


def read_distinct(content: dict[str, Any], count: int) -> Holds:
    need(count >= 2, "a guard about several objects")
    return lambda *objs: None if len({id(o) for o in objs}) == len(objs) else "one object twice"


def read_memory(content: dict[str, Any], count: int) -> Holds:
    expected = each(content["firsts"], "firsts", lambda n: index(n, count, "a place"))
    need(len(expected) == count >= 2, "a guard about the memory of several tensors")

    def holds(*tensors: Any) -> str | None:
        if not all(map(has_memory, tensors)):
            return "no plain tensors"
        return None if firsts_of(list(map(span, tensors))) == expected else "others overlap"

    return holds


def read_same(content: dict[str, Any], count: int) -> Holds:
    return lambda a, b: None if a is b else "two objects"


def read_sizes(content: dict[str, Any], count: int) -> Holds:
    holds = read_number(content["relation"], count)
    return lambda *objs: None if holds(objs) is True else f"sizes {', '.join(map(describe, objs))}"[:200]


def read_computed(content: dict[str, Any], count: int) -> Holds:
    evaluate, expected = read_number(content["formula"], count), decode(content["value"])

    def holds(*numbers: Any) -> str | None:
        now = evaluate(numbers)
        return None if same(now, expected) else f"{describe(now)} for {', '.join(map(describe, numbers))}"[:200]

    return holds


SIZES = ("shape", "stride")
FLAGS = ("requires_grad", "storage_offset", "is_leaf", "is_conj", "is_neg", "is_inference")


def said_by(tensor: torch.Tensor, name: str) -> Any:
    """What an attribute of a tensor, or its method without arguments, says."""
    found = getattr(tensor, name)
    return found() if callable(found) else found


def read_tensor(content: dict[str, Any], count: int) -> Holds:
    need(content["type"] is None or (type(content["type"]) is str and content["type"] in TYPES), "a tensor's type")
    kind = None if content["type"] is None else TYPES[content["type"]]
    plain = {k: decode(content[k]) for k in ("dtype", "device", "layout") if content[k] is not None}
    flags = {k: content[k] for k in FLAGS if content[k] is not None}
    need(all(type(v) in (bool, int) for v in flags.values()), "a tensor's flags")
    sizes = {k: content[k] for k in SIZES if content[k] is not None}
    for name, size in sizes.items():
        each(size, name, lambda n: need(n is None or (type(n) is int and 0 <= n < 1 << 48), "a tensor's size"))

    def holds(tensor: Any) -> str | None:
        if not isinstance(tensor, torch.Tensor) or (kind is not None and type(tensor) is not kind):
            return describe(tensor)
        right = all(getattr(tensor, k) == v for k, v in plain.items()) and tensor.layout is torch.strided
        right = right and all(said_by(tensor, k) == v for k, v in flags.items())
        for name, size in sizes.items() if right else ():
            now = said_by(tensor, name)
            right = len(now) == len(size) and all(w is None or n == w for n, w in zip(now, size, strict=True))
            if not right:
                break
        return None if right else describe(tensor)

    return holds


Reader = tuple[tuple[str, ...], Callable[[dict[str, Any], int], Holds]]
PAIR, MANY = ("same",), ("distinct", "memory", "sizes", "number")  # kinds about two objects, or more; else about one
READERS: dict[str, Reader] = {
    "type": (("type",), read_type),
    "equal": (("value",), read_equal),
    "absent": (("value",), read_absent),
    "length": (("length",), read_length),
    "keys": (("items",), read_keys),
    "contents": (("items",), read_contents),
    "distinct": ((), read_distinct),
    "same": ((), read_same),
    "memory": (("firsts",), read_memory),
    "sizes": (("relation",), read_sizes),
    "number": (("formula", "value"), read_computed),
    "tensor": (("type", "dtype", "device", "layout", *SIZES, *FLAGS), read_tensor),
}


def global_state() -> dict[str, Any]:
    """torch's switches that a graph depends on, as JSON."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast on cpu": torch.is_autocast_enabled("cpu") and str(torch.get_autocast_dtype("cpu")),
        "autocast on cuda": torch.is_autocast_enabled("cuda") and str(torch.get_autocast_dtype("cuda")),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }

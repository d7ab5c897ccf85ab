"""Constants as JSON and back: what a graph's arguments and a step's state are made of.

Numbers, strings, None and lists are themselves; everything else is an object with one field that names its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ExportError, LoadError
from .archive import each, need

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int64", "int32",
        "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
    )
    if hasattr(torch, name)
}  # fmt: skip
LAYOUTS = {"strided": torch.strided}
MEMORY_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
DEVICE_TYPES = ("cpu", "cuda", "meta")
NAMES = {value: name for table in (DTYPES, LAYOUTS, MEMORY_FORMATS) for name, value in table.items()}
MAX_INT = 1 << 64  # no size, index or seed is larger

Other = Callable[[Any], Any]


def no_other(value: Any) -> Any:
    raise ExportError(f"a {type(value).__name__} cannot be written to a file")


def encode(value: Any, other: Other = no_other) -> Any:
    """The JSON of a constant. ``other`` encodes what is no constant (a node, a place in the state), or raises."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) <= MAX_INT else no_other(value)
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if kind is list:
        return [encode(v, other) for v in value]
    if kind is tuple:
        return {"tuple": [encode(v, other) for v in value]}
    if kind is torch.Size:
        return {"size": [encode(v, other) for v in value]}
    if isinstance(value, list) and kind.__module__.startswith("torch.fx"):  # fx's immutable list
        return [encode(v, other) for v in value]
    if kind is dict or (isinstance(value, dict) and kind.__module__.startswith("torch.fx")):
        return {"dict": [[encode(k), encode(v, other)] for k, v in value.items()]}
    if kind is slice:
        return {"slice": [encode(v, other) for v in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"constant": "Ellipsis"}
    if kind in (torch.dtype, torch.layout, torch.memory_format) and value in NAMES:
        return {kind.__name__: NAMES[value]}
    if kind is torch.device and value.type in DEVICE_TYPES:
        return {"device": str(value)}
    return other(value)


def decode(value: Any, other: Other | None = None) -> Any:
    """The constant of its JSON. ``other`` decodes objects of a kind that is no constant. Raises LoadError."""
    if value is None or type(value) in (bool, str, float):
        return value
    if type(value) is int:
        need(abs(value) <= MAX_INT, "a number is too large")
        return value
    if type(value) is list:
        return [decode(v, other) for v in value]
    need(type(value) is dict and len(value) == 1, "a constant is an object with one field")
    ((kind, content),) = value.items()
    reader = READERS.get(kind)
    if reader is not None:
        return reader(content, other)
    if other is None:
        raise LoadError(f"a constant of the kind {kind!r:.40}")
    return other(value)


def read_float(content: Any, other: Other | None) -> float:
    need(type(content) is str and content in ("nan", "inf", "-inf"), "a float that is not finite is nan, inf or -inf")
    return float(content)


def read_complex(content: Any, other: Other | None) -> complex:
    parts = each(content, "a complex number", decode)
    need(len(parts) == 2 and all(type(p) is float for p in parts), "a complex number has two floats")
    return complex(*parts)


def read_tuple(content: Any, other: Other | None) -> tuple:
    return tuple(each(content, "a tuple", lambda v: decode(v, other)))


def read_size(content: Any, other: Other | None) -> Any:
    items = read_tuple(content, other)
    return torch.Size(items) if all(type(i) is int for i in items) else items


def read_key(content: Any) -> Any:
    key = decode(content)
    need(type(key) in (str, int, bool, float, type(None)), "a dictionary's key is a number or a string")
    return key


def read_pair(item: Any, read: Callable[[Any], Any]) -> tuple[Any, Any]:
    need(type(item) is list and len(item) == 2, "a dictionary's item is a pair")
    return read_key(item[0]), read(item[1])


def read_dict(content: Any, other: Other | None) -> dict:
    pairs = each(content, "a dictionary", lambda item: read_pair(item, lambda value: decode(value, other)))
    found = dict(pairs)
    need(len(found) == len(pairs), "a dictionary has a key twice")
    return found


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's elements fill their memory, in any order of the axes."""
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def read_slice(content: Any, other: Other | None) -> slice:
    parts = read_tuple(content, other)
    need(len(parts) == 3, "a slice has three parts")
    return slice(*parts)


def read_constant(content: Any, other: Other | None) -> Any:
    need(content == "Ellipsis", "an unknown constant")
    return Ellipsis


def read_device(content: Any, other: Other | None = None) -> torch.device:
    need(type(content) is str, "a device is a string")
    kind, _, number = content.partition(":")
    need(kind in DEVICE_TYPES and (not number or (number.isdecimal() and len(number) < 4)), f"device {content!r:.40}")
    return torch.device(content)


def from_table(table: dict[str, Any], what: str) -> Callable[[Any, Other | None], Any]:
    def read(content: Any, other: Other | None = None) -> Any:
        need(type(content) is str and content in table, f"{what} {content!r:.40} is not one of this torch's")
        return table[content]

    return read


read_dtype = from_table(DTYPES, "dtype")
READERS: dict[str, Callable[[Any, Other | None], Any]] = {
    "float": read_float,
    "complex": read_complex,
    "tuple": read_tuple,
    "size": read_size,
    "dict": read_dict,
    "slice": read_slice,
    "constant": read_constant,
    "device": read_device,
    "dtype": read_dtype,
    "layout": from_table(LAYOUTS, "layout"),
    "memory_format": from_table(MEMORY_FORMATS, "memory format"),
}

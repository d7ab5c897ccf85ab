"""A value in words: what is compared of it."""

from __future__ import annotations

import enum
import hashlib
import re
import types
from typing import Any

import numpy as np
import torch

DEPTH = 6
ADDRESSES = range(2**46, 2**47)  # of Linux's processes


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def described(value: Any, depth: int = 0) -> str:
    """Types, numbers bit by bit, the metadata of tensors, the parts of containers and of objects."""
    if depth > DEPTH:
        return "…"
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"{name}{tensor(value)}"
    if isinstance(value, np.ndarray):
        return f"{name}[{value.dtype}, {value.shape}, {digest(value)}]"
    if isinstance(value, list | tuple):
        return f"{name}({', '.join(described(v, depth + 1) for v in value)})"
    if isinstance(value, dict):
        return (
            f"{name}({', '.join(described(k, depth + 1) + ': ' + described(v, depth + 1) for k, v in value.items())})"
        )
    if isinstance(value, set | frozenset):
        return f"{name}({', '.join(sorted(described(v, depth + 1) for v in value))})"
    if isinstance(value, torch.nn.Module | type | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return f"{name} {getattr(value, '__qualname__', '')}"
    if isinstance(value, enum.Enum):  # (whose parts lead to all members, and from there on)
        return f"{name} {value.name}"
    if isinstance(value, int) and value in ADDRESSES:
        return f"{name} that may be an address"
    if hasattr(value, "__dict__") and not isinstance(value, types.ModuleType):
        return f"{name}({', '.join(f'{k}={described(v, depth + 1)}' for k, v in vars(value).items())})"
    return f"{name} {without_addresses(repr(value))[:200]}"


def tensor(value: torch.Tensor) -> list[Any]:
    try:
        plain = value.detach().to_dense() if value.is_sparse else value.detach()
        plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
        numbers = digest(plain.to(torch.float64).nan_to_num(12345.0).numpy())
        return [str(value.dtype), [*value.shape], value.stride(), value.requires_grad, value.is_leaf, numbers]
    except (RuntimeError, NotImplementedError, TypeError) as error:  # subclasses, layouts and devices without numbers
        return [str(value.dtype), type(error).__name__]


def digest(value: np.ndarray) -> str:
    return hashlib.sha1(np.ascontiguousarray(value).tobytes()).hexdigest()[:10]

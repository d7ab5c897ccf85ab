"""Two runs of one step compared: the first difference in words."""

from __future__ import annotations

import collections
import math
import types
from typing import Any

import torch

# Kernels that compute the same in another order round differently; as a part of the largest number in a tensor.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
CONSTANT = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, torch.Generator)


def tensors_differ(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """In what two tensors differ: metadata exactly, numbers up to rounding; NaN is NaN."""
    for name in ("dtype", "device", "shape", "requires_grad"):
        if getattr(a, name) != getattr(b, name):
            return f"{name} {getattr(a, name)} against {getattr(b, name)}"
    if a.is_meta or a.layout is not torch.strided or not a.numel():
        return None
    x, y = a.detach().as_subclass(torch.Tensor), b.detach().as_subclass(torch.Tensor)
    if not (x.is_floating_point() or x.is_complex()):
        return None if torch.equal(x, y) else "other numbers"
    if x.is_complex():
        x, y = torch.view_as_real(x.resolve_conj()), torch.view_as_real(y.resolve_conj())
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()) or not torch.equal(x[~finite].nan_to_num(), y[~finite].nan_to_num()):
        return "NaN or infinity in other places"
    x, y = torch.where(finite, x, 0).double(), torch.where(finite, y, 0).double()
    largest, off = float(y.abs().max()), float((x - y).abs().max())
    rounding = ROUNDING.get(a.dtype, ROUNDING[torch.bfloat16])
    alike = off <= rounding * max(largest, 1e-6)
    return None if alike else f"numbers differ by {off:.3g} where the largest is {largest:.3g}"


class Comparison:
    """Walks what the captured and the plain run left behind, each pair of objects once."""

    def __init__(self) -> None:
        self.met: set[tuple[int, int]] = set()

    def difference(self, got: Any, want: Any, where: str) -> str | None:
        """The first difference, depth first, or None."""
        if got is want or (id(got), id(want)) in self.met or isinstance(got, CONSTANT):
            return None
        self.met.add((id(got), id(want)))
        if type(got) is not type(want):
            return f"{where}: {type(got).__qualname__} against {type(want).__qualname__}"
        if isinstance(got, torch.Tensor):
            if found := tensors_differ(got, want):
                return f"{where}: {found}"
            return self.difference(got.grad, want.grad, f"{where}.grad") if got.is_leaf else None
        if isinstance(got, bool | int | str | bytes):
            return None if got == want else f"{where}: {got!r:.80} against {want!r:.80}"
        if isinstance(got, float):
            same = math.isclose(got, want, rel_tol=ROUNDING[torch.float32]) or (got != got and want != want)
            return None if same else f"{where}: {got!r} against {want!r}"
        if isinstance(got, dict):
            return self.mapping(got, want, where)
        if isinstance(got, list | tuple | collections.deque):
            if len(got) != len(want):
                return f"{where}: {len(got)} items against {len(want)}"
            pairs = enumerate(zip(got, want, strict=True))
            return next((d for i, (a, b) in pairs if (d := self.difference(a, b, f"{where}[{i}]"))), None)
        if isinstance(got, set | frozenset):
            return None if len(got) == len(want) else f"{where}: {len(got)} items against {len(want)}"
        if isinstance(got, torch.optim.Optimizer):
            found = self.difference(got.state, want.state, f"{where}.state")
            return found or self.difference(got.param_groups, want.param_groups, f"{where}.param_groups")
        namespace = getattr(got, "__dict__", None)
        return self.mapping(namespace, want.__dict__, where, ".") if isinstance(namespace, dict) else None

    def mapping(self, got: dict, want: dict, where: str, dot: str = "") -> str | None:
        if len(got) != len(want):
            return f"{where}: {len(got)} entries against {len(want)}"
        for (key, a), (other, b) in zip(got.items(), want.items(), strict=True):
            if isinstance(key, str | int) and key != other:
                return f"{where}: key {key!r} against {other!r}"
            place = f"{where}.{key}" if dot else f"{where}[{key!r:.40}]"
            if found := self.difference(a, b, place):
                return found
        return None

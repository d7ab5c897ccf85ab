"""Which operators may fail on a call's data, though they went well on fakes."""

from __future__ import annotations

from typing import Any

from moebius.interpreter import is_kind
from moebius.lowering.operators import NEVER_FAILING
from moebius.lowering.step import draw_array

from ..values.numbers import CLOCKS
from ..values.values import SYMBOLIC, RuntimeNumber, TensorProxy
from .fakes import leaves

# What fails on some floats; any other operator on floats alone gives a NaN where it can do nothing better.
OF_FLOATS = frozenset({"grad", "backward", "multinomial", "normal", "normal_", "poisson", "binomial", "masked_scatter"})
FAMILIES = ("linalg", "cholesky", "inverse", "solve", "eig", "lstsq", "svd", "bernoulli", "hist", "entropy", "assert")
# What does not fail on any integers or booleans, whose sizes the fakes have seen.
OF_INTEGERS = frozenset(
    (
        "add sub mul neg abs eq ne lt le gt ge and_ or_ xor invert view reshape expand flatten squeeze unsqueeze "
        "permute t transpose contiguous clone detach to cpu cuda float double half bfloat16 long int bool type_as "
        "cat stack sum any all cumsum sort argsort topk max min amax amin argmax argmin masked_fill masked_fill_ "
        "where zeros_like ones_like full_like fill_ zero_ copy_ unbind split chunk narrow nonzero unique dim size "
        "logical_not logical_and logical_or logical_xor numel tril triu roll flip item tolist"
    ).split()
)
PYTHONS = frozenset(("math", "cmath", "_operator", "builtins"))


def may_raise_on_data(target: Any, args: tuple) -> bool:
    """Whether an operator that went well on fakes may fail on the data of a call."""
    name = target if is_kind(target, str) else getattr(target, "__name__", "")
    home = "torch" if is_kind(target, str) else (getattr(target, "__module__", None) or "torch").split(".")[0]
    if (home == "moebius" and target is not draw_array) or target in CLOCKS:
        return False
    of_python = getattr(target, "__module__", None) in PYTHONS or (args and is_kind(args[0], RuntimeNumber))
    if of_python and any(is_kind(part, (RuntimeNumber, *SYMBOLIC)) for part in leaves(args)):
        return target not in NEVER_FAILING
    if home not in ("torch", "_operator", "builtins"):
        return True
    if name in OF_FLOATS or any(part in name for part in FAMILIES):
        return True
    tensors = [part.fake for part in leaves(args) if is_kind(part, TensorProxy)]
    floats = all(one.is_floating_point() or one.is_complex() for one in tensors)
    return not floats and name not in OF_INTEGERS

"""Which operators may fail on a call's data, though they went well on fakes; and why one fails on fakes alone."""

from __future__ import annotations

import functools
from typing import Any

from moebius.interpreter import is_kind
from moebius.lowering.operators import NEVER_FAILING
from moebius.lowering.step import draw_array

from ..torch_facts import torch_fakes, torch_sizes
from ..values.numbers import CLOCKS
from ..values.values import SYMBOLIC, Break, RuntimeNumber, TensorProxy
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
UNKNOWN = (RuntimeNumber, *SYMBOLIC)
PYTHONS = frozenset(("math", "cmath", "_operator", "builtins"))


def may_raise_on_data(target: Any, args: tuple) -> bool:
    """Whether an operator that went well on fakes may fail on the data of a call."""
    named = is_kind(target, str)
    module = None if named else getattr(target, "__module__", None)
    home = (module or "torch").partition(".")[0]
    if (home == "moebius" and target is not draw_array) or target in CLOCKS:
        return False
    of_python = module in PYTHONS or (args and is_kind(args[0], RuntimeNumber))
    given = leaves(args)
    if of_python and any(is_kind(part, UNKNOWN) for part in given):
        return target not in NEVER_FAILING
    if home not in ("torch", "_operator", "builtins"):
        return True
    name = target if named else getattr(target, "__name__", "")
    if fails_on_floats(name):
        return True
    tensors = [part.fake for part in given if is_kind(part, TensorProxy)]
    floats = all(one.is_floating_point() or one.is_complex() for one in tensors)
    return not floats and name not in OF_INTEGERS


@functools.cache
def fails_on_floats(name: str) -> bool:
    return name in OF_FLOATS or any(part in name for part in FAMILIES)


def lacks_fake(function: Any) -> Break:
    """The graph break at an operator that has no form for fake tensors, or none for sizes and numbers that vary."""
    name = getattr(function, "__name__", str(function))
    return Break("operator without a fake", name, "give it one: torch.library.register_fake; it runs natively")


def depends_on_data(function: Any, error: Exception) -> Break:
    """The graph break where an operator's fake says that it needs real values, or where there is none."""
    if torch_fakes.lacks_fake(error):
        return lacks_fake(function)
    name, asked = getattr(function, "__name__", str(function)), torch_sizes.asked_by(error)
    detail = f"{name} asks whether {asked}" if asked else f"{name}: {str(error).splitlines()[0][:160]}"
    return Break("data-dependent operator", detail, "write it without a branch or a size that depends on values")

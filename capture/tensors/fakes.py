"""Fake tensors in the place of what is traced, as operators are called with them."""

from __future__ import annotations

import enum
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..torch_facts import torch_fakes, torch_private
from ..values.numbers import Number
from ..values.values import SYMBOLIC, Break, RuntimeNumber, SymbolicObject, TensorProxy

# Questions whose answer is the same with an axis of size 1 less.
OF_ANY_RANK = frozenset(("numel", "nelement", "element_size", "is_floating_point", "is_complex", "dtype", "device",
                         "layout", "is_cpu", "is_cuda", "nbytes", "itemsize", "requires_grad", "is_leaf"))  # fmt: skip
# Questions about a sparse tensor that its shape, dtype and layout answer, whatever its entries are.
OF_ANY_ENTRIES = OF_ANY_RANK - {"nbytes"} | frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "len", "iter", "sparse_dim", "dense_dim", "is_sparse",
    "is_sparse_csr", "is_same_size", "names", "is_meta", "is_quantized", "is_mkldnn", "is_nested"))  # fmt: skip
QUANTISED = frozenset(
    dtype for name, dtype in vars(torch).items() if type(dtype) is torch.dtype and name.startswith(("qint", "quint"))
)
PLAIN = frozenset((type(None), bool, int, float, str))  # they have no parts, and no fakes
LIBRARIES = frozenset(("builtins", "moebius", "torch", "enum", "numpy"))


def dropped_out(x: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> torch.Tensor | None:
    """What dropout gives for a fake of unknown size, of which torch would ask whether it is empty; else None."""
    fits = 0 <= p <= 1 if type(p) in (int, float) else type(p) in (Number, torch.SymFloat)
    plain = is_kind(x, TensorProxy) and fits and training is True and not inplace
    if not plain or not torch_private.depends_on_values(x.fake) or not x.fake.dtype.is_floating_point:
        return None
    return x.fake * 1.0


def fake_of(value: Any, shaped: bool = False) -> Any:
    """The same structure with fakes in place of proxies. shaped: whether floats may decide the result's shape; else a
    float that varies is today's, or some one, and nothing is guarded of it."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if is_kind(value, TensorProxy):
        return value.fake
    if kind is torch.dtype and value in QUANTISED:
        hint = "quantise before the step; `fake_quantize_per_tensor_affine` stays in the graph"
        raise Break("tensor layout", f"an operator is asked for {value}: fakes have no quantised numbers", hint)
    if is_kind(value, Number):
        settled = value.settled()
        return plain_float(settled.representative) if settled is value else settled
    if kind is torch.SymFloat:
        return value if shaped else plain_float(torch_fakes.some_float(value))
    if kind in (tuple, list):
        return kind([fake_of(v, shaped) for v in value])
    if is_kind(value, list):
        return [fake_of(v, shaped) for v in value]
    if is_kind(value, tuple) and kind is not torch.Size:
        items = [fake_of(v, shaped) for v in value]
        return kind(*items) if hasattr(value, "_fields") else tuple(items)
    if is_kind(value, dict):
        return {k: fake_of(v, shaped) for k, v in value.items()}
    if is_kind(value, slice):
        return slice(fake_of(value.start), fake_of(value.stop), fake_of(value.step))
    if issubclass(kind, SymbolicObject):
        value.refuse("a use as an argument")
    return value


def refuse_doubtful(world: torch_fakes.FakeWorld, question: Any, values: Iterable[Any], result: Any = None) -> None:
    """A graph break where Python asks what only the running step knows, and fakes say something: how many axes there
    are (``x[mask].squeeze(0)`` has one less where one row was found), or what a sparse tensor has entries of (its fake
    has none). result: the operator's, where an operator is asked."""
    doubts = world.mode.rank_in_doubt
    name = question if is_kind(question, str) else getattr(question, "__name__", "")
    for value in values:
        if not is_kind(value, TensorProxy):
            continue
        if doubts and name not in OF_ANY_RANK and id(value.fake) in doubts and not has_tensor(result):
            hint = "squeeze an axis whose size is known, or ask before squeezing"
            raise Break("size that depends on values", f"{name} after squeeze() of rows that the data chooses", hint)
        if value.fake.layout is not torch.strided and name not in OF_ANY_ENTRIES and tells_entries(result):
            hint = "ask outside of the step; operators on sparse tensors that give dense ones stay in the graph"
            raise Break("size that depends on values", f"{name} of a sparse tensor: the data decides its entries", hint)


def tells_entries(result: Any) -> bool:
    """Whether what an operator gave for a sparse fake, which has no entries, may follow from how many there are."""
    tensors = [leaf for leaf in torch_private.tree_leaves(result) if is_kind(leaf, torch.Tensor)]
    return not tensors or any(t.layout is torch.strided and t.numel() == 0 for t in tensors)


def plain_float(value: Any) -> Any:
    """A number of which operators make no case of its own: dropout of nothing gives back what it is given."""
    return 0.5 if type(value) is float and value in (0.0, 1.0) else value


def takes_numbers(function: Callable[..., Any]) -> bool:
    """Whether it is an operator of Python's on two numbers: with a tensor, an int is no size there."""
    try:
        return type(function(7, 2)) in (int, float, bool)
    except TypeError:
        return False


ARITHMETIC = frozenset(f for f in vars(operator).values() if type(f) is types.BuiltinFunctionType and takes_numbers(f))


def as_operand(value: Any) -> Any:
    """An operand of arithmetic: an int that the graph has as a number stays one, whatever it is in this call."""
    is_open = is_kind(value, Number) and value.kind is int and value.known and value.node is not None
    return value.representative if is_open and value.size is None else value


@functools.cache
def flags_of(function: types.FunctionType) -> dict[str, int]:
    """Parameters that are yes or no, by what a function in Python has for them -> their places."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: i for i, p in enumerate(parameters) if type(p.default) is bool}


def decided_flags(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments of an operator; a number that it takes for a yes or no is this call's, under a guard: a function of
    torch's in Python decides by it what it does (``F.relu(x, inplace=n)``)."""
    given = (*args, *kwargs.values())
    if type(function) is types.FunctionType and any(is_kind(v, RuntimeNumber) or type(v) in SYMBOLIC for v in given):
        flags = flags_of(function)
        args = tuple(decided(v) if i in flags.values() else v for i, v in enumerate(args))
        kwargs = {name: decided(v) if name in flags else v for name, v in kwargs.items()}
    return args, kwargs


def decided(value: Any) -> Any:
    if is_kind(value, RuntimeNumber):
        return value.numbers.constant(value)  # type: ignore[attr-defined]
    return bool(value) if type(value) in SYMBOLIC else value


def refuse_numbers(value: Any) -> None:
    """A graph break if a number that the graph computes is among the leaves: it would decide a shape."""
    for leaf in torch_private.tree_leaves(value):
        if is_kind(leaf, Number):
            leaf.numbers.constant(leaf)


STATED = (torch.Tensor, enum.Enum, str, dict, type)  # what an operator is given as it is


def refuse_answering(value: Any, stated: tuple[type, ...] = STATED) -> None:
    """A graph break if an operator would ask an object of the user's what it is (``__torch_function__``, ``__index__``,
    ``__len__`` and more), or empty a capsule: once for the fakes, and once more for the graph."""
    kind = type(value)
    if kind is TensorProxy or kind in PLAIN:
        return
    if is_kind(value, (list, tuple)):
        for item in value:
            refuse_answering(item)
    elif is_kind(value, slice):
        for bound in (value.start, value.stop, value.step):
            refuse_answering(bound, (torch.Tensor,))
    elif kind.__name__ == "PyCapsule" or not (
        kind.__module__.partition(".")[0] in LIBRARIES or issubclass(kind, stated)
    ):
        hint = "make a number, a list or a tensor of it first"
        raise Break("object read by an operator", f"an operator in C asks a {kind.__name__} for what it holds", hint)


def has_tensor(value: Any) -> bool:
    """Whether tensors are among the leaves."""
    return is_kind(value, torch.Tensor) or any(is_kind(leaf, torch.Tensor) for leaf in leaves(value))


def leaves(value: Any) -> list[Any]:
    """What is in lists, tuples, dicts and slices."""
    found: list[Any] = []
    gather(value, found)
    return found


def gather(value: Any, found: list[Any]) -> None:
    """Puts the leaves there."""
    if is_kind(value, (tuple, list)):
        for part in value:
            gather(part, found)
    elif is_kind(value, dict):
        for part in value.values():
            gather(part, found)
    elif is_kind(value, slice):
        gather((value.start, value.stop, value.step), found)
    else:
        found.append(value)

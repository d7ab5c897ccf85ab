"""What is known of a node's value without running it: ``meta["val"]``, and where the user wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import fx

from moebius.lowering.autocast import autocast_at, autocast_now, casting
from moebius.lowering.graph import ExpertRegion
from moebius.lowering.memo import MEMO
from moebius.lowering.torch_private import fake_mode_of, same_size, same_stride

Where = tuple[str, int, str]
There = TypeVar("There")


def certain(value: There | None) -> There:
    """The value, which is certainly there."""
    assert value is not None
    return value


def value_of(node: Any) -> Any:
    """The fake (or example) value of an FX argument; a constant is its own."""
    if isinstance(node, fx.Node):
        return node.meta.get("val")
    if isinstance(node, tuple | list):
        return tuple(value_of(item) for item in node)
    if isinstance(node, slice):
        return slice(value_of(node.start), value_of(node.stop), value_of(node.step))
    return node


def tensor_of(node: Any) -> torch.Tensor | None:
    """The node's value if it is known to be a tensor."""
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) else None


def real_of(node: fx.Node) -> Any:
    """The tensor that an input of the graph was when it was captured, as long as that is there."""
    reference = node.meta.get("tensor")
    return reference() if callable(reference) else reference


def needs_gradient(value: Any) -> bool:
    """Whether the value, or one of several, is a tensor that needs a gradient."""
    if isinstance(value, tuple | list):
        return any(map(needs_gradient, value))
    return isinstance(value, torch.Tensor) and value.requires_grad


def shape_of(node: Any) -> tuple | None:
    """Sizes (ints or SymInts), or None where the value is no known tensor."""
    value = tensor_of(node)
    return None if value is None else tuple(value.shape)


def rank_of(node: Any) -> int:
    """How many axes a tensor has; 0 for what is not known to be one."""
    return len(shape_of(node) or ())


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of a node that is known to be a tensor."""
    value = tensor_of(node)
    return None if value is None else value.dtype


def is_floating(node: Any) -> bool:
    """Whether it is known to be a tensor of floating point."""
    value = tensor_of(node)
    return value is not None and value.dtype.is_floating_point


def memory_order(value: torch.Tensor) -> list[int] | None:
    """Its axes, the outermost in memory first; None where it is not known to fill its memory."""
    order: list[int] = []
    expected: Any = 1
    while len(order) < value.dim():
        left = [axis for axis in range(value.dim()) if axis not in order]
        inner = [a for a in left if same_size(value.shape[a], 1) or same_stride(value.stride(a), expected)]
        if not inner:
            return None
        order.insert(0, inner[-1])
        expected = expected * value.shape[inner[-1]]
    return order


def lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors of one shape certainly have the same strides, where these matter."""
    return all(same_size(n, 1) or same_stride(i, j) for n, i, j in zip(a.shape, a.stride(), b.stride(), strict=True))


def same_shape(a: tuple | None, b: tuple | None) -> bool:
    """Whether both are known and certainly equal."""
    return a is not None and b is not None and len(a) == len(b) and all(map(same_size, a, b))


def where_of(node: fx.Node) -> Where:
    """(file, line, function) of the user's line; ("", 0, "") where capture did not say."""
    return node.meta.get("where") or ("", 0, "")


TORCH_FILES = torch.__file__.removesuffix("__init__.py")


def users_place(node: fx.Node) -> Where:
    """The place in the innermost frame that is not torch's own (``nn.Linear`` calls the product)."""
    for place in reversed(node.meta.get("stack", ())):
        if not place[0].startswith(TORCH_FILES):
            return place
    return where_of(node)


def users_line(node: fx.Node) -> tuple[str, int]:
    """Its file and line."""
    return users_place(node)[:2]


def describe_where(node: fx.Node) -> str:
    """`file:line` for messages."""
    file, line = users_line(node)
    return f"{file}:{line}" if file else "a line that capture did not record"


def refuse(region: ExpertRegion, reason: str, node: fx.Node) -> None:
    """Say why a region stays as it is written, and where that is."""
    region.refusal, region.blocker = f"{reason} ({describe_where(node)})", users_place(node)


Onwards = Callable[[fx.Node], Iterable[fx.Node]]


def computed_of(starts: Iterable[fx.Node], onwards: Onwards | None = None) -> set[fx.Node]:
    """What these nodes are computed of, they included. onwards: the arguments of a node to go on to; else all."""
    seen = set[fx.Node]()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes if onwards is None else onwards(node)
    return seen


def results_of(graph: fx.Graph) -> list[Any]:
    """What a graph gives out."""
    given: Any = graph.output_node().args[0]
    return list(given) if isinstance(given, tuple | list) else [given]


def nodes_between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes that stand behind the first, which is no later one, and before the last."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def reaches(start: set[fx.Node], wanted: set[fx.Node], least: fx.Node, itself: bool = False) -> bool:
    """Whether nodes are computed of wanted ones, or are such themselves. least: the first of those in the graph."""
    if itself and start & wanted:
        return True
    seen, pending = set(start), list(start)
    while pending:
        for argument in pending.pop().all_input_nodes:
            if argument in wanted:
                return True
            if argument not in seen and not argument < least:
                seen.add(argument)
                pending.append(argument)
    return False


def add_call(graph: fx.Graph, like: fx.Node, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
    """A call_function node (call_method, where ``target`` is a name) with ``like``'s place and a value of its own."""
    op = "call_method" if isinstance(target, str) else "call_function"
    node = stands_at(graph.create_node(op, target, args, kwargs), like)
    node.meta["val"] = infer(node)
    return node


def put_before(place: fx.Node, target: Callable[..., Any] | str, args: tuple, like: fx.Node, value: Any) -> fx.Node:
    """A call before a node, with ``like``'s place and a value that is known."""
    op = "call_method" if isinstance(target, str) else "call_function"
    with place.graph.inserting_before(place):
        node = stands_at(place.graph.create_node(op, target, args), like)
    node.meta["val"] = value
    return node


def stands_at(node: fx.Node, like: fx.Node) -> fx.Node:
    """The node, said to be of ``like``'s place in the user's program."""
    node.meta.update({key: like.meta[key] for key in ("where", "stack", "number") if key in like.meta})
    return node


# fx keeps a table of nodes by operator, and every plain assignment to a node takes the node out and puts it back
SET_ARGS: Any = vars(fx.Node)["args"].fset
SET_KWARGS: Any = vars(fx.Node)["kwargs"].fset


def copy_node(graph: fx.Graph, node: fx.Node, place: Callable[[fx.Node], Any]) -> fx.Node:
    """What ``graph.node_copy`` makes, at half the time: a copy at the graph's end, its arguments given by ``place``.

    (Arguments that are given to create_node are searched for symbols, each time.)
    """
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    SET_ARGS(copy, fx.map_arg(node.args, place))
    if node.kwargs:
        SET_KWARGS(copy, fx.map_arg(node.kwargs, place))
    copy.meta.update(node.meta)
    return copy


def erase_new(graph: fx.Graph, before: set[fx.Node]) -> None:
    """Takes out again what a failed attempt wrote."""
    for node in [node for node in reversed(graph.nodes) if node not in before]:
        graph.erase_node(node)


def apply(node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a call node's function or method gives for these arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def infer(node: fx.Node) -> Any:
    """The value that a node has for its arguments' values: fake for fake ones.

    While passes run, operators on tensors of equal metadata have one value, under one autocast: of a fake only the
    metadata counts.
    """
    args, kwargs = value_of(node.args), {key: value_of(value) for key, value in node.kwargs.items()}
    known = None if MEMO.known is None else MEMO.known.values
    casts = autocast_at(node)
    key = None if known is None else (node.op, node.target, described(args), described(tuple(kwargs.items())), casts)
    try:
        if known is not None and key in known:
            return known[key]
    except TypeError:
        key = None  # a symbolic size, which has no hash
    values = [value_of(argument) for argument in node.all_input_nodes]
    with fake_mode_of(values), torch.no_grad(), casting(casts) if casts != autocast_now() else nullcontext():
        found = apply(node, args, kwargs)
    if known is not None and key is not None and isinstance(found, torch.Tensor):
        known[key] = found
    return found


def described(value: Any) -> Any:
    """A value as a key: metadata of a tensor, constants with their types."""
    if isinstance(value, torch.Tensor):
        mode = getattr(value, "fake_mode", None)
        where = (value.stride(), value.storage_offset()) if value.layout is torch.strided else None
        return type(value), id(mode), value.dtype, value.device, value.layout, value.shape, where, value.requires_grad
    if isinstance(value, tuple | list):
        return type(value), tuple(described(item) for item in value)
    if isinstance(value, slice):
        return slice, described((value.start, value.stop, value.step))
    return type(value), repr(value) if isinstance(value, float | complex) else value

"""Answers that rest on strides, or on sizes, which an operator's fake tells otherwise than the operator.

Torch's fakes of some operators give what they compute other strides than the operators do, where an operand is not
contiguous; those of many do along axes of size 1 and 0, where an operand has other strides there than a new tensor
(found by comparing the two over all public functions and torch's own sample inputs, torch 2.13 on a CPU:
tests/capture/test_layouts_of_all.py). No operator computes something else for that, but a program that asks decides by
it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind

from ..heap.heap import LAYOUTS, Heap
from ..torch_facts import torch_private
from ..values.values import Break, TensorProxy

ASK = frozenset(("is_contiguous", "stride", "dim_order"))
EXACT = frozenset(("stride", "dim_order"))  # they tell along axes of size 1 and 0 too
GIVE_BACK = "contiguous"  # its operand, where that is contiguous already
# By the name in a graph; of a batch norm what is in channels_last is known well.
UNSURE = frozenset(
    (
        "angle copysign div divide fft_fftshift fft_ifftshift floor_divide floordiv __floordiv__ __rfloordiv__ getitem "
        "__getitem__ heaviside isin lcm ldexp linalg_matrix_exp log_sigmoid logaddexp matrix_exp unfold "
        "logaddexp2 logical_and logical_or logical_xor xlogy special_xlogy special_xlog1py normal poisson rrelu "
        "batch_norm channel_shuffle native_channel_shuffle one_hot pad roll max_pool1d max_pool1d_with_indices "
        "max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d"
    ).split()
)
# They leave ``out`` the sizes that it has, if those are of as many numbers; their fakes make one dimension of it.
FILLING = frozenset(("arange", "range", "linspace", "logspace"))
# What they compute is contiguous, whatever their operands are.
SURE = frozenset(("contiguous", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "embedding"))
# Where a size is 1 or 0 their fakes may differ though all operands are laid out plainly.
NEVER_EXACT = frozenset(("einsum", "bilinear", "rms_norm", "conv3d", "native_channel_shuffle", "channel_shuffle"))
# Their fakes ask the operator's own code, along axes of size 1 too.
ALWAYS_EXACT = frozenset(("conv1d", "conv2d"))
# They name the numbers of their operand otherwise; its strides are theirs.
VIEWS = frozenset(
    (
        "getitem __getitem__ transpose permute t adjoint swapaxes swapdims movedim moveaxis unsqueeze squeeze expand "
        "expand_as select narrow chunk split unbind detach"
    ).split()
)


def refuse_resized(
    function: Any, out: Any, args: tuple, kwargs: dict[str, Any], on_fakes: Callable[..., Any]
) -> None:
    """A graph break where ``out`` gets the strides that an operator computes, as it is of other sizes."""
    name = getattr(function, "__name__", "")
    outs = [proxy for proxy in (out if is_kind(out, tuple | list) else (out,)) if is_kind(proxy, TensorProxy)]
    if name in FILLING and any(proxy.fake.dim() != 1 for proxy in outs):
        raise Break("out= of other sizes", f"{name} may keep or change them", "give it a tensor of one dimension")
    operands = [leaf.fake for leaf in torch_private.tree_leaves(args) if is_kind(leaf, TensorProxy)]
    if all(is_plain(operand) for operand in operands) and not name.startswith("fft_"):
        return
    others = {key: value for key, value in kwargs.items() if key != "out"}
    given = torch_private.tree_leaves(on_fakes(function, args, others))
    if [proxy.fake.shape for proxy in outs] != [tensor.shape for tensor in given]:
        detail = f"{name} with out= of other sizes than its result: strides that are known when it runs"
        raise Break("out= of other sizes", detail, "give it a tensor of the result's sizes, or leave out= away")


def refuse_lost_tangent(function: Any, result: Any) -> None:
    """A graph break where a tensor is asked for its forward-mode derivative, and its fake has none: the tensor may."""
    if getattr(function, "__name__", "") == "_unpack_dual" and result[1] is None:
        raise Break("forward-mode derivative", "a tensor from before this graph may have one", "it runs natively")


class Layouts:
    """What one trace has asked of the strides of its nodes: each question goes on from the answers before it."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self.sure: dict[bool, set[fx.Node]] = {False: set(), True: set()}  # by ``exactly``: all that they come from is

    def changed(self, tensor: Any) -> None:
        """A tensor was given other sizes or strides in place."""
        made = is_kind(tensor, TensorProxy) and tensor.source is None
        number = tensor.node.meta.get("number", 0) if made else 0
        self.heap.write(LAYOUTS, number, len(self.heap.events) if made else -1)
        for known in self.sure.values():
            known.clear()

    def unsure(self, node: fx.Node, exactly: bool) -> str | None:
        """The operator that a node's strides come from and that is not to be trusted with them, by its name.

        exactly: with those along axes of size 1 and 0 too, which no answer of ``is_contiguous`` rests on.
        """
        seen, pending = set(), [node]
        while pending:
            here = pending.pop()
            name = name_of(here)
            value = here.meta.get("val")
            known = here in self.sure[exactly] or here in seen
            if known or name in SURE or (is_kind(value, torch.Tensor) and not value.dim()):
                continue
            seen.add(here)
            operands = here.all_input_nodes
            if name in VIEWS:  # (of a gather: places in a row lie in one way)
                operands = operands[:1] + [n for n in operands[1:] if not is_row(n)]
            asked = operands[1:] if name in VIEWS else operands
            if name in UNSURE and is_odd(here, name) and (name == "unfold" or any(is_mixed(n, name) for n in asked)):
                return name
            always = name in NEVER_EXACT or name.startswith("fft_")
            exact = name in ALWAYS_EXACT or (name in VIEWS and not gathers(here))
            if exactly and operands and not exact and is_thin(here, always):
                return name
            pending += operands
        self.sure[exactly] |= seen
        return None

    def refuse_unsure(
        self, function: Any, args: tuple, kwargs: dict[str, Any], on_fakes: Callable[..., Any]
    ) -> None:
        """A graph break where an answer, or whether there is a copy, rests on strides that may be others.

        on_fakes: gives what an operator gives for fakes of its arguments.
        """
        name = getattr(function, "__name__", "")
        if (out := kwargs.get("out")) is not None:
            refuse_resized(function, out, args, kwargs, on_fakes)
        if (name in ASK or name == GIVE_BACK) and args and is_kind(args[0], TensorProxy):
            proxy = args[0]
            if name == GIVE_BACK and not proxy.fake.is_contiguous(**kwargs):
                return  # a copy in the graph; the operator may still give its operand
            if proxy.source is None and (found := self.unsure(proxy.node, name in EXACT)) is not None:
                detail = f"{name}() of what {found} has to do with: the strides that it computes are known when it runs"
                hint = "make the operator's input contiguous, or do not ask"
                raise Break("strides of a computed tensor", detail, hint)


def name_of(node: fx.Node) -> str:
    return node.target if is_kind(node.target, str) else getattr(inspect.unwrap(node.target), "__name__", "")


def is_odd(node: fx.Node, name: str) -> bool:
    """Whether an operator that has several forms is one whose fake is not right."""
    if name == "pad":
        return (node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")) != "constant"
    if name == "unfold":  # of images; the method of the same name is a view
        return not is_kind(node.target, str)
    if name in VIEWS:
        return gathers(node)
    return name not in ("div", "divide") or "rounding_mode" in node.kwargs


def gathers(node: fx.Node) -> bool:
    """Whether what is named like a view takes items at the places that a tensor says."""
    index = node.args[1] if name_of(node) in ("getitem", "__getitem__") and len(node.args) > 1 else None
    return any(is_kind(leaf, fx.Node) for leaf in torch_private.tree_leaves(index))


def is_mixed(operand: fx.Node, name: str) -> bool:
    """Whether an operand's numbers do not lie in the order of its dimensions, nor, for a batch norm, channels last."""
    value = operand.meta.get("val")
    if not is_kind(value, torch.Tensor) or is_plain(value):
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    thin = any(type(size) is int and size < 2 for size in value.shape)
    return name != "batch_norm" or last is None or thin or not value.is_contiguous(memory_format=last)


def is_row(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return is_kind(value, torch.Tensor) and value.dim() < 2


def is_thin(node: fx.Node, always: bool) -> bool:
    """Whether an operator has to do with an axis that may be of size 1 or 0, and with strides that are not plain.

    always: also where all are plain.
    """
    values = [value for n in (node, *node.all_input_nodes) for value in torch_private.tree_leaves(n.meta.get("val"))]
    tensors = [value for value in values if is_kind(value, torch.Tensor) and value.layout == torch.strided]
    thin = any(may_be_thin(size) for value in tensors for size in value.shape)
    return thin and (always or not all(map(is_plain, tensors)))


def may_be_thin(size: Any) -> bool:
    return size < 2 if type(size) is int else torch_private.depends_on_values(size)


def is_plain(value: torch.Tensor) -> bool:
    """Whether the strides are those of a new tensor, along axes of size 1 too."""
    if value.layout != torch.strided:
        return True
    if not value.is_contiguous():
        return False
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(stride) != str(expected):  # (of symbols, to compare them would be a guard)
            return False
        expected = expected * (1 if type(size) is int and size == 0 else size)
    return True

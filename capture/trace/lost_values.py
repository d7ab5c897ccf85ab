"""The values of a trace's nodes when the graph failed: what is still there, and what can be computed again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering import Storage, apply, computes, repeats_write

from ..tensors.graphs import GraphWriter
from ..tensors.tensors import lies_on_ranks
from ..torch_facts import torch_private

CONVERSIONS = (torch.sym_float, torch.sym_int, torch.sym_not, torch.sym_max, torch.sym_min)


class Unavailable(Exception):
    """A value that the step had when the operator failed is gone from the graph and cannot be computed again."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """A strided tensor, or those of a tuple or list, which an operator gives."""
    values = value if is_kind(value, tuple | list) else (value,)
    return [t for t in values if is_kind(t, torch.Tensor) and t.layout is torch.strided]


def apply_here(node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a node gives, out of its turn. An operator on what lies on ranks may wait for all; this one is alone."""
    held = torch_private.tree_leaves((args, kwargs))
    if any(is_kind(value, torch.Tensor) and lies_on_ranks(value) for value in held):
        raise Unavailable(f"{node.name} is needed, and all ranks together computed it")
    return apply(node, args, kwargs)


def is_view(node: fx.Node) -> bool:
    """Whether it gives memory that it was given, whatever stands there."""
    given = {torch_private.storage_of(t) for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))}
    found = {torch_private.storage_of(t) for t in tensors_in(node.meta.get("val"))}
    return bool(found) and found <= given


def lies_as(tensor: torch.Tensor, fake: torch.Tensor) -> bool:
    """Whether its sizes, strides and offset are the fake's, where those are known."""
    pairs = zip(
        (*tensor.shape, *tensor.stride(), tensor.storage_offset()),
        (*fake.shape, *fake.stride(), fake.storage_offset()),
        strict=False,
    )
    return tensor.dim() == fake.dim() and all(a == b for a, b in pairs if type(b) is int)


class Values:
    """The values of a trace's nodes when the graph failed: what is still there, and what can be computed again.

    there: by the number of its node. inputs: of the graph that ran, by their sources. found: by placeholder, what the
    trace found in its place. (The graph that ran has none where it needs none.)
    """

    def __init__(
        self, there: dict[Any, Any], inputs: dict[str, Any], writer: GraphWriter, found: dict[fx.Node, Any]
    ):
        self.there, self.inputs, self.writer, self.found = there, inputs, writer, found
        self.made: dict[fx.Node, Any] = {}  # once more, one object for each node; what was written into it since, too
        self.module = writer.module()  # through which the loops' bodies are found
        self.storage = Storage(writer.scope.graph)

    def of(self, output: Any) -> Any:
        return fx.map_arg(self.writer.argument(output), self.value)

    def has_changed(self, node: fx.Node) -> bool:
        """Whether memory that the node read may have been written to since it ran."""
        # (what a number is computed by that is written down only now, for an output, has no memory)
        roots = self.storage.roots
        read = {root for argument in node.all_input_nodes for root in roots.get(argument, ())}
        return bool(self.writers_after(node, read))

    def writers_after(self, node: fx.Node, roots: Collection[fx.Node]) -> list[fx.Node]:
        """What writes into one of these memories behind the node."""
        storage = self.storage
        found = [(one, target) for one, targets in storage.writers.items() for target in targets if one > node]
        return sorted({one for one, target in found if not storage.roots[target].isdisjoint(roots)})

    def value(self, node: fx.Node) -> Any:
        if self.is_there(node):
            return self.there[node.meta["number"]]
        if node not in self.made:
            self.made[node] = self.again(node)
        return self.made[node]

    def is_there(self, node: fx.Node) -> bool:
        number = node.meta.get("number")
        return number is not None and number in self.there

    def again(self, node: fx.Node) -> Any:
        if node.op == "placeholder" and node.meta.get("source") in self.inputs:
            return self.inputs[node.meta["source"]]
        if self.found.get(node) is not None:
            return self.found[node]
        if node.op == "get_attr":  # a branch's or loop's body
            return self.module.get_submodule(str(node.target))
        if not is_view(node) and (sharing := self.sharing(node)):
            return self.in_memory_of(node, sharing)
        if node.op == "placeholder" or not (computes(node) or node.target in CONVERSIONS):
            raise Unavailable(f"{node.name} is needed")
        changed = node.target not in CONVERSIONS and self.has_changed(node)
        if changed and not is_view(node):
            raise Unavailable(f"{node.name} is needed, and what it was computed from has changed since")
        args, kwargs = fx.map_arg(node.args, self.value), fx.map_arg(node.kwargs, self.value)
        if changed and any(t.requires_grad for t in args if is_kind(t, torch.Tensor)):
            raise Unavailable(f"{node.name} is needed, and its gradients are no more those that it had")
        with torch.set_grad_enabled(getattr(node.meta.get("val"), "requires_grad", False)):
            made = apply_here(node, args, kwargs)
        if changed and not all(map(lies_as, tensors_in(made), tensors_in(node.meta["val"]))):
            raise Unavailable(f"{node.name} is needed, and what it was computed from lies otherwise now")
        if tensors_in(node.meta.get("val")) and not is_view(node):
            self.write_again(node, made)
        return made

    def sharing(self, node: fx.Node) -> list[torch.Tensor]:
        """What is still there and lies in the memory of what the node gave."""
        own = {torch_private.storage_of(t) for t in tensors_in(node.meta.get("val"))}
        found = []
        for one in node.graph.nodes if own else ():
            if self.is_there(one):
                pairs = zip(tensors_in(self.there[one.meta["number"]]), tensors_in(one.meta.get("val")), strict=False)
                found += [t for t, fake in pairs if torch_private.storage_of(fake) in own]
        return found

    def in_memory_of(self, node: fx.Node, sharing: list[torch.Tensor]) -> torch.Tensor:
        """What the node gave, which others that are still there are views of."""
        fake = node.meta["val"]
        for tensor in sharing if is_kind(fake, torch.Tensor) else ():
            if tensor._base is not None and lies_as(tensor._base, fake) and tensor._base.dtype is fake.dtype:
                return tensor._base
            layout = fake.storage_offset(), fake.shape, fake.stride()
            if not fake.requires_grad and all(type(n) is int for n in (layout[0], *layout[1], *layout[2])):
                return tensor.new_empty(0, dtype=fake.dtype).set_(tensor.untyped_storage(), *layout)
        raise Unavailable(f"{node.name} is needed, and what shares its memory is still there")

    def write_again(self, node: fx.Node, made: Any) -> None:
        """What the graph has written into the memory of a value since it made it."""
        own = self.storage.roots[node]
        if not (writers := self.writers_after(node, own)):
            return
        roots = self.storage.roots
        sharing = [one for one in node.graph.nodes if one > node and not own.isdisjoint(roots[one])]
        if not all(map(repeats_write, writers)):
            raise Unavailable(f"{node.name} is needed, and it has changed since it was made")
        if any(t.requires_grad for one in (node, *writers) for t in tensors_in(one.meta.get("val"))):
            raise Unavailable(f"{node.name} is needed, and its gradients would be others")
        self.made[node] = made

        def then(argument: fx.Node) -> Any:
            """An argument of a writer, as it was then."""
            if argument not in self.made and argument in sharing:
                self.made[argument] = apply_here(argument, *fx.map_arg((argument.args, argument.kwargs), then))
            elif argument not in self.made and self.writers_after(writer, roots.get(argument, ())):
                raise Unavailable(f"{node.name} is needed, and what was written into it has changed since")
            return self.value(argument)

        with torch.no_grad():
            for writer in writers:
                self.made[writer] = apply_here(writer, *fx.map_arg((writer.args, writer.kwargs), then))

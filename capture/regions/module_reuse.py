"""Blocks that are seen again: a module whose call was interpreted once is not interpreted again with other weights,
nor a function of tensors with others like them.

While a module's call is interpreted, everything that it reads of objects that existed before is logged. When another
module of the same class (or the same function) is called with like arguments, the log is read again on the other
module, and on modules among the arguments: each read must lead to the equal constant, to a tensor of the same metadata,
or to the object that corresponds to the first one's (the correspondence must be one to one, and it makes the other
module's guards, as interpreting would have). Then the nodes are written once more over the other module's tensors.
Where anything at all differs, or the call did more than read and compute (it changed an object, drew on a context
variable, wrote into its arguments), it is interpreted like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering import copy_node

from ..guards.recorder import tensor_meta
from ..heap.heap import OWN, Event
from ..heap.records import DICTS, LISTS, SIMPLE, whole_items
from ..heap.tensor_attributes import given
from ..hook import ABSENT
from ..python.parts import Parts
from ..tensors.applied import Applied
from ..tensors.folding import constants_of
from ..torch_facts import torch_private
from ..values.expert_numbers import number_of
from ..values.values import ATOMS, SYMBOLIC, TensorProxy, proxies_in
from .recompute import ReadElsewhere

MAX_VARIANTS = 4  # recorded calls that are tried for one class and one kind of arguments
Called = torch.nn.Module | FunctionType
Step = tuple[str, Any, list[Any], list[Any]]  # kind of read, of what, keys, what was found at each
AGAIN = frozenset(("entry", "whole", "tensor"))  # reads that another module's are compared with
# those of what both read
SHARED = frozenset(
    ("cell", "context", "value", "class", "switch", "default", "defaults", "function", "answer", "looked")
)
CONTAINERS = frozenset((*DICTS, *LISTS))
COMPARED_BY_TEXT = ATOMS - {torch.SymInt, torch.SymFloat, torch.SymBool}


@dataclass
class Block:
    """One interpreted call of a module, or of a function.

    begin, end: its part of the log. before, after: the graph's last node at its beginning and end. number, count: of
    its nodes. arguments, result: its traced values. depth: of the user's stack where it was called. applied: what in it
    backward looks at again. shared: nodes of numbers that another is given, too. lists: by
    id, lists that the step made and whose items are arguments.
    """

    module: Called
    arguments: tuple[Any, ...]
    begin: int
    before: fx.Node | None
    number: int
    depth: int
    instructions: int
    versions: list[int]
    counted: dict[int, int]
    end: int = 0
    after: fx.Node | None = None
    count: int = 0
    result: Any = None
    applied: list[Applied] = field(default_factory=list)
    shared: frozenset[fx.Node] = frozenset()
    lists: frozenset[int] = frozenset()
    plan: Plan | None = None
    refused: bool = False


@dataclass
class Plan:
    """What of a block is read and written again. joined: for each result, the tensors that its gradient is for.
    carried: reads that say what cached functions look at.

    steps: reads that start at the module, as ``grouped`` has them. common: the others, which led to the very same
    objects for the second module (``pairs`` holds these; with a module for which others stand in their place, the
    block is not used) for as long as ``writes`` is the number of changes from outside.
    """

    reads: list[Event]
    nodes: list[fx.Node]
    results: list[TensorProxy]
    joined: list[list[TensorProxy]]
    carried: list[Event]
    steps: list[Step] = field(default_factory=list)
    common: list[Event] = field(default_factory=list)
    pairs: Bijection | None = None
    writes: int = -1


def all_hold(*questions: Callable[[], bool]) -> bool:
    return all(question() for question in questions)


class NotEquivalent(Exception):
    """The other module is not like the first one."""


class ModuleReuse:
    """The calls of modules and functions of one trace."""

    def __init__(self, domain: Parts):
        self.domain = domain
        self.objects, self.tensors, self.writer = domain.objects, domain.tensors, domain.tensors.writer
        self.heap, self.counter, self.gradients = domain.objects.heap, domain.counter, self.tensors.gradients
        self.met: dict[Any, list[Block]] = {}

    def call(self, module: Called, args: list, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """The call of a module or function: written again if it is like one that was interpreted, else interpreted by
        ``run``."""
        arguments = (*args, *kwargs.values())
        key = self.key_of(module, len(args), tuple(kwargs), arguments)
        if key is None:
            return run()
        for block in self.met.get(key, ()):
            if not block.refused and (found := self.write_again(block, module, arguments)) is not ABSENT:
                return found
        writer, switches, functions = self.writer, torch_private.switches(), self.gradients.functions
        n_before = len(functions)
        block = Block(
            module,
            arguments,
            self.heap.mark(),
            last_node(writer.scope.graph),
            writer.count,
            len(writer.where()),
            self.domain.instructions,
            [torch_private.version_of(p.fake) for p in proxies_in(arguments)],
            {},
        )
        counts = self.counter.mark()
        result = run()
        block.end, block.after = self.heap.mark(), last_node(writer.scope.graph)
        block.count = writer.count - block.number
        block.instructions, block.result = self.domain.instructions - block.instructions, result
        block.counted, block.applied = self.counter.since(counts), functions[n_before:]
        unchanged = [torch_private.version_of(p.fake) for p in proxies_in(arguments)] == block.versions
        variants = self.met.setdefault(key, [])
        if unchanged and torch_private.switches() == switches and len(variants) < MAX_VARIANTS:
            variants.append(block)
        return result

    # ------------------------------------------------------------------------------------------------------------------
    # Like arguments
    # ------------------------------------------------------------------------------------------------------------------

    def key_of(self, module: Any, positional: int, names: tuple[str, ...], arguments: tuple[Any, ...]) -> Any:
        """What two calls have in common that may be one block; None for a call that cannot be."""
        record = self.objects.record_of(module)
        if record is None or not record.source.static or self.objects.inside or self.writer.is_inner:
            return None
        if torch.is_inference_mode_enabled() or self.domain.open_loops:
            return None
        is_module = is_kind(module, torch.nn.Module)
        if not is_module and not any(type(value) is TensorProxy for value in arguments):
            return None
        described = [self.describe(a) for a in arguments]
        if any(d is None for d in described):
            return None
        called = type(module) if is_module else id(module)
        return called, positional, names, tuple(described), self.surroundings()

    def surroundings(self) -> Any:
        """What else two blocks have in common. (What is looked up on a class is not in the log.)"""
        return torch_private.modes(), self.domain.attributes.of_classes.changes

    def describe(self, value: Any) -> Any:
        kind = type(value)
        if kind is TensorProxy:
            return self.describe_tensor(value)
        if kind in COMPARED_BY_TEXT:
            return kind, repr(value)
        if kind is tuple:
            parts = tuple(self.describe(v) for v in value)
            return None if any(p is None for p in parts) else parts
        if is_kind(value, torch.nn.Module):
            return "module", kind
        return ("same", id(value)) if self.objects.record_of(value) is not None else None

    def describe_tensor(self, proxy: TensorProxy) -> Any:
        fake = proxy.fake
        if proxy.attributes or not torch_private.is_fake(fake) or fake.is_inference():
            return None
        sizes = tuple(torch_private.expression(s) for s in (*fake.shape, *fake.stride(), fake.storage_offset()))
        numbers = proxy.node if constants_of(proxy.node) else number_of(proxy.node)  # (Python may have asked for them)
        known = (proxy.cls, proxy.source is None, fake.grad_fn is None, fake.requires_grad, numbers)
        return fake.dtype, fake.device, fake.layout, fake.dim(), sizes, known

    def forget(self) -> None:
        """A tensor begins or ceases to require gradients: what a module gave before has another history."""
        self.met.clear()

    # ------------------------------------------------------------------------------------------------------------------
    # What a block did
    # ------------------------------------------------------------------------------------------------------------------

    def plan_of(self, block: Block) -> Plan | None:
        """The block's plan, made when it is first asked for; None for a block that cannot be written again."""
        if block.plan is None and not block.refused:
            try:
                block.plan = self.make_plan(block)
            except NotEquivalent:
                block.refused = True
        return block.plan

    def make_plan(self, block: Block) -> Plan:
        reads: dict[Any, Event] = {}
        read_tensors: list[TensorProxy] = []
        events = self.heap.events[block.begin : block.end]
        # (what a function with a cache looks at was read to find that out)
        carried = [event for kind, looked, _, _ in events if kind == "looked" for event in looked]
        looked_at = set(map(id, carried))
        for event in events:
            kind, owner, key, value = event
            if id(event) in looked_at:
                continue
            if self.heap.age(owner) >= block.begin or kind in ("meta", "mark"):  # (metadata is compared throughout)
                continue
            if kind == OWN and id(owner) in block.lists:
                continue
            if kind not in AGAIN and kind not in SHARED:
                raise NotEquivalent  # it wrote to what is older, or read what nobody can read again
            if (kind, id(owner), key) not in reads:
                reads[kind, id(owner), key] = event
                read_tensors += proxies_in((value,))
        nodes = nodes_between(self.writer.graph, block.before, block.after)
        inside = set(nodes)
        outside = {p.node for p in (*proxies_in(block.arguments), *read_tensors)} | block.shared
        if any(torch_private.version_of(p.fake) for p in read_tensors):
            raise NotEquivalent  # written in place: a buffer that counts
        for node in nodes:
            if any(n not in inside and n not in outside and not reads_size(n) for n in node.all_input_nodes):
                raise NotEquivalent  # it uses a tensor that it did not read from anywhere
        results = list(dict.fromkeys(p for p in proxies_in(shape_of_result(block.result)) if p.node in inside))
        self.refuse_older(block.result, block.begin, set())
        every = list(dict.fromkeys((*proxies_in(block.arguments), *read_tensors)))
        storages = [torch_private.storage_of(p.fake) for p in (*every, *results)]
        if len(set(storages[len(every) :])) < len(results) or set(storages[: len(every)]) & set(storages[len(every) :]):
            raise NotEquivalent  # a view of an argument, or two results of one storage
        for p in results:
            if torch_private.depends_on_values(p.fake) or p.fake.storage_offset() != 0 or p.attributes:
                raise NotEquivalent
            if p.fake.requires_grad and p.fake.grad_fn is None:
                raise NotEquivalent
        joined = [gradient_sources(p, every) for p in results]
        return Plan(list(reads.values()), nodes, results, joined, carried)

    def refuse_older(self, value: Any, begin: int, seen: set[int]) -> None:
        """Differs for a list or tuple in the result that another call would not make anew: it was there before the
        call, or is there twice."""
        if type(value) not in (tuple, list) or value == ():
            return
        if not self.objects.is_new(value) or self.heap.age(value) < begin or id(value) in seen:
            raise NotEquivalent
        seen.add(id(value))
        for part in value:
            self.refuse_older(part, begin, seen)

    # ------------------------------------------------------------------------------------------------------------------
    # Once more
    # ------------------------------------------------------------------------------------------------------------------

    def write_again(self, block: Block, module: Called, arguments: tuple[Any, ...]) -> Any:
        """The result of the block on another module, ABSENT if the two differ."""
        stop = self.writer.stop_number
        if stop is not None and self.writer.count < stop <= self.writer.count + block.count:
            return ABSENT  # somebody wants to be led into it
        plan = self.plan_of(block)
        if plan is None:
            return ABSENT
        try:
            pairs = self.read_again(block, plan, module, arguments)
        except NotEquivalent:
            return ABSENT
        nodes = self.copy_nodes(block, plan, pairs)
        results = self.copy_results(plan, pairs, nodes)
        histories = frozenset(p.fake.grad_fn for p in results.values()) - {None}
        is_like = partial(self.is_like, block, plan, module, arguments)
        for first in block.applied:
            is_unchanged = partial(all_hold, first.is_unchanged, is_like)
            copy = Applied(first.name, histories, first.casts, is_unchanged, copied=True)
            copy.reads_state, copy.ask_later = first.reads_state, first.ask_later
            copy.node = None if first.node is None else nodes.get(first.node)
            copy.read = None if first.read is None else ReadElsewhere(first.read, pairs.counterpart)
            self.gradients.applied(copy)
        self.domain.instructions += block.instructions
        self.counter.repeat(block.counted)
        return self.rebuilt(block.result, pairs, results)

    def is_like(self, block: Block, plan: Plan, module: Called, arguments: tuple[Any, ...]) -> bool:
        """Whether the other module is still like the block."""
        try:
            self.read_again(block, plan, module, arguments)
        except NotEquivalent:
            return False
        return True

    def read_again(self, block: Block, plan: Plan, module: Called, arguments: tuple[Any, ...]) -> Bijection:
        """Which object of the other module stands for which, from the block's reads; NotEquivalent if one does not
        fit."""
        fresh = plan.pairs is not None and plan.writes == self.heap.outside
        pairs = plan.pairs.copy() if fresh and plan.pairs is not None else Bijection(self)
        pairs.add(block.module, module)
        for first, second in zip(block.arguments, arguments, strict=True):
            pairs.add(first, second, argument=True)
        for step in plan.steps if fresh else grouped(plan.reads):
            pairs.read_again(*step)
        if fresh:
            self.heap.events += (*plan.common, *plan.carried)  # a block around this one has read it too
        elif module is not block.module:  # (the same module again says nothing of others)
            plan.common = [e for e in plan.reads if self.is_common(e, pairs)]
            chosen = set(map(id, plan.common))
            plan.steps = grouped([e for e in plan.reads if id(e) not in chosen])
            plan.pairs, plan.writes = Bijection(self), self.heap.outside
            self.hold_together(plan, plan.pairs)
            for step in grouped(plan.common):
                plan.pairs.read_again(*step)
        return pairs

    def is_common(self, event: Event, pairs: Bijection) -> bool:
        """Whether a read was of an object that no other stands for."""
        return all(pairs.forth.get(id(o), o) is o for o in self.read_in(event))

    def read_in(self, event: Event) -> list[Any]:
        """The object that was read, and whose ``__dict__`` it is."""
        _, read, _, _ = event
        owner = self.objects.owner_of(read)
        return [read] if owner is None else [read, owner.obj]

    def hold_together(self, plan: Plan, pairs: Bijection) -> None:
        """What two modules share, a third one may not: common reads count where their objects stand for themselves."""
        for event in plan.common:
            for shared in self.read_in(event):
                pairs.bind(shared, shared)

    def copy_nodes(self, block: Block, plan: Plan, pairs: Bijection) -> dict[fx.Node, fx.Node]:
        """The block's nodes over the other module's tensors, at the end of the graph."""
        writer = self.writer
        graph, shift, here = writer.scope.graph, writer.count - block.number, writer.where()
        nodes = {first.node: second.node for first, second in pairs.tensors}
        stacks: dict[int, Any] = {}

        for node in plan.nodes:
            copy = nodes[node] = copy_node(graph, node, lambda one: nodes.get(one, one))
            stack = node.meta.get("stack") or ()
            if id(stack) not in stacks:
                stacks[id(stack)] = (*here, *stack[block.depth :]) if stack else ()
            copy.meta["stack"] = stacks[id(stack)]
            if (number := node.meta.get("number")) is not None:
                copy.meta["number"] = shifted(number, shift)
        writer.count += block.count
        return nodes

    def copy_results(
        self, plan: Plan, pairs: Bijection, nodes: dict[fx.Node, fx.Node]
    ) -> dict[TensorProxy, TensorProxy]:
        """New proxies for the block's results, each a function of the same tensors as far as autograd is concerned."""
        second = dict(pairs.tensors)
        found = {}
        for result, sources in zip(plan.results, plan.joined, strict=True):
            fake = torch_private.joined(self.tensors.mode, result.fake, [second[p].fake for p in sources])
            proxy = TensorProxy(self.tensors, fake, nodes[result.node])
            proxy.node.meta["val"] = fake
            self.tensors.of_fake[id(fake)] = proxy
            found[result] = self.objects.made(proxy)
        return found

    def rebuilt(self, value: Any, pairs: Bijection, results: dict[TensorProxy, TensorProxy]) -> Any:
        kind = type(value)
        if kind is TensorProxy:
            return results[value] if value in results else dict(pairs.tensors)[value]
        if kind in (tuple, list):
            return self.objects.made(kind(self.rebuilt(v, pairs, results) for v in value))
        return value


@dataclass
class Bijection:
    """Which object of the other module stands for which of the first: one to one."""

    reuse: ModuleReuse
    forth: dict[int, Any] = field(default_factory=dict)
    back: dict[int, Any] = field(default_factory=dict)
    tensors: list[tuple[TensorProxy, TensorProxy]] = field(default_factory=list)

    def copy(self) -> Bijection:
        return Bijection(self.reuse, dict(self.forth), dict(self.back), list(self.tensors))

    def add(self, first: Any, second: Any, argument: bool = False) -> None:
        """The second value stands for the first; NotEquivalent if it cannot."""
        kind, objects = type(first), self.reuse.objects
        if kind is not type(second):
            raise NotEquivalent
        if kind in COMPARED_BY_TEXT:
            if first is not second and repr(first) != repr(second):
                raise NotEquivalent
            return
        if is_kind(first, tuple):
            if len(first) != len(second):
                raise NotEquivalent
            for a, b in zip(first, second, strict=True):
                self.add(a, b, argument)
            return
        if kind is TensorProxy:
            self.add_tensor(first, second, argument)
        elif first is second:
            if objects.is_new(first) and objects.record_of(first) is None:
                raise NotEquivalent  # made by the step: what is in it is not logged
            self.bind(first, second)
        elif kind in CONTAINERS or is_kind(first, torch.nn.Module):
            record = objects.record_of(second)
            if record is None or not record.source.static or objects.record_of(first) is None:
                raise NotEquivalent
            self.bind(first, second)
            if is_kind(first, torch.nn.Module):
                objects.instance_dict(record)  # its type is a fact
        else:
            raise NotEquivalent

    def add_tensor(self, first: TensorProxy, second: TensorProxy, argument: bool) -> None:
        if not argument and first is not second:
            ours, others = first.real, second.real
            if not is_kind(ours, torch.Tensor) or not is_kind(others, torch.Tensor):
                raise NotEquivalent
            if first.source is None or second.source is None or not (first.source.static and second.source.static):
                raise NotEquivalent
            if tensor_meta(ours) != tensor_meta(others) or ours.is_leaf != others.is_leaf:
                raise NotEquivalent
            if torch_private.version_of(second.fake) or first.fake.requires_grad != second.fake.requires_grad:
                raise NotEquivalent  # (the step may have written to it, or switched it)
        if id(first) not in self.forth:
            self.tensors.append((first, second))
        self.bind(first, second)

    def bind(self, first: Any, second: Any) -> None:
        forth, back = self.forth.setdefault(id(first), second), self.back.setdefault(id(second), first)
        if forth is not second or back is not first:
            raise NotEquivalent

    def read_again(self, kind: str, owner: Any, keys: list[Any], values: list[Any]) -> None:
        """Some reads of the first call, on what stands for the object that was read."""
        objects, heap = self.reuse.objects, self.reuse.heap
        other = self.counterpart(owner)
        if kind == "entry":
            found = objects.entries(objects.need(other), keys)
        elif kind == "tensor":
            found = [given(self.reuse.domain.attributes, other, key) for key in keys]
        elif kind != "whole":
            if other is not owner:
                raise NotEquivalent
            for asked in torch_private.tree_leaves((owner.args, owner.keywords)) if kind == "answer" else ():
                if type(asked) not in COMPARED_BY_TEXT:
                    self.bind(asked, asked)  # a function that was asked about the one says nothing of the other
            found = [heap.now[kind](owner, key, value) for key, value in zip(keys, values, strict=True)]
            for key, value in zip(keys, found, strict=True):
                heap.read(kind, owner, key, value)
        elif values == [()] and objects.is_empty(objects.need(other)):
            return
        else:
            found = [whole_items(objects.contents(other))]
        for value, now in zip(values, found, strict=True):
            if value is now and type(value) in SIMPLE:
                continue
            if value is ABSENT or now is ABSENT:
                raise NotEquivalent
            self.add(value, now)

    def counterpart(self, read: Any) -> Any:
        """The object to read in place of this one; one that no other stands for is itself."""
        objects = self.reuse.objects
        found = self.forth.get(id(read))
        if found is None:
            found, owner = read, objects.owner_of(read)
            other = None if owner is None else self.forth.get(id(owner.obj))
            if owner is not None and other is not None and other is not owner.obj:
                inner = objects.instance_dict(objects.need(other))
                if inner is None:
                    raise NotEquivalent
                found = inner.obj
            self.bind(read, found)
        return found


def grouped(reads: list[Event]) -> list[Step]:
    """What was read of one object together, where the first of it was read."""
    steps: dict[Any, Step] = {}
    for kind, owner, key, value in reads:
        step = steps.setdefault((kind, id(owner)), (kind, owner, [], []))
        step[2].append(key)
        step[3].append(value)
    return list(steps.values())


def shape_of_result(value: Any) -> tuple[Any, ...]:
    """A result as nested tuples; NotEquivalent for one that cannot be made again."""
    kind = type(value)
    if kind is TensorProxy or (kind in ATOMS and kind not in SYMBOLIC and kind is not torch.Size):
        return (value,)
    if kind in (tuple, list):
        return tuple(shape_of_result(v) for v in value)
    raise NotEquivalent


def last_node(graph: fx.Graph) -> fx.Node | None:
    return next(iter(reversed(graph.nodes)), None)


def nodes_between(graph: fx.Graph, before: fx.Node | None, after: fx.Node | None) -> list[fx.Node]:
    """The nodes after one up to another, inputs left out."""
    if before is after or after is None:
        return []
    node = next(iter(graph.nodes)) if before is None else before.next
    found = []
    while True:
        if node.op == "output":
            raise NotEquivalent
        if node.op != "placeholder":
            found.append(node)
        if node is after:
            return found
        node = node.next


def reads_size(node: fx.Node) -> bool:
    """A size of a tensor, or what was computed from sizes: known by its symbol, whoever reads it."""
    return is_kind(node.meta.get("val"), SYMBOLIC)


def shifted(number: Any, shift: int) -> Any:
    return (shifted(number[0], shift), number[1]) if is_kind(number, tuple) else number + shift


def gradient_sources(result: TensorProxy, every: list[TensorProxy]) -> list[TensorProxy]:
    """The tensors from outside that a result's gradient flows to (the fakes' own autograd graph says)."""
    if not result.fake.requires_grad:
        return []
    inner = {(p.fake.grad_fn, p.fake.output_nr): p for p in every if p.fake.grad_fn is not None}
    leaves = {id(p.fake): p for p in every if p.fake.grad_fn is None}
    found: dict[TensorProxy, None] = {}
    pending, seen = [(result.fake.grad_fn, result.fake.output_nr)], set()
    while pending:
        edge = pending.pop()
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        if edge in inner:
            found[inner[edge]] = None
            continue
        variable = getattr(edge[0], "variable", None)
        if variable is not None:
            if id(variable) not in leaves:
                raise NotEquivalent
            found[leaves[id(variable)]] = None
        pending += edge[0].next_functions
    return list(found)


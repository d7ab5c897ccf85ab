"""Iterations that are seen again: the loop of an optimizer over its parameters runs the same operators for each.

What an iteration does follows from its item, from the other locals that it reads, and from what is logged. A local that
is nothing but a position in lists (``grads[i]``) counts as the items there. So an iteration is a block, as the call of
a function is (module_reuse.py): where a later one begins with like values, and what was read is as it was, its nodes
are written once more over the other tensors, and it is not interpreted. It may write into tensors in place, as long as
no gradients are recorded: the others are then written as often.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.interpreter import UNSET, Frame, is_kind
from moebius.lowering import copy_node

from ..bytecode.liveness import accesses, read_by_name, reads_unnamed
from ..heap.heap import OWN
from ..torch_facts import torch_private
from ..values.numbers import Number
from ..values.values import SYMBOLIC, TensorProxy, proxies_in
from .module_reuse import Bijection, Block, ModuleReuse, NotEquivalent, last_node, shifted

MAX_KNOWN = 64  # iterations of one loop that are tried: as many as there are shapes of parameters
MAX_REFUSED = 3  # of one loop, that cannot be written again: then no other is looked at
SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
Place = tuple[str, str]  # names of a list and of a position in it; or "" and the name of a value


@dataclass(frozen=True)
class Shape:
    """How iterations begin. names: what the loop sets, the parts of its item where it unpacks that. places: of the
    arguments."""

    unpacks: bool
    names: tuple[str, ...]
    places: tuple[Place, ...]

    def given(self, item: Any) -> dict[str, Any] | None:
        if not self.unpacks:
            return {self.names[0]: item}
        fits = type(item) is tuple and len(item) == len(self.names)
        return dict(zip(self.names, item, strict=True)) if fits else None


@dataclass
class Iteration:
    """One that is interpreted. found: the locals as it found them, and its item. path: its instructions. Then what came
    of it: the locals that it sets and that are read later, with their values, and those that are not; written: how
    often the fake of each argument was."""

    block: Block
    head: int
    height: int
    item: Any
    found: dict[str, Any]
    counts: int
    switches: Any
    before: tuple[int, ...]
    path: list[int] = field(default_factory=list)
    leaves: dict[str, Any] = field(default_factory=dict)
    forgets: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    written: list[tuple[TensorProxy, int]] = field(default_factory=list)


@dataclass
class Loop:
    """Of one frame. known: by how they begin, and what their arguments are like."""

    count: int = 0
    refused: int = 0
    known: dict[Shape, dict[Any, Iteration]] = field(default_factory=dict)


@dataclass
class FrameLoops:
    """The loops of one frame. head: where it asks for an item now, -1 if it does not."""

    head: int = -1
    open: Iteration | None = None
    loops: dict[int, Loop] = field(default_factory=dict)


class IterationReuse:
    """The loops of one trace, in frames other than the root."""

    def __init__(self, blocks: Any):
        self.blocks: ModuleReuse = blocks  # (the domain knows less of it)
        self.domain, self.objects = blocks.domain, blocks.objects
        self.tensors, self.writer, self.heap = blocks.tensors, blocks.writer, blocks.heap
        self.counter, self.gradients, self.mode = blocks.counter, blocks.gradients, blocks.tensors.mode
        self.frames: dict[Frame, FrameLoops] = {}  # those that have begun a loop

    def watch(self, frame: Frame) -> None:
        """A frame asks for an item, maybe for the first time."""
        known = frame in self.frames or frame.function is None
        if not known and not frame.code.co_flags & SUSPENDS and not reads_unnamed(frame.code):
            self.frames[frame] = FrameLoops(frame.pc)

    def before(self, frame: Frame, found: FrameLoops) -> None:
        """Before an instruction of such a frame: an iteration ends, or begins; one that is known is passed over."""
        if (iteration := found.open) is not None:
            if frame.pc != iteration.head:
                iteration.path.append(frame.pc)
            else:
                found.open = None
                self.end(frame, found.loops[iteration.head], iteration)
        if found.head >= 0:
            head, found.head = found.head, -1
            loop = found.loops.setdefault(head, Loop())
            if frame.pc == head + 1 and loop.refused < MAX_REFUSED and self.may_begin():
                loop.count += 1
                if self.passes(frame, loop):
                    frame.pc, found.open = head, None  # (of a loop around it, no path is known)
                elif loop.count > 1 and sum(map(len, loop.known.values())) < MAX_KNOWN:
                    found.open = self.begin(frame, head)
        if frame.program.instructions[frame.pc].opname == "FOR_ITER":
            found.head = frame.pc

    def may_begin(self) -> bool:
        """Whether blocks are known where the program is, and no gradients are recorded."""
        writer, tensors = self.writer, self.tensors
        inner = self.objects.inside or writer.is_inner or self.domain.open_loops or tensors.foreign.storages
        inner = inner or tensors.offsets.asked  # (which may be of the one, and not of the other)
        recorded = torch.is_grad_enabled() or torch.is_inference_mode_enabled() or writer.recomputed
        return not inner and not recorded and writer.ran is None

    # ------------------------------------------------------------------------------------------------------------------
    # One that is interpreted
    # ------------------------------------------------------------------------------------------------------------------

    def begin(self, frame: Frame, head: int) -> Iteration:
        writer, before = self.writer, self.progress()
        assert frame.function is not None
        last = last_node(writer.scope.graph)
        block = Block(frame.function, (), self.heap.mark(), last, writer.count, 0, self.domain.instructions, [], {})
        found = dict(zip(frame.program.localsplus, frame.locals, strict=True))
        counts, height = self.counter.mark(), len(frame.stack) - 1
        switches = torch_private.switches()
        return Iteration(block, head, height, frame.stack[-1], found, counts, switches, before, [frame.pc])

    def progress(self) -> tuple[int, ...]:
        """How much has been written into tensors; and what no iteration may add to: functions of autograd's, effects
        behind the graph, tensors that were asked where they begin or how they lie."""
        offsets, layouts = self.tensors.offsets, self.tensors.layouts
        asked = len(offsets.asked), len(offsets.anywhere), *map(len, layouts.sure.values())
        return len(self.mode.written), len(self.gradients.functions), len(self.objects.after_effects), *asked

    def end(self, frame: Frame, loop: Loop, iteration: Iteration) -> None:
        block, writer = iteration.block, self.writer
        block.end, block.after = self.heap.mark(), last_node(writer.scope.graph)
        block.count = writer.count - block.number
        block.instructions = self.domain.instructions - block.instructions
        block.counted = self.counter.since(iteration.counts)
        try:
            if self.progress()[1:] != iteration.before[1:] or iteration.switches != torch_private.switches():
                raise NotEquivalent
            if iteration.height != len(frame.stack):
                raise NotEquivalent
            shape = self.shape_of(frame, iteration)
            arguments = self.arguments(shape, iteration.found, iteration.item)
            key = self.key_of(arguments)
            block.shared = frozenset(one.node for one in arguments if type(one) is Number and one.node is not None)
            block.lists = frozenset(id(iteration.found[holder]) for holder, _ in shape.places if holder)
            block.arguments = without_numbers(arguments)
            self.look_at_results(frame, iteration, shape)
            plan = self.blocks.plan_of(block)
            if plan is None or any(is_kind(key, (TensorProxy, torch.Tensor)) for _, _, key, _ in plan.reads):
                raise NotEquivalent  # (what it finds by a tensor, another would find by another)
            self.look_at_nodes(iteration, plan.nodes)
        except NotEquivalent:
            loop.refused += 1
        else:
            loop.known.setdefault(shape, {})[key] = iteration

    def shape_of(self, frame: Frame, iteration: Iteration) -> Shape:
        """Where the arguments come from: locals that are read before they are set, and the items at a position that the
        loop gives, where nothing else is done with that."""
        instructions, path = frame.program.instructions, iteration.path
        end = instructions[iteration.head].target
        if end is None or not all(iteration.head < pc < end for pc in path):
            raise NotEquivalent
        steps = [(at, kind, name) for at, pc in enumerate(path) for kind, name in accesses(instructions[pc])]
        unpacks = instructions[path[0]].opname == "UNPACK_SEQUENCE"
        count = len(iteration.item) if unpacks and type(iteration.item) is tuple else 1
        names = tuple(name for _, kind, name in steps[:count] if kind == "STORE")
        given = Shape(unpacks, names, ()).given(iteration.item) if len(names) == count else None
        at_once = dict.fromkeys(at for at, _, _ in steps[:count])  # (what is unpacked further comes between)
        if given is None or len(given) != count or list(at_once) != [*range(unpacks, unpacks + len(at_once))]:
            raise NotEquivalent
        fresh, stored = set(given), set[str]()
        places: dict[Place, None] = {}
        read: list[tuple[int, str]] = []  # of what was there before: at which step, and what
        for step, (at, kind, name) in enumerate(steps[count:]):
            if kind == "STORE":
                stored.add(name)
                fresh.discard(name)
            elif kind != "LOAD":
                raise NotEquivalent
            elif name in fresh and type(given[name]) is int:
                asks = instructions[path[at + 1]].opname if at + 1 < len(path) else ""
                if asks != "BINARY_SUBSCR" or not read or read[-1][0] != step - 1:
                    raise NotEquivalent
                if steps[count + step - 1][0] < at - 1:
                    raise NotEquivalent
                places[read.pop()[1], name] = None
            elif name in fresh:
                places["", name] = None
            elif name not in stored:
                read.append((step, name))
        places |= {("", name): None for _, name in read}
        live = read_by_name(frame.program)[iteration.head]
        iteration.kept = fresh & live  # of the item, as the loop gave it
        iteration.forgets = [name for name in {**given, **dict.fromkeys(stored)} if name not in live]
        iteration.leaves = dict.fromkeys(stored & live)
        return Shape(unpacks, names, tuple(places))

    def arguments(self, shape: Shape, values: dict[str, Any], item: Any) -> tuple[Any, ...]:
        given = shape.given(item)
        if given is None:
            raise NotEquivalent
        values, found = values | given, []
        for holder, name in shape.places:
            value = values[name]
            if holder:
                items = values[holder]
                known = type(items) in (list, tuple) and self.objects.is_new(items) and type(value) is int
                if not known or not 0 <= value < len(items):
                    raise NotEquivalent
                value = items[value]
            if value is UNSET:
                raise NotEquivalent
            found.append(value)
        return tuple(found)

    def key_of(self, arguments: tuple[Any, ...]) -> Any:
        """What two iterations have in common that may be one block."""
        described = tuple(id(one) if type(one) is Number else self.blocks.describe(one) for one in arguments)
        if None in described:
            raise NotEquivalent
        fakes = [proxy.fake for proxy in proxies_in(arguments)]
        memory: dict[int, int] = {}
        places = [memory.setdefault(torch_private.storage_of(fake), len(memory)) for fake in fakes]
        whole = [fake._base is None and torch_private.owns_storage(fake) for fake in fakes]
        return described, tuple(places), tuple(whole), self.blocks.surroundings()

    def look_at_results(self, frame: Frame, iteration: Iteration, shape: Shape) -> None:
        """What it leaves in locals, and has written into."""
        block, world = iteration.block, self.tensors.world
        last = dict(zip(frame.program.localsplus, frame.locals, strict=True))
        iteration.leaves = {name: last[name] for name in iteration.leaves}
        block.result = tuple(iteration.leaves.values())
        if any(type(value) in (list, tuple) for value in block.result):
            raise NotEquivalent
        proxies = {id(proxy.fake): proxy for proxy in proxies_in(block.arguments)}
        times: dict[int, int] = {}
        for fake in self.mode.written[iteration.before[0] :]:
            times[id(fake)] = times.get(id(fake), 0) + 1
        for place, proxy in proxies.items():
            if place in times:
                fake = proxy.fake
                alone = fake._base is None and torch_private.owns_storage(fake)
                if not alone or torch_private.version_of(fake) != world.writes_into(fake):
                    raise NotEquivalent
                iteration.written.append((proxy, times[place]))

    def look_at_nodes(self, iteration: Iteration, nodes: list[fx.Node]) -> None:
        """Differs where a node gives what has other names, or a size; or something was written that it did not make."""
        given = {id(proxy.fake) for proxy in proxies_in(iteration.block.arguments)}
        storages = {torch_private.storage_of(proxy.fake) for proxy in proxies_in(iteration.block.arguments)}
        made: dict[int, int] = {}
        for node in nodes:
            if node.op not in ("call_function", "call_method") or "operators" in node.meta:
                raise NotEquivalent
            for value in torch_private.tree_leaves(node.meta.get("val")):
                if is_kind(value, SYMBOLIC):
                    raise NotEquivalent
                if not is_kind(value, torch.Tensor) or id(value) in given:
                    continue
                if not torch_private.is_fake(value) or torch_private.depends_on_values(value) or value.requires_grad:
                    raise NotEquivalent
                storage = torch_private.storage_of(value)
                if storage in storages or made.setdefault(storage, id(value)) != id(value):
                    raise NotEquivalent
        for fake in self.mode.written[iteration.before[0] :]:
            if id(fake) not in given and made.get(torch_private.storage_of(fake)) != id(fake):
                raise NotEquivalent

    # ------------------------------------------------------------------------------------------------------------------
    # Once more
    # ------------------------------------------------------------------------------------------------------------------

    def passes(self, frame: Frame, loop: Loop) -> bool:
        """Whether the iteration that begins is like one that is known; then it is written, and its locals are set."""
        values = dict(zip(frame.program.localsplus, frame.locals, strict=True)) if loop.known else {}
        for shape, known in loop.known.items():
            try:
                arguments = self.arguments(shape, values, frame.stack[-1])
                iteration = known.get(self.key_of(arguments))
                if iteration is None or iteration.height != len(frame.stack) - 1:
                    continue
                left = self.write_again(iteration, without_numbers(arguments))
            except NotEquivalent:
                continue
            for holder in {holder for holder, _ in shape.places if holder}:
                self.heap.read(OWN, values[holder], None, None)  # (a block around this one has read it, too)
            given = shape.given(frame.stack.pop()) or {}
            left |= {name: given[name] for name in iteration.kept} | dict.fromkeys(iteration.forgets, UNSET)
            index = {name: place for place, name in enumerate(frame.program.localsplus)}
            for name, value in left.items():
                frame.locals[index[name]] = value
            return True
        return False

    def write_again(self, iteration: Iteration, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Writes it over other arguments; what it leaves in locals."""
        block, writer, stop = iteration.block, self.writer, self.writer.stop_number
        if stop is not None and writer.count < stop <= writer.count + block.count:
            raise NotEquivalent  # somebody wants to be led into it
        plan = self.blocks.plan_of(block)
        if plan is None:
            raise NotEquivalent
        pairs = self.blocks.read_again(block, plan, block.module, arguments)
        fakes = {id(first.fake): second.fake for first, second in pairs.tensors}
        nodes = self.copy_nodes(block, plan.nodes, pairs, fakes)
        for proxy, times in iteration.written:
            fake = fakes[id(proxy.fake)]
            for _ in range(times):
                self.mode.note_write(fake)
                torch.autograd.graph.increment_version(fake)
        for first, second in pairs.tensors:
            second.is_asked = second.is_asked or first.is_asked
        left = {name: self.counterpart(value, pairs, nodes, fakes) for name, value in iteration.leaves.items()}
        self.domain.instructions += block.instructions
        self.counter.repeat(block.counted)
        return left

    def copy_nodes(
        self, block: Block, nodes: list[fx.Node], pairs: Bijection, fakes: dict[int, Any]
    ) -> dict[fx.Node, fx.Node]:
        """The nodes over the other tensors; ``fakes`` gets those of what they make."""
        writer = self.writer
        graph, shift = writer.scope.graph, writer.count - block.number
        places = {first.node: second.node for first, second in pairs.tensors}

        def other(value: Any) -> Any:
            if not is_kind(value, torch.Tensor):
                return value
            if id(value) not in fakes:
                fakes[id(value)] = torch_private.joined(self.mode, value, [])
            return fakes[id(value)]

        for node in nodes:
            copy = places[node] = copy_node(graph, node, lambda one: places.get(one, one))
            if (value := node.meta.get("val")) is not None:
                copy.meta["val"] = torch_private.tree_map(other, value)
            if (number := node.meta.get("number")) is not None:
                copy.meta["number"] = shifted(number, shift)
        writer.count += block.count
        return places

    def counterpart(
        self, value: Any, pairs: Bijection, nodes: dict[fx.Node, fx.Node], fakes: dict[int, Any]
    ) -> Any:
        """What stands for a value that a local has at the end."""
        if type(value) is not TensorProxy:
            return value
        if id(value) in pairs.forth:
            return pairs.forth[id(value)]
        fake, known = fakes[id(value.fake)], self.tensors.of_fake
        if id(fake) not in known:
            known[id(fake)] = self.objects.made(TensorProxy(self.tensors, fake, nodes[value.node]))
        return known[id(fake)]


def without_numbers(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those that another iteration has others for: a number that only the running step knows is the same one."""
    return tuple(one for one in arguments if type(one) is not Number)

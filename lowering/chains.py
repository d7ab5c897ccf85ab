"""Chains: operators element by element on tensors of one shape, one after another, outside of autograd. That is what an
optimizer does to a parameter; ``kernels.chains`` does it in one pass over the tensors.

The lowered graph stays as it is, for reports, files and what goes on after a failure. The code that runs it has one
call for a chain (``repeats.written_once``), as for a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from moebius.kernels.chains import MOST_NUMBERS, TEMPORARIES, TENSORS, Chain, Step
from moebius.lowering.aliasing import Storage
from moebius.lowering.experts.layout import WithoutGrad
from moebius.lowering.memo import remembering
from moebius.lowering.operators import read_call
from moebius.lowering.torch_private import nobody_looks
from moebius.lowering.values import apply, nodes_between, same_shape, shape_of, tensor_of, value_of

FEWEST = 4  # operators of a chain: calling torch's for fewer takes no longer than calling ours
LARGE = 2**18  # elements, from which on reading them once matters more than that
THREE = ("addcmul", "addcdiv")  # operators of three tensors and a number, by their names in torch
PYTHON = ("_operator", "math", "builtins")  # whose functions make numbers of numbers
NO_NUMBER = object()


@dataclass
class Operation:
    """A node as a step: ``out = operator(*operands, number)``. inplace: whether out is the first operand."""

    node: fx.Node
    operator: str
    operands: list[fx.Node]
    number: Any
    inplace: bool


@dataclass
class Run:
    """The nodes of one chain. tensors, numbers: what they get; steps: those of kernels.chains, with our registers."""

    operations: list[Operation] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    tensors: list[fx.Node] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    registers: dict[fx.Node, tuple[bool, int]] = field(default_factory=dict)  # whether a temporary, and its place
    steps: list[tuple[str, tuple[bool, int], tuple[tuple[bool, int], ...], int]] = field(default_factory=list)
    temporaries: int = 0

    def take(self, operation: Operation) -> bool:
        """Whether there is room for one more operation; then it is in the chain."""
        operands = operation.operands
        new = [node for node in dict.fromkeys(operands) if node not in self.registers]
        if len(self.tensors) + len(new) > TENSORS or (self.temporaries == TEMPORARIES and not operation.inplace):
            return False
        if len(self.numbers) == MOST_NUMBERS:
            return False
        for node in new:
            self.registers[node] = False, len(self.tensors)
            self.tensors.append(node)
        given = tuple(self.registers[node] for node in operands)
        out = given[0]
        if not operation.inplace:
            out, self.temporaries = (True, self.temporaries), self.temporaries + 1
        place = -1
        if operation.number is not NO_NUMBER:
            place = len(self.numbers)
            self.numbers.append(operation.number)
        self.registers[operation.node] = out
        self.steps.append((operation.operator, out, given, place))
        self.operations.append(operation)
        self.nodes.append(operation.node)
        return True

    def shorter(self) -> Run:
        """Without its last operation, of which somebody else may use what it gives."""
        run = Run()
        for operation in self.operations[:-1]:
            run.take(operation)
        return run

    def chain(self) -> Chain:
        """For the kernels."""

        def place(register: tuple[bool, int]) -> int:
            return register[1] + register[0] * len(self.tensors)

        steps = [Step(name, place(out), tuple(map(place, given)), at) for name, out, given, at in self.steps]
        return Chain(tuple(steps), len(self.tensors), len(self.numbers))

    def pays(self) -> bool:
        """Whether one call takes less time than torch's operators."""
        if len(self.nodes) >= FEWEST:
            return True
        shape = shape_of(self.nodes[0]) if len(self.nodes) > 1 else None
        return shape is not None and all(type(size) is int for size in shape) and math.prod(shape) >= LARGE

    def stands_alone(self, storage: Storage) -> bool:
        """Whether nobody else uses what its nodes give, and no node between them reads or writes what it writes."""
        own = set(self.nodes)
        if any(user not in own for node in own for user in node.users):
            return False
        for node in nodes_between(self.nodes[0], self.nodes[-1]):
            tensors = [] if node in own else [n for n in node.all_input_nodes if tensor_of(n) is not None]
            if any(storage.share(tensor, mine) for tensor in tensors for mine in self.tensors):
                return False
        return True


class ChainCall:
    """Stands in a graph for a chain's nodes. Called with the tensors, then the numbers that are no constants.

    nodes: of one of the chains that it stands for, which run where C does not do them. inputs: what it is called with
    in the place of these.
    """

    def __init__(self, run: Run, inputs: list[fx.Node]):
        self.chain, self.nodes, self.inputs = run.chain(), list(run.nodes), inputs
        self.constants = tuple(None if isinstance(number, fx.Node) else number for number in run.numbers)
        self.__name__ = self.__qualname__ = "chain"  # what fx calls it in code

    def __call__(self, *inputs: Any) -> None:
        if nobody_looks() and self.chain.run(inputs, self.constants):
            return
        run_nodes(self.nodes, dict(zip(self.inputs, inputs, strict=True)))


def run_nodes(nodes: list[fx.Node], values: dict[fx.Node, Any]) -> None:
    """Run nodes of a chain, one after another. values: what they are given, and then what they give. How many have
    run, ``reached``, is read from a traceback."""
    for reached in range(len(nodes)):
        node = nodes[reached]
        values[node] = apply(node, *fx.map_arg((node.args, node.kwargs), values.__getitem__))


def find_chains(graph: fx.Graph) -> list[tuple[ChainCall, list[fx.Node], list[fx.Node]]]:
    """The graph's chains: what is called for each, its nodes, and what it is called with. Equal ones have one call."""
    found, calls = [], dict[Any, ChainCall]()
    with remembering():
        every = list(runs(graph))
        storage = Storage(graph) if every else None
    for run in every:
        while storage is not None and run.pays() and not run.stands_alone(storage):
            run = run.shorter()
        if storage is None or not run.pays():
            continue
        inputs = run.tensors + [number for number in run.numbers if isinstance(number, fx.Node)]
        constants = tuple(None if isinstance(number, fx.Node) else number for number in run.numbers)
        key = (run.chain(), constants, tuple(inputs.index(node) for node in inputs))
        call = calls.setdefault(key, ChainCall(run, inputs))
        found.append((call, run.nodes, inputs))
    return found


def runs(graph: fx.Graph) -> Iterator[Run]:
    """What may be chains, outside of autograd: operations with nothing but numbers between them."""
    quiet, numbers = WithoutGrad(graph), set[fx.Node]()
    stretch: list[Operation] = []
    for node in graph.nodes:
        if is_number(node, numbers):
            numbers.add(node)
        elif node in quiet and (operation := read(node, numbers)) is not None:
            stretch.append(operation)
        elif node.op != "placeholder":
            yield from joined(stretch)
            stretch = []
    yield from joined(stretch)


def joined(stretch: list[Operation]) -> Iterator[Run]:
    """One chain for those operations that have tensors in common, directly or by others. (Two parameters are two
    chains: a step may leave out one of them.)"""
    of: dict[fx.Node, list[Operation]] = {}  # by tensor: what is joined to it
    for operation in stretch:
        mine = (operation.node, *operation.operands)
        met = {id(of[node]): of[node] for node in mine if node in of}
        group = max(met.values(), key=len, default=[])
        for other in met.values():
            if other is not group:
                group += other
                of |= {node: group for one in other for node in (one.node, *one.operands)}
        group.append(operation)
        of |= dict.fromkeys(mine, group)
    for own in {id(group): group for group in of.values()}.values():
        run = Run()
        for operation in sorted(own, key=lambda operation: operation.node):
            if not run.take(operation):
                yield run
                run = Run()
                run.take(operation)
        yield run


def is_number(node: fx.Node, numbers: set[fx.Node]) -> bool:
    """Whether a node gives a number, and does nothing else. numbers: the earlier ones that do."""
    if type(value_of(node)) in (int, float, torch.SymFloat, np.float64):
        return True
    if value_of(node) is not None:
        return False
    if node.op == "call_method":
        return node.target == "item"
    computes = node.op == "call_function" and getattr(node.target, "__module__", "") in PYTHON
    return computes and bool(node.all_input_nodes) and numbers.issuperset(node.all_input_nodes)


def read(node: fx.Node, numbers: set[fx.Node]) -> Operation | None:
    """The node as a step of a chain, if it can be one: of float32 tensors of one shape on a CPU, and one number."""
    parsed = parse(node)
    if parsed is None:
        return None
    operator, operands, number, inplace = parsed
    shape = shape_of(node)
    if not is_candidate(node) or not all(map(is_candidate, operands)):
        return None
    if not all(same_shape(shape_of(operand), shape) for operand in operands) or node.kwargs.get("out") is not None:
        return None
    if number is not NO_NUMBER and number not in numbers and type(number) not in (int, float):
        return None
    return Operation(node, operator, operands, number, inplace)


def parse(node: fx.Node) -> tuple[str, list[Any], Any, bool] | None:
    """Operator, tensors, number and whether it is in place, as the node is spelled."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    base, inplace = name.removesuffix("_"), name.endswith("_")
    ours = node.op == "call_method" or getattr(torch, name, None) is node.target
    args, kwargs = node.args, node.kwargs
    if ours and base in THREE and len(args) == 3 and kwargs.keys() <= {"value"}:
        return base, list(args), kwargs.get("value", 1), inplace
    if ours and base == "lerp" and len(args) == 3 and not kwargs:
        return base, list(args[:2]), args[2], inplace
    call = read_call(node)
    if call is None:
        return None
    inplace = call.op.inplace
    if call.name == "sqrt":
        return "sqrt", [call["input"]], NO_NUMBER, inplace
    if call.name not in ("add", "mul", "div") or call.args.get("rounding_mode") is not None:
        return None
    first, second, alpha = call["input"], call["other"], call.args.get("alpha", 1)
    if tensor_of(first) is None:
        return None  # (a number before a tensor)
    if tensor_of(second) is None:
        return None if alpha != 1 else (f"{call.name}_number", [first], second, inplace)
    return call.name, [first, second], alpha if call.name == "add" else NO_NUMBER, inplace


def is_candidate(node: Any) -> bool:
    """Whether its tensor may be one that C reads. (Those that a call has are looked at once more.)"""
    tensor = tensor_of(node)
    return tensor is not None and tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.dim() > 0

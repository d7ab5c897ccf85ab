"""The graph under construction: scopes (one for the step, one for each open expert loop), arguments, symbolic sizes."""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering import only_computes
from moebius.lowering.graph import expert_loop, skip_iteration

from ..bytecode import progress
from ..torch_facts import torch_fakes, torch_private, torch_sizes
from ..values.numbers import Number
from ..values.numpy_numbers import NUMPY_NUMBERS
from ..values.values import ATOMS, SYMBOLIC, Break, TensorProxy

Where = tuple[str, int, str]
AS_THEY_ARE = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))  # plain in a graph's text
# Files of torch's whose code asks for grad mode in order to put it back, or (once_differentiable) for a node to know.
LETS_BE = frozenset({torch.autograd.grad_mode.__file__, torch.autograd.function.__file__})
# torch takes Python's types as dtypes (torch/csrc/utils/python_arg_parser.cpp); a graph's source text cannot name them
DTYPES_OF_TYPES: dict[Any, torch.dtype] = {
    int: torch.int64,
    float: torch.float64,
    bool: torch.bool,
    complex: torch.complex128,
}


# (an assignment also takes a node out of the graph's table of operators and puts it in again, at its end)
ARGS, KWARGS = vars(fx.Node)["args"], vars(fx.Node)["kwargs"]


class Graph(fx.Graph):
    """An fx graph whose code means what its nodes say: fx writes a power as ``{} ** {}``, and of a base of -1 as
    ``-1 ** n``, which Python reads as ``-(1 ** n)``. A function's name has no precedence."""

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, *rest: Any, **more: Any
    ) -> fx.Node:
        if target is operator.pow and args and not is_kind(args[0], fx.Node):
            target = pow if type(args[0]) in (int, float, complex) and repr(args[0]).startswith("-") else target
        node = super().create_node(op, target, None, None, *rest, **more)
        if args:  # (given now: fx would look through them for symbolic sizes, which are nodes here)
            ARGS.__set__(node, args)
        if kwargs:
            KWARGS.__set__(node, kwargs)
        return node


class GraphScope:
    """One fx graph being written. An inner scope lifts what it uses of the outer one into placeholders of its own."""

    def __init__(self, parent: GraphScope | None = None, conditional: bool = False, of_call: bool = False):
        """conditional: whether it is what runs once, or not at all: the body of a branch on values. of_call: whether
        the branch is on a number of the call, so that no backward goes through it."""
        self.graph = Graph()
        self.parent, self.conditional, self.of_call = parent, conditional, of_call
        self.in_loop = parent is not None  # (a graph of a function's own: if that is in one)
        self.is_forward = False  # of an autograd.Function
        self.lifted: dict[fx.Node, fx.Node] = {}
        self.symbols: dict[Any, Callable[[], fx.Node]] = {}
        self.rows_of: dict[Any, fx.Node] = {}  # by its symbol: the first node that has so many rows
        self.expressions: dict[Any, Any] = {}
        self.numbers: dict[tuple[int, float], Any] = {}  # read in it of a tensor of one, by how often that was written
        self.held_equal: set[frozenset[Any]] = set()  # pairs of sizes that it compares already
        self.taken: dict[str, int] = {}  # names of placeholders, and how many more were to have each
        self.anchor: fx.Node | None = None  # placeholders go after it
        self.noted: set[str] = set()  # what happened in it, or in a graph within: ``autograd_joins``
        # of the root: what is known of each node of autograd's, for ``autograd_joins``
        self.certain: dict[Any, Any] = {}

    def placeholder(self, name: str) -> fx.Node:
        """A new input, after those that are there. Its name is its own: it becomes a parameter's."""
        wanted = name
        while name in self.taken:
            self.taken[wanted] += 1
            name = f"{wanted}_{self.taken[wanted]}"
        self.taken[name] = 0
        if self.anchor is None:
            first = next(iter(self.graph.nodes), None)
            where = self.graph.inserting_before(first) if first is not None else self.graph.inserting_after()
        else:
            where = self.graph.inserting_after(self.anchor)
        with where:
            node = self.graph.placeholder(name)
        self.anchor = node
        return node

    def note(self, what: str) -> None:
        self.noted.add(what)
        if self.parent is not None:
            self.parent.note(what)

    def root(self) -> GraphScope:
        return self if self.parent is None else self.parent.root()

    def is_branch(self) -> bool:
        """Whether it is the step's own graph, or the body of branches on values in it alone."""
        return self.parent is None or (self.conditional and self.parent.is_branch())

    def is_never_repeated(self) -> bool:
        """Whether a call runs it once, or not at all."""
        return self.parent is None or (self.of_call and self.parent.is_never_repeated())

    def around(self) -> Iterator[GraphScope]:
        """This one and those around it."""
        scope: GraphScope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def scope_of(self, node: fx.Node) -> GraphScope | None:
        """Of this one and those around it: the one whose graph has the node."""
        return next((scope for scope in self.around() if scope.graph is node.graph), None)

    def as_made(self, node: Any) -> Any:
        """What a value is in the scope that made it: a placeholder of this one, or of one around it, is lifted."""
        while is_kind(node, fx.Node) and node.op == "placeholder" and (scope := self.scope_of(node)) is not None:
            outer = next((outer for outer, inner in scope.lifted.items() if inner is node), None)
            if outer is None:
                break
            node = outer
        return node

    def only_asks(self) -> bool:
        """Whether nothing in it so far writes, and no loop or branch stands in it."""
        nodes = [n for n in self.graph.nodes if n.op != "placeholder" and n.target is not skip_iteration]
        return all(n.target is not expert_loop and only_computes(n) for n in nodes)

    def own(self, node: fx.Node) -> fx.Node:
        """The node as this scope's graph knows it: itself, or a placeholder that it is lifted into."""
        if node.graph is self.graph:
            return node
        inner = self.lifted.get(node)
        if inner is None:
            assert self.parent is not None, f"node {node} belongs to no open graph"
            self.parent.own(node)
            inner = self.lifted[node] = self.placeholder(f"{node.name}_outer")
            inner.meta.update(node.meta)
        return inner

    def symbol(self, symbol: Any) -> fx.Node:
        """The node whose value is this size symbol."""
        for scope in self.around():
            if symbol in scope.symbols:
                return self.own(scope.symbols[symbol]())
        raise Break(
            "symbolic size of unknown origin", f"no tensor of this graph has the size {symbol}", "please report this"
        )


# Where nothing may be written that does more than compute (``TensorOperations.runs_once``).
ELSEWHERE = "in a loop over experts, a checkpointed call or for a foreign backend"


class GraphWriter:
    """Writes nodes into the innermost open scope and turns traced values into node arguments."""

    def __init__(self, world: torch_fakes.FakeWorld, where: Callable[[], tuple[Where, ...]]):
        self.world, self.where = world, where
        self.scope = GraphScope()
        self.submodules: dict[str, fx.GraphModule] = {}
        self.generator: Callable[[torch.Generator], fx.Node]  # the node of one
        self.count = 0
        self.stop_number: int | None = None  # where the trace is to end, if it is not to go through
        self.recomputed = False  # in a checkpointed call, which backward runs once more
        # where it is not known whether gradients are recorded: the graph break of what asks
        self.unasked: Callable[[str], Break] | None = None
        self.ran: list[Any] | None = None  # the operators that ran on fakes since the last node, where they are wanted
        # told of each node before it is made: its number, what it calls, and with what
        self.before_node: Callable[[int, Any, tuple], None] = lambda number, target, args: None

    @property
    def in_forward(self) -> bool:
        """Whether the forward of an autograd.Function is interpreted."""
        return self.scope.is_forward

    @property
    def is_inner(self) -> bool:
        """Whether what is written now is part of a node: the body of a loop, of a function of autograd's, of a hook."""
        return self.scope.parent is not None

    @property
    def graph(self) -> fx.Graph:
        return self.scope.graph

    @property
    def in_loop(self) -> bool:
        return self.scope.in_loop

    @property
    def runs_at_most_once(self) -> bool:
        """Whether a call runs what is written now once, or not at all, as a number of the call decides."""
        return self.scope.is_never_repeated() and not self.recomputed

    def node_of(self, size: Any) -> fx.Node | None:
        """The node whose value is a symbolic size, where it is a symbol of this graph by itself."""
        found = self.scope.root().symbols.get(size.node.expr)
        return None if found is None else found()

    def own(self, node: fx.Node) -> fx.Node:
        """The node as the innermost scope's graph knows it."""
        return self.scope.own(node)

    def placeholder(self, name: str) -> fx.Node:
        """A new input of the innermost scope's graph."""
        return self.scope.placeholder(name)

    @contextmanager
    def in_front(self, nodes: Iterable[fx.Node], passes: Callable[[GraphScope], bool]) -> Iterator[None]:
        """What is written stands in front of the branches on values that are open, as far as these nodes do. It runs
        whichever way they go, so that it must not be seen that it does. passes: whether it may stand before all that
        the body has so far."""
        inner, nodes = self.scope, tuple(nodes)
        while self.scope.conditional and passes(self.scope):
            if any(node.graph is self.scope.graph for node in nodes):
                break
            assert self.scope.parent is not None
            self.scope = self.scope.parent
        try:
            yield
        finally:
            self.scope = inner

    def module(self) -> fx.GraphModule:
        """The innermost scope's graph as a module that holds the bodies of its loops, and what else it names."""
        owner = torch.nn.Module()
        for name in dict.fromkeys(str(n.target) for n in self.graph.find_nodes(op="get_attr")):
            if (body := self.submodules.get(name)) is not None:
                owner.add_module(name, body)
        return torch_private.uncompiled(owner, self.graph)

    def node(self, op: str, target: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
        """Append one node; args and kwargs are traced values."""
        if op == "call_function" and not torch_private.found_by_name(target):
            raise Break(
                "function of torch that was replaced",
                f"{target.__name__} is called, and torch has another function under its name, or none",
                "nothing to do: it runs natively",
            )
        if "from" in kwargs:  # of random_ and uniform_: a word that no Python source has as an argument's name
            if "to" not in kwargs:
                raise Break("argument named from", f"{target} is given it alone", "give from and to by their places")
            kwargs = dict(kwargs)
            args = (*args, kwargs.pop("from"), kwargs.pop("to"))
        self.before_node(self.count + 1, target, args)
        progress.step()
        self.count += 1
        node = self.graph.create_node(op, target, self.argument(args), self.argument(kwargs))
        node.meta["number"] = self.count
        stack = self.where()
        node.meta["stack"] = stack
        node.meta["where"] = stack[-1] if stack else ("", 0, "")
        if self.ran:
            node.meta["operators"] = self.ran[:]
            self.ran.clear()
        return node

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """The node of a function, or of a method by its name, that gives no tensor: nothing, or a number."""
        node = self.node("call_method" if type(target) is str else "call_function", target, args, kwargs)
        node.meta["val"] = None
        return node

    def before_failure(self, target: Any, args: tuple) -> None:
        """Numbers for which it fails are no node; where it is the one that failed in the graph, the trace stops."""
        if self.count + 1 == self.stop_number:
            self.before_node(self.stop_number, target, args)

    def note_dropout(self, fake: torch.Tensor) -> torch.Tensor:
        """Dropout has run, and not on the fakes; gives what it gave."""
        if self.ran is not None:
            self.ran.append((torch.ops.aten.native_dropout.default, (fake, 0.5, True), {}, (fake, fake)))
        return fake

    def refuse_question(self, what: str) -> None:
        """Where the answer while tracing is not that of each run: what depends on it is not to be asked."""
        if self.unasked is not None and self.where()[-1][0] not in LETS_BE:
            raise self.unasked(what)

    def argument(self, value: Any) -> Any:
        """A traced value as an fx argument of the innermost scope."""
        kind = type(value)
        if kind in AS_THEY_ARE:
            return value
        if kind is tuple or kind is torch.Size:
            return tuple([self.argument(v) for v in value])
        if is_kind(value, TensorProxy):
            return self.scope.own(value.node)
        if is_kind(value, fx.Node):
            return self.scope.own(value)
        if is_kind(value, SYMBOLIC):
            return self.size_argument(value)
        if is_kind(value, Number):
            if value.node is None:
                return self.argument(value.numbers.constant(value))
            if id(value) in value.numbers.fixed:
                return self.argument(value.representative)
            return self.scope.own(value.node)
        if is_kind(value, tuple):
            items = [self.argument(v) for v in value]
            return kind(*items) if hasattr(value, "_fields") else tuple(items)
        if is_kind(value, list):
            return [self.argument(v) for v in value]
        if is_kind(value, dict):  # (most often the arguments by name, of which there are none)
            return {k: self.argument(v) for k, v in value.items()}
        if is_kind(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if is_kind(value, type) and value in DTYPES_OF_TYPES:  # dtype=int
            return DTYPES_OF_TYPES[value]
        if kind is complex and not is_told_by_its_text(value):
            return self.valueless(complex, (value.real, value.imag))
        if kind is torch.Generator:
            return self.generator(value)
        if kind in NUMPY_NUMBERS:
            return self.valueless(kind, (value.item(),))
        if kind in ATOMS or is_kind(value, type | types.BuiltinFunctionType | types.FunctionType):
            return value
        raise Break(
            "object passed to a tensor operator",
            f"an operator got a {kind.__name__}, which a graph cannot hold",
            "pass tensors and plain numbers to operators",
        )

    def with_sizes(self, values: tuple) -> tuple:
        """Values for a text: a ``torch.Size`` as a node, since fx would take it for a tuple, which prints otherwise."""
        made = []
        for value in values:
            if type(value) is torch.Size:
                value = self.valueless(torch.Size, (self.argument(value),))
            made.append(value)
        return tuple(made)

    def valueless(self, function: Callable[..., Any], args: tuple) -> fx.Node:
        """A node that makes a constant which fx's code cannot hold."""
        node = self.graph.call_function(function, args)
        node.meta.update(val=None, where=("", 0, ""), stack=())
        return node

    def size_argument(self, value: Any) -> Any:
        """A symbolic scalar as a node, or as the number that it certainly is. What only the running step knows stays a
        node, though an operator has taken it to be some number: that one is given what it is, and says so."""
        made = torch_sizes.as_made(value)
        symbols = torch_private.free_unbacked_symbols(made) if made != torch_private.expression(value) else ()
        if symbols and all(map(self.bound, symbols)):
            return self.expression_node(made, value)
        constant = torch_private.constant_of(value)
        if constant is not None:
            return constant
        return self.expression_node(torch_private.expression(value), value)

    def expression_node(self, expression: Any, value: Any) -> fx.Node:
        """The node that computes a sympy expression over size symbols in the innermost scope; made once a scope."""
        known = self.scope.expressions.get(expression)
        if known is None:
            known = torch_sizes.expression_to_node(expression, self.scope.symbol, self.graph)
            known.meta.setdefault("val", value)
            known.meta.setdefault("where", ("", 0, ""))
            known.meta.setdefault("stack", ())
            self.scope.expressions[expression] = known
        return known

    def bind_symbols(self, fake: Any, node: fx.Node) -> None:
        """Remember which node's size a fresh symbol is, so that the symbol can be computed when somebody uses it."""
        scope = self.scope
        if is_kind(fake, SYMBOLIC):
            expression = torch_private.expression(fake)
            if expression.is_Symbol:
                scope.symbols.setdefault(expression, lambda: node)
            return
        if not is_kind(fake, torch.Tensor):
            return
        read = [("size", axis, size) for axis, size in enumerate(fake.shape)]
        if node.op == "placeholder" and any(is_kind(size, torch.SymInt) for size in fake.shape):
            # of a part of a tensor: no product of its own sizes
            read += [("stride", axis, stride) for axis, stride in enumerate(fake.stride())]
        for method, axis, size in read:
            symbol = torch_private.expression(size) if is_kind(size, torch.SymInt) else None
            if symbol is not None and symbol.is_Symbol and not self.bound(symbol):
                scope.symbols[symbol] = self.size_reader(scope, node, method, axis, size, symbol)
                scope.rows_of |= {symbol: node} if method == "size" and axis == 0 else {}

    def bound(self, symbol: Any) -> bool:
        return any(symbol in scope.symbols for scope in self.scope.around())

    def size_reader(
        self, scope: GraphScope, node: fx.Node, method: str, axis: int, size: Any, symbol: Any
    ) -> Callable[[], fx.Node]:
        """Emits ``node.size(axis)`` (or stride) right after the node, once, when the symbol is first used."""

        def read() -> fx.Node:
            if symbol not in scope.expressions:
                after = scope.anchor if node.op == "placeholder" and scope.anchor is not None else node
                with scope.graph.inserting_after(after):
                    reader = scope.graph.call_method(method, (node, axis))
                reader.meta.update(
                    val=size, where=node.meta.get("where", ("", 0, "")), stack=node.meta.get("stack", ())
                )
                scope.expressions[symbol] = reader
            return scope.expressions[symbol]

        return read


def is_told_by_its_text(value: complex) -> bool:
    """Whether Python reads the number in what ``repr`` gives, as code of fx does: ``-0j`` is -(0j)."""
    parts = (value.real, value.imag)
    plain = all(math.isfinite(part) and (part or math.copysign(1.0, part) > 0) for part in parts)
    return plain and (bool(value.real) or value.imag >= 0)

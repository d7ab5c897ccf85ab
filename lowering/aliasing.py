"""Who writes where, and which nodes may share storage. Where the tables know nothing, the answer is "may"."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from moebius.lowering.graph import LayerCall, expert_loop
from moebius.lowering.memo import MEMO
from moebius.lowering.operators import Call, draws, given_to, is_pure, is_size, loop_body, read_call
from moebius.lowering.step import backward_with_hooks, gradient_of, is_backward, set_data, set_gradient
from moebius.lowering.torch_private import (
    IN_C,
    draws_numbers,
    may_write,
    only_reads,
    returns_new,
    shared_by_schema,
    written_by_schema,
)
from moebius.lowering.values import value_of


def writes_into(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory this one may change. An operator that the tables do not know counts by its spelling."""
    return writes_of(node, read_call(node))


def writes_of(node: fx.Node, call: Call | None) -> list[fx.Node]:
    """The same for a node that was read."""
    if is_backward(node):
        # where a hook's graph writes at all, it may change everything that it was given
        return gradients_before(node) + [given for _, written in writes_of_hooks(node) for given in written]
    tensors = list(node.all_input_nodes)
    if call is not None:
        if call.name == "expert_loop":
            return loop_writes(call)
        if not call.op.inplace:
            return []
        first = node.args[0] if node.args else node.kwargs.get("input")
        return [first] if isinstance(first, fx.Node) else tensors
    if node.op == "call_method":
        return named_writes(node, str(node.target), tensors)
    if node.op == "call_function":
        return function_writes(node, tensors)
    return tensors if node.op == "call_module" else []


def gradients_before(node: fx.Node) -> list[fx.Node]:
    """What may be some tensor's ``.grad`` when backward begins, which adds to it in place: what the graph was given as
    one, set as one, or read from one."""
    graph = node.graph
    given = [other for other in graph.find_nodes(op="placeholder") if is_gradient(other)]
    read = list(graph.find_nodes(op="call_function", target=gradient_of))
    put = [one.args[1] for one in graph.find_nodes(op="call_function", target=set_gradient)]
    return given + [one for one in read + put if isinstance(one, fx.Node) and one < node]


def writes_of_hooks(node: fx.Node) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """For each tensor with hooks in this backward that write: the tensor, and what its hooks may change."""
    if node.target is not backward_with_hooks:
        return
    owner: Any = node.graph.owning_module
    for hooked in (node.args[2:5], node.args[5:8]):
        for tensor, body, captured in zip(*hooked, strict=True):
            if any(writes_into(inner) for inner in owner.get_submodule(body.target).graph.nodes):
                yield tensor, [given for given in captured if isinstance(given, fx.Node)]


def is_gradient(node: fx.Node) -> bool:
    """Whether an input of the graph was found in some tensor's ``.grad``."""
    return str(node.meta.get("source", "")).endswith(".grad")


def function_writes(node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    target: Any = node.target
    if isinstance(target, LayerCall) and target.isolated:
        return []
    module = (getattr(target, "__module__", "") or "").split(".")[0]
    if module == "moebius":  # ours write into what they say, and what the graphs do that they are given
        said: tuple[int, ...] = getattr(target, "writes", ())
        return tensors if runs_writer(node) else nodes_in(node.args[i] for i in said)
    if may_write(target) is not None:
        return named_writes(node, "", tensors)
    name = getattr(target, "__name__", "")
    if name in UNSAID and module == "torch":
        asked = UNSAID[name]
        return tensors if asked is None or asks(node, asked) else []
    if module not in ("torch", "_operator", "builtins", "math", "operator"):
        return tensors
    if module == "_operator" and name in INPLACE_OPERATORS:
        return tensors[:1]
    return tensors[:1] if asks(node, "inplace") else named_writes(node, name, tensors)


def named_writes(node: fx.Node, name: str, tensors: list[fx.Node]) -> list[fx.Node]:
    """What torch's function or method of that name writes into: what its schema says, and at least its first argument
    where it is spelled so."""
    said = written_by_schema(schema_of(node), node.args, node.kwargs)
    written = nodes_in([*said, node.kwargs.get("out")])
    return written or tensors[: int(name in INPLACE_METHODS or spelled_in_place(name))]


def spelled_in_place(name: str) -> bool:
    """Whether a function or method of torch's says by its name that it writes (Python's ``or_`` does not)."""
    return name.endswith("_") and not name.endswith("__") and not hasattr(operator, name)


def schema_of(node: fx.Node) -> Any:
    """The operator of torch.ops whose schema speaks for a function or method of torch's, if there is one."""
    target: Any = node.target
    if node.op == "call_method":
        return getattr(torch.ops.aten, str(target), None)
    if may_write(target) is not None:
        return target
    ours = (getattr(target, "__module__", "") or "torch").split(".")[0] == "torch"
    return getattr(torch.ops.aten, getattr(target, "__name__", ""), None) if ours else None


def nodes_in(arguments: Any) -> list[fx.Node]:
    """The nodes among an operator's arguments, and in the lists among them."""
    found: list[fx.Node] = []
    fx.map_arg(tuple(arguments), found.append)
    return found


def runs_writer(node: fx.Node) -> bool:
    """Whether a graph that the node is given, and may run, writes into what it is given in turn."""
    if node.graph.owning_module is None:
        return any(given.op == "get_attr" for given in node.all_input_nodes)
    return any(map(writes_outside, graphs_given(node)))


def graphs_given(node: fx.Node) -> list[fx.Graph]:
    """The graphs that the node is given."""
    owner = node.graph.owning_module
    named = [operator.attrgetter(str(given.target)) for given in node.all_input_nodes if given.op == "get_attr"]
    return [body.graph for body in (of(owner) for of in named) if isinstance(body, fx.GraphModule)]


def writes_outside(graph: fx.Graph) -> bool:
    """Whether a graph writes into anything but the tensors that it makes."""
    storage = storage_of(graph)
    return any(not storage.is_fresh(target) for targets in storage.writers.values() for target in targets)


def asks(node: fx.Node, option: str) -> bool:
    """Whether a function that offers this option (``inplace=``) was called with it."""
    if not isinstance(node.target, types.FunctionType):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except TypeError:
        return False
    return bound.arguments.get(option) not in (None, False)


# Functions that write into an argument without saying so, running statistics or rows that max_norm shortens; and the
# option that asks for it.
UNSAID: dict[str, str | None] = {
    "batch_norm": None, "instance_norm": None, "fused_moving_avg_obs_fake_quant": None, "embedding": "max_norm",
    "embedding_bag": "max_norm",
}
INPLACE_OPERATORS = frozenset(
    {"iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
     "itruediv", "ixor", "setitem", "delitem"}
)  # fmt: skip
INPLACE_METHODS = frozenset(f"__{name}__" for name in INPLACE_OPERATORS)


def loop_writes(call: Call) -> list[fx.Node]:
    """What the iterations of a loop write: the outer nodes of those placeholders that the body changes."""
    storage = storage_of(loop_body(call.node).graph)
    roots = {root for targets in storage.writers.values() for target in targets for root in storage.roots[target]}
    return [outer for inner, outer in given_to(call.node).items() if inner in roots and isinstance(outer, fx.Node)]


def storage_of(graph: fx.Graph) -> Storage:
    """The Storage of a graph that no pass changes: what was captured, or a loop's body, which equal layers share. It is
    read once, and is not to be changed."""
    if MEMO.known is None:
        return Storage(graph)
    known = MEMO.known.storages
    if graph not in known:
        known[graph] = Storage(graph)
    return known[graph]


def storage_now(graph: fx.Graph) -> Storage:
    """The Storage of a graph that passes change, as it stands. One for all who ask while they run: whoever asks again
    gets the same, brought up to date."""
    if MEMO.known is None:
        return Storage(graph)
    known = MEMO.known.changing
    if graph in known:
        known[graph].catch_up()
    else:
        known[graph] = Storage(graph)
    return known[graph]


UNREAD = (None, None, None)


class Storage:
    """Which storages each node of a graph may share, found in one walk.

    roots[node]: the nodes that made those storages. The parts of an operator's result (``getitem`` of ``topk``) are
    storages of their own. What no table knows shares those of its arguments. writers_into: the writers by what they
    write into; backwards: the nodes in which autograd runs.
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.walk()

    def walk(self) -> None:
        self.read_from: dict[fx.Node, tuple[Any, ...]] = {}  # args, kwargs, target
        self.roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self.sharing: dict[fx.Node, list[fx.Node]] = {}  # by root: the nodes that may share its storage
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        self.writers_into: dict[fx.Node, list[fx.Node]] = {}
        self.backwards: list[fx.Node] = []
        self.merged = False  # whether memory was put into the place of other memory
        self.memory: dict[int, fx.Node] = {}  # the first input of those that have memory in common
        self.gradients: dict[Any, frozenset[fx.Node]] = {}  # by tensor, or its source: of its ``.grad``
        for node in self.graph.nodes:
            self.add(node)

    def catch_up(self) -> None:
        """Say of the graph as it stands what a walk would say: read what is new or has changed, and what is made of it
        where that has other roots now."""
        nodes, changed = dict.fromkeys(self.graph.nodes), set[fx.Node]()
        gone = self.roots.keys() - nodes.keys()
        if self.merged or any(map(speaks_of_others, gone)):
            return self.walk()
        for node in gone:
            self.take_out(node)
        for node in nodes:
            args, kwargs, target = self.read_from.get(node, UNREAD)
            # (fx gives a node whose arguments change new tuples and dicts)
            if args is node.args and kwargs is node.kwargs and target is node.target:
                if not changed or changed.isdisjoint(node.all_input_nodes):
                    continue
            if speaks_of_others(node):
                return self.walk()
            before = self.take_out(node)
            self.add(node)
            # (what a loop gives out is made of its operands, whatever it has for roots itself; and what is made of a
            # node of which others said what it shares was read before that)
            if args is None or self.roots[node] != before or node.target is expert_loop:
                changed.add(node)

    def take_out(self, node: fx.Node) -> frozenset[fx.Node] | None:
        """Nothing is known of the node any more. Its roots, if any were."""
        self.forget(node)
        if node in self.backwards:
            self.backwards.remove(node)
        before = self.roots.pop(node, None)
        for root in before or () if node.op != "output" else ():
            self.sharing[root].remove(node)
        return before

    def add(self, node: fx.Node) -> None:
        """Take a node in whose arguments are known."""
        call = read_call(node)
        self.put(node, self.find(node, call))
        if node.target is set_data or node.target == "set_":
            self.merge(self.roots[node])
        if node.op not in ("placeholder", "output", "get_attr"):
            written = writes_of(node, call)
            if written:
                self.writers[node] = written
            for target in written:
                self.writers_into.setdefault(target, []).append(node)
            if is_backward(node):
                self.backwards.append(node)
        self.read_from[node] = (node.args, node.kwargs, node.target)

    def put(self, node: fx.Node, roots: frozenset[fx.Node]) -> None:
        before = self.roots.get(node, frozenset())
        self.roots[node] = roots
        self.read_from.pop(node, None)
        for root in before - roots if before else ():
            self.sharing[root].remove(node)
        if node.op != "output":
            for root in roots - before if before else roots:
                self.sharing.setdefault(root, []).append(node)

    def merge(self, roots: frozenset[fx.Node]) -> None:
        """What had one of these storages may from now on have any of them."""
        self.merged = True
        for node in set().union(*(self.sharing.get(root, ()) for root in roots)):
            self.put(node, self.roots[node] | roots)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """``new`` takes the place of ``old``: what shared with the one shares with the other."""
        self.put(new, self.roots[old])

    def forget(self, node: fx.Node) -> None:
        """The node is gone, and its writes with it."""
        self.read_from.pop(node, None)
        for target in self.writers.pop(node, ()):
            self.writers_into[target].remove(node)

    def find(self, node: fx.Node, call: Call | None) -> frozenset[fx.Node]:
        if is_gradient(node):
            self.gradients[str(node.meta["source"]).removesuffix(".grad")] = frozenset((node,))
        if "memory" in node.meta and node.op == "placeholder":  # (inputs may have overlapped when they were captured)
            return frozenset((node, self.memory.setdefault(node.meta["memory"], node)))
        if node.op in ("placeholder", "get_attr") or (call is not None and not call.op.alias):
            return frozenset((node,))
        if node.target in (gradient_of, set_gradient):
            put = node.args[1] if len(node.args) > 1 else None
            return self.roots_of_gradient(node.args[0], put, node)
        if call is not None and call.name == "getitem" and (made := part_of_loop(call)) is not None:
            return self.roots_of_part(*made, node)
        if owns_parts(call) if call is not None and call.name == "getitem" else call is None and makes_new(node):
            return frozenset((node,))
        if call is not None and isinstance(call.args.get("input"), fx.Node):
            if call.name == "getitem" and picks_rows(call["index"]):
                return frozenset((node,))
            return self.roots[call["input"]]  # a view, or the first argument itself; never of an index
        said = [] if node.target == "set_" else nodes_in(shared_by_schema(schema_of(node), node.args, node.kwargs))
        shared = frozenset().union(*(self.roots[argument] for argument in said or node.all_input_nodes))
        return shared or frozenset((node,))

    def roots_of_part(self, loop: Call, part: int, node: fx.Node) -> frozenset[fx.Node]:
        """Of a value that a loop or branch gives out: what it was given, or what its iterations make of their
        operands."""
        body, given = loop_body(loop.node).graph, given_to(loop.node)
        results: Any = body.output_node().args[0]
        iterations = storage_of(body)
        once = type(loop["source"]) is int and loop["source"] == 1
        parts = [part] if once else range(len(results))  # (a later iteration is given what an earlier one has made)
        made = [iterations.roots[results[i]] if isinstance(results[i], fx.Node) else frozenset() for i in parts]
        outer = [given.get(root, node) for root in frozenset().union(*made)] + [loop["carried"][i] for i in parts]
        known = [frozenset((one,)) if one is node else self.roots[one] for one in outer if isinstance(one, fx.Node)]
        return frozenset().union(*known) or frozenset((node,))

    def roots_of_gradient(self, tensor: Any, put: Any, node: fx.Node) -> frozenset[fx.Node]:
        """Of ``.grad`` of a tensor, which is another tensor than itself: the one that was found or put there."""
        place = tensor.meta.get("source", tensor)
        known = self.roots[put] if isinstance(put, fx.Node) else frozenset()
        self.gradients[place] = self.gradients.get(place, frozenset()) | known or frozenset((node,))
        return self.gradients[place]

    def share(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether the two may share storage."""
        return not self.roots[a].isdisjoint(self.roots[b])

    def family(self, node: fx.Node) -> set[fx.Node]:
        """All nodes that may share storage with this one, itself included."""
        return {other for root in self.roots[node] for other in self.sharing[root]}

    def is_fresh(self, node: fx.Node) -> bool:
        """Whether its storage was made in this graph, so that no input can share it."""
        return not any(map(is_outside, self.roots[node]))

    def is_known(self, node: fx.Node) -> bool:
        """Whether all that share its storage are known: it was made in this graph, or came with memory that the step's
        guards compare."""
        return not any(is_outside(root) and "memory" not in root.meta for root in self.roots[node])

    def writer_between(self, node: fx.Node, end: fx.Node) -> fx.Node | None:
        """The first node after ``node`` and before ``end`` that may write into ``node``'s storage."""
        return next(self.writers_of((node,), node, end), None)

    def writers_of(
        self, nodes: Iterable[fx.Node], after: fx.Node | None = None, end: fx.Node | None = None
    ) -> Iterator[fx.Node]:
        """The nodes that may write into the storage of one of some nodes, between two nodes where these are given, in
        the order of the graph."""
        roots = frozenset[fx.Node]().union(*(self.roots[node] for node in nodes))
        named = {node for root in roots for node in self.sharing.get(root, ())}
        writers = {writer for node in named for writer in self.writers_into.get(node, ())}
        for writer in sorted(writers):
            if (after is None or after < writer) and (end is None or writer < end):
                yield writer

    def writer_into(self, nodes: Iterable[fx.Node], end: fx.Node) -> fx.Node | None:
        """The same of several nodes."""
        return next((found for node in nodes if (found := self.writer_between(node, end)) is not None), None)


def speaks_of_others(node: fx.Node) -> bool:
    """Whether nodes that are not made of this one may have other roots, or write elsewhere, because of it."""
    return node.op == "placeholder" or node.target in (gradient_of, set_gradient, set_data, "set_") or is_gradient(node)


def is_outside(root: fx.Node) -> bool:
    """Whether a storage was there before the graph."""
    return root.op in ("placeholder", "get_attr") or root.target is gradient_of


def picks_rows(index: Any) -> bool:
    """Whether an index holds a tensor with axes: then torch copies (one without axes may stand for a number)."""
    values = [value_of(key) for key in (index if isinstance(index, tuple | list) else (index,))]
    return any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values)


def part_of_loop(call: Call) -> tuple[Call, int] | None:
    """The loop and which of its values this getitem takes, if it takes one."""
    source, index = call["input"], call["index"]
    loop = read_call(source) if isinstance(source, fx.Node) and type(index) is int else None
    return (loop, index) if loop is not None and loop.name == "expert_loop" else None


def owns_parts(call: Call) -> bool:
    """Whether this getitem takes one of several results of an operator that makes new tensors."""
    source = call["input"]
    if not isinstance(source, fx.Node) or not isinstance(value_of(source), tuple | list):
        return False
    maker = read_call(source)
    if maker is not None and maker.name in ("where", "nonzero"):  # the columns of one tensor
        return False
    return (maker is not None and not maker.op.alias) or makes_new(source)


# Functions that are made of others, by name, and always return new tensors. (Of torch's own operators schemas say so.)
NEW_TENSORS = frozenset(
    {"layer_norm", "rms_norm", "group_norm", "scaled_dot_product_attention", "cross_entropy", "nll_loss", "outer",
     "conv1d", "conv2d", "experts"}
)  # fmt: skip


def only_computes(node: fx.Node) -> bool:
    """Whether running the node once more changes nothing: an operator of our tables, or torch's own that by its schema
    writes nowhere and draws no random numbers."""
    if is_pure(node):
        return True
    if node.op not in ("call_method", "call_function") or "out" in node.kwargs:
        return False
    if is_backward(node) or writes_into(node):  # (torch.ops has another `backward`, which has nothing to do with it)
        return False
    if node.op == "call_method":
        return only_reads(str(node.target))
    name = getattr(node.target, "__name__", "")
    return only_reads(name) and is_torchs(node, name)


def computes(node: fx.Node) -> bool:
    """Whether running the node once more changes nothing: ``only_computes``, Python's arithmetic too, and branches and
    loops in which nothing else is done."""
    call = read_call(node)
    if call is not None and call.name == "expert_loop":
        return all(computes(inner) for inner in loop_body(node).graph.nodes if inner.op.startswith("call_"))
    return only_computes(node) or is_size(node) or (call is not None and call.name == "skip_iteration")


def repeats_write(node: fx.Node) -> bool:
    """Whether a node writes into its first argument, does nothing else, and would write the same once more."""
    if node.op not in ("call_method", "call_function") or is_backward(node) or draws(node):
        return False
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    call = read_call(node)
    known = spelled_in_place(name) if call is None else bool(call.op.inplace)
    return known and not draws_numbers(name) and writes_into(node) == list(node.all_input_nodes[:1])


def makes_new(node: fx.Node) -> bool:
    """Whether an operator outside the tables is known to return new tensors."""
    if node.op == "call_method":
        return returns_new(str(node.target))
    if node.op != "call_function" or "out" in node.kwargs or asks(node, "inplace"):
        return False
    if isinstance(node.target, LayerCall):
        return node.target.fresh
    if node.target is torch.einsum:  # (of one operand it may be a view)
        return len(node.args) > 2 and all(isinstance(operand, fx.Node) for operand in node.args[1:])
    name = getattr(node.target, "__name__", "")
    module = (getattr(node.target, "__module__", "") or "").split(".")[0]
    return (name in NEW_TENSORS and module in ("torch", "moebius")) or (returns_new(name) and is_torchs(node, name))


def is_torchs(node: fx.Node, name: str) -> bool:
    """Whether it is torch's own function of that name (torch.masked has another ``prod``), or Python's operator."""
    return any(getattr(home, name, None) is node.target for home in (torch, torch.nn.functional, operator, *IN_C))

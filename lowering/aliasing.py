"""Who writes where, and which nodes may share storage. Where the tables know nothing, the answer is "may"."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from moebius.lowering.graph import LayerCall
from moebius.lowering.memo import MEMO
from moebius.lowering.operators import Call, call_operands, is_pure, loop_body, read_call
from moebius.lowering.step import autograd_function, backward_with_hooks, by_autocast, is_backward, set_data
from moebius.lowering.torch_private import may_write, only_reads
from moebius.lowering.values import value_of


def writes_into(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory this one may change. An operator that the tables do not know counts by its spelling."""
    return writes_of(node, read_call(node))


def writes_of(node: fx.Node, call: Call | None) -> list[fx.Node]:
    """The same for a node that was read."""
    if is_backward(node):
        return gradients_before(node) + hook_writes(node)
    tensors = [argument for argument in node.all_input_nodes]
    if call is not None:
        if call.name == "expert_loop":
            return loop_writes(call)
        if not call.op.inplace:
            return []
        first = node.args[0] if node.args else node.kwargs.get("input")
        return [first] if isinstance(first, fx.Node) else tensors
    if "out" in node.kwargs:
        return tensors
    if node.op == "call_method":
        name = str(node.target)
        return tensors[:1] if name.endswith("_") and not name.endswith("__") else []
    if node.op == "call_function":
        return function_writes(node, tensors)
    return tensors if node.op == "call_module" else []


def gradients_before(node: fx.Node) -> list[fx.Node]:
    """The ``.grad`` that the graph was given: backward adds to them, in place."""
    return [other for other in node.graph.find_nodes(op="placeholder") if is_gradient(other)]


def hook_writes(node: fx.Node) -> list[fx.Node]:
    """What the graphs of a backward's hooks may change: where one writes at all, everything that it was given."""
    return [given for _, written in writes_of_hooks(node) for given in written]


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
    name = getattr(target, "__name__", "")
    if target in (autograd_function, by_autocast):
        owner: Any = node.graph.owning_module
        given: Any = node.args[:2] if target is autograd_function else node.args[1]
        bodies = [owner.get_submodule(body.target) for body in given if isinstance(body, fx.Node)]
        return tensors if any(writes_into(inner) for body in bodies for inner in body.graph.nodes) else []
    mutable = may_write(target)
    if mutable is not None:
        return tensors if mutable else []
    module = getattr(target, "__module__", "") or ""
    if name in UNSAID and module.split(".")[0] == "torch":
        asked = UNSAID[name]
        return tensors if asked is None or asks(node, asked) else []
    if module.split(".")[0] in ("torch", "_operator", "builtins", "math", "operator"):
        inplace = (name.endswith("_") and not name.endswith("__")) or (
            module == "_operator" and name in INPLACE_OPERATORS
        )
        if name.startswith(("_foreach", "_fused", "_amp")):  # they write lists of tensors; which of theirs is not said
            return tensors
        return tensors[:1] if inplace or asks(node, "inplace") else []
    return [] if module.startswith(READING) else tensors


def asks(node: fx.Node, option: str) -> bool:
    """Whether a function that offers this option (``inplace=``) was called with it."""
    if not isinstance(node.target, types.FunctionType):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except TypeError:
        return False
    return bound.arguments.get(option) not in (None, False)


READING = ("moebius.kernels", "moebius.lowering.step.checkpoint")  # modules whose functions write into no argument
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


def loop_writes(call: Call) -> list[fx.Node]:
    """What the turns of a loop write: the outer nodes of those placeholders that the body changes."""
    body = loop_body(call.node)
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, call_operands(call), strict=True))
    storage = storage_of_body(body.graph)
    roots = {root for targets in storage.writers.values() for target in targets for root in storage.roots[target]}
    return [outer for placeholder, outer in given.items() if placeholder in roots and isinstance(outer, fx.Node)]


def storage_of_body(graph: fx.Graph) -> Storage:
    """The Storage of a loop's body. Equal layers have one body, which no pass changes: it is read once."""
    if MEMO.known is None:
        return Storage(graph)
    known = MEMO.known.bodies
    if graph not in known:
        known[graph] = Storage(graph)
    return known[graph]


class Storage:
    """Which storages each node of a graph may share, found in one walk.

    roots[node]: the nodes that made those storages. The parts of an operator's result (``getitem`` of ``topk``) are
    storages of their own. What no table knows shares those of its arguments.
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self.sharing: dict[fx.Node, list[fx.Node]] = {}  # by root: the nodes that may share its storage
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            self.add(node)

    def add(self, node: fx.Node) -> None:
        """Take a node in whose arguments are known."""
        call = read_call(node)
        self.put(node, self.find(node, call))
        if node.target is set_data:
            self.merge(self.roots[node])
        if node.op not in ("placeholder", "output", "get_attr"):
            written = writes_of(node, call)
            if written:
                self.writers[node] = written

    def put(self, node: fx.Node, roots: frozenset[fx.Node]) -> None:
        self.roots[node] = roots
        if node.op != "output":
            for root in roots:
                self.sharing.setdefault(root, []).append(node)

    def merge(self, roots: frozenset[fx.Node]) -> None:
        """What had one of these storages may from now on have any of them."""
        for node in set().union(*(self.sharing.get(root, ()) for root in roots)):
            self.put(node, self.roots[node] | roots)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """``new`` takes the place of ``old``: what shared with the one shares with the other."""
        self.put(new, self.roots[old])

    def forget(self, node: fx.Node) -> None:
        """The node is gone, and its writes with it."""
        self.writers.pop(node, None)

    def find(self, node: fx.Node, call: Call | None) -> frozenset[fx.Node]:
        if node.op in ("placeholder", "get_attr") or (call is not None and not call.op.alias):
            return frozenset((node,))
        if (call is not None and call.name == "getitem" and owns_parts(call)) or makes_new(node):
            return frozenset((node,))
        if call is not None and isinstance(call.args.get("input"), fx.Node):
            if call.name == "getitem" and picks_rows(call["index"]):
                return frozenset((node,))
            return self.roots[call["input"]]  # a view, or the first argument itself; never of an index
        shared = frozenset().union(*(self.roots[argument] for argument in node.all_input_nodes))
        return shared or frozenset((node,))

    def share(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether the two may share storage."""
        return not self.roots[a].isdisjoint(self.roots[b])

    def family(self, node: fx.Node) -> set[fx.Node]:
        """All nodes that may share storage with this one, itself included."""
        return {other for root in self.roots[node] for other in self.sharing[root]}

    def is_fresh(self, node: fx.Node) -> bool:
        """Whether its storage was made in this graph, so that no input can share it."""
        return all(root.op not in ("placeholder", "get_attr") for root in self.roots[node])

    def writer_between(self, node: fx.Node, end: fx.Node) -> fx.Node | None:
        """The first node after ``node`` and before ``end`` that may write into ``node``'s storage."""
        for writer, targets in self.writers.items():
            if node < writer < end and any(self.share(node, target) for target in targets):
                return writer
        return None


def picks_rows(index: Any) -> bool:
    """Whether an index holds a tensor with axes: then torch copies (one without axes may stand for a number)."""
    values = [value_of(key) for key in (index if isinstance(index, tuple | list) else (index,))]
    return any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values)


def owns_parts(call: Call) -> bool:
    """Whether this getitem takes one of several results of an operator that makes new tensors."""
    source = call["input"]
    if not isinstance(source, fx.Node) or not isinstance(value_of(source), tuple | list):
        return False
    maker = read_call(source)
    if maker is not None and maker.name in ("where", "nonzero"):  # the columns of one tensor
        return False
    return (maker is not None and not maker.op.alias) or makes_new(source)


# Functions of torch, by name, that always return new tensors; for alias analysis alone (no proof looks into them).
NEW_TENSORS = frozenset(
    {"softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "scaled_dot_product_attention", "embedding",
     "cat", "stack", "cumsum", "mean", "var", "cos", "sin", "bmm", "baddbmm", "cross_entropy", "nll_loss",
     "masked_fill", "outer", "isin", "tril", "triu", "ones", "ones_like", "empty_like", "new_ones", "rand_like",
     "randn_like", "logsumexp", "max", "min", "amax", "amin", "sort", "argsort", "bincount", "multinomial", "norm",
     "reciprocal", "floor", "round", "elu", "new_empty", "repeat", "repeat_interleave", "conv1d", "scatter",
     "index_copy", "experts", "logaddexp", "log1p", "expm1"}
)  # fmt: skip


def only_computes(node: fx.Node) -> bool:
    """Whether running the node once more changes nothing: an operator of our tables, or torch's own that by its schema
    writes nowhere and draws no random numbers."""
    if is_pure(node):
        return True
    if node.op not in ("call_method", "call_function") or "out" in node.kwargs or writes_into(node):
        return False
    if node.op == "call_method":
        return only_reads(str(node.target))
    name = getattr(node.target, "__name__", "")
    homes = (torch, torch.nn.functional, operator)
    return only_reads(name) and any(getattr(home, name, None) is node.target for home in homes)


def makes_new(node: fx.Node) -> bool:
    """Whether an operator outside the tables is known to return new tensors."""
    if node.op == "call_method":
        return str(node.target) in NEW_TENSORS
    if node.op != "call_function" or "out" in node.kwargs:
        return False
    if isinstance(node.target, LayerCall):
        return node.target.fresh
    name = getattr(node.target, "__name__", "")
    module = (getattr(node.target, "__module__", "") or "").split(".")[0]
    return name in NEW_TENSORS and module in ("torch", "moebius")

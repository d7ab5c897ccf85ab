"""The whole training step as one graph for a backend of torch.compile.

Contract. Needs: a lowered graph with one or more ``backward()`` in it, whose other nodes give tensors, or are Python's
arithmetic on numbers. Promises: a graph of torch's operators without autograd, in which each backward is written out,
whose inputs are the tensors of the step (parameters as they are, detached) and its numbers as tensors without axes, and
which gives the results and the gradients that the leaves have at its end; it writes into parameters and state as the
optimizer does. ``check`` holds it to that. What cannot be said so is refused with a reason (WholeStepRefusedError):
loops and branches over graphs, hooks, ``.grad`` that was there before, shared memory, results with a history.

Numbers stay Python's: what comes from the call's numbers alone is computed before the graph, what only the results need
is computed after it, operation by operation, to the last bit. What the graph itself needs goes in as a tensor of 64
bits, read with ``item()``.

What capture has no guard for is asked before each run (``WholeStep.fits``); where it does not hold, the lowered graph
runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from moebius.lowering.autocast import depth_of_autocast, leave_autocast, leave_to_depth
from moebius.lowering.errors import WholeStepRefusedError
from moebius.lowering.experts.stacking import asks_which_ran
from moebius.lowering.step.gradients import gradient_of, keep, require_gradients, set_gradient
from moebius.lowering.step.hooks import backward_with_hooks
from moebius.lowering.torch_private import (
    FakeTensor,
    compiling_with,
    custom_operator_name,
    default_saved_tensors_hooks,
    has_gradient_hooks,
    set_grad_enabled,
    storage_of,
    traced_by_operators,
)
from moebius.lowering.values import computed_of, real_of

SWITCHES = frozenset(
    {
        set_grad_enabled, leave_autocast, torch.set_autocast_enabled, torch.set_autocast_dtype,
        torch.set_autocast_cache_enabled, torch.autocast_increment_nesting, torch.autocast_decrement_nesting,
    }
)  # fmt: skip
GRADIENTS = frozenset({set_gradient, gradient_of, require_gradients, keep, torch.autograd.backward})
ARITHMETIC = frozenset({"_operator", "math", "builtins"})  # the modules of functions on numbers that have no effect
TYPES = {float: torch.float64, int: torch.int64}  # of numbers that go into the graph
SECOND_TIME = (
    "Trying to backward through the graph a second time: the captured step has run backward() on this tensor, and its "
    "history is freed. Specify retain_graph=True in the step if you need to backward through it a second time."
)


def refuse(why: str) -> NoReturn:
    raise WholeStepRefusedError(why)


# ----------------------------------------------------------------------------------------------------------------------
# Which node runs where
# ----------------------------------------------------------------------------------------------------------------------


def is_backward(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target == "backward") or node.target is torch.autograd.backward


def holds_tensors(value: Any) -> bool:
    """Whether a node's value is a tensor, a size of one, or a list of tensors."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(holds_tensors, value))
    return isinstance(value, torch.Tensor | torch.SymInt)


def is_number(node: fx.Node) -> bool:
    """Whether it gives a Python number, and does nothing else."""
    if node.op == "placeholder":
        return type(node.meta.get("val")) in (int, float, bool)
    if is_item(node):
        return True
    pure = node.op == "call_function" and getattr(node.target, "__module__", "") in ARITHMETIC
    return pure and not holds_tensors(node.meta.get("val"))


def is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def check_node(node: fx.Node) -> None:
    """Raise WholeStepRefusedError for a node that no graph can hold."""
    value = node.meta.get("val")
    if node.target is backward_with_hooks:
        refuse("gradient hooks are called in it")
    if asks_which_ran(node):
        refuse("each expert has parameters of its own, and one that no token chose gets no gradient")
    if node.op == "placeholder":
        if not is_number(node) and not isinstance(value, torch.Tensor | torch.SymInt):
            refuse(f"an input of it is a {type(value).__name__}")
    elif node.op == "get_attr":
        if isinstance(getattr(node.graph.owning_module, str(node.target), None), torch.nn.Module):
            refuse("a loop, a branch or another region with a graph of its own is in it")
    elif node.target is set_gradient and node.args[1] is not None:
        refuse("it sets .grad to a tensor")
    elif node.op != "output" and not is_number(node) and not is_backward(node):
        if node.target not in SWITCHES and node.target not in GRADIENTS and not holds_tensors(value):
            refuse(f"only Python can run {getattr(node.target, '__name__', node.target)} in it")


def numbers_of_the_call(graph: fx.Graph) -> set[fx.Node]:
    """Numbers that come from the call's numbers alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_number(node) and not is_item(node) and all(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def part_of(gm: fx.GraphModule, inputs: Sequence[fx.Node], results: Sequence[fx.Node], through: Callable) -> Any:
    """The code that computes some nodes from others. through: whether a node is one of that part."""
    graph, copied = fx.Graph(), {}
    for node in inputs:
        copied[node] = graph.placeholder(node.name)
    wanted = computed_of(results, lambda node: () if node in copied else node.all_input_nodes) - copied.keys()
    assert all(map(through, wanted)), wanted
    for node in gm.graph.nodes:
        if node in wanted:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in results))
    return fx.GraphModule(gm, graph).forward


# ----------------------------------------------------------------------------------------------------------------------
# The step
# ----------------------------------------------------------------------------------------------------------------------


class WholeStep:
    """A step split into numbers before, one graph of tensors, and numbers after. Called as the lowered graph is.

    gm: the lowered graph. as_it_is: runs it where the tensors of a call do not fit. Raises WholeStepRefusedError.
    """

    def __init__(self, gm: fx.GraphModule, as_it_is: Callable[..., tuple]):
        self.as_it_is, graph = as_it_is, gm.graph
        nodes, placeholders = list(graph.nodes), graph.find_nodes(op="placeholder")
        memory = [node.meta["memory"] for node in placeholders if "memory" in node.meta]
        if len(set(memory)) < len(memory):
            refuse("inputs of it share memory")
        for node in sorted(nodes, key=lambda node: node.target is not backward_with_hooks):
            check_node(node)
        if not any(map(is_backward, nodes)):
            refuse("there is no backward() in it")
        results: Any = graph.output_node().args[0]
        self.outputs = tuple(results)
        early = numbers_of_the_call(graph)
        inside = self.inside(graph, early)
        self.given = [n for n in nodes if n in early and any(user in inside for user in n.users)]
        late = [n for n in dict.fromkeys(self.outputs) if isinstance(n, fx.Node) and is_number(n)]
        self.items = [n for n in nodes if is_item(n) and self.leads_to(n, set(late))]
        self.place = {node: i for i, node in enumerate(placeholders)}
        self.numbers = [self.place[n] for n in placeholders if is_number(n)]
        self.tensors = [self.place[n] for n in placeholders if not is_number(n)]
        known = [placeholders[i] for i in self.numbers]
        self.before = part_of(gm, known, self.given, is_number)
        self.after = part_of(gm, [*known, *self.items], late, is_number)
        self.late = late
        values = self.before(*(node.meta["val"] for node in known))
        self.kinds = [type(value) for value in values]
        if any(kind not in TYPES for kind in self.kinds):
            refuse("a number of the call decides what it computes")
        self.results = [n for n in dict.fromkeys(self.outputs) if isinstance(n, fx.Node) and n not in late]
        self.leaves = [
            i for i, p in enumerate(self.tensors)
            if isinstance(value := placeholders[p].meta["val"], torch.Tensor) and value.requires_grad
        ]  # fmt: skip
        self.roots = self.backward_roots(nodes)
        self.cleared = self.cleared_first(nodes)
        self.inner = self.inner_graph(gm, [placeholders[p] for p in self.tensors], inside)
        self.examples = [placeholders[p].meta["val"] for p in self.tensors]
        self.check_real(placeholders)
        self.compiled: Callable[..., Sequence[Any]] | None = None

    @staticmethod
    def leads_to(node: fx.Node, wanted: set[fx.Node]) -> bool:
        """Whether a number is one of those, or numbers lead from it to one."""
        return node in wanted or any(is_number(user) and WholeStep.leads_to(user, wanted) for user in node.users)

    @staticmethod
    def inside(graph: fx.Graph, early: set[fx.Node]) -> set[fx.Node]:
        """The nodes of the graph of tensors: all that are no numbers, and the numbers from tensors that they need."""
        found: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if node.op in ("placeholder", "output") or node in early:
                continue
            if not is_number(node) or any(user in found for user in node.users):
                found.add(node)
        return found

    @staticmethod
    def backward_roots(nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """The tensors whose history a backward has freed."""
        calls = [n for n in nodes if is_backward(n) and not n.kwargs.get("retain_graph")]
        roots: list[Any] = [n.args[0] for n in calls]
        return {one for root in roots for one in (root if isinstance(root, list | tuple) else [root])}

    def cleared_first(self, nodes: Sequence[fx.Node]) -> set[int]:
        """Leaves whose ``.grad`` the step sets to None before anything else asks for it: places among the inputs."""
        found: set[int] = set()
        for node in nodes:
            if is_backward(node) or node.target is gradient_of:
                break
            if node.target is set_gradient and node.args[0] in self.place:
                found.add(self.place[node.args[0]])
        return found

    def inner_graph(self, gm: fx.GraphModule, inputs: Sequence[fx.Node], inside: set[fx.Node]) -> fx.GraphModule:
        """The graph of tensors with the numbers that it is given, still with autograd in it."""
        graph, copied = fx.Graph(), {}
        for node in inputs:
            copied[node] = graph.placeholder(node.name)
        given = [graph.placeholder(f"number_{i}") for i in range(len(self.given))]
        for node, tensor in zip(self.given, given, strict=True):
            copied[node] = graph.call_method("item", (tensor,))
        read: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            if node in self.items:  # what is read is what the tensor holds now
                now = graph.call_method("detach", (copied[node.args[0]],))
                read[node] = graph.call_method("clone", (now,))
            if node in inside:
                copied[node] = graph.node_copy(node, copied.__getitem__)
        graph.output((*(copied[n] for n in self.results), *(read[n] for n in self.items)))
        return fx.GraphModule(gm, graph)

    def check_real(self, placeholders: Sequence[fx.Node]) -> None:
        """Raise WholeStepRefusedError where already the tensors that it was captured with do not fit."""
        leaves = {p: real_of(placeholders[p]) for p in (self.tensors[i] for i in self.leaves)}
        if why := self.misfit({place: leaf for place, leaf in leaves.items() if leaf is not None}):
            refuse(why)

    def misfit(self, leaves: dict[int, torch.Tensor]) -> str:
        """What the graph is not made for in tensors that require gradients, by place; "" where it is made for them."""
        for place, leaf in leaves.items():
            if not leaf.is_leaf:
                return "an input of it has a history"
            if leaf.grad is not None and place not in self.cleared:
                return "a parameter has a gradient before backward; begin with optimizer.zero_grad()"
        return "a parameter has gradient hooks" if has_gradient_hooks(*leaves.values()) else ""

    # ------------------------------------------------------------------------------------------------------------------
    # Written out
    # ------------------------------------------------------------------------------------------------------------------

    def with_gradients(self, *inputs: Any) -> tuple:
        """The graph of tensors on leaves of its own: results, then each leaf's gradient. Notes what is what."""
        mine = list(inputs)
        for i in self.leaves:
            mine[i] = inputs[i].detach().requires_grad_()
        state, depth = torch.is_grad_enabled(), depth_of_autocast()
        try:
            found = list(fx.Interpreter(self.inner).run(*mine))
            if torch.is_grad_enabled() is not state or depth_of_autocast() != depth:
                refuse("it leaves grad mode or autocast other than it found it")
        finally:
            torch.set_grad_enabled(state)
            leave_to_depth(depth)
        gradients = {i: mine[i].grad for i in self.leaves}
        self.reached = [i for i in self.leaves if gradients[i] is not None]
        self.note_results(found, mine, gradients)
        return (*(found[i].detach() for i in self.fresh), *(gradients[i].detach() for i in self.reached))

    def note_results(self, found: list[Any], inputs: list[Any], gradients: dict[int, Any]) -> None:
        """What each result is: an input, a gradient, or a tensor of its own that the graph gives."""
        self.how: list[tuple[str, Any]] = []
        self.fresh: list[int] = []
        inputs = inputs[: len(self.tensors)]
        for i, value in enumerate(found):
            if not isinstance(value, torch.Tensor):
                refuse("a size is among its results")
            same = [k for k, one in enumerate(inputs) if one is value]
            as_gradient = [k for k in self.reached if gradients[k] is value]
            if same:
                self.how.append(("input", same[0]))
            elif as_gradient:
                self.how.append(("gradient", as_gradient[0]))
            elif value.requires_grad and self.results[i] not in self.roots:
                refuse("a tensor with a history is among its results; return loss.detach()")
            else:
                name = type(value.grad_fn).__name__ if value.requires_grad else ""
                self.how.append((name and "spent", (len(self.fresh), name)))
                self.fresh.append(i)
        places = [*inputs, *(found[i] for i in self.fresh), *(gradients[k] for k in self.reached)]
        storages = [storage_of(one) for one in places if isinstance(one, torch.Tensor)]
        if len({*storages}) != len(storages):
            refuse("its results and inputs share memory")

    def write_out(self) -> tuple[fx.GraphModule, list[Any]]:
        """The graph and examples of its inputs. Raises WholeStepRefusedError."""
        examples = self.fakes()
        with compiling_with(examples):
            try:
                traced = traced_by_operators(self.with_gradients, examples)
            except WholeStepRefusedError:
                raise
            except Exception as error:
                raise WholeStepRefusedError(f"it cannot be written out: {in_short(error)}") from error
        check(traced, len(examples), len(self.fresh) + len(self.reached))
        return traced, self.fakes()

    def fakes(self) -> list[Any]:
        """New examples of the inputs, without autograd."""
        mode: Any = next((v.fake_mode for v in self.examples if isinstance(v, FakeTensor)), None)
        if mode is None:
            refuse("it has no tensors for inputs")
        with mode:
            like = [torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device=v.device)
                    if isinstance(v, torch.Tensor) else v for v in self.examples]  # fmt: skip
            return [*like, *(torch.empty((), dtype=TYPES[kind], device="cpu") for kind in self.kinds)]

    # ------------------------------------------------------------------------------------------------------------------
    # Run
    # ------------------------------------------------------------------------------------------------------------------

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether the tensors of a call are as the graph holds them to be: leaves without gradients and hooks, and
        nothing that shares memory; and nobody looks at what autograd does."""
        if default_saved_tensors_hooks() is not None or torch.is_anomaly_enabled():
            return False
        if self.misfit({place: inputs[place] for place in (self.tensors[i] for i in self.leaves)}):
            return False
        seen = [storage_of(t) for p in self.tensors if isinstance(t := inputs[p], torch.Tensor)]
        return len({*seen}) == len(seen)

    def __call__(self, *inputs: Any) -> tuple:
        numbers = [inputs[p] for p in self.numbers]
        given = self.before(*numbers)
        if [type(value) for value in given] != self.kinds or not self.fits(inputs):
            return self.as_it_is(*inputs)
        assert self.compiled is not None
        tensors = [inputs[p] for p in self.tensors]
        for i in self.leaves:
            tensors[i] = tensors[i].detach()
        kinds = map(TYPES.__getitem__, self.kinds)
        made = [torch.tensor(v, dtype=kind, device="cpu") for v, kind in zip(given, kinds, strict=True)]
        with torch.no_grad():
            found = self.compiled(*tensors, *made)
        n = len(self.fresh)
        gradients = dict(zip(self.reached, found[n:], strict=True))
        for i in self.leaves:
            leaf = inputs[self.tensors[i]]
            if i in gradients or self.tensors[i] in self.cleared:
                leaf.grad = gradients.get(i)
        values: list[Any] = []
        for kind, which in self.how:
            if kind == "input":
                values.append(inputs[self.tensors[which]])
            elif kind == "gradient":
                values.append(gradients[which])
            else:
                values.append(spent(found[which[0]], which[1]) if kind else found[which[0]])
        known = dict(zip(self.results, values, strict=False))
        known.update(zip(self.late, self.after(*numbers, *values[len(self.results) :]), strict=True))
        return tuple(known[one] if isinstance(one, fx.Node) else one for one in self.outputs)


class Spent(torch.autograd.Function):
    """The history of a tensor on which the step has run backward: asked a second time, it raises as torch does."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(SECOND_TIME)


def spent(value: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor with a history that is freed. name: of the autograd node that it had."""
    kind = SPENT.get(name) or SPENT.setdefault(name, type(name.partition("Backward")[0], (Spent,), {}))
    with torch.enable_grad():
        anchor = torch.empty((), dtype=torch.float32, device="cpu", requires_grad=True)
        return kind.apply(anchor, value)


SPENT: dict[str, type[Spent]] = {}


def check(gm: fx.GraphModule, inputs: int, results: int) -> None:
    """The promise: operators of torch's libraries alone, so many inputs and results, no autograd and no region."""
    for node in gm.graph.nodes:
        known = custom_operator_name(node.target) is not None or (
            node.op == "call_function" and getattr(node.target, "__module__", "") in (*ARITHMETIC, "torch")
        )
        if node.op == "call_function" and not known:
            refuse(f"{node.target} is left in it")
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            refuse(f"a {node.op} is left in it")
    given: Any = gm.graph.output_node().args[0]
    if len(gm.graph.find_nodes(op="placeholder")) != inputs or len(given) != results:
        refuse("it has other inputs or results than the step")


def whole_step(
    gm: fx.GraphModule,
    as_it_is: Callable[..., tuple],
    compile_whole: Callable[[fx.GraphModule, list[Any]], Any],
    rounds: bool = False,
) -> WholeStep:
    """The step, its graph compiled by a backend. rounds: whether that makes float32 of each number that a graph reads.

    Raises WholeStepRefusedError.
    """
    step = WholeStep(gm, as_it_is)
    written = step.write_out()
    if rounds and reads_float64(*written):
        refuse("it computes in float64, and the backend rounds numbers that it reads, as a learning rate, to float32")
    try:
        step.compiled = compile_whole(*written)
    except Exception as error:  # (what it raises for forward graphs too is raised there)
        raise WholeStepRefusedError(f"the backend cannot compile it whole: {in_short(error)}") from error
    return step


def reads_float64(gm: fx.GraphModule, examples: list[Any]) -> bool:
    """Whether numbers of 64 bits meet tensors of 64 bits in a graph."""
    wide = any(isinstance(t, torch.Tensor) and t.dim() and t.dtype == torch.float64 for t in examples)
    read = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
    return wide and any(node.args[0].meta["val"].dtype == torch.float64 for node in read)


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]

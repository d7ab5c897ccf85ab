"""Abstract interpretation of an expert loop: a fact for each node of its body, and what its iterations do to the world.

Nodes outside the loop are read on demand and only as far as routing goes (masks, counts, hit lists); all other tensors
from outside are invariants. The rules are in the files rules_*.py, for canonical operators.
"""

from __future__ import annotations

import functools
from bisect import insort
from collections.abc import Callable
from typing import Any

from torch import fx

from moebius.lowering.aliasing import storage_of
from moebius.lowering.experts.facts import (
    Accumulated,
    Constant,
    Evidence,
    ExpertId,
    Fact,
    HitList,
    Invariant,
    Items,
    Skip,
    State,
    StateRows,
    Test,
    Unknown,
)
from moebius.lowering.operators import CONTROL, Call, call_operands, loop_body, read_call, target_name
from moebius.lowering.torch_private import set_grad_enabled
from moebius.lowering.values import add_call, is_floating

Rule = Callable[["Reader", Call], "Fact | None"]
RULES: dict[str, list[Rule]] = {}  # by canonical operator; the first that answers is right
FIRST: set[Rule] = set()  # asked before those of all files
# The files of rules in the order in which they are asked, whichever is imported first.
FILES = (
    "rules_routing", "rules_rows", "rules_gates",
    "rules_computed",  # takes what none of those has a word for
)  # fmt: skip

# Operators that are read outside of the loop too: those that make masks, counts and hit lists from a routing index.
READ_OUTSIDE = frozenset(
    {"one_hot", "permute", "transpose", "t", "T", "mT", "sum", "any", "gt", "ge", "ne", "eq", "nonzero", "argwhere",
     "where", "unique", "squeeze", "unsqueeze", "reshape", "flatten", "getitem", "select", "unbind", "cast",
     "contiguous", "clone", "bincount", "tolist", "mul", "and"}
)  # fmt: skip


def rule(*names: str, of: Any = None, first: bool = False) -> Callable[[Callable[..., Any]], Rule]:
    """Registers a rule for canonical operators. A rule returns a fact, or None when it has nothing to say. of: it is
    only asked where the first argument has a fact of this kind, which it is given. first: before those of all files."""

    def register(function: Callable[..., Any]) -> Rule:
        def asked(reader: Reader, call: Call) -> Any:
            if of is None:
                return function(reader, call)
            fact = reader.fact(call["input"])
            return function(reader, call, fact) if isinstance(fact, of) else None

        made: Rule = functools.wraps(function)(asked)
        if first:
            FIRST.add(made)
        for name in names:
            insort(RULES.setdefault(name, []), made, key=rank)
        return made

    return register


def rank(function: Rule) -> int:
    return -1 if function in FIRST else FILES.index(function.__module__.rpartition(".")[2])


class Reader:
    """Reads one expert_loop node. ``evidence`` is complete after construction. alone: whether its experts have the
    tokens of this process only."""

    alone = True

    def __init__(self, loop: fx.Node):
        call = read_call(loop)
        assert call is not None and call.name == "expert_loop"
        self.loop, self.call, self.body = loop, call, loop_body(loop)
        self.placeholders = list(self.body.graph.find_nodes(op="placeholder"))
        self.facts: dict[fx.Node, Fact] = {}
        self.outside: dict[fx.Node, Fact] = {}
        self.evidence = Evidence()
        self.made: dict[Any, fx.Node] = {}
        self.mode_at_entry = grad_mode_before(loop, self.body)
        self.mode = self.mode_at_entry
        self.switch: fx.Node = loop
        self.enter()
        for node in self.body.graph.nodes:
            if node.op == "output":
                self.evidence.results = [self.fact(value) for value in node.args[0]]
            elif node.op != "placeholder":
                self.facts[node] = self.read(node)
        if self.mode != self.mode_at_entry:  # the next iteration begins otherwise than this one
            self.evidence.ungraded.append(self.switch)
        self.evidence.routing = {node: fact for node, fact in self.outside.items() if not isinstance(fact, Invariant)}

    def enter(self) -> None:
        """Facts of the body's placeholders."""
        row, *others = self.placeholders
        self.facts[row] = self.source_row(self.call["source"])
        written, touched = self.written_placeholders()
        carried = len(self.call["carried"])
        for position, (placeholder, outer) in enumerate(zip(others, call_operands(self.call)[1:], strict=True)):
            if position < carried or placeholder in written:
                self.facts[placeholder] = State(placeholder, position < carried)
            elif placeholder in touched:
                name = target_name(touched[placeholder])
                self.facts[placeholder] = Unknown(f"{name} may change a tensor in place", touched[placeholder])
            elif isinstance(outer, fx.Node):
                self.facts[placeholder] = self.read_outside(outer)
            else:
                self.facts[placeholder] = Constant(outer)

    def written_placeholders(self) -> tuple[set[fx.Node], dict[fx.Node, fx.Node]]:
        """Those that known operators write into, and those that unknown ones may: with the first such operator."""
        written: set[fx.Node] = set()
        touched: dict[fx.Node, fx.Node] = {}
        storage = storage_of(self.body.graph)
        for node, targets in storage.writers.items():
            for root in frozenset().union(*(storage.roots[target] for target in targets)):
                if read_call(node) is None:
                    touched.setdefault(root, node)
                else:
                    written.add(root)
        return written, touched

    def source_row(self, source: Any) -> Fact:
        """What one row of the loop's source is."""
        if isinstance(source, int):
            return ExpertId()
        fact = self.read_outside(source)
        if isinstance(fact, HitList):
            return ExpertId(vector=fact.column)
        return Unknown("the rows that the loop runs over are not a list of experts", source)

    # ------------------------------------------------------------------------------------------------------------------
    # Facts of arguments
    # ------------------------------------------------------------------------------------------------------------------

    def fact(self, argument: Any) -> Fact:
        """The fact of an FX argument of a body node (or, for rules that run outside, of an outer node)."""
        if isinstance(argument, fx.Node):
            if argument.graph is self.body.graph:
                return self.facts[argument]
            return self.read_outside(argument)
        if isinstance(argument, tuple | list):
            return Items(tuple(self.fact(item) for item in argument))
        if isinstance(argument, slice) and any(
            isinstance(p, fx.Node) for p in (argument.start, argument.stop, argument.step)
        ):
            return Unknown("a slice whose bounds are not constants")
        return Constant(argument)

    def read_outside(self, node: fx.Node) -> Fact:
        """The fact of a node outside of the loop: a routing fact, or an invariant."""
        known = self.outside.get(node)
        if known is None:
            call = read_call(node)
            found = None
            if call is not None and call.name in READ_OUTSIDE and not call.op.inplace:
                found = self.apply_rules(call)
            if found is None or isinstance(found, Unknown):
                found = Invariant(("outside", node), node)
            known = self.outside[node] = found
        return known

    def make(self, target: Any, *args: Any, each: fx.Node | None = None) -> fx.Node:
        """A node before the loop that a fact speaks of: equal arguments, one node. each: of an iteration, that it
        stands for alone. Where the proof fails, whoever asked for it takes these nodes out again."""
        key = (target, repr(args), each)
        if key not in self.made:
            with self.loop.graph.inserting_before(self.loop):
                self.made[key] = add_call(self.loop.graph, self.loop, target, *args)
        return self.made[key]

    # ------------------------------------------------------------------------------------------------------------------
    # Facts of body nodes
    # ------------------------------------------------------------------------------------------------------------------

    def read(self, node: fx.Node) -> Fact:
        """The fact of one body node; notes its effects in the evidence."""
        call = read_call(node)
        if call is None:
            stranger = Unknown(f"{target_name(node)} is not an operator that the proof knows", node)
            self.evidence.strangers.append(stranger)
            return stranger
        if call.name == "set_grad_enabled":
            self.mode, self.switch = call["mode"], node
            return Constant(None)
        if call.name == "skip_iteration":
            self.evidence.skips.append(Skip(node, self.fact(call["condition"]), bool(self.evidence.sums)))
            return Constant(None)
        operands = [self.facts[argument] for argument in node.all_input_nodes]
        if call.name in ("size", "numel"):
            return self.first(call, operands) or self.invariant_or_unknown(
                call, [f for f in operands if not isinstance(f, State)]
            )
        found = self.first(call, operands)
        if isinstance(found, Accumulated):
            self.evidence.sums.append(found)
            return self.graded(node, found)
        if isinstance(found, StateRows):
            if call.op.inplace:
                self.facts[call["input"]] = found  # the copy itself; who read it before has no fact of use
            return self.graded(node, found)
        if call.op.inplace:
            unknown = Unknown(f"{target_name(node)} changes a tensor in place that is not the sum", node)
            cause = found if isinstance(found, Unknown) else unknown
            self.evidence.writes.append(cause)
            return cause
        if any(isinstance(fact, State | StateRows | Accumulated) for fact in operands):
            cause = Unknown(f"{target_name(node)} reads what earlier iterations wrote", node)
            self.evidence.readbacks.append(cause)
            return cause
        if found is None:
            found = self.invariant_or_unknown(call, operands)
        return self.graded(node, found)

    def first(self, call: Call, operands: list[Fact]) -> Fact | None:
        """What the rules say, unless an operand is unknown: then that."""
        for fact in operands:
            if isinstance(fact, Unknown):
                return fact
        return self.apply_rules(call)

    def apply_rules(self, call: Call) -> Fact | None:
        for candidate in RULES.get(call.name, ()):
            found = candidate(self, call)
            if found is not None:
                return found
        return None

    def invariant_or_unknown(self, call: Call, operands: list[Fact]) -> Fact:
        """An operator on invariants alone gives an invariant; on anything else, what no rule knows is unknown."""
        node = call.node
        if (
            not call.op.inplace
            and call.name not in CONTROL
            and all(self.key_of(n) is not None for n in node.all_input_nodes)
        ):
            return Invariant(self.structure(node), node)
        kinds = " and ".join(sorted({fact.words for fact in operands}))
        return Unknown(f"{target_name(node)} of {kinds or 'constants'}: the proof knows no such operator", node)

    def key_of(self, argument: Any) -> Any:
        """A key that equal invariants share, for an FX argument of a body node; None for what varies with the
        iteration."""
        if isinstance(argument, fx.Node):
            if argument.op == "placeholder":
                fact = self.facts[argument]
                return None if isinstance(fact, State | ExpertId) else ("outside", self.outer_of(argument))
            fact = self.facts[argument]
            return fact.key if isinstance(fact, Invariant) else None
        if isinstance(argument, tuple | list):
            return tuple(self.key_of(item) for item in argument)
        if isinstance(argument, slice):
            return ("slice", self.key_of(argument.start), self.key_of(argument.stop), self.key_of(argument.step))
        return (type(argument).__name__, repr(argument))

    def structure(self, node: fx.Node) -> Any:
        kwargs = tuple(sorted((name, self.key_of(value)) for name, value in node.kwargs.items()))
        return (node.op, node.target, self.key_of(node.args), kwargs)

    def outer_of(self, placeholder: fx.Node) -> Any:
        """What the loop node passes for a placeholder of the body."""
        return call_operands(self.call)[self.placeholders.index(placeholder)]

    def graded(self, node: fx.Node, found: Fact) -> Fact:
        """Notes floating point that runs in another grad mode than the loop: it is cut off from autograd, or joined."""
        if self.mode == self.mode_at_entry or not is_floating(node):
            return found
        self.evidence.ungraded.append(node)
        return found


def grad_mode_before(loop: fx.Node, body: fx.GraphModule) -> bool | None:
    """Grad mode at the loop: the last switch before it; else what the body's own regions restore; else None
    (untouched).

    None also stands for "cannot be told" when a body leaves it switched off: its floating point is then taken as
    ungraded. """
    mode = None
    for node in loop.graph.find_nodes(op="call_function", target=set_grad_enabled):
        if node < loop:
            mode = node.args[0]
    if mode is not None:
        return mode
    switches = [node.args[0] for node in body.graph.find_nodes(op="call_function", target=set_grad_enabled)]
    return True if switches and switches[-1] is True else None


def negate(test: Fact) -> Fact:
    """The opposite condition."""
    return Test(test.kind, test.value, not test.negated) if isinstance(test, Test) else test

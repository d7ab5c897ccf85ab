"""The proof that an expert loop computes  Σ_k weight[t,k] · down[e](f(gate(x[t])) · up(x[t])),  e = index[t,k].

:func:`prove` takes what was accumulated in a loop that was read (reader.py) apart into a claim (claims.py), and puts
the claim to every step of STEPS. The first step that does not hold is the refusal: its name, what it found, and the
user's line. Steps only judge; taking one out makes the proof accept more and changes nothing else (the tests do that).
What an earlier iteration wrote has no fact that could enter a claim (reader.py), so no step needs to look for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.experts.claims import Claim, Fused, Refused, placed
from moebius.lowering.experts.facts import Fact, RowFunction, Selection, State, Test, Unknown
from moebius.lowering.experts.reader import Reader
from moebius.lowering.experts.routing import (
    ALL,
    DROPPED,
    allowed_indices,
    coverage_fault,
    distinct,
    index_root,
    is_among,
    is_skipped,
    skip_values,
    weighs_alike,
)
from moebius.lowering.experts.saved_for_backward import before_the_loop, writer_before_backward
from moebius.lowering.graph import ProofStep
from moebius.lowering.operators import draws, loop_body, read_call, target_name
from moebius.lowering.step.checkpoint import checkpoint_around
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import computed_of, rank_of, same_shape, shape_of, tensor_of, users_line

# ----------------------------------------------------------------------------------------------------------------------
# The steps
# ----------------------------------------------------------------------------------------------------------------------

Fault = tuple[str, fx.Node]
AnyClaim = TypeVar("AnyClaim", bound=Claim)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # what the operator computes in


def first_fault(causes: list[Unknown]) -> Fault | None:
    return (causes[0].reason, causes[0].node) if causes and causes[0].node is not None else None


def known_operators(claim: Claim) -> Fault | None:
    """Every node of the body is an operator whose effects are known."""
    return first_fault(claim.reader.evidence.strangers)


def nothing_else_written(claim: Claim) -> Fault | None:
    """An iteration changes nothing in place but the sum."""
    return first_fault(claim.reader.evidence.writes)


def nothing_else_drawn(claim: Claim) -> Fault | None:
    """Random numbers are drawn for what is added alone: others would no longer be, and what is drawn later differ."""
    wanted, graphs = set(getattr(claim, "nodes", ())), [claim.reader.body.graph]
    for graph in graphs:
        for node in graph.nodes:
            if draws(node) and node not in wanted:
                return "an iteration draws random numbers for a value that it does not add", node
            if (call := read_call(node)) is not None and call.name == "expert_loop":
                graphs.append(loop_body(node).graph)
    return None


def one_sum(claim: Claim) -> Fault | None:
    """Each iteration adds once, to one place, and hands nothing else on to the next iteration or to the code after the
    loop."""
    evidence = claim.reader.evidence
    if len(evidence.sums) > 1:
        return "an iteration adds to more than one place, or twice", evidence.sums[1].node
    for position, result in enumerate(evidence.results):
        unchanged = isinstance(result, State) and result.placeholder is claim.reader.placeholders[1 + position]
        if result is claim.sum or result == claim.sum:
            if position != state_position(claim):
                return "the sum changes its place among the carried values", claim.node
        elif unchanged and not isinstance(claim.reader.call["carried"][position], fx.Node):
            return f"the {ordinal(position)} carried value is no tensor", claim.reader.loop
        elif not unchanged and outer_uses(claim.reader.loop, position):
            which = ordinal(position)
            return f"an iteration hands on a value (the {which} carried one) that is not a sum", claim.reader.loop
        elif claim.sum.state.carried and position == state_position(claim):
            return "the sum is made and then thrown away", claim.node
    return None


def own_storage(claim: Claim) -> Fault | None:
    """The tensor that is added to was made in this graph, and nothing that the iterations read shares its storage."""
    if claim.sum.state.carried:
        return None
    reader, storage = claim.reader, claim.storage
    target = reader.outer_of(claim.sum.state.placeholder)
    if not storage.is_fresh(target):
        return "the tensor that is added to came from outside, so the loop may read it under another name", claim.node
    used = [node for node in reader.loop.all_input_nodes if node is not target and node.op != "get_attr"]
    for other in used:
        if tensor_of(other) is not None and storage.share(other, target):
            return f"the loop reads {other.name}, which may share storage with the tensor that is added to", claim.node
    captured = [outer for outer in reader.call["captures"] if outer is target]
    return ("the tensor that is added to goes into the loop twice", claim.node) if len(captured) > 1 else None


def every_expert_once(claim: Claim) -> Fault | None:
    """The iterations run each expert that has rows exactly once."""
    fault = coverage_fault(claim.limit, claim.hits, claim.selection, claim.experts)
    return (fault, claim.reader.loop) if fault else None


def harmless_skips(claim: Claim) -> Fault | None:
    """An iteration ends early only before it adds anything, and only for an expert beyond the weights or without
    rows."""
    skips = claim.reader.evidence.skips
    for skip in skips:
        if skip.late:
            return "the iteration ends early after it has added its rows", skip.node
        if not isinstance(skip.condition, Test):
            reason = skip.condition.reason if isinstance(skip.condition, Unknown) else "the condition is not understood"
            return f"an iteration ends early, and it is not proven for which experts: {reason}", skip.node
        rows = skip.condition.value
        if isinstance(rows, Selection) and index_root(rows.index.node) is not index_root(claim.index):
            return "an iteration ends early where another selection is empty", skip.node
        if isinstance(rows, Selection) and rows.keep:  # where all are dropped, not even x gets a gradient
            return "an iteration ends early where all rows are dropped", skip.node
    for expert in {*range(claim.experts), *skip_values(skips)}:
        if expert < claim.experts and is_skipped(expert, skips):
            return f"the iteration of expert {expert} ends early although rows may be routed to it", skips[0].node
    return None


def allowed_routing(claim: Claim) -> Fault | None:
    """The routing indices for which the loop runs without an error are one interval (checked at run time)."""
    found = allowed_indices(claim.limit, claim.hits, claim.selection, claim.experts, claim.reader.evidence.skips)
    return (found, claim.reader.loop) if isinstance(found, str) else None


def rows_by_token(claim: Claim) -> Fault | None:
    """Rows are read from x and added to the result at the token: the first axis of the routing index."""
    rank = rank_of(claim.index)
    if rank not in (1, 2):
        return f"the routing index has {rank} axes; the proof knows [tokens] and [tokens, slots]", claim.node
    if claim.selection.axes == (0,) and rank == 2:
        if not distinct(claim.index):
            return "tokens are selected, not slots, and nothing proves that no token has an expert twice", claim.node
    elif set(claim.selection.axes) != set(range(rank)):
        return "the mask has an axis that the routing index has not", claim.node
    if any(rows.axis != 0 for rows in claim.lookups):
        return "rows of x are read at the slot, not at the token", claim.node
    if claim.sum.coordinate.axis != 0:
        return "rows are added at the slot, not at the token", claim.node
    return None


def one_selection(claim: Claim) -> Fault | None:
    """Rows are added at the positions that they were read from, in the same order."""
    rows = claim.sum.rows
    assert isinstance(rows, RowFunction)
    if rows.selection != claim.selection:
        return "rows are added at the positions of another selection than they were computed for", claim.node
    return None


def tokens_once(claim: Claim) -> Fault | None:
    """Where rows are written back rather than added, each token is selected once: positions of topk differ in a row."""
    if not claim.sum.once or rank_of(claim.index) == 1:
        return None
    if distinct(claim.index):
        return None
    return "rows are written, not added, and nothing proves that no token is selected twice", claim.node


def routing_weights(claim: Claim) -> Fault | None:
    """A row is scaled by the weight of its own token and slot (or of its token and this expert)."""
    index_shape = shape_of(claim.index)
    for weight in claim.weights:
        shape = shape_of(weight.source.node)
        if shape is not None:
            shape = tuple(size for axis, size in enumerate(shape) if axis not in dict(weight.picked))
        if weight.dtype not in FLOATS:
            return f"routing weights are {weight.dtype}, not floating point", claim.node
        if weight.axes in ((0, "e"), (0,)) and shape is not None and index_shape is not None:
            if not same_size(shape[0], index_shape[0]):
                return "the routing weights and the routing index have different numbers of tokens", claim.node
            if weight.axes == (0, "e") and not is_among(claim.index, shape[1]):
                return "weights are looked up by expert, and an index beyond them is not excluded", claim.node
        elif weight.axes != tuple(range(len(index_shape or ()))):
            return f"a row is scaled by a weight looked up by {weight.axes}, not by its token and slot", claim.node
        elif not same_shape(shape, index_shape):
            return "the routing weights and the routing index have different shapes", claim.node
    return None


def same_input(claim: Fused) -> Fault | None:
    """Gate and up read the same rows."""
    if claim.up is not None and claim.up.input != claim.gate.input:
        return "gate and up read different rows", claim.node
    return None


def whole_weights(claim: Fused) -> Fault | None:
    """The projections contract over the whole of an axis, their weights hold the same number of experts, and fit."""
    linears_used = [linear for linear in (claim.gate, claim.up, claim.down) if linear is not None]
    for linear in linears_used:
        shape = shape_of(linear.weight.weight.node)
        inner = 3 - linear.out_axis
        if shape is None or linear.weight.range_of(inner) != range(shape[inner]):
            return "a projection uses part of its weight's input axis", claim.node
    for piece in claim.slices:
        shape = shape_of(piece.weight.node)
        fits = shape is not None and (shape[0] == claim.experts if claim.limit is None else shape[0] >= claim.experts)
        if not fits:
            return "the weights of gate, up and down do not hold the same number of experts", claim.node
    return None


def sizes_agree(claim: Fused) -> Fault | None:
    """x, the routing index and the result have the same number of tokens; the result is as wide as x."""
    x, index, target = (shape_of(node) for node in (claim.x.source.node, claim.index, target_of(claim)))
    if x is None or index is None or target is None:
        return "a shape is not known", claim.node
    if not same_size(x[0], index[0]):
        return f"x has {x[0]} rows and the routing index {index[0]}; they are not proven to be as many", claim.node
    if len(target) != 2 or not same_size(target[0], x[0]):
        return (
            f"the result has shape {tuple(target)}, x {tuple(x)}; they are not proven to have as many rows",
            claim.node,
        )
    width = len(claim.down.weight.range_of(claim.down.out_axis))
    if claim.after is not None:
        made = shape_of(claim.after.node)
        slots = index[1] if len(index) == 2 else 1
        if made is None or not same_size(made[1], width):
            return "what is done with each row changes its width", claim.after.node
        if not isinstance(slots, int):
            return "how many experts a token has is not a constant", claim.after.node
    if not same_size(x[1], width) or not same_size(target[1], width):
        return f"the result is {width} wide and x {x[1]}; the operator has one width", claim.node
    return None


def one_precision(claim: Fused) -> Fault | None:
    """All products are computed in one dtype: that of x and the weights, or autocast's."""
    operands = {claim.x.dtype, *(piece.dtype for piece in claim.slices if piece not in claim.vectors)}
    computed = {linear.dtype for linear in (claim.gate, claim.up, claim.down) if linear is not None}
    if len(computed) != 1:
        return f"the projections are computed in different dtypes: {', '.join(map(str, computed))}", claim.node
    dtype = computed.pop()
    if dtype not in FLOATS:
        return f"products are in {dtype}, which the operator has not", claim.node
    if operands == {dtype}:
        return None
    if dtype.itemsize == 2 and operands <= {torch.float32, dtype}:
        return None  # autocast, which the operator follows
    return f"x and the weights have dtypes {', '.join(map(str, operands))}, and products are in {dtype}", claim.node


def a_weights_factor(claim: Fused) -> Fault | None:
    """What all rows are multiplied with may be multiplied into their weights."""
    factor = claim.coefficient
    if weighs_alike(factor, {claim.down.dtype, *(weight.dtype for weight in claim.weights)}):
        return None
    return f"rows are multiplied with {factor:g}, and weights times that may be no numbers of their type", claim.node


def with_gradients(claim: Claim) -> Fault | None:
    """Floating point runs in the grad mode that the loop has, so that nothing is cut off from autograd. Without tokens
    no iteration runs, and the result has no gradient; on a mesh, the experts have those of other ranks' tokens."""
    no_tokens = any(type(size) is int and size == 0 for size in claim.index.meta["val"].shape)
    if claim.reader.alone and claim.hits and no_tokens:
        return "a batch without tokens hits no expert", claim.index
    if claim.hits and index_root(claim.index).meta.get(DROPPED) == ALL:
        return "the batch may drop every slot, and then no iteration runs", claim.hits.index.node
    ungraded = claim.reader.evidence.ungraded
    if ungraded:
        return f"{target_name(ungraded[0])} runs in another grad mode than the loop", ungraded[0]
    return None


def routing_unchanged(claim: Claim) -> Fault | None:
    """Nothing writes into the routing index, the mask or the hit list between their making and the loop."""
    for node in routed_by(claim):
        writer = claim.storage.writer_between(node, claim.reader.loop)
        if writer is not None:
            return f"{target_name(writer)} changes {node.name} in place before the loop", writer
    return None


def routed_by(claim: Claim) -> list[fx.Node]:
    """What stands before the loop and says which rows an expert has."""
    sources = [claim.index, index_root(claim.index), *([claim.hits.index.node] if claim.hits else [])]
    for made in claim.reader.made.values():  # stands at the loop, for what the user computed earlier
        sources += made.all_input_nodes
    return [node for node in (*claim.reader.evidence.routing, *sources) if node.graph is claim.reader.loop.graph]


def routed_again(claim: Claim) -> Fault | None:
    """In a checkpointed call: nothing writes into what the routing is computed of before backward computes it again. An
    expert may have other rows then, which torch raises of the loop; the operator has as many rows as before."""
    begin = checkpoint_around(claim.reader.loop)
    if begin is None:
        return None
    within = computed_of(routed_by(claim), lambda node: node.all_input_nodes if begin < node else ())
    read = [node for node in within if not begin < node or node.op == "get_attr"]
    writer = writer_before_backward(claim.storage, begin, read, read, target_of(claim))
    if writer is None:
        return None
    return f"{target_name(writer)} changes what a checkpointed call routes by, before backward", writer


def kept_unchanged(claim: Claim) -> Fault | None:
    """Nothing writes into x, the weights or the routing weights between the loop and the backward through it."""
    kept = [*(piece.weight.node for piece in claim.slices), *(weight.source.node for weight in claim.weights)]
    return changed_before_backward(claim, [*kept, *(rows.source.node for rows in claim.lookups)])


def changed_before_backward(claim: Claim, kept: list[fx.Node]) -> Fault | None:
    """What writes into something that is kept for backward, before that."""
    reader, out = claim.reader, target_of(claim)
    held = [node for one in kept for node in before_the_loop(reader, one)]
    read = [node for rows in claim.lookups for node in before_the_loop(reader, rows.source.node)[:1]]
    writer = writer_before_backward(claim.storage, reader.loop, held, read or held, out)
    if writer is None:
        return None
    return f"{target_name(writer)} changes what the operator keeps, before backward", writer


def at_the_sum(claim: Claim) -> fx.Node:
    return claim.node


def at_the_loop(claim: Claim) -> fx.Node:
    return claim.reader.loop


def at_the_target(claim: Claim) -> fx.Node:
    target = target_of(claim)
    return target if isinstance(target, fx.Node) else claim.reader.loop


def at_the_routing(claim: Claim) -> fx.Node:
    return index_root(claim.index)


def at_the_skips(claim: Claim) -> fx.Node:
    return next((skip.node for skip in claim.reader.evidence.skips), claim.reader.loop)


def at_the_rows(claim: Claim) -> fx.Node:
    return where_it_is(claim, claim.lookups[0]) if claim.lookups else claim.node


def at_the_gate(claim: Fused) -> fx.Node:
    return where_it_is(claim, claim.gate)


def at_the_down_projection(claim: Fused) -> fx.Node:
    return where_it_is(claim, claim.down)


def where_it_is(claim: Claim, fact: Fact) -> fx.Node:
    """The first node of an iteration that is this."""
    return next((node for node, known in claim.reader.facts.items() if known == fact), claim.node)


@dataclass(frozen=True)
class Step:
    """One step of the proof: its name in refusals, the judge, and what it is about, for the line in reports."""

    name: str
    judge: Callable[[Any], Fault | None]
    about: Callable[[Any], fx.Node] = at_the_sum

    def proven(self, claim: Claim) -> ProofStep:
        """What a report says where it holds: the first sentence on the judge."""
        return proof_step(self.name, " ".join((self.judge.__doc__ or "").split()).partition(". ")[0], self.about(claim))


def proof_step(name: str, holds: str, node: fx.Node) -> ProofStep:
    return ProofStep(name, holds.removesuffix("."), *users_line(placed(node)))


STEPS: tuple[Step, ...] = (
    Step("known operators", known_operators, at_the_loop),
    Step("nothing else written", nothing_else_written, at_the_loop),
    Step("nothing else drawn", nothing_else_drawn, at_the_loop),
    Step("one sum", one_sum),
    Step("own storage", own_storage, at_the_target),
    Step("every expert once", every_expert_once, at_the_loop),
    Step("harmless skips", harmless_skips, at_the_skips),
    Step("allowed routing", allowed_routing, at_the_routing),
    Step("rows by token", rows_by_token, at_the_rows),
    Step("one selection", one_selection),
    Step("tokens once", tokens_once, at_the_routing),
    Step("routing weights", routing_weights),
    Step("same input", same_input, at_the_gate),
    Step("whole weights", whole_weights, at_the_gate),
    Step("sizes", sizes_agree),
    Step("one precision", one_precision, at_the_down_projection),
    Step("a weight's factor", a_weights_factor, at_the_down_projection),
    Step("gradients", with_gradients, at_the_loop),
    Step("routing unchanged", routing_unchanged, at_the_routing),
    Step("kept unchanged", kept_unchanged, at_the_rows),
    Step("routed again", routed_again, at_the_routing),
)


def prove(
    make: Callable[[Reader, Storage], AnyClaim], steps: Iterable[Step], reader: Reader, storage: Storage
) -> AnyClaim:
    """The claim that ``make`` takes the loop for, all steps holding. storage: of the loop's graph. Raises Refused."""
    claim = make(reader, storage)
    claim.proof.append(proof_step("expert function", f"An expert computes {claim.function}", at_the_rows(claim)))
    for step in steps:
        fault = step.judge(claim)
        if fault is not None:
            raise Refused(step.name, *fault, claim.proof)
        claim.proof.append(step.proven(claim))
    return claim


# ----------------------------------------------------------------------------------------------------------------------
# Small questions
# ----------------------------------------------------------------------------------------------------------------------


def state_position(claim: Claim) -> int:
    """Which carried value the sum is; -1 where it is written in place."""
    if not claim.sum.state.carried:
        return -1
    return claim.reader.placeholders.index(claim.sum.state.placeholder) - 1


def target_of(claim: Claim) -> Any:
    """The outer node that is added to."""
    return claim.reader.outer_of(claim.sum.state.placeholder)


def outer_uses(loop: fx.Node, position: int) -> list[fx.Node]:
    """Who uses the i-th carried value after the loop. Any use of the loop's result but ``result[i]`` counts for all."""
    uses = []
    for user in loop.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            uses += list(user.users) if user.args[1] == position else []
        else:
            uses.append(user)
    return uses


def ordinal(position: int) -> str:
    return f"{position + 1}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(position + 1, 'th') }"

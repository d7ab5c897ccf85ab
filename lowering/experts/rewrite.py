"""Replaces each proven expert loop by one grouped experts operator; the others stay, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from moebius.kernels import experts
from moebius.lowering.aliasing import Storage, storage_now
from moebius.lowering.contract import Contract, Work, well_formed
from moebius.lowering.dead_code import drop_dead_code, drop_idle_switches, drop_loose
from moebius.lowering.errors import defect
from moebius.lowering.experts import (
    by_row,
    grouped,
    proof,
    provisional,
    result_sinks,
    rows_written,
    slots,
    weight_concat,
)
from moebius.lowering.experts.anchors import adds_rows, leads_to, without_identities
from moebius.lowering.experts.batched import Weight, batched_layers
from moebius.lowering.experts.batched_iterations import Batched
from moebius.lowering.experts.blocks import RowsOf, all_are_read, build_blocks, expert_rows, runs
from moebius.lowering.experts.buffers import straighten
from moebius.lowering.experts.choices import choices
from moebius.lowering.experts.claims import Claim, Fused, Refused, make_claim, placed
from moebius.lowering.experts.dense import Chain, DenseSum, added, build_dense, dense_chains, scaled, stacks
from moebius.lowering.experts.facts import Test
from moebius.lowering.experts.hoisted_conditionals import (
    cut_behind_exits,
    open_branches,
    settle_branches,
    skip_unused,
)
from moebius.lowering.experts.idle import postpone_zeros, sum_of
from moebius.lowering.experts.kept_by_loop import kept_as_written
from moebius.lowering.experts.loops import find_loops, loops_are_readable, unlowered_region
from moebius.lowering.experts.matrices import flatten_rows
from moebius.lowering.experts.missed_experts import (
    DIFFERENT,
    MissedExperts,
    find_overlooked,
    is_weight,
    missed_experts,
    products_behind,
    root_of,
)
from moebius.lowering.experts.nested import replace_nested
from moebius.lowering.experts.out_of_place import write_out_of_place
from moebius.lowering.experts.plain_forms import write_plainly
from moebius.lowering.experts.proof import prove
from moebius.lowering.experts.routing import is_among
from moebius.lowering.experts.rows_written import RowsWriter
from moebius.lowering.experts.rules import Reader
from moebius.lowering.experts.stacking import blocks_apart, of_iterations_that_ran
from moebius.lowering.experts.unrolled_loops import (
    Differ,
    NoExperts,
    Unrolled,
    build_loop,
    groups,
    is_branch,
    remove,
)
from moebius.lowering.experts.writing import Writer, fill_region, kept_bytes, put_in_place, write_operator
from moebius.lowering.experts.written_out import write_out
from moebius.lowering.graph import ExpertRegion, LoweringOptions
from moebius.lowering.operators import target_name
from moebius.lowering.values import erase_new, refuse, tensor_of, users_line, where_of

CONTRACT = Contract(
    name="experts",
    needs="a well-formed graph; each expert_loop node has a body with one placeholder per operand and returns a tuple",
    promises="a well-formed graph of the same meaning; each proven loop is one experts operator, each other loop is as "
    "it was and its region says why",
    need=(loops_are_readable, well_formed),
    promise=(loops_are_readable, well_formed),
    run=lambda work: replace_loops(work),
)


# Steps of the proof that are about what is computed of the rows.
ABOUT_ROWS = {"expert function", "same input", "whole weights", "sizes", "one precision", "a weight's factor"}


def replace_loops(work: Work) -> None:
    """Prove and replace, loop by loop; one ExpertRegion for each. What could not become the operator, in whatever form
    it was read, is tried once more as projections of sorted rows."""
    if work.keep_loops is None:
        drop_idle_switches(work.gm.graph)
        if takes_blocks(work):
            write_out_of_place(work)
        postpone_zeros(work)
        straighten(work, takes_blocks(work))
    replace_all(work)
    left = any(not region.lowered for region in work.regions)
    if left and work.keep_loops is None and takes_blocks(work) and weight_concat.applies(work.options):
        work.by_rows = True
        work.regions = [region for region in work.regions if region.lowered]
        replace_all(work)


def replace_all(work: Work) -> None:
    """Every front end, once."""
    storage: Storage | None = None  # made where one is asked for: most graphs have nothing of a kind
    for loop in find_loops(work.gm):
        storage = storage or Storage(work.gm.graph)
        region = unlowered_region(loop, work.keep_loops)
        work.regions.append(region)
        if work.keep_loops is None and not replace_loop(work, loop, storage, region, users=True) and takes_blocks(work):
            replace_written_out(work, loop, region)
    if work.keep_loops is not None:
        return
    plain = write_plainly(work) if takes_blocks(work) else []
    failed = replace_iterations(work)
    sums = [(chain, replace_chain(work, chain)) for chain in dense_chains(work.gm.graph)]
    for find in (choices, stacks):
        tried = [(whole.anchors, replace_dense(work, whole)) for whole in find(work.gm.graph)]
        sums += [(anchors, [region]) for anchors, region in tried if region is not None]
    for anchors, regions in sums:
        work.regions += regions
        failed += [Failed(region, anchors) for region in regions if not region.lowered]
    if takes_blocks(work):
        drop_dead_code(work)  # what was replaced above is not to be looked at
        opened, refused = open_branches(work, list(filter(is_branch, work.gm.graph.nodes)))
        stands_for = {one.branch: one.rest for one in opened if one.rest is not None}
        for iterations in failed:
            iterations.anchors = [stands_for.get(anchor, anchor) for anchor in iterations.anchors]
        if len(refused) > 1:
            branch, why = next(iter(refused.items()))
            region = ExpertRegion(*users_line(branch), f"{len(refused)} experts, each behind a branch")
            refuse(region, f"{DIFFERENT}: {why.reason}", why.node)
            work.regions.append(region)
        flat = flatten_rows(work)
        cut, left = cut_behind_exits(work)
        asked = left | {one.down: one.asked for one in opened}
        asked |= {made: asked[one.node] for one in flat if one.node in asked for made in (one.core, one.result)}
        replace_blocks(work, failed, asked)
        replaced = set(work.loose)
        provisional.settle(work, [*flat, *cut])
        settle_branches(work, opened, replaced | {one.node for one in flat if one.core in replaced})
    gathered = grouped.gather_weights(work) if takes_blocks(work) else grouped.Gathered()
    if takes_blocks(work):
        write_out_of_place(work)
    reported: set[fx.Node] = set()
    first, taken, results = len(work.regions), set[fx.Node](), {one.result for one in gathered.found}
    # (the last first: a layer's up-projections read the products of the layer before as if they were of their own)
    for down, weight, ups in reversed(batched_layers(work.gm.graph)):
        found = replace_batched(work, down, weight, ups, taken) if down not in taken else None
        work.regions[first:first] = [found] if found is not None else []
        reported |= {down, *ups} if found is not None and not found.lowered else set()
        if found is not None and down in results:
            found.idiom = grouped.IDIOM
    provisional.settle(work, [*gathered.found, *plain])
    report_grouped(work, gathered, {one.node for one in gathered.found if one.result in reported})
    if takes_rows(work):
        replace_meeting(work, failed)
    if takes_blocks(work):
        replace_nested(work, replace_all)
    report_overlooked(work, reported)


def report_grouped(work: Work, gathered: grouped.Gathered, reported: set[fx.Node]) -> None:
    """A region for each layer of grouped products that is as it was written and has none. reported: those that have."""
    for products in grouped.left_over(work.gm.graph):
        if reported.isdisjoint(products):
            reasons = [gathered.why[one] for one in products if one in gathered.why]
            why = others_products(work) if not takes_blocks(work) else reasons[0] if reasons else grouped.NO_LAYER
            region = ExpertRegion(*users_line(products[-1]), grouped.IDIOM)
            refuse(region, f"batched experts: {why}", products[-1])
            work.regions.append(region)


def replace_meeting(work: Work, failed: list[Failed]) -> None:
    """Experts that no other front end has found, each on rows of its own, by where their results meet."""
    drop_dead_code(work)
    tried: set[fx.Node] = set()
    while True:
        there = [one for one in find_overlooked(work.gm.graph) if one.place not in tried and len(one.results) > 1]
        if not there:
            return
        ends = result_sinks.ends(there[0])
        known = [one.region for one in failed if one.uses(ends)]
        found, _ = in_equal_parts(ends, partial(replace_ends, work))
        if not found:
            tried.add(there[0].place)
        else:
            lines = {place for node in there[0].nodes for place in places_of(node)}
            work.regions = [r for r in work.regions if r.lowered or (r.file, r.line) not in lines]
            work.regions = without(work.regions, known) + [region for region in found if region.lowered]
            drop_dead_code(work)


def replace_ends(work: Work, ends: list[fx.Node]) -> ExpertRegion | None:
    """What experts give, each on rows of its own or all on the same."""
    rows_of = partial(result_sinks.rows_behind, shared=result_sinks.shared_by(ends))
    return replace_piece(work, ends, rows_of=rows_of) if all(map(rows_of, ends)) else None


def report_overlooked(work: Work, reported: set[fx.Node]) -> None:
    """A region for each layer of experts that is still as it was written and has none. reported: products that have."""
    drop_dead_code(work)
    known = {(region.file, region.line) for region in work.regions if not region.lowered}
    try:
        found = missed_experts(work.gm.graph)
    except Exception as error:  # nobody loses a graph for a line of its report
        place = next((node for node in work.gm.graph.nodes if where_of(node)[0]), work.gm.graph.output_node())
        found = [MissedExperts(0, place, place, f"{DIFFERENT}: {defect(error)}", set())]
    for one in found:
        if not one.nodes & reported and not any(known & set(places_of(node)) for node in one.nodes):
            idiom = one.idiom or f"experts whose results meet in {target_name(one.place)}"
            region = ExpertRegion(*users_line(one.place), idiom)
            region.num_experts = one.count
            refuse(region, one.reason, one.node)
            work.regions.append(region)


def places_of(node: fx.Node) -> list[tuple[str, int]]:
    """File and line of every frame that a node was made in."""
    return [where_of(node)[:2], *((file, line) for file, line, *_ in node.meta.get("stack", ()))]


def takes_blocks(work: Work) -> bool:
    """Foreign backends are not given blocks of rows: their sizes are known only when the graph runs."""
    return work.options.backend == "moebius"


def others_products(work: Work) -> str:
    return f"the backend {work.options.backend} has products of its own for them"


def in_equal_parts(
    nodes: list[fx.Node], replace: Callable[[list[fx.Node]], ExpertRegion | None]
) -> tuple[list[ExpertRegion], list[ExpertRegion]]:
    """(regions, refusals): all nodes as one layer, or as the fewest of equal length that become operators: one after
    another, or in turn, where an expert runs on rows of one slot after another."""
    count, refusals = len(nodes), list[ExpertRegion]()
    for parts in [parts for parts in range(1, count // 2 + 1) if count % parts == 0]:
        length, in_turn = count // parts, of_one_expert(nodes[:parts])
        first, *others = (nodes[i::parts] if in_turn else nodes[i * length :][:length] for i in range(parts))
        found = replace(first)
        if found is not None and found.lowered:
            return [found, *(region for region in map(replace, others) if region is not None)], refusals
        refusals += [found] if found is not None else []
    return [], refusals


def of_one_expert(nodes: list[fx.Node]) -> bool:
    """Whether these are products with the same weights."""
    first, *others = (set(map(root_of, filter(is_weight, node.all_input_nodes))) for node in nodes)
    return bool(first) and all(other == first for other in others)


def replace_blocks(work: Work, failed: list[Failed], asked: dict[fx.Node, Any]) -> None:
    """Experts that stand one after another, each on rows of its own, whatever the rows are. failed: iterations whose
    sums could not be replaced: done with where their experts are replaced here. asked: as in skip_unused()."""
    for downs in runs(work.gm.graph):
        known = [one.region for one in failed if one.uses(downs)]
        found, refusals = in_equal_parts(downs, partial(replace_piece, work, asked=asked))
        if found:
            work.regions = without(work.regions, known)
            work.regions += [region for region in found if region.lowered]
        elif not known:
            work.regions += refusals[:1]


def without(regions: list[ExpertRegion], known: list[ExpertRegion]) -> list[ExpertRegion]:
    return [region for region in regions if not any(region is one for one in known)]


class Attempt:
    """One try at a region: says why nothing came of it, if nothing does, and takes out again what it wrote.

    place: where it is refused, if not at a node whose line is known. step: of the proof, that it is. foreign: whether
    these are no experts, so that nobody needs to be told."""

    def __init__(self, work: Work, region: ExpertRegion, place: fx.Node, step: str = DIFFERENT):
        self.work, self.region, self.place, self.step = work, region, place, step
        self.before, self.modules = set(work.gm.graph.nodes), set(work.gm._modules)
        self.held = list(work.regions), list(work.loose)
        self.foreign = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, below: Any) -> bool:
        if isinstance(error, Differ):
            self.foreign = isinstance(error, NoExperts)
            refuse(self.region, f"{self.step}: {error.reason}", error.node if where_of(error.node)[0] else self.place)
        if not self.region.lowered:
            gm, (self.work.regions, self.work.loose) = self.work.gm, self.held
            erase_new(gm.graph, self.before)
            for name in set(gm._modules) - self.modules:  # the bodies that it made
                delattr(gm, name)
        return isinstance(error, Differ)

    @property
    def told(self) -> ExpertRegion | None:
        return None if self.foreign else self.region


def replace_piece(
    work: Work,
    downs: list[fx.Node],
    asked: dict[fx.Node, Any] | None = None,
    rows_of: RowsOf = expert_rows,
) -> ExpertRegion | None:
    """The down-projections of one layer's experts; None where these are none. rows_of: the rows that each is
    computed of."""
    region = ExpertRegion(*users_line(downs[0]), f"{len(downs)} experts, one after another, each on rows of its own")
    storage = storage_now(work.gm.graph)
    with Attempt(work, region, downs[0]) as attempt:
        all_are_read(work.gm.graph, downs, asked or {})
        iterations, parts = build_blocks(work.gm, downs, storage, rows_of)
        apart = len({min(rows_of(down) or [down]) for down in downs}) > 1
        behind = asked is not None and asked.keys() >= set(downs)
        if replace_loop(work, iterations.loop, storage, region, by_rows=apart, skips=behind):
            region.top_k = None if apart else region.top_k  # (of the rows; nobody has seen what they are of the tokens)
            skip_unused(downs, asked or {}, iterations.stacked)
            iterations.draw_elsewhere()
            for down, part in zip(downs, parts, strict=True):
                down.replace_all_uses_with(part)
                work.loose.append(down)
    return attempt.told


def replace_batched(
    work: Work, down: fx.Node, weight: Weight, ups: list[fx.Node], taken: set[fx.Node]
) -> ExpertRegion | None:
    """Experts as batched products, as one loop; None where these are none. taken: is given what the loop computes."""
    region = ExpertRegion(*users_line(down), weight.idiom)
    with Attempt(work, region, down, "batched experts") as attempt:
        if not takes_blocks(work):
            raise Differ(others_products(work), down)
        try:
            layer = Batched(work.gm, down, weight.experts, ups, storage_now(work.gm.graph))
            loop, result = layer.loop()
        except Differ:
            raise
        except Exception as error:  # the products stay, whatever went wrong
            refuse(region, defect(error), down)
            return region
        if replace_loop(work, loop, layer.storage, region):
            layer.end.replace_all_uses_with(result)
            taken |= layer.computed
            work.loose += layer.drop()
            move_to_tokens(work, region, attempt.before)
            drop_loose(work)
    return attempt.told


def move_to_tokens(work: Work, region: ExpertRegion, before: set[fx.Node]) -> None:
    """The operator on tokens, where its rows are their slots."""
    for node in [n for n in work.gm.graph.find_nodes(op="call_function", target=experts) if n not in before]:
        there = set(work.gm.graph.nodes)
        try:
            moved = slots.at_tokens(work, node)
        except Exception as error:  # it stays the operator on rows, and what this wrote is read by nobody
            refuse(region, defect(error), node)
            erase_new(work.gm.graph, there)
            continue
        if moved is not None:
            x, down, index = (tensor_of(moved.args[place]) for place in (0, 2, 3))
            assert x is not None and down is not None and index is not None
            (tokens, top_k), sizes = index.shape, (down.shape[0], down.shape[1], down.shape[2])
            region.top_k = top_k
            if region.saved_bytes is not None and isinstance(tokens, int):
                gated = moved.kwargs["gate"] != "none"
                region.saved_bytes = kept_bytes((tokens, top_k, x.dtype.itemsize), sizes, gated, work.options)


def replace_written_out(work: Work, loop: fx.Node, region: ExpertRegion) -> None:
    """A loop over range(n) whose sum is not understood: its iterations written out, if that makes an operator of it."""
    graph = work.gm.graph
    with Attempt(work, region, loop) as attempt:
        if (written := write_out(work.gm, loop)) is None:
            return
        carried = graph.call_function(tuple, (tuple(written.carried),))  # (what is opened gives others in their place)
        loop.prepend(carried)
        opened, _ = open_branches(work, written.branches)
        downs = next((downs for downs in runs(graph) if not attempt.before & set(downs)), [])
        asked = {one.down: one.asked for one in opened}
        found, _ = in_equal_parts(downs, partial(replace_piece, work, asked=asked))
        if not found or not all(one.lowered for one in found):
            return
        settle_branches(work, opened, set(work.loose))
        for name, value in vars(found[0]).items():
            if name not in ("file", "line", "idiom"):
                setattr(region, name, value)
    region.refusal = region.blocker = None
    region.idiom += ", written out, each expert on rows of its own"
    results: Any = carried.args[0]
    for user in list(loop.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(carried)
    work.loose += loop.all_input_nodes
    graph.erase_node(loop)


def replace_chain(work: Work, nodes: list[fx.Node]) -> list[ExpertRegion]:
    """Additions as the iterations of one loop, or of loops of equal length (one over slots around one over experts)."""
    base = (added(nodes[0]) or (None,))[0]
    if isinstance(base, fx.Node) and scaled(base):
        one = replace_dense(work, Chain(nodes, whole=True))
        if one is not None and one.lowered:
            return [one]
    found, refusals = in_equal_parts(nodes, lambda part: replace_dense(work, Chain(part)))
    return found or refusals[:1]


def replace_dense(work: Work, whole: DenseSum) -> ExpertRegion | None:
    """Experts that are computed on all tokens and masked, as the iterations of one loop; None where these are none."""
    region = ExpertRegion(*where_of(whole.place)[:2], "experts on all tokens, masked by a gate")
    with Attempt(work, region, whole.place) as attempt:
        nodes, storage = whole.write()
        iterations = build_dense(work.gm, nodes, storage)
        if replace_loop(work, iterations.loop, storage, region, iterations):
            work.loose += whole.settle()
    return attempt.told


def replace_loop(
    work: Work, loop: fx.Node, storage: Storage, region: ExpertRegion, iterations: Unrolled | None = None,
    by_rows: bool = True, users: bool = False, skips: bool = False,
) -> bool:
    """Prove one loop and put the operator in its place; or the graph stays as it was, and the region says why. by_rows:
    whether it may be projections of sorted rows: where all experts read the same rows, these would be E copies. users:
    whether its iterations are the user's. skips: whether each of its experts was behind a branch."""
    before = loop.prev
    try:
        reader = Reader(loop)
        reader.alone = work.options.mesh is None
        for node in reader.made.values():
            storage.add(node)
        claim, result = prove_and_write(work, reader, storage, by_rows)
    except Refused as refusal:
        region.proof = tuple(refusal.proof)
        refuse(region, f"{refusal.step}: {refusal.reason}", placed(refusal.node))
    except Exception as error:  # the loop runs as a loop, whatever went wrong with its proof
        refuse(region, defect(error), loop)
    else:
        fill(region, claim, work.options)
        region.as_written = kept_as_written(claim) if users else None
        if iterations is not None:
            writer = Writer(claim)
            index = writer.invariant(claim.selection.index)
            iterations.skip_unused(index, [*reader.made.values(), *writer.made])
            iterations.draw_elsewhere()
            work.loose += remove(iterations, storage)
            if region.saved_bytes is not None and not weight_concat.applies(work.options):
                region.saved_bytes += iterations.stacked_bytes()
        result = where_iterations_ran(work, claim, result, iterations, skips)
        work.loose += [*put_in_place(claim, result), *reader.made.values()]
        return True
    while loop.prev is not before:  # what the attempt wrote stands before the loop
        work.gm.graph.erase_node(loop.prev)
    return False


def where_iterations_ran(
    work: Work, claim: Claim, result: fx.Node, iterations: Unrolled | None, branches: bool
) -> fx.Node:
    """The result, without history where all iterations were skipped: a batch of no rows leaves no gradients behind.

    Not for other backends, which do not know the operator, and whose batches of no rows have graphs of their own. On a
    mesh all ranks' tokens count, so that the exchange says it (expert_parallel.py); there backward comes to experts
    behind branches, too, whichever are taken (way_back.py)."""
    skips = any(isinstance(s.condition, Test) and s.condition.kind == "empty" for s in claim.reader.evidence.skips)
    skips = skips or claim.hits is not None or (iterations is not None and iterations.skipping)
    skips = skips or (branches and work.options.mesh is not None)
    if not skips or not takes_blocks(work):
        return result
    if work.options.mesh is not None:
        written = claim.reader.loop.prev
        while written is not result and written.target is not experts:
            written = written.prev
        written.meta["skips"] = True
        return result
    writer = Writer(claim)
    index = writer.invariant(claim.selection.index)  # dropped slots count: the iterations ask for those of the index
    outside = () if is_among(index, claim.experts) else (claim.experts,)
    return writer.call(of_iterations_that_ran, result, index, *outside)


def takes_rows(work: Work) -> bool:
    """Whether experts may be other projections than the operator's. (These are not placed on ranks.)"""
    return work.by_rows


def prove_and_write(work: Work, reader: Reader, storage: Storage, by_rows: bool) -> tuple[Claim, fx.Node]:
    """The claim that holds, of the operator or of its rows, and the result written before the loop. Raises Refused."""
    try:
        fused = prove(make_claim, proof.STEPS, reader, storage)
        return fused, write_operator(fused, work.options, work.known)
    except Refused as refusal:
        if refusal.step not in ABOUT_ROWS or not (by_rows and takes_rows(work)):
            raise
        try:
            rows = prove(by_row.make_claim, by_row.STEPS, reader, storage)
            return rows, RowsWriter(rows).result()
        except Refused as other:
            raise refusal if other.step == "row by row" else other from None


def fill(region: ExpertRegion, claim: Claim, options: LoweringOptions) -> None:
    region.proof = tuple(claim.proof)
    if isinstance(claim, Fused):
        fill_region(region, claim, options)
    else:
        assert isinstance(claim, by_row.ByRow)
        rows_written.fill_region(region, claim)


@dataclass
class Failed:
    """Sums, iterations that stand one after another among them, and the region that says why they are no loop."""

    region: ExpertRegion
    anchors: list[fx.Node]

    def uses(self, downs: list[fx.Node]) -> bool:
        """Whether every sum adds what some of the projections gave."""
        wanted, least = set(downs), min(downs)
        return all(leads_to(anchor, wanted, least) for anchor in self.anchors)


def replace_iterations(work: Work) -> list[Failed]:
    """The same for iterations that stand one after another: all of them as one loop, or as loops of equal length.
    Returns those that it could not replace."""
    failed = []
    storage: Storage | None = None
    done = {node for node in work.gm.graph.nodes if node.target is blocks_apart}
    for anchors in groups(work.gm.graph):
        if all(sum_of(anchor) is not None for anchor in anchors):
            continue  # zeros, of experts without rows
        if done and all(leads_to(anchor, done, min(done)) for anchor in anchors):
            continue  # the iterations of a loop that was written out: their experts are an operator already
        anchors = without_identities(anchors)
        storage = storage or Storage(work.gm.graph)
        found, refusals = in_equal_parts(anchors, partial(replace_part, work, storage=storage))
        work.regions += found
        if not found and adds_rows(anchors[0]) and products_behind(anchors[0]) != products_behind(anchors[-1]):
            worst = max(refusals, key=lambda region: DIFFERENT not in (region.refusal or ""))
            work.regions.append(worst)
            failed.append(Failed(worst, anchors))
    return failed


def replace_part(work: Work, anchors: list[fx.Node], storage: Storage) -> ExpertRegion:
    """Some accumulations as the iterations of one loop."""
    region = ExpertRegion(*where_of(anchors[0])[:2], f"{len(anchors)} iterations, one after another")
    with Attempt(work, region, anchors[0]):
        iterations = build_loop(work.gm, anchors, storage)
        replace_loop(work, iterations.loop, storage, region, iterations, users=True)
    return region

"""Contract
needs: a lowered graph, in which expert regions are calls of ``moebius.kernels.experts``; placeholders with
    ``meta["val"]``, and with ``meta["tensor"]`` (a weak reference to the real tensor) and ``meta["source"]`` where they
    are parameters.
promises: the same results for this rank's own tokens, each such call done by the ranks that own the experts, but for
    those that this rank's data chose (``options.partial``): no other rank need come to them, and each runs them alone.
    A weight that was placed (:mod:`placement`) goes in as this rank's rows, where nothing else in the graph uses it;
    any other weight is whole, and this rank's experts are taken from it. Changes the graph in place, and nothing else.
"""
from __future__ import annotations

import inspect
import operator
import os
import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import fx

from moebius.kernels import experts
from moebius.lowering.distribution.backward import promises, tensors_of
from moebius.lowering.distribution.exchange import reached_experts, remember_axis
from moebius.lowering.distribution.expert_parallel import combine, dispatch, outline, own_experts
from moebius.lowering.distribution.placement import stays_whole, to_graph_input
from moebius.lowering.distribution.plan import Plan, resolve_plan
from moebius.lowering.distribution.reduce import is_left_to_fsdp, number_of
from moebius.lowering.distribution.sharded import Sharded
from moebius.lowering.distribution.torch_private import tree_leaves
from moebius.lowering.distribution.way_back import WaysBack
from moebius.lowering.distribution.weighing import SHARE
from moebius.lowering.experts.stacking import stack_experts
from moebius.lowering.experts.views import moved
from moebius.lowering.graph import LoweringOptions
from moebius.lowering.operators import read_call
from moebius.lowering.planner.traffic import RegionShape, chunk_span
from moebius.lowering.step.absent import is_backward
from moebius.lowering.torch_private import FakeTensor, has_history
from moebius.lowering.values import apply, computed_of, rank_of, real_of

WEIGHTS = ("gate_up_E2ND", "down_EDN", "gate_up_bias", "down_bias")  # arguments whose first axis counts experts
SIGNATURE = inspect.signature(experts)


def place(gm: fx.GraphModule, options: LoweringOptions) -> fx.GraphModule:
    """Spread the expert regions of a lowered graph over ``options.mesh``; see the Contract. Sets ``gm.meta["plan"]``.

    Raises DistributionError where the mesh or the plan does not fit.
    """
    mesh = options.mesh
    plan = resolve_plan(options.plan, mesh)
    gm.meta["plan"] = plan
    axis = plan.axis_index(mesh)
    found = [node for node in gm.graph.nodes if node.op == "call_function" and node.target is experts]
    regions = [node for node in found if not _is_chosen(node, options.partial)]
    ways_back = WaysBack(gm.graph, regions)
    regions = [node for node in regions if node not in ways_back.alone]
    gm.meta["chosen"] = {node.meta["where"][:2] for node in found if node not in regions}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["placement"] = "shard→full" if isinstance(real_of(node), Sharded) else "as is"
    if plan.ranks == 1 or not regions:
        _gather_where_used(gm)
        gm.recompile()
        return gm
    group_name = remember_axis(mesh, axis)
    rank = mesh.get_local_rank(axis)
    chains = {id(weight): _chain(weight) for node in regions for weight in _weights(node).values()}
    for node in regions:
        _describe(node, chains, plan)
    kept = _only_experts(regions, chains)
    here = _all_or_none({item for item in kept if _is_placed(real_of(item), mesh, axis)}, chains)
    rows = _beside_whole_steps(here, regions, chains)
    chains = {id(weight): _chain(weight) for node in regions for weight in _weights(node).values()}
    kept, here = (items | {taken for taken, item in rows.items() if item in items} for items in (kept, here))
    # Read before the first rewrite: it changes the fakes of weights that a later region may share.
    shares = gm.graph.find_nodes(op="call_function", target=SHARE)
    promised = promises(gm, regions, here, shares)
    experts_of = {node: int(_weights(node)["gate_up_E2ND"].meta["val"].shape[0]) for node in regions}
    for node in shares:
        node.args = (*node.args[:2], promised[node][1])
    if not options.partial:
        _ask_all_ranks(gm.graph, group_name)
    returned = dict[fx.Node, fx.Node]()
    for node, num_experts in experts_of.items():
        where = node.meta.get("where") or ("", 0)
        name = f"experts {_number_of(node)}, {os.path.basename(where[0])}:{where[1]}"
        ways_back.write(node, returned)
        asked = kept, here, plan.ranks, rank, group_name, name, promised[node]
        returned[node] = _replace(node, num_experts, chains, *asked)
    for end in [end for end in ways_back.starts if end not in returned]:
        ways_back.write(end, returned)
    _gather_where_used(gm)
    for taken, item in rows.items():
        taken.args = (item, taken.meta["placement"])
    if not here:  # not again once they are placed
        _say_idle_ranks(plan)
    gm.graph.lint()
    gm.recompile()
    return gm


def parameters_to_place(gm: fx.GraphModule) -> list[torch.nn.Parameter]:
    """Parameters that ``gm`` (after :func:`place`) takes whole though this rank needs its own experts of them only.

    What a caller gives to ``place_parameters`` before it captures again. Empty once all are placed.
    """
    wants = [node for node in gm.graph.find_nodes(op="placeholder") if node.meta.get("wants_shard")]
    found = [real_of(node) for node in wants if node.meta.get("placement") == "as is"]
    return [tensor for tensor in found if not isinstance(tensor, Sharded)]


def _may_move(node: fx.Node) -> bool:
    tensor = real_of(node)
    return isinstance(tensor, torch.nn.Parameter) and not is_left_to_fsdp(tensor) and not stays_whole(tensor)


def input_conversions(gm: fx.GraphModule, options: LoweringOptions) -> list[str]:
    """How each input, in order, must reach a graph that :func:`place` has seen: the second argument of to_graph_input.

    "as is": as it is. "shard→local": this rank's rows of a placed parameter. "shard→full": all of it, gathered.
    """
    return [node.meta.get("placement", "as is") for node in gm.graph.nodes if node.op == "placeholder"]


def _is_chosen(region: fx.Node, function: str) -> bool:
    """Whether this rank's data chose what these experts are: they are of the part that the graph is of a function, as
    where a loop over experts asks which have a token. Not those of a module that this function calls, all of them.
    (Each expert that is a module is called so, too.)"""
    pending = [*_weights(region).values()]
    seen = set(pending)
    while function and pending and pending[-1].target is not stack_experts:
        new = [item for item in pending.pop().all_input_nodes if item not in seen]
        pending += new
        seen.update(new)
    callers = [name for _, _, name in region.meta.get("stack") or ()]
    return bool(function) and (bool(pending) or not any(name.endswith("._call_impl") for name in callers))


# ----------------------------------------------------------------------------------------------------------------------
# Which weights are an experts' parameter and nothing else
# ----------------------------------------------------------------------------------------------------------------------


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Of an experts call, by name."""
    return dict(SIGNATURE.bind(*node.args, **node.kwargs).arguments)


def call_experts(graph: fx.Graph, arguments: dict[str, Any]) -> fx.Node:
    bound = inspect.BoundArguments(SIGNATURE, OrderedDict(arguments))
    return graph.call_function(experts, bound.args, bound.kwargs)


def _weights(node: fx.Node) -> dict[str, fx.Node]:
    arguments = arguments_of(node)
    return {name: arguments[name] for name in WEIGHTS if isinstance(arguments.get(name), fx.Node)}


def _chain(weight: fx.Node) -> list[fx.Node] | None:
    """[placeholder, ..., weight] where each step works on each expert alone, several parameters where some are
    concatenated (gate and up); None where it comes from elsewhere."""
    chain = computed_of([weight], lambda node: [] if _is_source(node) else node.all_input_nodes)
    return sorted(chain) if all(_is_source(node) or _keeps_experts_apart(node) for node in chain) else None


def _is_source(node: fx.Node) -> bool:
    return node.op == "placeholder" or node.target is to_graph_input


def _sources(chain: list[fx.Node] | None) -> set[fx.Node]:
    """The parameters that a weight is made of."""
    return set(filter(_is_source, chain or ()))


def _all_or_none(items: set[fx.Node], chains: dict[int, list[fx.Node] | None]) -> set[fx.Node]:
    """Those of these parameters of which no weight has another one too."""
    before = None
    while before != items:
        before = items
        items = items.difference(*(found for chain in chains.values() if not (found := _sources(chain)) <= items))
    return items


def _keeps_experts_apart(node: fx.Node) -> bool:
    """Whether a node's result for expert e is made of expert e's rows alone, whatever number of experts there is."""
    if node.op == "call_function" and node.target is torch.cat and not node.kwargs and len(node.args) == 2:
        ranks = {rank_of(part) for part in node.all_input_nodes}
        rank, axis = ranks.pop(), node.args[1]
        return not ranks and bool(rank) and isinstance(axis, int) and axis % rank != 0
    call = read_call(node)
    source = None if call is None or call.op.inplace else call.args.get("input")
    if call is None or node.all_input_nodes != [source] or not rank_of(source):
        return False
    if call.name == "getitem":
        index = call["index"]
        # weight[:, a:b]: a plain slice of all experts first, and no axis added or dropped before it
        return isinstance(index, tuple) and bool(index) and index[0] == slice(None) and None not in index
    axes = moved(call, tuple(range(rank_of(source))))
    return call.name == "cast" or (axes is not None and axes[0] == 0)


def _only_experts(regions: list[fx.Node], chains: dict[int, list[fx.Node] | None]) -> set[fx.Node]:
    """Placeholders all of whose uses lead to experts calls that can take this rank's rows."""
    allowed = set(regions)
    kept: set[fx.Node] = set()
    for chain in chains.values():
        if chain is not None:
            allowed.update(chain)
            kept |= _sources(chain)
    for chain in chains.values():
        if chain is not None:
            later = set[fx.Node]().union(*(_of_the_step(source, allowed) for source in _sources(chain)))
            if any(user not in allowed and user not in later for node in chain for user in node.users):
                kept -= _sources(chain)
    # The same node may be an experts' weight and its x, say; then it is needed whole.
    for node in regions:
        weights = set(_weights(node).values())
        for name, value in arguments_of(node).items():
            if isinstance(value, fx.Node) and name not in WEIGHTS and value in weights:
                kept -= _sources(chains[id(value)]) or {value}
    return _all_or_none(kept, chains)


# ----------------------------------------------------------------------------------------------------------------------
# The rewrite
# ----------------------------------------------------------------------------------------------------------------------


def _of_the_step(parameter: fx.Node, regions: set[fx.Node]) -> set[fx.Node]:
    """The users of a parameter that belong to backward and the optimizer: they take the parameter itself, wherever its
    rows are. (None, where nothing writes into it or asks for its gradient.)"""
    own = {u for u in parameter.users if u not in regions and not any(map(has_history, tensors_of(u)))}
    touched = any(not (found := tensors_of(u)) or any(v is parameter.meta.get("val") for v in found) for u in own)
    return own if touched or any(is_backward(node) for node in parameter.graph.nodes) else set()


def _number_of(region: fx.Node) -> str:
    """Which experts these are, in words that are the same on all ranks: by the first parameter that they read."""
    pending = list(_weights(region).values())[::-1]
    while pending:
        node = pending.pop()
        if node.op == "placeholder" and (number := number_of(real_of(node))) is not None:
            return f"of parameter {number}"
        which = node.args[0] if node.target is stack_experts else None  # of these, what this rank's data say
        pending += [item for item in node.all_input_nodes[::-1] if item is not which]
    return ""


def _beside_whole_steps(
    here: set[fx.Node], regions: list[fx.Node], chains: dict[int, list[fx.Node] | None]
) -> dict[fx.Node, fx.Node]:
    """Where backward and the optimizer use a parameter too, its rows for experts are nodes of the graph's own, each
    where it is used: what the step writes, and the gradient mode that it sets, holds for them. Their parameters."""
    rows: dict[fx.Node, fx.Node] = {}
    use = {*regions, *(node for chain in chains.values() if chain for node in chain)}
    for item in [node for node in regions[0].graph.find_nodes(op="placeholder") if node in here]:
        if _of_the_step(item, use):
            item.meta["placement"] = "as is"
            for user in [user for user in item.users if user in use]:
                with item.graph.inserting_before(user):
                    taken = item.graph.call_function(to_graph_input, (item, "shard→full"))
                taken.meta = {**item.meta, "placement": "shard→full"}
                user.replace_input_with(item, taken)
                rows[taken] = item
    return rows


def _gather_where_used(gm: fx.GraphModule) -> None:
    """A parameter on ranks that is computed with whole, in a graph that trains it: gathered at each of these places.
    An optimizer's graph (what it trains was reached by the backward of another one) works on this rank's rows of all
    that is on ranks: of gradients too, that it only reads."""
    on_ranks = [item for item in gm.graph.find_nodes(op="placeholder") if item.meta["placement"] == "shard→full"]
    if any(_of_the_step(item, set()) for item in on_ranks):
        for item in on_ranks:
            item.meta["placement"] = "as is"
            for user in [user for user in item.users if any(map(has_history, tensors_of(user)))]:
                with gm.graph.inserting_before(user):
                    whole = gm.graph.call_function(to_graph_input, (item, "shard→full"))
                whole.meta = dict(item.meta)
                user.replace_input_with(item, whole)


def _ask_all_ranks(graph: fx.Graph, group_name: str) -> None:
    """A parameter for each expert: those get no gradient that no token of any rank has reached. Asked once for all
    parameters of a layer."""
    asked = dict[fx.Node, fx.Node]()
    for stack in graph.find_nodes(op="call_function", target=stack_experts):
        index, *parameters = stack.args
        if not isinstance(index, fx.Node):
            continue
        if index not in asked:
            with graph.inserting_before(stack):
                reached = asked[index] = graph.call_function(reached_experts, (index, len(parameters), group_name))
            reached.meta = {key: value for key, value in stack.meta.items() if key in ("where", "stack")}
            _propagate(reached)
        stack.args = (asked[index], *parameters)


def _say_idle_ranks(plan: Plan) -> None:
    fewest = min((total for total, _ in plan.parameters.values()), default=plan.ranks)
    if -(-fewest // -(-fewest // plan.ranks)) < plan.ranks:
        warnings.warn(
            f"{fewest} experts on {plan.ranks} ranks: the last ranks have none, and compute none; take a number of "
            f"ranks that divides {fewest}", stacklevel=2,
        )


def _replace(
    node: fx.Node, num_experts: int, chains: dict[int, list[fx.Node] | None], kept: set[fx.Node], here: set[fx.Node],
    ranks: int, rank: int, group_name: str, place: str, promised: tuple[int, int],
) -> fx.Node:
    """Writes the exchange in the place of a region; what it gives."""
    graph = node.graph
    arguments, skips = arguments_of(node), "skips" in node.meta
    x, index, weight = arguments["x_TD"], arguments["index_TK"], arguments["weight_TK"]

    def emit(target: Any, args: tuple, like: Any = None) -> fx.Node:
        made = graph.call_function(like or target, args[: 3 if like else None])
        made.meta = {key: value for key, value in node.meta.items() if key in ("where", "stack")}
        _propagate(made)
        made.target, made.args = target, args
        return made

    with graph.inserting_before(node):
        for name, value in _weights(node).items():
            chain = chains.get(id(value))
            if chain is not None and _sources(chain) <= here:
                _take_rows(chain, ranks, rank)
            else:
                for source in _sources(chain) & kept if all(map(_may_move, _sources(chain))) else ():
                    source.meta["wants_shard"] = True
                arguments[name] = emit(own_experts, (value, group_name))
        sent = emit(dispatch, (x, index, weight, num_experts, group_name, place, *promised, skips), outline)
        x_RD, expert_R1, weight_R1, *ticket = [emit(operator.getitem, (sent, i)) for i in range(6)]
        arguments |= {"x_TD": x_RD, "index_TK": expert_R1, "weight_TK": None if weight is None else weight_R1}
        local = call_experts(graph, arguments)
        local.meta = {key: value for key, value in node.meta.items() if key != "val"}
        _propagate(local)
        out = graph.call_function(combine, (local, *ticket))
        out.meta = {key: value for key, value in node.meta.items() if key in ("where", "stack", "val")}
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    if weight is None:
        graph.erase_node(weight_R1)
    return out


def _take_rows(chain: list[fx.Node], ranks: int, rank: int) -> None:
    for step in chain:
        if not _is_source(step):
            _propagate(step)
        elif step.meta["placement"] != "shard→local":
            step.meta["placement"] = "shard→local"
            whole = step.meta["val"]
            low, high = chunk_span(int(whole.shape[0]), ranks, rank)
            step.meta["global_shape"] = tuple(whole.shape)
            if isinstance(whole, FakeTensor):
                with whole.fake_mode:
                    local = torch.empty((high - low, *whole.shape[1:]), dtype=whole.dtype, device=whole.device)
                step.meta["val"] = local.requires_grad_(whole.requires_grad)


def _propagate(node: fx.Node) -> None:
    """Set ``meta["val"]`` of a new or changed node by running it on its inputs' fakes; without fakes, leave it out."""
    node.meta.pop("val", None)
    inputs = node.all_input_nodes
    if not inputs or any("val" not in item.meta for item in inputs):
        return
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
    mode = next((leaf.fake_mode for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)), None)
    if mode is None or mode.shape_env is None:
        return
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols():
        node.meta["val"] = apply(node, args, kwargs)


def _describe(node: fx.Node, chains: dict[int, list[fx.Node] | None], plan: Plan) -> None:
    """Write a region, and the parameters that it reads, into the plan."""
    arguments = arguments_of(node)
    for value in _weights(node).values():
        for source in (node for node in chains[id(value)] or () if _is_source(node) and "val" in node.meta):
            total = int(source.meta["val"].shape[0])
            plan.parameters[str(source.meta.get("source", source.name))] = (total, -(-total // plan.ranks))
    values = {
        name: arguments[name].meta.get("val") for name in ("x_TD", "index_TK", "weight_TK", "gate_up_E2ND")
        if isinstance(arguments[name], fx.Node)
    }
    x, index, weight, gate_up = (values.get(name) for name in ("x_TD", "index_TK", "weight_TK", "gate_up_E2ND"))
    if x is None or index is None or gate_up is None:
        return
    sizes = (x.shape[0], index.shape[1], gate_up.shape[0], x.shape[1])
    if all(isinstance(size, int) for size in sizes):  # a size that varies from call to call is not known here
        plan.regions.append(
            RegionShape(
                *sizes, item_bytes=x.element_size(), weight_bytes=weight.element_size() if weight is not None else 0,
                index_bytes=index.element_size(), weighted=weight is not None,
            )
        )


def _is_placed(tensor: Any, mesh: Any, axis: int) -> bool:
    """Whether a parameter is split over this axis of this mesh (an earlier capture may have used another one)."""
    if not isinstance(tensor, Sharded):
        return False
    return bool(tensor.shards.device_mesh == mesh and tensor.shards.placements[axis].is_shard())

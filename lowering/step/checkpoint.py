"""Activation checkpointing: the operators between a checkpointed call's beginning and end run as one recomputed body.

While a step is captured, and while experts are lowered, they are operators like any other; this pass comes last.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import fx

from moebius.lowering.autocast import depth_of_autocast, leave_to_depth
from moebius.lowering.contract import Contract, well_formed
from moebius.lowering.draft import copy_graph, finish
from moebius.lowering.graph import code_of, expert_loop
from moebius.lowering.step.asked import ASKED, ask_before
from moebius.lowering.step.selective import Keeper, mark_places
from moebius.lowering.torch_private import set_grad_enabled
from moebius.lowering.values import put_before

CONTRACT = Contract(
    name="checkpoint",
    needs="a well-formed graph in which checkpointed calls stand one after another or one inside another",
    promises="a well-formed graph of the same meaning, without marks of checkpointed calls, in bodies of branches too",
    need=(well_formed, lambda gm: unpaired(gm.graph, MARKS, "checkpointed calls")),
    promise=(well_formed, lambda gm: "a checkpointed call is left" if is_marked(gm) else None),
    run=lambda work: outline(work.gm),
    wanted=lambda work: is_marked(work.gm),
)


def begin_checkpoint(
    preserve_rng_state: bool,
    reentrant: bool,
    determinism_check: str,
    early_stop: bool,
    selective: bool | None,
    *given: torch.Tensor,
) -> None:
    """Stands where a checkpointed call begins; does nothing. given: the tensors among the call's arguments.

    selective: of a call that keeps what a policy names (``selective``), whether that may be written to; else None.
    """


def end_checkpoint(*results: torch.Tensor) -> None:
    """Stands where a checkpointed call ends; does nothing. results: all that a reentrant call gives."""


def from_checkpoint(result: torch.Tensor) -> torch.Tensor:
    """What a reentrant checkpointed call gives, as it is: its history is the call, and nothing inside of it."""
    return result


def enable_within(enabled: bool, outside: bool) -> None:
    """``torch.set_grad_enabled``, in a reentrant call's body: forward has no gradients, which it would switch on."""
    torch.set_grad_enabled(enabled and outside)


Marks = tuple[Any, Any]  # what stands where something begins, and where it ends
MARKS: Marks = (begin_checkpoint, end_checkpoint)


def checkpointed(
    body: fx.GraphModule,
    given: Sequence[torch.Tensor],
    captures: Sequence[Any],
    preserve_rng_state: bool,
    reentrant: bool,
    determinism_check: str = "default",
    early_stop: bool = True,
    policy: Keeper | None = None,
) -> tuple[Any, ...]:
    """``body(*given, *captures)``, whose intermediate values backward computes once more instead of keeping them.

    given: tensors that the user's call had for arguments; torch keeps them, and raises in backward if one was written
    to since. captures: what the function reached in another way, parameters for one; torch does not look at those.
    reentrant: backward of the body is a backward within the other, as with ``use_reentrant=True``. determinism_check:
    early_stop: as torch's, where that is not so. policy: names what is kept all the same.
    """

    runs = itertools.count()

    def run(*tensors: torch.Tensor) -> tuple[Any, ...]:
        if next(runs):  # for backward
            ask_before(body)
        devices = {t.device.type for t in (*tensors, *captures) if isinstance(t, torch.Tensor)}
        with modes_put_back({"cpu", *devices}):
            return cast(tuple[Any, ...], code_of(body)(*tensors, *captures))

    options: dict[str, Any] = {} if reentrant else {"determinism_check": determinism_check}
    if not early_stop:
        options["early_stop"] = False
    if policy is not None:
        options["context_fn"] = policy.contexts
    result = torch.utils.checkpoint.checkpoint(
        run, *given, use_reentrant=reentrant, preserve_rng_state=preserve_rng_state, **options
    )
    return cast(tuple[Any, ...], result)


@contextmanager
def modes_put_back(devices: Iterable[str], always: bool = False) -> Iterator[None]:
    """Where the body ends early, by an error or as torch has it do once backward has what it needs, autocast and grad
    mode are as they were before: a graph has no block around what runs in ``with torch.autocast``. always: and where
    it ends well, as a part of a graph may."""
    recorded = torch.is_grad_enabled()
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cached = torch.is_autocast_cache_enabled()
    depth = depth_of_autocast()
    ended = False
    try:
        yield
        ended = not always
    finally:
        if not ended:
            leave_to_depth(depth)
            for device, enabled, dtype in before:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(cached)
            torch.set_grad_enabled(recorded)


def unpaired(graph: fx.Graph, marks: Marks, what: str) -> str | None:
    """A mark that has no other half, or None."""
    depth = 0
    for node in marked(graph, marks):
        depth += 1 if node.target is marks[0] else -1
        if depth < 0:
            break
    return f"{depth} {what} have no end" if depth else None


def marked(graph: fx.Graph, marks: Marks) -> list[fx.Node]:
    """Where something begins and ends."""
    return sorted(node for mark in marks for node in graph.find_nodes(op="call_function", target=mark))


def is_marked(gm: fx.GraphModule) -> bool:
    """Whether a checkpointed call stands in the graph, or in the body of a branch."""
    return bool(marked(gm.graph, MARKS)) or any(is_marked(body) for _, body in bodies_of(gm))


def bodies_of(gm: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    """The bodies of branches that a graph runs, by name."""
    names = {str(node.args[0].target) for node in gm.graph.find_nodes(op="call_function", target=expert_loop)}
    return [(name, body) for name in sorted(names) if isinstance(body := getattr(gm, name), fx.GraphModule)]


def calls_around(node: fx.Node) -> list[fx.Node]:
    """Where the checkpointed calls around a node begin, the outermost first."""
    return calls_in(node.graph)(node)


def calls_in(graph: fx.Graph) -> Callable[[fx.Node], list[fx.Node]]:
    """The same of any node, for as long as no such call comes, goes or moves."""
    marks = marked(graph, MARKS)
    opened = [list[fx.Node]()]
    for mark in marks:
        opened.append([*opened[-1], mark] if mark.target is begin_checkpoint else opened[-1][:-1])
    return lambda node: opened[bisect.bisect_right(marks, node)]


def checkpoint_around(node: fx.Node) -> fx.Node | None:
    """Where the outermost checkpointed call around a node begins, of those that compare what they compute again."""
    return next((begin for begin in calls_around(node) if not begin.args[1]), None)


def stretches(gm: fx.GraphModule, marks: Marks) -> Iterator[tuple[int, fx.Node, list[fx.Node], fx.Node]]:
    """(its number, where it begins, the nodes in it, where it ends) of what is between two marks and not empty, the
    innermost first. The marks go."""
    opened: list[fx.Node] = []
    every = marked(gm.graph, marks)
    for count, end in enumerate(every):
        if end.target is marks[0]:
            opened.append(end)
            continue
        begin = opened.pop()
        inside, node = [], begin.next
        while node is not end:
            inside += [node] if node.op != "placeholder" else []
            node = node.next
        if inside:
            yield count, begin, inside, end
        gm.graph.erase_node(begin)
        gm.graph.erase_node(end)
    if every:
        gm.recompile()


def outline(gm: fx.GraphModule) -> None:
    """What stands between two marks becomes the body of one ``checkpointed`` node, the innermost calls first. (Bodies
    of branches are others' too: those in which there are any are copied.)"""
    for name, shared in bodies_of(gm):
        if is_marked(shared):
            own = copy_graph(shared)
            outline(own)
            gm.add_submodule(name, finish(own))
    for count, begin, inside, end in stretches(gm, MARKS):
        *options, selective = begin.args[:5]
        if options[1]:
            keep_mode(begin, inside)
        if isinstance(selective, bool):
            options.append(mark_places(begin, inside, selective))
        name = f"checkpoint_{count}"
        outline_call(gm, inside, begin, name, checkpointed, *options, last=end)
        if ASKED in begin.meta:
            body = cast(fx.GraphModule, gm.get_submodule(name))
            body.meta[ASKED] = begin.meta[ASKED]


def keep_mode(begin: fx.Node, inside: list[fx.Node]) -> None:
    """Grad mode is switched within the mode that the body begins in: off in forward, on when backward runs it again."""
    switches = [n for n in inside if n.op == "call_function" and n.target is set_grad_enabled]
    if not switches:
        return
    outside = put_before(inside[0], torch.is_grad_enabled, (), begin, True)
    for node in switches:
        node.target, node.args = enable_within, (node.args[0], outside)
    inside.insert(0, outside)


def outline_call(
    gm: fx.GraphModule, inside: list[fx.Node], begin: fx.Node, name: str, target: Callable[..., Any], *options: Any,
    last: fx.Node | None = None,
) -> None:  # fmt: skip
    """Nodes that stand together become one: ``target(body, given, captures, *options)``. given: named by ``begin``.

    last: names results that come first, in its order.
    """
    members = set(inside)
    given = [n for n in dict.fromkeys(begin.all_input_nodes) if n not in members]
    captures = {n: None for node in inside for n in node.all_input_nodes if n not in members and n not in given}
    named = [] if last is None else [n for n in last.all_input_nodes if n in members]
    results = [n for n in inside if n.op != "get_attr" and any(user not in members for user in n.users)]
    results = [*named, *(n for n in results if n not in named)]
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for n in (*given, *captures):
        copied[n] = graph.placeholder(n.name)
        copied[n].meta = dict(n.meta)
    for n in inside:
        copied[n] = graph.node_copy(n, lambda old: copied[old])
    graph.output(tuple(copied[n] for n in results))
    gm.add_submodule(name, fx.GraphModule(gm, graph))
    place = {key: begin.meta[key] for key in ("where", "stack", "number")}
    with gm.graph.inserting_after(inside[-1]):
        call = gm.graph.call_function(target, (None, tuple(given), tuple(captures), *options))
    with gm.graph.inserting_before(call):
        body = gm.graph.get_attr(name)
    call.args = (body, *call.args[1:])
    body.meta.update(place, val=None)
    call.meta.update(place, val=tuple(n.meta.get("val") for n in results))
    after = call
    for i, n in enumerate(results):
        with gm.graph.inserting_after(after):
            after = gm.graph.call_function(operator.getitem, (call, i))
        after.meta = dict(n.meta)
        n.replace_all_uses_with(after, delete_user_cb=lambda user: user not in members)
    for n in reversed(inside):
        gm.graph.erase_node(n)


for _name in ("checkpointed", "begin_checkpoint", "end_checkpoint", "from_checkpoint", "enable_within"):
    fx.wrap(_name)

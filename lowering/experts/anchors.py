"""The sums to which iterations add, one after another (``unrolled_loops.groups``): what each adds, and of what."""

from __future__ import annotations

from torch import fx

from moebius.lowering.experts.unrolled_loops import added_rows, place_of
from moebius.lowering.operators import PRODUCTS, read_call
from moebius.lowering.values import computed_of, reaches, shape_of

MAKE_ROWS = PRODUCTS | {"grouped_mm", "expert_loop"}
INPUTS = ("placeholder", "get_attr")


def leads_to(node: fx.Node, wanted: set[fx.Node], least: fx.Node) -> bool:
    """Whether a node is computed of one of these. least: the first of them in the graph."""
    adds = added_rows(node) or node
    beside = {one for one in adds.all_input_nodes if one is not adds.args[0]}  # the sum so far
    return reaches(beside or set(adds.all_input_nodes), wanted, least, itself=True)


def without_identities(anchors: list[fx.Node]) -> list[fx.Node]:
    """The first iterations, where the last ones add the tokens themselves (zero-computation experts): these stay."""
    count = len(anchors)
    while count and not projects(anchors[count - 1], anchors[count - 2] if count > 1 else None):
        count -= 1
    return anchors[:count] if count > 1 else anchors


def projects(anchor: fx.Node, before: fx.Node | None) -> bool:
    """Whether what is added comes of a product with a weight in the iteration itself, which begins after ``before``."""
    place = place_of(anchor)
    if place is None or before is None:
        return True

    def is_own(node: fx.Node) -> bool:
        return node.graph is not anchor.graph or before < node

    starts = [n for n in place.inner.all_input_nodes if n is not place.inner.args[0]]
    own = [n for n in computed_of(starts, lambda n: n.all_input_nodes if is_own(n) else ()) if is_own(n)]
    return any(call.name in MAKE_ROWS if (call := read_call(n)) is not None else n.op not in INPUTS for n in own)


def adds_rows(anchor: fx.Node) -> bool:
    """Whether what it adds to has features: counts of tokens and losses have none."""
    shape = None if (place := place_of(anchor)) is None else shape_of(place.base)
    return shape is None or len(shape) > 1

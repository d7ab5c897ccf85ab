"""A computation written in another way, so that a front end can read it: taken back where no operator came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from moebius.lowering.contract import Work
from moebius.lowering.dead_code import drop_dead_code, drop_loose
from moebius.lowering.values import put_before


@dataclass
class Provisional:
    """node: as it was written. result: the same value, computed in another way. core: the node of that computation that
    an operator takes the place of."""

    node: fx.Node
    result: fx.Node
    core: fx.Node


def settle(work: Work, rewritten: Sequence[Provisional]) -> None:
    """What became part of no operator is as it was written, unless it is read before that by now; of the rest that
    goes."""
    if not rewritten:
        return
    drop_dead_code(work)
    for one in reversed(rewritten):  # (each may be read by what the next was written of)
        if one.core.users and any(user < one.node for user in one.result.users):  # (a node that is gone has none)
            readers = list(one.result.users)
            copy = put_before(one.result.next, "clone", (one.result,), one.node, one.node.meta["val"])
            for user in readers:
                user.replace_input_with(one.result, copy)
            work.loose.append(one.node)  # (a view of what it reads is not to be handed on)
        elif one.core.users:
            one.result.replace_all_uses_with(one.node)
            work.loose.append(one.result)
        else:
            work.loose.append(one.node)
        drop_loose(work)
    drop_dead_code(work)

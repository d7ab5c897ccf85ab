"""``all(…)`` and ``any(…)`` of what only the running step knows: one truth, which the caller branches on.

Python stops at the first item that decides. The items behind it are computed all the same, where nobody can tell: they
change nothing that is older, draw nothing, and cannot fail.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.interpreter.shells import frame_of
from moebius.lowering import only_computes

from ..heap.iterator_states import STEPPING
from ..heap.walks import parts_of
from ..tensors.failing import may_raise_on_data
from ..tensors.folding import constant_truth
from ..torch_facts import torch_private
from ..values.numbers import Number
from ..values.values import Break, TensorProxy
from .parts import Parts

EMPTY: tuple[Any, ...] = ({}, {}.values(), {}.items(), set(), "", b"")
OF_CONTAINERS = frozenset(type(iter(one)) for one in EMPTY)
TELLING = STEPPING | OF_CONTAINERS | {types.GeneratorType}  # iterators of which it is known what goes on with them
REFUSED = ("data-dependent branch", "items behind one whose truth depends on values do more than to ask",
           "make a list of the truths first")  # fmt: skip


def quantifiers(domain: Parts) -> dict[Any, Any]:
    """What stands for the two functions."""
    return {
        any: lambda values: quantified(domain, values, True),
        all: lambda values: quantified(domain, values, False),
    }


def quantified(domain: Parts, values: Any, decides: bool) -> Any:
    """``any(values)``, which an item that is true decides, or ``all(values)``."""
    asked: list[Any] = []
    if not is_of_nobody(domain, values):
        return any(domain.truth(v) is decides for v in domain.native_iter(values)) is decides
    items, beyond = domain.native_iter(values), Beyond(domain, values)
    while True:
        try:
            value = beyond.following(items) if asked else next(items)
        except StopIteration:
            break
        if (truth := open_truth(domain, value)) is None:
            if domain.truth(value) is decides:
                return decides
        else:
            asked.append(truth)
    if len({type(truth) for truth in asked}) > 1:  # a size and a tensor: each by itself
        return any(domain.truth(truth) is decides for truth in asked) is decides
    return functools.reduce(lambda a, b: domain.binary("|" if decides else "&", a, b), asked) if asked else not decides


def is_of_nobody(domain: Parts, values: Any) -> bool:
    """Whether nobody sees how many items were taken: of a container, or a generator expression that stands here."""
    if type(values) in (list, tuple, TensorProxy):
        return domain.tensors.branches
    if type(values) is not types.GeneratorType or domain.frame is None or not domain.tensors.branches:
        return False
    steps, here, frame = domain.frame.program.instructions, domain.frame.pc, frame_of(values)
    before = (step.opname for step in reversed(steps[:here]) if step.opname not in ("PRECALL", "CACHE"))
    if frame is None or [*itertools.islice(before, 2)] != ["CALL", "GET_ITER"]:
        return False  # (nothing else calls what it has just iterated)
    alone = domain.iterators.alone.get(id(frame.locals[0]))
    return is_held_here(frame.locals) if alone is None else alone() is domain.frame


def is_held_here(held: list[Any]) -> bool:
    """Whether the first is a generator that nobody has but the list, and the register of what the trace made."""
    probe = [object()]
    register = probe[0]
    fewest = sys.getrefcount(probe[0])
    del register
    return type(held[0]) is types.GeneratorType and sys.getrefcount(held[0]) <= fewest


def open_truth(domain: Parts, value: Any) -> Any:
    """The truth of a value as a bool of the graph; None where it is known now, under a guard or not."""
    if type(value) is torch.SymBool:
        return value if torch_private.depends_on_values(value) else None
    if type(value) is Number:
        return value if value.kind is bool and not value.known and value.node is not None else None
    if type(value) is not TensorProxy or value.fake.dim() or constant_truth(value.node) is not None:
        return None
    return domain.numbers.item_of(value) if value.fake.dtype is torch.bool else None


class Beyond:
    """What is done for items that Python may not come to. values: what the items are of."""

    def __init__(self, domain: Parts, values: Any) -> None:
        self.writer, self.heap, frame = domain.tensors.writer, domain.objects.heap, frame_of(values)
        self.begin, self.own = self.heap.mark(), [values, *(parts_of(frame.locals[0]) if frame is not None else ())]

    def changes_older(self) -> bool:
        """Whether the items have changed anything that was there before, other than how many were taken; or may have,
        as an iterator in C was advanced that does not tell what it goes through."""
        writes = [(owner, born) for _, owner, _, born in self.heap.writes_between(self.begin)]
        older = any(born < self.begin and all(owner is not one for one in self.own) for owner, born in writes)
        return older or any(hasattr(type(owner), "__next__") and type(owner) not in TELLING for owner, _ in writes)

    def following(self, items: Any) -> Any:
        """The next item. A graph break where more is done for it than to compute what cannot fail."""
        writer, before, scope = self.writer, self.writer.before_node, self.writer.scope
        last = next(reversed(writer.graph.nodes), None)

        def look(number: int, target: Any, args: tuple) -> None:
            if may_raise_on_data(target, args):
                raise Break(*REFUSED)
            before(number, target, args)

        writer.before_node = look
        try:
            return next(items)
        except (StopIteration, Break):
            raise
        except Exception:  # of the user's program, which Python may not have come to
            raise Break(*REFUSED) from None
        finally:
            writer.before_node = before
            if writer.scope is not scope or self.changes_older() or not computed_since(writer.graph, last):
                raise Break(*REFUSED)


def computed_since(graph: fx.Graph, last: fx.Node | None) -> bool:
    """Whether the nodes behind it compute, and do nothing else."""
    for node in reversed(graph.nodes):
        if node is last:
            break
        if is_kind(node, fx.Node) and node.op != "placeholder" and not only_computes(node):
            return False
    return True

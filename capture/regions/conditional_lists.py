"""Lists to which the step appends a tensor behind a branch on values: ``if n == 0: continue`` … ``parts.append(y)``, or
in the iterations of the experts that were hit (active_experts.py).

The branch is one node of the graph, and the tensor that it may append is among what that node gives: with no rows where
the branch is not taken. A ``ConditionalList`` stands for the list. It knows for each item whether it is always there or
on which condition; so the items can be joined (``torch.cat``), counted, and put into a real list when the step has run.
What else a program does with the list cannot be said without knowing which items it has: it is then traced again with a
list of Python's own, and the branch breaks the graph or has a side exit.

Which lists these are is learnt from a trace that such an ``append`` stopped: by the instruction that makes the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.step.gathered import cat_present, how_many, no_rows, present

from ..python.parts import Parts
from ..tensors.arrays import ArrayNumber
from ..torch_facts import torch_fakes, torch_private
from ..values.residual_program import Call, Expression, Residual, tuple_of
from ..values.values import BoundMethod, Break, CannotRebuild, SymbolicObject, TensorProxy
from .autograd_joins import carried_on
from .branches import Conditional
from .loop_regions import ONE, LoopRegion

Site = tuple[Any, int]  # code, and the index of the instruction that makes the list
JOINS = frozenset({torch.cat, torch.concat, torch.concatenate})


@dataclass(frozen=True)
class Presence:
    """An item is there where the condition, a number or a tensor that nobody can write into, has this truth."""

    condition: Any
    taken_if: bool


class ConditionalList(SymbolicObject):
    """A list while tracing. items: each with its presence, None if it is always there."""

    kind = list

    def __init__(self, lists: Lists, site: Site):
        self.lists, self.site = lists, site
        self.domain, self.tensors, self.objects = lists.domain, lists.tensors, lists.objects
        self.items: list[tuple[Any, Presence | None]] = []

    def refuse(self, what: str) -> NoReturn:
        if self.settled():  # a list of Python's own can do that
            self.lists.refuse(self.site)
        raise Break(
            "list of what a branch on values appends",
            f"{what} depends on the data",
            "join its items with torch.cat, or append in each iteration",
        )

    def attribute(self, name: str) -> Any:
        if name not in ("append", "extend"):
            self.refuse(f"list.{name}")
        return self.objects.made(BoundMethod(self, name))

    def call_method(self, name: str, args: list, kwargs: dict[str, Any]) -> None:
        if kwargs or len(args) != 1:
            self.refuse(f"list.{name}")
        self.append(args[0]) if name == "append" else self.extend(args[0])

    def append(self, value: Any) -> None:
        """``list.append(value)``."""
        loops, objects = self.domain.loops, self.objects
        objects.writes += 1
        if not loops.open and not objects.inside:
            self.items.append((value, None))
            return
        loop = loops.open[-1] if len(loops.open) == 1 and len(objects.inside) == 1 else None
        if loop is None or not is_kind(loop.rows, ONE) or loop.skips or not can_be_absent(value):
            self.lists.refuse(self.site)
            self.refuse("what it holds")
        if not loop.gathered and known_inside(loop):
            loop.gathered.append((None, self.tensors.function(torch.ones, ((),), {"dtype": torch.bool})))
        loop.gathered.append((self, value))

    def extend(self, values: Any) -> None:
        """``list.extend(values)``, or ``+=``."""
        if type(values) not in (list, tuple):
            self.refuse("list.extend")
        for value in self.objects.contents(values):
            self.append(value)

    def binary(self, op: str, left: Any, right: Any) -> Any:
        if op != "+=" or left is not self:
            self.refuse(op)
        self.extend(right)
        return self

    def settled(self) -> bool:
        """Whether nothing of it depends on the data."""
        return not self.domain.open_loops and all(presence is None for _, presence in self.items)

    def length(self) -> Any:
        if self.settled():
            return len(self.items)
        asked = self.asked()
        tensors = self.tensors
        found = tensors.record("call_function", how_many, (asked,), {}, tensors.world.unknown_count())
        self.lists.count(found)
        return found

    def truth(self) -> bool:
        if any(presence is None for _, presence in self.items) or self.settled():
            return bool(self.items)
        return self.tensors.symbolic_truth(self.length() > 0)

    def asked(self) -> list[tuple[Any, bool]]:
        """For each item, what says whether it is there."""
        if self.domain.open_loops:
            self.refuse("what it holds, behind a branch on values,")
        return [(True, True) if p is None else (p.condition, p.taken_if) for _, p in self.items]

    def plain(self) -> list:
        """The list itself, where nothing of it depends on the data."""
        if not self.settled():
            self.refuse("what it holds")
        return self.objects.made([value for value, _ in self.items])

    def iterate(self) -> Any:
        return self.domain.get_iter(self.plain())

    def item(self, key: Any) -> Any:
        return self.domain.get_item(self.plain(), key)

    def joined(self, args: list, kwargs: dict[str, Any]) -> TensorProxy:
        """``torch.cat(list, …)`` of rows, which fails as torch does where no item is there."""
        tensors = self.tensors
        values, asked = [value for value, _ in self.items], self.asked()
        rows = (args, kwargs) in (([], {}), ([0], {}), ([], {"dim": 0}))
        if not rows or not all(is_kind(value, TensorProxy) for value in values):
            self.refuse("torch.cat")
        if len({value.fake.dtype for value in values}) > 1:  # what is not there counts for nothing
            self.refuse("the dtype of torch.cat")
        fake = tensors.on_fakes(torch.cat, (values, 0), {})
        return tensors.record("call_function", cat_present, (values, asked), {}, fake)

    def expression(self, emitter: Residual) -> Expression:
        if self.domain.open_loops:
            raise CannotRebuild("a list is alive in the middle of a branch that appends to it")
        values = emitter.values(value for value, _ in self.items)
        asked = tuple_of(emitter.values(each) for each in self.asked())
        return Call(emitter.constant(present), (values, asked))


class Lists:
    """The lists of one trace that branches append to. sites: of those that are to be such from their beginning.

    wanted: of those that this trace found to be. refused: of those that were used otherwise.
    """

    def __init__(self, domain: Parts):
        self.domain = domain
        self.tensors, self.objects = domain.tensors, domain.objects
        self.sites: set[Site] = set()
        self.wanted: set[Site] = set()
        self.refused: set[Site] = set()
        self.made_at: dict[int, Site] = {}
        self.counts: set[Any] = set()  # symbols of how many items such lists have: most often there are some

    def refuse(self, site: Site) -> None:
        self.refused.add(site)

    def count(self, items: torch.SymInt) -> None:
        self.counts.add(torch_private.expression(items))

    def make(self, items: list) -> Any:
        """A list display."""
        frame = self.domain.frame
        if items or frame is None or self.domain.open_loops or not self.tensors.branches:
            return self.objects.made(items)
        site = (frame.code, frame.pc)
        if site in self.sites:
            return self.objects.made(ConditionalList(self, site))
        made = self.objects.made(items)
        self.made_at[id(made)] = site
        return made

    def appends(self, owner: Any) -> None:
        """``owner.append`` or ``extend``: note it where the trace is about to break, as a branch may leave it out."""
        loops = self.domain.open_loops
        site = self.made_at.get(id(owner))
        if site is not None and len(loops) == 1 and is_kind(loops[0].rows, ONE):
            self.wanted.add(site)

    def absent(self, loop: LoopRegion) -> list[fx.Node]:
        """What stands, for each of the items, where the branch is not taken: a tensor without rows (the flag: no)."""
        writer, made = self.tensors.writer, []
        for target, value in loop.gathered:
            fake = value.fake
            function: Any = torch.zeros if target is None else no_rows
            sizes = tuple(fake.shape[1:])
            kind: dict[str, Any] = {"dtype": fake.dtype, "device": fake.device}
            node = writer.scope.graph.call_function(function, (writer.argument(sizes),), kind)
            with self.tensors.mode:
                node.meta["val"] = function(sizes, **kind)
            node.meta.update(**loop.stands_at)
            made.append(node)
        for node, placeholder in zip(made, loop.nodes[len(loop.nodes) - len(made) :], strict=True):
            placeholder.meta.update(node.meta)
        return made

    def close(self, loop: LoopRegion, items: list[TensorProxy]) -> None:
        """The branch is written. items: what it appends, each as it is behind the branch."""
        if not loop.gathered:
            return
        presence = Presence(True, True)
        if not known_inside(loop):
            rows, condition = loop.rows, loop.begun_with[-1]
            assert isinstance(rows, Conditional)
            presence = Presence(condition.value if type(condition) is ArrayNumber else condition, not rows.skip_if)
        for (target, _), value in zip(loop.gathered, items, strict=True):
            if target is None:
                presence = Presence(value, True)
            else:
                target.items.append((value, presence))


def known_inside(loop: LoopRegion) -> bool:
    """Whether a flag says that the branch was taken: its condition may be overwritten, or is not known outside."""
    return not is_kind(loop.rows, Conditional) or is_kind(loop.begun_with[-1], TensorProxy)


def maybe_absent(world: torch_fakes.FakeWorld, fake: torch.Tensor) -> torch.Tensor:
    """The fake of an item behind its branch: of as many rows, or of none. (A flag is always there.)"""
    if not fake.dim():
        return fake.clone()
    with world.mode:
        like = fake.new_empty((world.unknown_count(), *fake.shape[1:]))
    return carried_on(like, fake) if fake.requires_grad else like


def can_be_absent(value: Any) -> bool:
    """Whether a tensor without rows can stand for it where it is not there."""
    return (
        is_kind(value, TensorProxy)
        and value.cls is torch.Tensor
        and value.fake.dim() > 0
        and not value.fake.is_inference()
        and not any(torch_private.depends_on_values(size) for size in value.fake.shape[1:])
    )

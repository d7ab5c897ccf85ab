"""Progress bars of tqdm's: ``bar.update(1)`` and ``bar.set_postfix(loss=loss.item())`` are nodes, in their places.

What they write into the bar tracing does not see: a step that reads the bar's own attributes gets a graph break.
"""

from __future__ import annotations

import sys
import types
from typing import Any, NoReturn

from moebius.interpreter import is_kind
from moebius.lowering.step import bar_call

from ..heap.records import raw_dict
from ..tensors.graphs import ELSEWHERE
from ..values.numbers import Number
from ..values.values import ATOMS, Break, SymbolicObject
from .parts import Parts
from .texts import is_stream

HINT = "draw it around the step: for batch in tqdm(loader): step(batch)"
METHODS = frozenset(
    ("update", "refresh", "set_description", "set_description_str", "set_postfix", "set_postfix_str", "unpause")
)
# What decides how a bar is drawn, if one has its own of it. (``sp`` writes to its file; tqdm's own makes it.)
OVERRIDES = METHODS | {"display", "format_meter", "status_printer", "moveto", "get_lock"}


class Drawn(SymbolicObject):
    """What ``bar.update()`` gives: whether it has drawn the bar, which depends on the clock."""

    __slots__ = ()
    kind = type(None)

    def refuse(self, what: str) -> NoReturn:
        raise Break("progress bar", f"{what} of what a bar's method gives", HINT)


class Bars:
    """The progress bars of one trace."""

    def __init__(self, domain: Parts):
        self.domain, self.objects, self.tensors = domain, domain.objects, domain.tensors
        self.guards, self.texts = self.objects.guards, self.tensors.texts

    def draws(self, args: list) -> bool:
        """Whether a function of tqdm's draws a bar: one that others call, but on a bar that is switched off."""
        frame = self.domain.frame
        if frame is not None and str(frame.globals.get("__name__")).startswith("tqdm."):
            return False
        bar = args[0] if args and not is_kind(args[0], type) else None
        attributes = self.domain.attributes
        known = bar is not None and self.objects.is_known(bar) and attributes.has(bar, "disable")
        return not known or attributes.get(bar, "disable") is not True

    def call(self, function: types.FunctionType, args: list, kwargs: dict[str, Any]) -> Any:
        """A call of a function of tqdm's that draws; a graph break where it is not one of METHODS on a known bar."""
        what = f"{function.__qualname__}()"
        bar = args[0] if args else None
        record = None if bar is None else self.objects.record_of(bar)
        writer = self.tensors.writer
        own = bar_class()
        if own is None or vars(own).get(function.__name__) is not function or function.__name__ not in METHODS:
            raise Break("progress bar", f"{what} writes to the terminal", HINT)
        if not self.tensors.runs_once:
            raise Break("progress bar", f"{what} {ELSEWHERE}", HINT)
        if record is None or not is_drawn_plainly(bar):
            raise Break("progress bar", f"{what} writes to the terminal, by code that is not known", HINT)
        inner = self.objects.instance_dict(record)
        assert inner is not None
        read = {key for key, value in inner.reads.items() if key in vars(bar)} - {"disable"}
        if read or inner.shadow is not None or inner.changed or id(own) in map(id, self.objects.class_dicts):
            raise Break("progress bar", f"{what} after the step read or changed the bar's attributes", HINT)
        values = (*args[1:], *kwargs.values())
        if not all(type(v) in ATOMS or is_kind(v, Number) or self.is_text(v) for v in values):
            raise Break("progress bar", f"{what} of values that are not plain", "give it numbers and strings")
        self.guards.holds(record.source.name, "is drawn by tqdm's own code", is_drawn_plainly, record.source)
        self.objects.note("progress bar")
        if id(inner) not in self.objects.drawn:
            name = f"progress bar {len(self.objects.drawn)}"  # (stands for it in the graph, which must not hold it)
            self.objects.drawn[id(inner)] = self.tensors.add_input(bar, name, record.source)
        drawn = self.objects.drawn[id(inner)]
        writer.call(bar_call(function, tuple(kwargs)), drawn, *writer.with_sizes(values))
        return self.objects.made(Drawn())

    def is_text(self, value: Any) -> bool:
        return self.texts.is_part(value) or self.texts.is_text(value)


def bar_class() -> Any:
    """``tqdm.tqdm``, if the program has imported it."""
    return getattr(sys.modules.get("tqdm.std"), "tqdm", None)


def is_drawn_plainly(bar: Any) -> bool:
    """Whether drawing the bar runs no code of the user's."""
    own, inside = bar_class(), raw_dict(bar)
    if own is None or inside is None or (type(bar) is not own and type(bar).__module__ != "tqdm.asyncio"):
        return False
    if not OVERRIDES.isdisjoint(inside) or inside.get("gui") or inside.get("disable"):
        return False
    file = inside.get("fp")
    if type(file).__module__ == "tqdm.utils":
        file = raw_dict(file).get("_wrapped")  # type: ignore[union-attr]
    named = [inside.get(name) for name in ("desc", "unit", "bar_format", "postfix", "colour")]
    return is_stream(file) and all(type(text) in (str, type(None)) for text in named)

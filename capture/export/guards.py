"""Guards in a file: what a loaded step checks of its arguments and of its state before it runs.

Facts about the world of the capture that no argument leads to (the model's attributes, the code of functions) are true
of the graph as it is written, and are not in the file. What the step itself changes is: a count that the graph was
captured for is checked at each call.
"""

from __future__ import annotations

import ast
from typing import Any

from moebius.interpreter import is_kind

from ..errors import ExportError
from ..guards.recorder import Fact
from ..hook import ABSENT
from ..tensors.overlaps import Overlaps
from ..values.residual_program import Output
from .checks import FLAGS, SIZES, TYPES, same
from .relations import write_number, write_relation
from .residual import ResidualReader
from .unchanged import parts_of
from .values import encode
from .world import Frozen, Open, State, World

META = (*SIZES, *FLAGS)
TYPE_NAMES = {value: name for name, value in TYPES.items()}
# Checks of objects that no argument leads to. "none_of": the objects of the capture are not where the file is loaded,
# but for the tensors of the state, and those every loaded step compares with its arguments.
OF_OBJECTS = ("class", "instance", "static_tensor", "function", "answers", "none_of")
OF_SLOTS = (
    "is", "is_weak", "type", "equal", "length", "keys", "absent", "contents", "tensor", "distinct", "same", "python",
)  # fmt: skip


class GuardWriter:
    """Turns the facts of a segment into JSON."""

    def __init__(self, world: World, state: State, residual: ResidualReader):
        self.world, self.state, self.residual = world, state, residual
        self.written: list[dict[str, Any]] = []

    def write(self) -> list[dict[str, Any]]:
        """All guards. Raises ExportError for a fact about the call that a file cannot hold."""
        for fact in self.world.facts:
            kind, *rest = fact.check
            if kind == "dict":
                self.dictionary(fact, *rest)
            elif kind in OF_SLOTS:
                self.slots(fact, kind, rest)
            elif kind not in OF_OBJECTS:
                self.refuse(fact, f"a check of the kind {kind!r}")
        return self.written

    # ------------------------------------------------------------------------------------------------------------------
    # Facts about dictionaries that the step writes to
    # ------------------------------------------------------------------------------------------------------------------

    def dictionary(self, fact: Fact, the_dict: dict, entries: dict[Any, Any], keys: tuple | None) -> None:
        for (owner, key), value in self.residual.written.items():
            if owner != id(the_dict):
                continue
            if keys is not None and key not in keys:
                self.refuse(fact, f"the step adds {key!r}")
            if key not in entries:
                continue
            expected = entries[key]
            if value is expected or (is_plain(value) and same(value, expected)):
                continue  # it is set to what it is
            name = self.state.cells[(owner, key)]
            if not is_plain(expected):
                self.refuse(fact, f"the step replaces {name}")
            self.add(fact, "equal", {"state": name}, value=encode(expected), text=f"{name} == {expected!r}"[:200])

    # ------------------------------------------------------------------------------------------------------------------
    # Facts about slots
    # ------------------------------------------------------------------------------------------------------------------

    def slots(self, fact: Fact, kind: str, rest: list[Any]) -> None:
        positions, operands = parts_of(kind, rest)
        places = [self.place(fact, self.world.slot(p)) for p in positions]
        if not any(places):
            return  # about the world of the capture alone
        if kind == "python":
            self.predicate(fact, operands[0], places)
        elif kind in ("distinct", "same"):
            if kind == "distinct":
                places = [p for p in places if p]
            if not all(places):
                self.refuse(fact, "it compares an argument with an object of the capture")
            if len(places) > 1:
                self.add(fact, kind, places)
        else:
            place = places[0]
            assert place is not None
            self.refuse_offset(fact, self.world.slot(positions[0]), operands)
            if isinstance(self.world.slot(positions[0]), Open) or kind in ("type", "equal", "tensor"):
                self.one(fact, kind, place, operands)
            else:
                self.refuse(fact, "it is about what the step replaces")

    def refuse_offset(self, fact: Fact, found: Open | Frozen | None, operands: list[Any]) -> None:
        """Where the file is loaded, the state's tensors begin where their storages do."""
        asked = operands and isinstance(operands[0], dict) and operands[0].get("storage_offset") is not None
        if asked and isinstance(found, Frozen) and found.obj is not None and found.obj.storage_offset():
            self.refuse(fact, "it begins elsewhere in its storage, and the step asks where")

    def place(self, fact: Fact, found: Open | Frozen | None) -> Any:
        """The JSON of where a fact looks, or None for a frozen place."""
        if found is None:
            return None
        if isinstance(found, Open):
            return {"argument": found.argument, "path": [[op, encode(key)] for op, key in found.path]}
        for place in found.places[:-1]:
            if place in self.residual.written:
                self.refuse(fact, f"the step replaces {self.state.cells[place]}, which leads to it")
        last = found.places[-1] if found.places else None
        if last in self.state.cells:
            return {"state": self.state.cells[last]}
        if last is not None and last[1] == "grad" and last[0] in self.state.tensor_names:
            return {"gradient": self.state.tensor_names[last[0]]}
        return None

    def one(self, fact: Fact, kind: str, place: Any, operands: list[Any]) -> None:
        if kind == "type":
            name = TYPE_NAMES.get(operands[0])
            if name is None:
                self.refuse(fact, f"a {operands[0].__qualname__}; a loaded step takes tensors and plain containers")
            self.add(fact, "type", place, type=name)
        elif kind == "tensor":
            self.add(fact, "tensor", place, **self.meta(fact, operands[0]))
        elif kind in ("equal", "absent") or (kind == "is" and is_plain(operands[0])):
            self.add(fact, "absent" if kind == "absent" else "equal", place, value=self.constant(fact, operands[0]))
        elif kind == "length":
            self.add(fact, "length", place, length=operands[0])
        elif kind in ("keys", "contents"):
            self.add(fact, kind, place, items=[self.constant(fact, k) for k in operands[0]])
        else:
            self.refuse(fact, "the identity of an object")

    def constant(self, fact: Fact, value: Any) -> Any:
        try:
            return encode(value)
        except ExportError:
            self.refuse(fact, f"a {type(value).__name__}")

    def meta(self, fact: Fact, meta: dict[str, Any]) -> dict[str, Any]:
        if meta.get("type") not in (None, *TYPE_NAMES):
            self.refuse(fact, f"a {meta['type'].__name__}")
        found: dict[str, Any] = {k: list(v) if isinstance(v := meta[k], tuple) else v for k in META if k in meta}
        if meta.get("type") is not None:
            found["type"] = TYPE_NAMES[meta["type"]]
        for key in ("dtype", "device", "layout"):
            if meta.get(key) is not None:
                found[key] = encode(meta[key])
        return found

    def predicate(self, fact: Fact, predicate: Any, places: list[Any]) -> None:
        if is_kind(predicate, Overlaps):  # (the state's tensors lie apart where the file is loaded)
            self.memory(fact, predicate, places)
        elif not all(places):
            self.refuse(fact, "it is about an argument and the world of the capture")
        elif (text := getattr(predicate, "relation", None)) is not None:
            self.add(fact, "sizes", places, relation=write_relation(ast.parse(text, mode="eval").body))
        elif hasattr(predicate, "evaluate") and hasattr(predicate, "expected"):
            formula = write_number(predicate.evaluate, predicate.sources)
            self.add(fact, "number", places, formula=formula, value=encode(predicate.expected))
        elif fact.record.check.startswith("has no attribute"):
            return  # of a tensor: the loading side's tensors are torch's own
        else:
            self.refuse(fact, "no file can hold this check")

    def memory(self, fact: Fact, overlaps: Overlaps, places: list[Any]) -> None:
        known = [(place, first) for place, first in zip(places, overlaps.lowest, strict=False) if place]
        firsts = [first for _, first in known]
        if len(known) > 1:
            self.add(fact, "memory", [place for place, _ in known], firsts=list(map(firsts.index, firsts)))

    # ------------------------------------------------------------------------------------------------------------------

    def add(self, fact: Fact, kind: str, of: Any, text: str | None = None, **operands: Any) -> None:
        text = text or f"{fact.record.source} {fact.record.check}"
        guard = {"check": kind, "of": of, "text": text[:400], **operands}
        if guard not in self.written:
            self.written.append(guard)

    def refuse(self, fact: Fact, why: str) -> Any:
        raise ExportError(
            f"{fact.record.file}:{fact.record.line}: the step relies on {fact.record.source} {fact.record.check}, and "
            f"a file cannot hold that ({why}). Call the step until it is captured no more, or keep it out of the step"
        )


def is_plain(value: Any) -> bool:
    """Constants that are compared by value. Not what a graph computes, not ABSENT."""
    if value is ABSENT or isinstance(value, Output):
        return False
    return value is None or type(value) in (bool, int, float, str) or (
        type(value) is tuple and all(is_plain(v) for v in value)
    )  # fmt: skip

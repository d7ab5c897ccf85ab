"""Reads and writes that the heap's log leaves out, one kind at a time: which cells of the matrix notice?

``make state ARGS=--mutate`` looks for each kind through all cells in which it is read or written; NOTICED has one
cell for each, which run with the tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moebius.heap.heap import Heap
from moebius.heap.records import DICTS, SETS
from moebius.values.values import TensorProxy

from .matrix import KINDS, QUESTIONS, outcome

OF_TENSORS = ("grad", "data", "requires_grad")
NOTICED = {
    "read entry": ("attribute", "checkpoint"),
    "read item": ("dict entry by object", "checkpoint"),
    "read whole": ("dict length", "checkpoint"),
    "read last": ("list append", "cached, no arguments"),
    "read cell": ("cell", "checkpoint"),
    "read context": ("context variable", "checkpoint"),
    "read value": ("slot", "checkpoint"),
    "read class": ("class attribute", "checkpoint"),
    "read defaults": ("keyword default", "checkpoint"),
    "read tensor": ("parameter attribute", "layers"),
    "read meta": ("requires_grad", "checkpoint"),
    "read gradient": (".grad's value", "cached, no arguments"),
    "read own": ("attribute", "of an object that the step made"),
    "read registry": ("singledispatch", "checkpoint"),
    "read switch": ("attention's switch", "checkpoint"),
    "write dict": ("dict entry", "cached, no arguments"),
    "write list": ("nested dict", "cached, no arguments"),
    "write set": ("set", "cached, no arguments"),
    "write deque": ("deque", "cached, no arguments"),
    "write cell": ("cell", "cached, no arguments"),
    "write ContextVar": ("context variable", "cached, no arguments"),
    "write slot": ("slot", "cached, no arguments"),
    "write iterator": ("iterator", "one state for all layers"),
    "write switch": ("attention's switch", "layers, state held outside"),
    "write new object": ("attribute", "of an object that the step made"),
    "write tensor's grad": (".grad", "cached, no arguments"),
    "write tensor's data": (".data", "cached, no arguments"),
    "write tensor's requires_grad": ("requires_grad", "cached, no arguments"),
}
# Kinds that no cell was found to depend on, and why.
UNSEEN = {
    "read answer": "a registry's read says the same; a cached function's answer is one for all: a module is no key",
    "read function": "its code is a guard; it is told for a backward that the caller runs alone",
    "read fact": "a clock's or a draw's node may be written again; id() is another number in each run",
    "read keys": "what it guards is read as a whole as well",
    "read length": "of a list that differs from call to call alone",
    "read looked": "without it what a cached function looks at is taken for the layer's own reads",
    "read other": "it only refuses: the layers that it keeps from being written again were found to be the same",
    "write tensor's attribute": "the tensor's dict is written as well",
}
# Questions that ask the log; the others do not depend on it.
ASKING = [
    name for name in QUESTIONS
    if any(word in name for word in ("layer", "cached", "checkpoint", "backward", "made", "both", "forward reads"))
]  # fmt: skip


def kind_of_write(owner: Any, key: Any, born: int) -> str:
    """What a write to the log is one of."""
    if isinstance(owner, TensorProxy):
        return f"tensor's {key}" if key in OF_TENSORS else "tensor's attribute"
    if born >= 0:
        return "new object"
    if isinstance(owner, tuple(DICTS)):
        return "dict"
    if isinstance(owner, tuple(SETS)):
        return "set"
    if hasattr(type(owner), "__next__"):
        return "iterator"
    name = type(owner).__name__
    return name if name in ("list", "deque", "cell", "ContextVar") else "switch" if callable(owner) else "slot"


@dataclass
class Left:
    """How often the log was not told."""

    out: int = 0


@contextlib.contextmanager
def left_out(mutant: str) -> Iterator[Left]:
    """The log is not told of one kind. mutant: ``read entry``, ``write dict``."""
    what, _, kind = mutant.partition(" ")
    left, read, write = Left(), Heap.read, Heap.write

    def forgets_read(self: Heap, kind_read: str, owner: Any, key: Any, value: Any) -> None:
        if kind_read == kind:
            left.out += 1
        else:
            read(self, kind_read, owner, key, value)

    def forgets_write(self: Heap, owner: Any, *rest: Any) -> None:
        if kind_of_write(owner, rest[0] if rest else None, rest[1] if len(rest) > 1 else -1) == kind:
            left.out += 1
        else:
            write(self, owner, *rest)

    def forgets_note(self: Heap, of: str) -> None:
        left.out += 1

    name, forgets = ("read", forgets_read) if what == "read" else ("write", forgets_write)
    if mutant == "read other":
        name, forgets = "note", forgets_note
    original = getattr(Heap, name)
    setattr(Heap, name, forgets)
    try:
        yield left
    finally:
        setattr(Heap, name, original)


def is_noticed(mutant: str, kind: str, question: str) -> bool:
    with left_out(mutant):
        return bool(outcome(kind, question).differs)


def those_that_notice(mutant: str, most: int | None = None) -> Iterator[tuple[str, str]]:
    """The cells that differ without it. most: how many are looked for."""
    found = 0
    for kind in KINDS:
        for question in ASKING:
            with left_out(mutant) as left:
                try:
                    differs = bool(outcome(kind, question).differs)
                except Exception:
                    differs = True
            if left.out and differs and (found := found + 1):
                yield kind, question
                if found == most:
                    return

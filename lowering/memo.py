"""What passes find out about nodes, kept while they run: equal layers ask the same again and again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass
class Known:
    """calls: nodes as ``operators.read_call`` read them, each with what it was read from. storages: of graphs
    that no pass changes, and changing: of those that passes change (aliasing.py). values: of operators on tensors with
    equal metadata (values.py). zeros: which nodes are zero whatever they are computed of, each with the call that said
    so (experts/idle.py)."""

    calls: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)
    storages: dict[fx.Graph, Any] = field(default_factory=dict)
    changing: dict[fx.Graph, Any] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)
    zeros: dict[fx.Node, tuple[Any, bool]] = field(default_factory=dict)


class Memo(threading.local):
    """Of this thread; None while no pass runs."""

    known: Known | None = None


MEMO = Memo()


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """For the time that passes work on one graph."""
    outer, MEMO.known = MEMO.known, Known()
    try:
        yield
    finally:
        MEMO.known = outer

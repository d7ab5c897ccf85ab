"""Kinds of state × questions about it: a share of the cells. `make state` runs all."""

from __future__ import annotations

from typing import Any

import pytest

from moebius.heap.heap import Heap

from .matrix import KINDS, QUESTIONS, outcome, share, source_of

COUNT = 150
# The same share for each commit as long as about one cell in 150 differs (matrix.OPEN names those that are known):
# one that changes with the code would fail by chance. `make state` runs all.
SHARE = 2
# By the kind of read in the log: a cell that differs where such reads are not written down.
READS = {
    "entry": ("attribute", "checkpoint"),
    "whole": ("dict length", "checkpoint"),
    "cell": ("cell", "checkpoint"),
    "context": ("context variable", "checkpoint"),
    "value": ("slot", "checkpoint"),
    "class": ("class attribute", "checkpoint"),
    "defaults": ("keyword default", "checkpoint"),
    "tensor": ("parameter attribute", "layers"),
    "meta": ("requires_grad", "checkpoint"),
    "gradient": (".grad's value", "cached, no arguments"),
    "own": ("attribute", "of an object that the step made"),
}


def test_a_share_of_all() -> None:
    """Programs whose answers differ, and those that no graph was made for, though one could be."""
    found, graphs = [], 0
    for kind, question in share(SHARE, COUNT):
        seen = outcome(kind, question)
        graphs += seen.how != "native"
        if seen.differs:
            found.append(f"{kind} × {question} ({seen.how}): {seen.differs}")
    assert not found, "\n".join(found)
    assert graphs > COUNT // 2


@pytest.mark.share(23)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_with_layers_that_are_reused(kind: str) -> None:
    assert outcome(kind, "layers").differs == ""


@pytest.mark.parametrize("kind", READS)
def test_a_read_that_is_not_written_down_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Heap.read

    def read(self: Heap, what: str, owner: Any, key: Any, value: Any) -> None:
        if what != kind:
            original(self, what, owner, key, value)

    monkeypatch.setattr(Heap, "read", read)
    assert outcome(*READS[kind]).differs, source_of(KINDS[READS[kind][0]], QUESTIONS[READS[kind][1]])


def test_writes_that_are_not_written_down_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heap, "write", lambda *_: None)
    assert outcome("slot", "cached, no arguments").differs

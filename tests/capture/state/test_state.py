"""Kinds of state × questions about it: a share of the cells. `make state` runs all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import moebius
from moebius.heap.heap import OWN

from .matrix import KINDS, QUESTIONS, outcome, share, source_of
from .mutation import NOTICED, UNSEEN, is_noticed

COUNT = 150
SHARE = 2  # the same for each commit; `make state` runs all
# Cells that were answered wrongly, one for each mend.
MENDED = (
    ("abc register", "layers changed outside"),
    ("autocast dtype", "read only"),
    ("generator frame", "straight"),
    ("annotations of a class", "outside and inside"),
    ("name of a class", "layers changed outside"),
    ("numpy resize", "layers changed outside"),
    ("tensor transposed", "checkpoint"),
    ("tensor strides", "checkpoint that writes"),
    ("__subclasses__", "read only"),
    ("module's parameter", "looked up"),
    ("attribute", "backward after a break"),
    ("attribute", "backward after a break, of a checkpoint"),
    ("__bool__ of a metaclass", "read only"),
    ("__hash__ of a metaclass", "read only"),
    ("__str__ of a metaclass", "read only"),
    ("__format__ of a metaclass", "read only"),
    ("__int__ of a metaclass", "read only"),
    ("__abs__ of a metaclass", "read only"),
    ("__instancecheck__ of a metaclass", "read only"),
    ("__subclasscheck__ of a metaclass", "read only"),
    ("__bool__ of a module", "read only"),
    ("class of a class", "read only"),
    ("code that is no function's", "straight"),
    ("expression compiled", "read only"),
    ("conjugate", "read only"),
    ("negative", "read only"),
    ("parameter's copy", "cached, no arguments"),
    ("thread's attribute", "cached, no arguments"),
    ("descriptor that only sets", "straight"),
    ("list insert", "saved tensors' hooks that write"),
)


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


@pytest.mark.parametrize("kind, question", MENDED)
def test_what_was_once_answered_wrongly(kind: str, question: str) -> None:
    assert outcome(kind, question).differs == ""


@pytest.mark.share(15)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_with_layers_that_are_reused(kind: str) -> None:
    assert outcome(kind, "layers").differs == ""


@pytest.mark.parametrize("mutant", NOTICED)
def test_a_read_or_write_that_is_not_written_down_is_noticed(mutant: str) -> None:
    kind, question = NOTICED[mutant]
    assert is_noticed(mutant, kind, question), source_of(KINDS[kind], QUESTIONS[question])


def test_each_kind_of_read_is_one_that_is_left_out() -> None:
    assert {f"read {kind}" for kind in kinds_of_read()} == {name for name in NOTICED | UNSEEN if name[:4] == "read"}


def kinds_of_read() -> Iterator[str]:
    """Those that capture tells its log of, from the source."""
    yield "other"  # Heap.note
    for path in Path(moebius.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "heap.read(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "read":
                asked = ast.unparse(node.func.value)
                if asked.endswith("heap") and isinstance(node.args[0], ast.Constant):
                    yield node.args[0].value
                elif asked.endswith("heap") and ast.unparse(node.args[0]) == "OWN":
                    yield OWN

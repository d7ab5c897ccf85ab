"""Objects of modules whose value C code keeps, changed between calls: what an operator says of them is not kept."""

import array
import collections
import types

import numpy as np
import pytest
import torch

from moebius import capture

HELD = {
    "bytearray": lambda: bytearray(b"ab"),
    "array": lambda: array.array("b", b"ab"),
    "memoryview": lambda: memoryview(bytearray(b"ab")),
    "ndarray": lambda: np.array([97, 98], np.int8),
    "deque": lambda: collections.deque(b"ab"),
    "list": lambda: list(b"ab"),
    "namespace": lambda: types.SimpleNamespace(a=97),
}
QUESTIONS = (
    lambda x: x * (2 if np.all(ONE == OTHER) else 3),
    lambda x: x * (2 if np.any(ONE != OTHER) else 3),
    lambda x: x * len(ONE + ONE),
    lambda x: x * (2 if ONE else 3),
    lambda x: x * len(ONE),
    lambda x: x * ONE[0],
    lambda x: x * (98 in ONE),
    lambda x: x * (2 if ONE < OTHER else 3),
)
ONE = OTHER = None


def change(held, value):
    if isinstance(held, types.SimpleNamespace):
        held.a = value
    else:
        held[0] = value


def answers(run, kind):
    global ONE, OTHER
    ONE, OTHER, found = HELD[kind](), HELD[kind](), []
    for value in (97, 98, 97, 96):
        change(ONE, value)
        try:
            found.append(run(torch.ones(1)).item())
        except (TypeError, ValueError, AttributeError) as error:
            found.append(type(error))
    return found


@pytest.mark.share(17)
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("kind", HELD)
def test_as_plain_python(kind, question):
    assert answers(capture(question, backend="eager"), kind) == answers(question, kind)

"""``isinstance`` of a protocol asks for its members and for nothing else that its class has, on each Python."""

from __future__ import annotations

import itertools
import typing

import pytest
import torch

from moebius import capture, explain

FUTURE = {"annotations as text": "from __future__ import annotations\n", "annotations": ""}
METHODS = {
    "a method": "class P(Protocol):\n    def size(self): ...",
    "two": "class P(Protocol):\n    def size(self): ...\n    def width(self) -> int: ...",
    "slots": "class P(Protocol):\n    __slots__ = ()\n    def size(self): ...",
    "of a type": "class P(Protocol[T]):\n    def size(self) -> T: ...",
    "derived": "class Q(Protocol[T]):\n    def size(self): ...\n"
    "@runtime_checkable\nclass P(Q[T], Protocol[T]):\n    def width(self): ...",
    "makes it": "class P(Protocol):\n    def __new__(cls, x): ...\n    def size(self): ...",
}
DATA = {
    "data": "class P(Protocol):\n    size: int",
    "of an unknown type": 'class P(Protocol):\n    size: "Unknown"',
    "both": "class P(Protocol):\n    width: int\n    def size(self): ...",
}
GIVEN = {"none": (), "one": ("size",), "two": ("size", "width")}


@pytest.mark.parametrize(("future", "protocol"), [*itertools.product(FUTURE, METHODS | DATA)])
def test_each(future, protocol):
    names = dict(vars(typing), T=typing.TypeVar("T"))
    text = f"{FUTURE[future]}@runtime_checkable\n{(METHODS | DATA)[protocol]}"
    exec(compile(text, "<protocol>", "exec", dont_inherit=True), names)

    def step(x, *values):
        for i, value in enumerate(values):
            x = x + 2**i if isinstance(value, names["P"]) else x
        return x

    values = [type(name, (torch.nn.Module,), dict.fromkeys(given, len))() for name, given in GIVEN.items()]
    x = torch.zeros(2)
    asked = {broken.reason for broken in explain(step)(x, *values).breaks}
    assert asked == ({"isinstance() of a protocol"} if protocol in DATA else set())
    captured = capture(step, backend="eager")
    assert torch.equal(captured(x, *values), step(x, *values))
    values[0].size = values[0].width = len
    assert torch.equal(captured(x, *values), step(x, *values))

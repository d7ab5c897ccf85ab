"""Objects that are no tensors and no plain numbers, as operands of tensors and as arguments of operators."""

from __future__ import annotations

import enum
import itertools

import pytest
import torch
from torch.utils.dlpack import to_dlpack

from moebius import capture
from moebius.tensors import tensors


class Modality(enum.IntEnum):
    IMAGE = 1
    TEXT = 2


class Flags(enum.IntFlag):
    SEEN = 1


class Own(int):
    def __eq__(self, other):
        return "its own answer"

    __hash__ = int.__hash__

    def __radd__(self, other):
        return "its own sum"


class Length(float):
    pass


class Named(enum.Enum):
    ONE = 1


class Name(enum.StrEnum):
    ONE = "1"


OPERANDS = (Modality.IMAGE, Flags.SEEN, Length(1), Own(1), 1 + 0j, Named.ONE, Name.ONE, [1], None, "1", torch.float32)
OPERATORS = ("==", "!=", "<", ">=", "+", "*")


def outcome(run, *args):
    try:
        result = run(*args)
    except Exception as error:
        return type(error)
    return type(result), str(result)


@pytest.mark.parametrize("operand", OPERANDS, ids=repr)
def test_as_operands_of_tensors(operand):
    for sign, (a, b) in itertools.product(OPERATORS, (("x", "y"), ("y", "x"))):
        names: dict = {}
        exec(f"def step(x, y):\n    return {a} {sign} {b}", names)
        for x in (torch.tensor([1.0, 2.0]), torch.tensor([1, 2])):
            expected = outcome(names["step"], x, operand)
            assert outcome(capture(names["step"], backend="eager"), x, operand) == expected, (a, sign, b, x.dtype)


def test_a_member_of_an_enum_is_compared_in_the_graph():
    def step(ids):
        return torch.where(ids == Modality.TEXT, ids * 10, ids) * (Modality.IMAGE != ids)

    ids = torch.tensor([1, 2, 3])
    assert capture(step, fullgraph=True)(ids).tolist() == step(ids).tolist() == [0, 20, 3]


class Counting:
    """Each question is another answer."""

    def __init__(self):
        self.asked = 0

    def __index__(self):
        self.asked += 1
        return self.asked

    def __float__(self):
        return float(self.__index__())


class Sequence(Counting):
    __index__ = None

    def __len__(self):
        return 2

    def __getitem__(self, i):
        self.asked += 1
        if i >= 2:
            raise IndexError
        return float(self.asked)


ASKED = {
    "sequence": (Sequence, lambda x, o: torch.tensor(o) + x),
    "sequence as an array": (Sequence, lambda x, o: torch.asarray(o) + x),
    "sequence in a list": (Sequence, lambda x, o: torch.tensor([o, o])),
    "index": (Counting, lambda x, o: torch.arange(8)[o] + x),
    "slice": (Counting, lambda x, o: torch.arange(8)[:o]),
    "size": (Counting, lambda x, o: torch.arange(8).narrow(0, 0, o)),
    "capsule": (lambda: to_dlpack(torch.ones(2)), lambda x, o: torch.asarray(o) + x),
}


def asked(what, captured):
    make, step = ASKED[what]
    run = capture(step, backend="eager") if captured else step
    found = []
    for _ in range(3):
        thing = make()
        found += [outcome(run, torch.zeros(2), thing), getattr(thing, "asked", None)]
    return found


@pytest.mark.parametrize("what", ASKED)
def test_what_operators_ask_an_object_for_they_ask_once(what):
    assert asked(what, True) == asked(what, False)


def test_without_that_fakes_ask_as_well(monkeypatch):
    monkeypatch.setattr(tensors, "refuse_answering", lambda value: None)
    assert [what for what in ASKED if asked(what, True) == asked(what, False)] == []

"""``types.SimpleNamespace``: made in the step, derived from, compared, changed under guards; as plain Python."""

from __future__ import annotations

import types
from types import SimpleNamespace

import pytest
import torch

from moebius import capture, stats

ONE, OTHER = SimpleNamespace(), SimpleNamespace()


class Derived(SimpleNamespace):
    def tripled(self):
        return self.a * 3


class WithInit(SimpleNamespace):
    def __init__(self, a, **others):
        super().__init__(a=a, **others)
        self.more = a + 1


class WithSetattr(SimpleNamespace):
    def __setattr__(self, name, value):
        super().__setattr__(name, value if name != "b" else value * 2)


class WithSlot(SimpleNamespace):
    __slots__ = ("slot",)


class AlwaysEqual(SimpleNamespace):
    __hash__ = None

    def __eq__(self, other):
        return True


KINDS = (SimpleNamespace, Derived, WithInit, WithSetattr, WithSlot, AlwaysEqual)


def is_used(x, kind):
    made = kind(a=x * 2, n=x.shape[0])
    made.b = made.a + made.n
    return made.b + len(made.__dict__), sorted(vars(made)), isinstance(made, SimpleNamespace)


def is_returned(x, kind):
    made = kind(**{"a": x * 2, "b": [x]})
    del made.b
    made.__dict__["c"] = made.a + 1
    return made


def holds_itself(x, kind):
    made = kind(a=x + 1)
    made.me = made
    return made.me.me.a * 2


def lives_over_a_break(x, kind):
    made = kind(a=x * 2)
    float(x.sum())
    made.b = made.a + 1
    return made


def is_filled_again(x, kind):
    made = kind(a=x, b=1)
    made.__init__(a=x * 3)
    return made


def is_compared(x, kind):
    small, large = kind(a=1, b=2), kind(a=1, b=3)
    answers = [small == large, small != large, small == SimpleNamespace(a=1, b=2), small == 3, ONE == OTHER]
    return x * sum(2**i * answer for i, answer in enumerate(answers))


def is_ordered(x, kind):
    return kind(a=1) < kind(a=2)


def has_no_such(x, kind):
    return hasattr(kind(a=x), "b"), kind(a=x).c


def is_hashed(x, kind):
    return hash(kind(a=1))


def counts(x, kind):
    ONE.count += 1
    ONE.last = kind(a=x.sum())
    return x * ONE.count


def takes_a_mapping(x, kind):
    return SimpleNamespace({"a": x, "b": 1}, b=2)


def takes_no_number_as_a_name(x, kind):
    return kind(a=x, **{1: 2})


def shown(value):
    if isinstance(value, SimpleNamespace):
        return type(value).__name__, [(n, shown(v)) for n, v in vars(value).items()], getattr(value, "slot", None)
    if isinstance(value, tuple | list):
        return [*map(shown, value)]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def outcomes(run, kind):
    """What calls give, of which one finds another object in a global namespace."""
    found = []
    for namespace in (ONE, OTHER):
        namespace.__dict__.clear()
        namespace.__dict__.update(count=0, b=1)
    OTHER.count = 2
    for call in range(6):
        ONE.b = 2 if call == 4 else 1
        try:
            given = shown(run(torch.ones(3 + call % 2, 2), kind))
        except (TypeError, AttributeError) as error:
            given = type(error).__name__, str(error)
        found.append((given, shown(ONE)))
    return found


PROGRAMS = (is_used, is_returned, holds_itself, lives_over_a_break, is_filled_again, is_compared, is_ordered,
            has_no_such, is_hashed, counts, takes_a_mapping, takes_no_number_as_a_name)  # fmt: skip


WHOLE = (is_used, is_returned, holds_itself, is_filled_again, is_compared, counts)


@pytest.mark.share(22)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_plain_python(program: types.FunctionType, kind: type):
    run = capture(program, backend="eager")
    assert outcomes(run, kind) == outcomes(program, kind)
    if kind is not WithSetattr and program in WHOLE:
        assert stats(run).breaks == 0


def test_two_that_are_equal_by_now():
    run = capture(lambda x: x * (2 if ONE == OTHER else 3), backend="eager")
    found = []
    for namespace in (ONE, OTHER):
        namespace.__dict__.clear()
    for value in (0, 1, 1, 0):
        ONE.inner, OTHER.inner = SimpleNamespace(a=value), SimpleNamespace(a=1)
        found.append(run(torch.ones(1)).item())
    assert found == [3, 2, 2, 3]

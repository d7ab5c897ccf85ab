"""An error that capture raises where plain Python raises none: never the step's own, and no handler's of the step's."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import re
import types
from typing import TypedDict

import pytest
import torch

from moebius import capture, explain, stats
from moebius.api import captured_of, report_of
from moebius.python.attributes import Attributes


class Called:
    def __call__(self, *args):
        return len(args)


class Bound:
    def __get__(self, instance, owner=None):
        return lambda *args: (instance is None, owner, *args)


def plain(*args):
    return len(args)


INNER = {
    "a function": plain, "C's": max, "a partial": functools.partial(plain, 1), "a class": types.SimpleNamespace,
    "an object": Called(), "a descriptor": Bound(), "a method": Called().__call__, "a generic": types.GenericAlias,
    "a cache": functools.lru_cache(plain), "C's method": [3, 1].count, "a property": property(lambda cls: lambda: 2),
    "a number": 3, "a tensor": torch.ones(2),
}  # fmt: skip
WRAPPERS = {"class": classmethod, "static": staticmethod, "neither": lambda inner: inner}
ACCESS = {
    "of the class": lambda cls: cls.part,
    "of an instance": lambda cls: cls().part,
    "of a subclass": lambda cls: type("Sub", (cls,), {})().part,
    "called": lambda cls: cls.part(),
    "called by an instance": lambda cls: cls().part(),
    "by super": lambda cls: cls().through_super(),
}


def outcome(function, *args):
    try:
        found = function(*args)
    except Exception as error:
        return type(error)
    return type(found) if type(found).__repr__ is object.__repr__ else re.sub(r" at 0x\w+", "", repr(found))


@pytest.mark.share(35)
@pytest.mark.parametrize("inner, wrapper, access", [*itertools.product(INNER, WRAPPERS, ACCESS)])
def test_whatever_a_class_holds_is_bound_as_python_binds_it(inner, wrapper, access):
    base = type("Base", (), {"part": WRAPPERS[wrapper](INNER[inner])})

    class Own(base):
        def through_super(self):
            return super().part

    def step(x):
        try:
            found = ACCESS[access](Own)
        except Exception as error:
            return type(error), x + 1
        return (type(found) if type(found) in (types.MethodType, Called, Bound) else found), x + 1

    report = explain(step)(torch.ones(2))
    assert outcome(lambda: report.result[0]) == outcome(lambda: step(torch.ones(2))[0])
    assert not [b for b in report.breaks if b.code in ("MB020", "MB033")]


class Told(TypedDict):
    a: torch.Tensor


class Fixed(type):
    def __instancecheck__(cls, _):
        raise TypeError("never")

    __subclasscheck__ = __instancecheck__


CLASSES = {
    "a TypedDict": Told,
    "a metaclass whose call is a class": type("Meta", (type,), {"__call__": dict})("Made", (), {}),
    "a metaclass whose call is C's": type("Meta", (type,), {"__call__": staticmethod(dict)})("Made", (), {}),
    "a metaclass that refuses checks": Fixed("Made", (), {"__init__": lambda self, a: setattr(self, "a", a)}),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_classes_are_called_as_their_metaclass_says(kind):
    cls = CLASSES[kind]

    def step(x):
        made = cls(a=x + 1)
        return (made["a"] if type(made) is dict else made.a) * 2

    report = explain(step)(torch.ones(2))
    assert report.result.tolist() == [4.0, 4.0] and not report.breaks


BROKEN = """
def generic(self, obj, name):
    if name == "probe":
        $
    return original(self, obj, name)
"""


def break_reads(monkeypatch, how):
    """``object.probe`` fails in capture alone."""
    namespace = {"__name__": "moebius.python.attributes", "original": Attributes.generic}
    exec(BROKEN.replace("$", how), namespace)
    monkeypatch.setattr(Attributes, "generic", namespace["generic"])


class Probed:
    probe = 5


def handled(x, probed):
    try:
        return x * probed.probe
    except AttributeError:
        return x


def in_the_middle(x, probed):
    y = x + 0
    y = y * probed.probe
    return y + 0


@pytest.mark.faults
def test_a_handler_of_the_steps_never_meets_it(monkeypatch):
    break_reads(monkeypatch, "return obj.another")
    report = explain(handled)(torch.ones(2), Probed())
    assert report.result.tolist() == [5.0, 5.0] and {b.code for b in report.breaks} == {"MB033"}


@pytest.mark.faults
@pytest.mark.parametrize("whole", (False, True))
def test_it_is_not_told_as_the_steps(monkeypatch, whole):
    break_reads(monkeypatch, "raise TypeError('by capture')")
    step = (lambda x, probed: (locals(), x * probed.probe)[1]) if whole else in_the_middle
    report = explain(step)(torch.ones(2), Probed())
    assert report.result.tolist() == [5.0, 5.0] and {b.code for b in report.breaks} == {"MB033"}


def test_what_the_step_does_raise_is_the_steps():
    def step(x):
        y = x + 1
        raise ValueError(y.shape)

    captured = capture(step)
    with pytest.raises(ValueError, match="2"):
        captured(torch.ones(2))
    assert {b.code for b in report_of(captured_of(captured)).breaks} == {"MB020"}


@pytest.mark.filterwarnings("error")
def test_a_cache_that_capture_fills_itself_is_no_change():
    """A cached function is interpreted after a write, to see what it depends on, and then asked natively."""
    re.purge()

    @functools.lru_cache
    def asked(name):
        return importlib.metadata.version(name), re.match("a(b|c)+d", "abcd") is not None

    def step(x):
        x.mul_(2)
        return x + 1, asked("torch")

    captured = capture(step, backend="eager")
    found = [captured(torch.ones(2)) for _ in range(3)]
    assert found[2][1] == (importlib.metadata.version("torch"), True) and found[2][0].tolist() == [3.0, 3.0]
    assert stats(captured).hits == 2 and stats(captured).graphs == 1


# ----------------------------------------------------------------------------------------------------------------------
# What a report says where Python raises nothing
# ----------------------------------------------------------------------------------------------------------------------


def check(good):
    if not good:
        raise ValueError("wrong")


def refused_by_a_fake(x):
    return torch.nn.functional.logsigmoid(x.transpose(1, 2)).view(-1)


def by_numbers_that_vary(x, n):
    return torch.full((), n >= float("nan"))


WAYS = {  # data that lead to the error in the call that is captured, and not in the next
    "itself": "if (x * 2).exp().sum().item() > 100: raise ValueError('wrong')",
    "in a call": "check((x * 2).exp().sum() < 100)",
    "in each": "for e in x.nonzero():\n        check(False)",
    "in a side": "if x[0] > 50:\n        x = x + missing",
}


@pytest.mark.parametrize("whole", (False, True))
@pytest.mark.parametrize("way", WAYS)
def test_data_that_go_another_way_are_no_fault(way, whole):
    before = "locals()" if whole else "x = x + 0"
    names = {"check": check}
    exec(f"def step(x):\n    {before}\n    {WAYS[way]}\n    return x * 2", names)
    captured = capture(names["step"])
    for value in (90.0, 0.0, 90.0, 0.0, 0.0):
        x = torch.full((2,), value)
        assert outcome(captured, x) == outcome(names["step"], x)
        assert not [b.detail for b in report_of(captured_of(captured)).breaks if b.code == "MB033"]


def test_an_operator_that_its_fake_refuses_is_said_so():
    report = explain(refused_by_a_fake)(torch.ones(3, 5, 4))
    assert [(b.reason, b.code) for b in report.breaks] == [("operator whose fake raises", "MB023")]
    captured = capture(by_numbers_that_vary)
    for n in (3, 4, 5):
        assert captured(torch.ones(2), n).item() is False
    assert {b.code for b in report_of(captured_of(captured)).breaks} <= {"MB023"}


CHANGES = {
    "set": lambda o: setattr(o, "another", 1), "set its own": lambda o: setattr(o, "real", 1),
    "delete": lambda o: delattr(o, "another"), "delete its own": lambda o: delattr(o, "real"),
}  # fmt: skip


class Bare:
    """Without a place for attributes, and with one that only its class has."""

    __slots__ = ()

    def real(self):
        pass


CONSTANTS = (
    3, 2.5, True, "text", b"bytes", None, ..., 1j, torch.float32, len, (1, 2), range(3), torch.Size([2]), Bare(),
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_of_what_has_none(change):
    for constant in CONSTANTS:

        def step(x, o):
            try:
                CHANGES[change](o)
            except (AttributeError, TypeError) as error:
                x = x + len(str(error)) + len(str(getattr(error, "name", None)))
            return x

        captured = capture(step)
        for i in range(4):
            o = constant + i if type(constant) in (int, float) else constant
            assert outcome(captured, torch.ones(2), o) == outcome(step, torch.ones(2), o)


class Counted:
    def __init__(self):
        self.count = 0

    def __len__(self):
        return self.count


NUMBERS = {
    "length": lambda x, o: x * len(o),
    "switch": lambda x, o: (torch.set_grad_enabled(o.count % 2 == 1), x * 2, torch.set_grad_enabled(True))[1],
    "block": lambda x, o: under(torch.set_grad_enabled(o.count % 2 == 1), x),
}


def under(switch, x):
    with switch:
        return x * 2


@pytest.mark.parametrize("use", NUMBERS)
def test_a_count_as_a_length_and_as_a_switch(use):
    def step(x, o):
        o.count += 1
        return NUMBERS[use](x, o)

    captured, ours, theirs = capture(step), Counted(), Counted()
    x = torch.ones(2, requires_grad=True)
    for _ in range(6):
        mine, plain = captured(x, ours), step(x, theirs)
        assert (mine.tolist(), mine.requires_grad) == (plain.tolist(), plain.requires_grad)
    assert stats(captured).entries < 5 and not report_of(captured_of(captured)).breaks

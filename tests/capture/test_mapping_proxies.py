"""Mapping proxies that were there before the step: what they show is read as the dict itself is."""

from __future__ import annotations

import collections
import inspect
import types

import pytest
import torch

from moebius import capture, stats
from moebius.heap.objects import Objects

READS = {
    "item": lambda p: p["a"],
    "get": lambda p: p.get("b", 7),
    "in": lambda p: "b" in p,
    "length": lambda p: len(p),
    "keys": lambda p: list(p),
    "values": lambda p: sum(p.values()),
    "items": lambda p: [k + str(v) for k, v in p.items()],
    "copy": lambda p: dict(p),
    "unpacked": lambda p: {**p, "z": 0},
    "or": lambda p: p | {"z": 0},
    "or from the right": lambda p: {"z": 0} | p,
    "or of two": lambda p: p | p,
    "or of a new one": lambda p: types.MappingProxyType({"z": 0}) | p,
    "equal": lambda p: p == {"a": 1, "c": 3},
    "unequal from the right": lambda p: {"a": 1, "c": 3} != p,
    "equal to a new one": lambda p: p == types.MappingProxyType({"a": 1, "c": 3}),
}
CHANGES = {
    "none": lambda d: None,
    "a value": lambda d: d.update(a=5),
    "a key": lambda d: d.update(b=6),
    "fewer": lambda d: d.pop("a") and d.update(a=2, c=1),
}
KINDS = (dict, collections.OrderedDict)


@pytest.mark.share(29)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_as_plain(read, change, kind):
    shown = kind(a=1, c=3)
    proxy, holder = types.MappingProxyType(shown), types.SimpleNamespace(shown=types.MappingProxyType(shown))

    def step(x, argument):
        return x * 2, read(proxy), read(argument), read(holder.shown)

    captured = capture(step, backend="eager")
    for call in range(4):
        x = torch.ones(3)
        assert captured(x, types.MappingProxyType(shown))[1:] == step(x, types.MappingProxyType(shown))[1:]
        if call == 1:
            change(shown)
    assert stats(captured).breaks == 0 and stats(captured).hits >= 2 - (change is not CHANGES["none"])


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_another_mapping_of_an_argument(read):
    def step(x, argument):
        return x * 2, read(argument)

    captured = capture(step, backend="eager")
    for values in ({"a": 1}, {"a": 1}, {"a": 2}, {"b": 3, "a": 1}):
        assert captured(torch.ones(3), types.MappingProxyType(values))[1] == read(values)


def test_written_by_the_step():
    shown = {"a": 1, "c": 3}
    proxy = types.MappingProxyType(shown)

    def step(x):
        before = proxy["a"]
        shown["a"] = before + 1
        shown["d"] = 4
        return x * proxy["a"], list(proxy), proxy["a"]

    captured = capture(step, backend="eager")
    for call in range(3):
        result, keys, value = captured(torch.ones(3))
        assert (result.tolist(), keys, value) == ([call + 2.0] * 3, ["a", "c", "d"], call + 2)
        assert shown == {"a": call + 2, "c": 3, "d": 4}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_read_when_the_step_has_written(read):
    def step(x, shown, proxy):
        shown["a"] += 1
        shown["d"] = len(shown)
        return x * 2, read(proxy)

    captured, (ours, plain) = capture(step, backend="eager"), ({"a": 1, "c": 3}, {"a": 1, "c": 3})
    for _ in range(4):
        got = captured(torch.ones(3), ours, types.MappingProxyType(ours))[1]
        assert got == step(torch.ones(3), plain, types.MappingProxyType(plain))[1] and ours == plain


class Attributes:
    scale = 2


def test_the_attributes_of_a_class():
    proxy = Attributes.__dict__

    def step(x):
        Attributes.scale += 1
        return x * proxy["scale"], proxy["scale"]

    captured = capture(step, backend="eager")
    for call in range(3):
        assert captured(torch.ones(3))[1] == Attributes.scale == call + 3


def test_a_signature_from_before():
    """As libraries bind the arguments of what they wrap."""

    def wrapped(x, scale, *rest, shift=1):
        return x * scale + shift

    signature = inspect.signature(wrapped)

    def step(x, scale):
        bound = signature.bind(x, scale, shift=3)
        bound.apply_defaults()
        return wrapped(*bound.args, **bound.kwargs)

    captured = capture(step, backend="eager")
    for scale in (2, 2, 3):
        assert torch.equal(captured(torch.ones(3), scale), step(torch.ones(3), scale))
    assert stats(captured).breaks == 0


def test_switched_off(monkeypatch):
    monkeypatch.setattr(Objects, "seen_through", lambda self, obj: obj)
    proxy = types.MappingProxyType({"a": 1})

    def step(x):
        return x * proxy["a"]

    captured = capture(step, backend="eager")
    captured(torch.ones(3))
    assert stats(captured).breaks


@pytest.mark.parametrize("read", [lambda p: (p | {})["scale"], lambda p: p == {"scale": 3}], ids=["or", "equal"])
def test_operators_of_a_classs_attributes(read):
    class Owner:
        scale = 2

    def step(x):
        Owner.scale += 1
        return x * 2, read(Owner.__dict__)

    captured, found = capture(step, backend="eager"), []
    for each in (captured, step):
        Owner.scale = 2
        found.append([each(torch.ones(3))[1] for _ in range(4)])
    assert found[0] == found[1]

"""Texts that another call brings: one more graph where the step hands them on, one for each where it reads them."""

from __future__ import annotations

import collections
import enum
import functools
import json
import operator
import os
import re
import types
from typing import Any, NamedTuple

import pytest
import torch
from answers import shown

from moebius import capture, stats


def printed(x, s, log):
    print(s, x.sum())
    return x * 2


def kept(x, s, log):
    log.append(s)
    log.last = (s, s)
    return x * 2, {"name": s, "pair": [s, s]}


def formatted(x, s, log):
    return x * 2, f"{s:>6}: {x.sum().item()}", s + "!", ", ".join([s, "b"]), "%s" % s, "{}".format(s)  # noqa: UP031,UP032


def in_an_object(x, s, log):
    print(log.title)
    log.last = log.title
    return x + 1


def left_alone(x, s, log):
    return x + 1




def make_log():
    log: Any = types.SimpleNamespace(lines=[], title="", last=None)
    log.append = log.lines.append
    return log


@pytest.mark.parametrize("step", [printed, kept, formatted, in_an_object, left_alone])
def test_a_text_that_is_handed_on_is_no_recompile_after_it_was_seen_to_change(step):
    captured, ours, theirs = capture(step, backend="eager"), make_log(), make_log()
    for iteration in range(8):
        x, s = torch.full((3,), float(iteration)), f"batch {iteration}"
        ours.title = theirs.title = s
        assert shown(captured, x, s, ours) == shown(step, x, s, theirs)
        assert (ours.lines, ours.last) == (theirs.lines, theirs.last)
    graphs = 3 if step is in_an_object else 2  # there two texts vary
    assert stats(captured).breaks == 0 and stats(captured).graphs <= graphs, stats(captured).recompiles


class Named:
    s1 = 2


class Color(enum.Enum):
    s1 = 1
    s2 = "s2"


class Pair(NamedTuple):
    first: str
    second: int


@functools.lru_cache
def cached(s):
    return len(s) + (s == "s1")


def plain_function(s1=1, s2=2, **others):
    return s1 * 2 + s2 + len(others)


def raised(s):
    try:
        raise KeyError(s)
    except KeyError as error:
        return error.args[0] == "s1"


def in_local_set(s):
    seen = set()
    seen.add(s)
    seen.add("s1")
    return len(seen)


def in_local_dict(s):
    table = dict.fromkeys(["s1", s], 3)
    table["s2"] = 4
    table.setdefault(s, 7)
    return sum(table.values()) * 10 + len(table)


def set_on(s):
    box = Named()
    setattr(box, s or "empty", 3)
    return box.s1 + hasattr(box, s)


MODULES = torch.nn.ModuleDict({"s1": torch.nn.ReLU(), "s2": torch.nn.Tanh()})
LOOKS = {
    "compare": lambda x, s: x * (2 if s == "s3" else 3),
    "compare itself": lambda x, s: x * (s == s) * (s != s + "1") * (s < "s2"),  # noqa: PLR0124
    "is": lambda x, s: x * (s is None),
    "method": lambda x, s: x * (2 if s.startswith("s1") else 3),
    "truth": lambda x, s: x * (2 if s else 3),
    "length": lambda x, s: x * len(s),
    "key": lambda x, s: x * {"s1": 2}.get(s, 5),
    "item": lambda x, s: x * ({"s1": 2} | dict.fromkeys(("s0", "", "s2", "s3"), 3))[s],
    "a key that is set": lambda x, s: {s: x},
    "contains": lambda x, s: x * (2 if "1" in s else 3),
    "is in": lambda x, s: x * (2 if s in ("s1", "s2") else 3),
    "is in a set": lambda x, s: x * (2 if s in {"s1", "s2"} else 3),
    "is in a new set": lambda x, s: x * (2 if s in set(["s1", "s2"]) else 3),
    "is in a list": lambda x, s: x * (2 if s in ["s1", x.shape] else 3),
    "is in a dict": lambda x, s: x * (2 if s in {"s1": x} else 3),
    "counted": lambda x, s: x * ["s1", "s2"].count(s),
    "a set of it": lambda x, s: x * len({s, "s1"}),
    "a frozenset of it": lambda x, s: x * len(frozenset([s, "s1"])),
    "sets": lambda x, s: x * in_local_set(s),
    "dicts": lambda x, s: x * in_local_dict(s),
    "letters": lambda x, s: [x for letter in s],
    "index": lambda x, s: x * (2 if s[-1:] == "1" else 3),
    "attribute": lambda x, s: getattr(Named, s, 5) * x,
    "has attribute": lambda x, s: hasattr(Named, s) * x,
    "set attribute": lambda x, s: set_on(s) * x,
    "attrgetter": lambda x, s: (operator.attrgetter(s or "s1")(Named) if s in ("s1", "") else 4) * x,
    "format": lambda x, s: f"{s:>{len(s) + 3}}",
    "hash": lambda x, s: x * (hash(s) == hash("s1")),
    "sorted": lambda x, s: x * sorted([s, "s2"]).index(s),
    "largest": lambda x, s: (x, max(s, "s1")),
    "replace": lambda x, s: (x, s.replace("s", "t")),
    "repeat": lambda x, s: (x, s * 2),
    "type": lambda x, s: x * isinstance(s, str) * (type(s) is str) * callable(s),
    "keyword": lambda x, s: (lambda **names: names)(**{s: x}),
    "keyword of a function": lambda x, s: x * plain_function(**{s: 9}),
    "native": lambda x, s: (x, json.dumps([s])),
    "regular expression": lambda x, s: x * bool(re.match("s[12]", s)),
    "path": lambda x, s: (x, os.path.join("a", s)),
    "int": lambda x, s: x * int(s[1:] or 0),
    "ord": lambda x, s: x * ord(s[-1:] or "a"),
    "encode": lambda x, s: (x, s.encode(), bytes(s, "utf-8")),
    "match": lambda x, s: matched(s) * x,
    "cache": lambda x, s: cached(s) * x,
    "exception": lambda x, s: raised(s) * x,
    "enum": lambda x, s: x * (Color[s].name == "s1" if s in Color.__members__ else 3),
    "enum by value": lambda x, s: x * (2 if s == Color.s2.value else 3),
    "named tuple": lambda x, s: (x, Pair(s, 1), Pair(s, 1)._replace(second=2).first == "s1"),
    "module": lambda x, s: MODULES[s](x) if s in MODULES else x,
    "submodule": lambda x, s: MODULES.get_submodule(s)(x) if s in ("s1", "s2") else x,
    "reduction": lambda x, s: torch.nn.functional.mse_loss(x, x * 2, reduction="mean" if s == "s1" else "sum"),
    "einsum": lambda x, s: torch.einsum({"s1": "i,i->"}.get(s, "i,i->i"), x, x),
    "einsum of it": lambda x, s: torch.einsum(f"{s[:1] or 'i'},{s[:1] or 'i'}->", x, x),
    "partial": lambda x, s: x * functools.partial(plain_function, **{s: 4})(),
    "map": lambda x, s: x * sum(map({"s1": 2, "": 1}.get, [s, "s1"], [3, 4])),
    "filter": lambda x, s: x * len(list(filter(None, [s, "a"]))),
    "zip": lambda x, s: (x, dict(zip([s], [1], strict=True))),
    "split": lambda x, s: (x, *s.split("s")),
    "unpack": lambda x, s: (x, *s),
    "counter": lambda x, s: x * collections.Counter([s, "s1"])["s1"],
    "sort by it": lambda x, s: (x, sorted([3, 1, 2], key=lambda n: f"{s}{n % 3}")),
}


def matched(s):
    match s:
        case "s1":
            return 1
        case "s2":
            return 2
        case _:
            return 3


@pytest.mark.share(22)
@pytest.mark.parametrize("name", LOOKS)
def test_a_text_that_is_looked_into_is_never_an_old_one(name):
    step = LOOKS[name]
    captured, plain = capture(step, backend="eager"), capture(step, backend="eager")
    for s in ("s0", "s1", "", "s2", "s1", "s0", "s3"):
        for function in (captured, plain):
            assert shown(function, torch.ones(2), s) == shown(step, torch.ones(2), s)
    fixed = capture(lambda x, s=s: step(x, s))  # the same with a constant
    fixed(torch.ones(2))
    assert not stats(captured).breaks or stats(fixed).breaks or name == "attrgetter"  # (as with a constant)


def test_a_subclass_of_str_is_not_taken_for_one():
    class Loud(str):
        def __str__(self):
            return str.__str__(self).upper()

        __format__ = None  # type: ignore[assignment]

    captured = capture(lambda x, s: (x, "%s" % s), backend="eager")  # noqa: UP031
    for s in ("a", "b", Loud("b"), "c", Loud("c")):
        assert captured(torch.ones(1), s)[1] == "%s" % s  # noqa: UP031


def test_a_path_is_joined():
    def step(x, folder):
        return x * 2, os.path.join(folder, "kept", "model.pt"), os.fspath(folder), os.path.basename(folder)

    captured = capture(step, backend="eager", fullgraph=True)
    x = torch.ones(2)
    for folder in ("runs/a", "runs/a", "runs/b"):
        assert captured(x, folder)[1:] == step(x, folder)[1:]
    assert stats(captured).hits == 1

"""Whether an object still lives, asked in a step that takes it out of its place: what the step writes is done later.

Each way to hold an object × to let it go × to ask, before and after.
"""

from __future__ import annotations

import itertools
import types
import weakref
from typing import Any

import pytest
import torch
from seeds import some

from moebius import capture, stats


class Plain:
    def __init__(self, v: Any = 1.0):
        self.v = v


def held(how: str) -> types.SimpleNamespace:
    """An object that one place holds, and all kinds of weak references to it."""
    k = Plain()
    s = types.SimpleNamespace(r=weakref.ref(k), p=weakref.proxy(k), ws=weakref.WeakSet([k]))
    s.wk, s.wv = weakref.WeakKeyDictionary({k: 1}), weakref.WeakValueDictionary({"a": k})
    inner = types.SimpleNamespace(b=k)
    places = {"kept": k, "d": {"k": k}, "l": [k], "s": {k}, "nested": Plain((1, [k])), "deep": Plain(inner)}
    setattr(s, how, places[how])
    return s


LET_GO = {
    "kept": "s.kept = None;del s.kept;s.__dict__.pop('kept');s.__dict__['kept'] = 0;setattr(s, 'kept', 3)",
    "d": "s.d.clear();del s.d['k'];s.d.pop('k');s.d['k'] = 0;s.d = {};s.d.update(k=1)",
    "l": "s.l.clear();s.l.pop();del s.l[0];s.l[0] = 0;s.l = [];s.l[:] = [];s.l.remove(s.l[0])",
    "s": "s.s.clear();s.s.pop();s.s = set()",
    "nested": "s.nested = None;s.nested.v = None;s.nested.v[1].clear()",
    "deep": "s.deep = None;s.deep.v = None;del s.deep.v.b",
}
ASKS = (
    "s.r() is None", "bool(s.r())", "len(s.ws)", "len(s.wk)", "len(s.wv)", "list(s.wv.keys())", "'a' in s.wv",
    "[1 for _ in s.ws]", "[v.v for v in s.wv.values()]", "ask(s.p)", "weakref.getweakrefcount(s.p)",
)  # fmt: skip
CASES = [
    (how, way, ask, early)
    for how, ways in LET_GO.items()
    for way, ask, early in itertools.product(ways.split(";"), ASKS, (False, True))
]


def ask(proxy: Any) -> Any:
    try:
        return proxy.v
    except ReferenceError:
        return "dead"


def made(body: str) -> Any:
    namespace = dict(globals())
    exec(f"def step(x, s):\n    {body}\n", namespace)
    return namespace["step"]


def outcome(function: Any, how: str) -> Any:
    try:
        return function(torch.ones(2), held(how))[1:]
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize(("how", "way", "question", "early"), some(CASES, 40, of="weak references"))
def test_an_object_that_the_step_lets_go(how: str, way: str, question: str, early: bool) -> None:
    step = made(f"b = {question if early else 0}\n    {way}\n    return x * 2, b, {question}")
    captured = capture(step, backend="eager")
    for _ in range(2):
        assert outcome(captured, how) == outcome(step, how)


OF_ITS_OWN = (
    "k = Plain(); r = weakref.ref(k); del k; return x * 2, r() is None",
    "k = Plain(); r = weakref.ref(k); return x * 2, r() is k",
    "l = [Plain()]; r = weakref.ref(l[0]); l.clear(); return x * 2, r() is None",
    "ws = weakref.WeakSet(); ws.add(Plain()); return x * 2, len(ws)",
    "wv = weakref.WeakValueDictionary(); wv['a'] = Plain(); return x * 2, 'a' in wv",
    "log = []; k = Plain(); r = weakref.ref(k, lambda _: log.append(1)); del k; return x * 2, log",
    "log = []; k = Plain(); weakref.finalize(k, log.append, 1); del k; return x * 2, log",
    "t = x + 1; r = weakref.ref(t); u = r(); return x * 2, u is t",
)


@pytest.mark.parametrize("body", OF_ITS_OWN)
def test_an_object_of_the_step_s_own(body: str) -> None:
    step = made(body)
    captured = capture(step, backend="eager")
    for _ in range(3):
        assert outcome(captured, "kept") == outcome(step, "kept")


def test_one_that_stays_is_no_graph_break() -> None:
    def step(x: torch.Tensor, s: Any) -> torch.Tensor:
        s.count += 1
        s.last = [s.count]
        return x * s.r().v

    captured, s = capture(step, backend="eager"), held("kept")
    s.count, s.last = 0, [Plain()]
    for i in range(4):
        s.kept.v = i * 2.0
        assert torch.equal(captured(torch.ones(2), s), torch.full((2,), i * 2.0))
    assert stats(captured).graphs == 2 and not stats(captured).breaks  # (the second has the number as an input)


def test_what_a_reference_leads_to_is_guarded() -> None:
    def step(x: torch.Tensor, s: Any) -> torch.Tensor:
        k = s.r()
        return x if k is None else x * k.v

    captured, s = capture(step, backend="eager"), held("kept")
    assert captured(torch.ones(1), s).item() == 1.0
    s.kept.v = 5.0
    assert captured(torch.ones(1), s).item() == 5.0
    s.kept = None
    assert captured(torch.ones(1), s).item() == 1.0


def test_without_the_question_an_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from moebius.heap.lifetimes import Lifetimes

    monkeypatch.setattr(Lifetimes, "may_be_gone", lambda self, obj: False)
    monkeypatch.setattr("moebius.heap.lifetimes.death_is_seen", lambda obj: False)
    step = made("s.l.clear()\n    return x * 2, s.r() is None")
    assert outcome(capture(step, backend="eager"), "l") != outcome(step, "l")

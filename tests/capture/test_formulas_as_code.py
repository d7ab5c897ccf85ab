"""Formulas of guards and places: as Python code they give what they give part by part; what runs often is code."""

from __future__ import annotations

import operator
import random
from typing import Any

import torch

from moebius import capture, stats
from moebius.guards.sources import Arg
from moebius.values import formulas
from moebius.values.formulas import OFTEN, AtSource, Formula, as_function, computed, in_order

FUNCTIONS = (operator.add, operator.mul, operator.floordiv, operator.mod, operator.lt)


def total(*parts: Any, scale: int = 1) -> int:
    return scale * sum(total(*part) if isinstance(part, (list, tuple)) else part for part in parts)


def drawn(draw: random.Random, parts: list[Any]) -> Formula:
    one, other = draw.choice(parts), draw.choice([*parts, draw.randrange(-3, 4)])
    if draw.random() < 0.5:
        return Formula(draw.choice(FUNCTIONS), (one, other))
    within = [[one, (other,)], (one, [other, 2]), (), []]
    return Formula(total, (draw.choice(within), other), {"scale": draw.choice([one, 3])})


def outcome(function: Any, *values: Any) -> Any:
    try:
        found = function(*values)
    except Exception as error:
        return type(error), str(error)
    return type(found), found


def test_code_gives_what_the_parts_give(seed):
    draw = random.Random(seed)
    sources = tuple(Arg(f"a{place}", place) for place in range(3))
    for _ in range(200):
        parts: list[Any] = [AtSource(source) for source in sources]
        for _ in range(draw.randrange(1, 12)):
            parts.append(drawn(draw, parts))
        order = in_order(parts[-1])
        code = as_function(order, sources)
        for _ in range(4):
            values = [draw.randrange(-2, 5) for _ in sources]
            by_part = outcome(lambda *v, o=order: computed(o, dict(zip(sources, v, strict=True))), *values)
            assert outcome(code, *values) == by_part, seed


class Counter:
    step = 0


def test_what_is_asked_often_is_code(monkeypatch):
    me, asked = Counter(), []
    monkeypatch.setattr(formulas, "computed", lambda *given: asked.append(1) or computed(*given))

    def step(x_D):
        me.step += 1
        table = [1.0, 2.0, 3.0]
        return x_D * 2 if (me.step * 3 + 1) % 5 > 7 else x_D + table[me.step % 2]

    captured, x_D = capture(step), torch.ones(3)
    for _ in range(3 * OFTEN):
        captured(x_D)
    asked.clear()
    hits = stats(captured).hits
    for _ in range(OFTEN):
        captured(x_D)
    assert stats(captured).hits == hits + OFTEN and not asked
    monkeypatch.setattr(formulas, "as_function", None)  # a new formula is asked part by part first
    captured(torch.ones(3, 2))
    captured(torch.ones(3, 2))
    assert asked

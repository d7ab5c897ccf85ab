"""Patterns and matches in a step: which pattern it is, what a match from before says, matches over a graph break."""

from __future__ import annotations

import re
import types
from collections.abc import Callable

import pytest
import torch

import moebius
from moebius import capture, stats

LAYER = re.compile(r"\.(\d)(?P<rest>.*)")
PATTERNS = [re.compile("a"), re.compile("l"), LAYER]
STATE = types.SimpleNamespace(pattern=LAYER, name="layer.1.w", match=None)


@moebius.disable
def native() -> None:
    pass


def groups_of_any_pattern() -> float:
    match = STATE.pattern.search(STATE.name)
    return match.end() + len(match.group()) + match.re.groups if match else -1


def over_a_break() -> float:
    match = LAYER.search(STATE.name)
    native()
    return int(match.group(1)) + match.start() + len(match.string)


def item_over_a_break() -> float:
    match = LAYER.search(STATE.name)
    native()
    return int(match[1]) + len(match["rest"])


def matches_over_a_break() -> float:
    matches = list(LAYER.finditer(STATE.name))
    native()
    return sum(int(match[1]) for match in matches)


def match_from_before() -> float:
    return int(STATE.match.group(1)) + len(STATE.match.groupdict()) + STATE.match.span("rest")[1]


def no_such_group() -> float:
    try:
        return int(LAYER.search(STATE.name)["other"])
    except IndexError as error:
        return len(str(error))


CASES: list[Callable[[], float]] = [
    groups_of_any_pattern,
    over_a_break,
    item_over_a_break,
    matches_over_a_break,
    match_from_before,
    no_such_group,
    lambda: int(LAYER.search(STATE.name)[1]),
    lambda: int(STATE.match[1]) + len(STATE.match.string) + STATE.match.lastindex,
]


@pytest.mark.parametrize("case", CASES)
def test_as_in_plain_python(case, monkeypatch):
    def step(x):
        return x + case()

    captured = capture(step)
    for i in range(12):
        monkeypatch.setattr(STATE, "pattern", PATTERNS[i % 3])
        monkeypatch.setattr(STATE, "name", f"layer.{i // 3}" + ".w" * (i // 6))
        monkeypatch.setattr(STATE, "match", LAYER.search(STATE.name))
        assert torch.equal(captured(torch.zeros(1)), step(torch.zeros(1))), i
    assert stats(captured).entries


def test_a_match_that_is_an_argument():
    def step(match, x):
        return x * int(match.group(1))

    captured = capture(step)
    for i in (1, 1, 2, 1, 2):
        assert captured(LAYER.search(f"layer.{i}.w"), torch.ones(1)).item() == i
    assert stats(captured).entries == 2
    assert stats(captured).hits == 3

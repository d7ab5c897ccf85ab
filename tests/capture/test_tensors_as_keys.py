"""Tensors as keys of dicts and sets: they are hashed by what they are, so another tensor is another key."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.heap import identities

OF_ALL: dict[Any, Any] = {}


def item(x, known):
    known[x].add_(1)
    return known[x] * 2


def got(x, known):
    return x * 2, known.get(x), known.get((x, 1), "none")


def member(x, known):
    return x * 2 if x in known else x * 3


def of_keys(x, known):
    return x * 2 if x in known.keys() else x * 3


def of_a_set(x, known):
    return x * 2 if x in set(known) else x * 3


def met_by_a_made_set(x, known):
    return x * len({x} & set(known))


def met_by_a_made_dict(x, known):
    return x * len({**known, x: None})


def taken_out(x, known):
    return x * 2, known.pop(x, None)


def put_in(x, known):
    known[x] = x * 2
    return len(known)


def in_a_tuple(x, known):
    return x * 2, {(k, 1): v for k, v in known.items()}.get((x, 1), "none")


def hashed(x, known):
    return x * 2, hash(x)


def found_in_a_list(x, known):
    return x * 2, any(k is x for k in known)


def of_a_global(x, known):
    return x * 2, OF_ALL.get(x)


def iterated(x, known):
    return [k is x for k in known], [(k is x, v) for k, v in known.items()], [k is x for k in reversed(known)]


def unpacked(x, known):
    first, *others = known
    return first is x, len(others), max(known, key=lambda k: k.sum()) is x


def moved(x, known):
    if x in known:
        known[x] = known.pop(x)
    return list(known.values())


def made_and_given(x, known):
    return {x: 1, **{k: 2 for k in known}}, {(x, "a"): 1}, [{x}]


def made_default(x, known):
    found = collections.defaultdict(list)
    for k in (x, *known, x):
        found[k].append(k is x)
    return found, len(found)


USES = [item, got, member, of_keys, of_a_set, met_by_a_made_set, met_by_a_made_dict, taken_out, put_in, in_a_tuple]
USES += [hashed, found_in_a_list, of_a_global, iterated, unpacked, moved, made_and_given, made_default]


def keys_and_dict():
    keys = [torch.full((3,), float(i)) for i in range(4)]
    return keys, {k: torch.zeros(3) + 10 * i for i, k in enumerate(keys[:3])}


@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
def test_each_tensor_finds_what_is_its_own(use):
    (keys, theirs), captured = keys_and_dict(), capture(use, backend="eager")
    ours = {k: v.clone() for k, v in theirs.items()}
    OF_ALL.clear()
    OF_ALL.update({k: i for i, k in enumerate(keys[:2])})
    for x in (*keys, *keys):
        assert outcome(captured, x, ours) == outcome(use, x, theirs)
        assert list(map(id, ours)) == list(map(id, theirs))
        assert repr(ours) == repr(theirs)


def outcome(function, x, known):
    try:
        return repr(function(x, known))
    except KeyError as error:
        return repr(type(error))


@pytest.mark.parametrize("breaks", [False, True])
def test_a_loop_over_tensors_updates_the_state_of_each(breaks):
    """An optimizer written by hand, with a graph break in each iteration."""

    def step(params, state):
        for p in params:
            moment = state[p]["moment"]
            moment.mul_(0.9).add_(p)
            if breaks and p.data_ptr() == 0:
                raise RuntimeError("no memory")
            p.sub_(moment, alpha=0.1)

    def made():
        torch.manual_seed(0)
        params = [torch.randn(4) for _ in range(5)]
        return params, {p: {"moment": torch.zeros(4)} for p in params}

    ours, theirs, captured = made(), made(), capture(step, backend="eager")
    for _ in range(3):
        captured(*ours)
        step(*theirs)
    for (a, mine), (b, its) in zip(ours[1].items(), theirs[1].items(), strict=True):
        assert torch.equal(a, b) and torch.equal(mine["moment"], its["moment"])


def test_without_the_guard_it_is_wrong(monkeypatch):
    monkeypatch.setattr(identities.Identities, "pin_at", lambda *args: None)
    (keys, known), captured = keys_and_dict(), capture(item, backend="eager")
    captured(keys[0], known)
    captured(keys[1], known)
    assert known[keys[0]][0] == 2 and known[keys[1]][0] == 10


@pytest.mark.parametrize("kind", [set, frozenset, lambda keys: dict.fromkeys(keys).keys()])
@pytest.mark.parametrize("given", [True, False])
def test_sets_of_tensors(kind, given):
    keys, _ = keys_and_dict()
    known = kind(keys[:2])

    def step(x, known):
        items = list(known)
        return x in known, len(known | {x}), len(known & {x}), [k is x for k in items], [k is items[0] for k in known]

    def of_a_closure(x):
        return step(x, known)

    captured = capture(step if given else of_a_closure, backend="eager")
    for x in (*keys, *keys):
        assert (captured(x, known) if given else captured(x)) == step(x, known)


def test_tensors_in_keys_that_are_tuples():
    keys, _ = keys_and_dict()
    known = {(k, i): i * 10 for i, k in enumerate(keys[:3])}

    def step(x, i, known):
        pairs = [(k is x, j, v) for (k, j), v in known.items()]
        known[x, i] = known.get((x, i), 0) + 1
        return pairs, (x, i) in known

    captured, theirs = capture(step, backend="eager"), dict(known)
    for x in (*keys, *keys):
        for i in (0, 1):
            assert captured(x, i, known) == step(x, i, theirs)
            assert list(known.values()) == list(theirs.values())


def test_a_new_tensor_that_is_no_key_is_one_graph():
    def step(x, known):
        return x * 2 if x in known else x * 3

    _, known = keys_and_dict()
    captured = capture(step, backend="eager")
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(captured(x, known), x * 3)
    assert stats(captured).graphs == 1

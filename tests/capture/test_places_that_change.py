"""What a step counts in lists, and what it keeps in containers that it makes anew: it is captured a few times."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch

from moebius import capture, stats


class Holder:
    pass


@dataclasses.dataclass
class Counts:
    k: int = 0


def count_in_a_list():
    count = [0]

    def step(x):
        count[0] += 1
        return x * count[0]

    return step


def several_in_a_list():
    state = [0, "a", 2.5, None]

    def step(x):
        state[0] += 1
        state[2] *= 1.5
        return x * 2, state[2], state[1]

    return step


def items_that_change_kind():
    state, other = [0], [torch.ones(2), "text", 2.5, (1, 2), [3], 7]

    def step(x):
        other.append(other.pop(0))
        state[0] = other[len(state) * 2]
        return x, type(state[0]).__name__, len(state)

    return step


def replaced(kind):
    def make():
        h = Holder()
        h.c = kind()

        def step(x):
            c = h.c
            if kind in (dict, collections.OrderedDict):
                v = c.get("k", 0)
                h.c = kind(k=v + 1, t=x.sum())
            elif kind in (list, collections.deque):
                v = len(c)
                h.c = kind([*list(c)[-2:], x.sum()])
            elif kind is set:
                v = len(c)
                h.c = {v, 1}
            else:
                v = getattr(c, "k", 0)
                h.c = kind()
                h.c.k = v + 1
            return x + v, h.c is c

        return step

    make.__name__ = f"replaced_{kind.__name__}"
    return make


KINDS = [dict, collections.OrderedDict, list, set, Holder, Counts]
CASES = [count_in_a_list, several_in_a_list, *map(replaced, KINDS)]


def compare(make, calls):
    plain, captured = make(), capture(make())
    found = [stats(captured).entries]
    for n in range(calls):
        x = torch.full((2,), float(n))
        assert repr(captured(x)) == repr(plain(x))
        found.append(stats(captured).entries)
    return captured, found


@pytest.mark.parametrize("make", CASES, ids=lambda f: f.__name__)
def test_a_few_captures_serve_all_calls(make):
    captured, entries = compare(make, 10)
    assert entries[5] == entries[-1] <= 5 and not stats(captured).breaks


def test_what_changes_into_something_else_is_plain_pythons():
    compare(items_that_change_kind, 14)


def test_a_list_that_is_another_at_each_call_and_one_that_two_names_share():
    def make():
        h, shared = Holder(), [1, 2]
        h.c, h.other, h.calls = shared, shared, 0

        def step(x):
            h.calls += 1
            h.c[0] += 1
            total = h.other[0] + h.c[0]
            if h.calls % 3 == 0:
                h.c = [10 * h.calls, 5]
            elif h.calls % 5 == 0:
                h.c = h.other
            return x + total, h.c is h.other, list(h.other)

        return step

    compare(make, 16)


def test_a_gradient_scaler_settles():
    """Its ``update`` makes a new table of the optimizers' states at each step."""

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

        def step(x):
            optimizer.zero_grad()
            loss = model(x.repeat(3, 2)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach(), scaler.get_scale()

        return step

    _, entries = compare(make, 8)
    assert entries[5] == entries[-1]


def averaged(kind):
    """Averaged weights that each step puts in the old ones' place, as EMA classes do."""

    def make():
        torch.manual_seed(0)
        model, h = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4))), Holder()
        h.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        if kind == "in a list":
            h.shadow = list(h.shadow.values())

        def step(x):
            if kind == "in a dict":
                for name, p in model.named_parameters():
                    h.shadow[name] = (0.9 * h.shadow[name] + 0.1 * p.data * x.sum()).clone()
            elif kind == "in a list":
                for i, p in enumerate(model.parameters()):
                    h.shadow[i] = 0.9 * h.shadow[i] + 0.1 * p.detach() * x.sum()
            else:
                h.shadow = {name: 0.9 * h.shadow[name] + 0.1 * p for name, p in model.state_dict().items()}
            return model(x).sum().detach(), h.shadow

        return step

    make.__name__ = kind.replace(" ", "_")
    return make


AVERAGED = [averaged(where) for where in ("in a dict", "in a list", "in a new dict")]


@pytest.mark.parametrize("make", AVERAGED, ids=lambda f: f.__name__)
def test_averaged_weights_are_two_captures(make):
    captured, entries = compare(make, 6)
    assert entries[-1] <= 2 and not stats(captured).breaks


KINDS = [int, float, np.float64, np.float32, np.float16, np.int64]


def of_dicts(kind, i):
    return [{"lr": kind(i + n)} for n in range(5)], lambda places: [group["lr"] for group in places]


def of_objects(kind, i):
    places = [Holder() for _ in range(5)]
    for n, place in enumerate(places):
        place.lr = kind(i + n)
    return places, lambda places: [place.lr for place in places]


def of_one_dict(kind, i):
    return {f"lr{n}": kind(i + n) for n in range(5)}, lambda places: [*places.values()]


def of_a_list(kind, i):
    return [kind(i + n) for n in range(5)], lambda places: places[:]


@pytest.mark.parametrize("made", [of_dicts, of_objects, of_one_dict, of_a_list], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda f: f.__name__)
def test_numbers_that_change_together_are_left_open_together(kind, made):
    """The learning rates of all groups: not one capture for each."""
    places, read = made(kind, 2)

    def step(x):
        for rate in read(places):
            x = x * float(rate) + 1
        return x

    captured = capture(step, backend="eager")
    for i in range(2, 12):
        fresh, _ = made(kind, i)
        if isinstance(places, list) and isinstance(places[0], dict | Holder):
            for old, new in zip(places, fresh, strict=True):
                vars(old).update(vars(new)) if isinstance(old, Holder) else old.update(new)
        elif isinstance(places, dict):
            places.update(fresh)
        else:
            places[:] = fresh
        assert torch.equal(captured(torch.ones(3)), step(torch.ones(3)))
    assert stats(captured).misses <= 3

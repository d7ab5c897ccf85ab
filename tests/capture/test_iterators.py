"""Iterators that existed before: what they give next is known without advancing them, the rest of a loop over one is
captured on, and afterwards each of them stands where it does in plain Python."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import operator
import warnings

import pytest
import torch
from answers import broken, same, told
from torch import nn

from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.guards.recorder import GuardRecorder
from moebius.heap import walks

X = torch.arange(4.0)


class OtherList(list):
    """A list whose own way of being walked nobody asks for once the iterator is there."""

    def __iter__(self):
        return reversed(self)


def some():
    return [X, X + 1, X + 2]


def next_one(it):
    return next(it) * 2


def next_with_default(it):
    return next(it, None), next(it, None), next(it, "none left"), next(it, "none left")


def all_of_it(it):
    return list(it), list(it)


def unpacked(it):
    first, *others = it
    return first, others


def as_arguments(it):
    return max(*(v.sum().item() if isinstance(v, torch.Tensor) else 0 for v in it), 0)


def for_loop(it):
    total = X * 0
    item = None
    for item in it:
        total = total + (item is not None)
    else:
        return total, item


def left_early(it):
    for item in it:
        return item


def in_pairs(it):
    return [pair for pair in zip(it, it, strict=False)]


def broken_between(it):
    found = []
    for item in it:
        found.append(item)
        broken(X)
    return found


def broken_in_a_zip(it):
    found = []
    for pair in zip(itertools.count(3), it):  # noqa: B905
        found.append(pair)
        broken(X)
    return found, list(it)


def sliced(it):
    part = itertools.islice(it, 2)
    first = next(part, None)
    broken(X)
    return first, list(part), next(it, None)


def searched(it):
    return None in it, list(it)


def yielded_from(it):
    def inner():
        yield from it

    return [y for y in inner()]


def raises_in_the_middle(it):
    first = next(it)
    index = torch.tensor([9])
    X[index]
    return first, next(it)


def handled(it):
    first = next(it)
    try:
        X[torch.tensor([9])]
        next(it)
    except IndexError:
        return first, next(it, None)


def branch_on_data(it):
    first = next(it, None)
    if (X.sum() > 100).item():
        next(it)
    return first, next(it, None)


def stacked(it):
    return torch.stack(it), list(it)


def summed(it):
    return sum(it), list(it)


def reduced(it):
    return functools.reduce(lambda a, b: (a, b), it, 0)


def as_dict(it):
    return dict(it), list(it)


def teed(it):
    one, other = itertools.tee(it)
    return next(one), next(one), next(other), next(it, None)


def copied(it):
    other = copy.copy(it)
    return next(other), next(other, None), next(it, None)


def half_mapped(it):
    mapped = map(lambda x: (x, x), it)
    first = next(mapped)
    broken(X)
    return first, list(mapped), list(it)


def half_of_a_generator(it):
    generator = ((x, 1) for x in it)
    first, second = next(generator), next(it, None)
    broken(X)
    return first, second, list(generator)


def chained(it):
    chain = itertools.chain([1], it)
    next(chain), next(chain, None)
    broken(X)
    return list(chain)


def half_enumerated(it):
    numbered = enumerate(it)
    first = next(numbered)
    next(it, None)
    broken(X)
    return first, list(numbered)


def nested(it):
    found = []
    for a in it:
        for b in it:
            found.append((a, b))
            broken(X)
    return found


def in_blocks(it):
    found = []
    try:
        for a in it:
            found.append(a)
            try:
                broken(X)
                if len(found) == 2:
                    raise ValueError
            finally:
                found.append("finally")
    except ValueError:
        found.append(next(it, "end"))
    return found


def with_named_iterations(it):
    count = 0
    while next(it, None) is not None:
        count += 1
        broken(X)
    return count


def in_pairs_of_their_own(it):
    pairs = zip(it, it, strict=False)
    first = next(pairs, None)
    broken(X)
    second = next(pairs, None)
    broken(X)
    return first, second, next(it, None), list(pairs)


def what_it_is(it):
    return iter(it) is it, type(it).__name__, isinstance(it, collections.abc.Iterator), operator.length_hint(it, 7)


ITERATORS = {
    "list": lambda: iter(some()),
    "list with more to come": lambda: itertools.islice(iter(some()), 1) and iter(some() * 2),
    "end of a list": lambda: iter([]),
    "reversed": lambda: reversed(some()),
    "tuple": lambda: iter(tuple(some())),
    "text": lambda: iter("ab\u20ac"),
    "range": lambda: iter(range(5, 9)),
    "long range": lambda: iter(range(1 << 70, (1 << 70) + 3)),
    "dict": lambda: iter({"a": X, "b": X + 1}.items()),
    "dict backwards": lambda: reversed({"a": X, "b": X + 1}),
    "ordered": lambda: iter(collections.OrderedDict(a=1, b=2).values()),
    "set": lambda: iter({1, 2, 3}),
    "enumerate": lambda: enumerate(some(), 4),
    "zip": lambda: zip(some(), "abcd", strict=False),
    "zip that fails": lambda: zip(some(), "ab", strict=True),
    "zip of an enumerate": lambda: zip(enumerate(some()), itertools.count(1, -2), strict=False),
    "modules": lambda: iter(MODULES),
    "list of another kind": lambda: list.__iter__(OtherList(some())),
    "deque": lambda: iter(collections.deque(some())),
    "map": lambda: map(str, "abc"),
    "generator": lambda: (y for y in some()),
    "cycle": lambda: itertools.islice(itertools.cycle("ab"), 5),
}
MODULES = [nn.Linear(4, 4), nn.ReLU()]
PROGRAMS = [
    next_one, next_with_default, all_of_it, unpacked, as_arguments, for_loop, left_early, in_pairs, broken_between,
    broken_in_a_zip, sliced, searched, yielded_from, raises_in_the_middle, handled, branch_on_data, stacked, summed,
    reduced, as_dict, teed, copied, half_mapped, half_of_a_generator, chained, half_enumerated, nested, in_blocks,
    with_named_iterations, in_pairs_of_their_own, what_it_is,
]  # fmt: skip


@pytest.mark.share(5)
@pytest.mark.parametrize("program", PROGRAMS)
def test_stands_where_it_does_in_plain_python(program):
    captured = capture(program)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "moebius: .* was captured .* times")  # one program has every kind of iterator
        for kind in ITERATORS:
            for given in (0, 0, 1, 2, 0):
                ours, theirs = ITERATORS[kind](), ITERATORS[kind]()
                for it in (ours, theirs):
                    told(list, itertools.islice(it, given))
                assert same(told(captured, ours), told(program, theirs)), kind
                assert same(told(list, ours), told(list, theirs)), kind


# ----------------------------------------------------------------------------------------------------------------------
# The rest of a loop is captured on
# ----------------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = broken(layer(x)) + number
        return x


def reasons(captured):
    return {found.reason for found in report_of(captured_of(captured)).breaks}


@pytest.mark.parametrize("count", [3, 90])
def test_a_loop_over_layers_goes_on_in_one_rest_for_each_iteration(count):
    model = Layers(count)
    captured = capture(model.forward)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "moebius")
        for _ in range(3):
            assert torch.equal(captured(X), model(X))
    misses = stats(captured).misses
    assert torch.equal(captured(X), model(X)) and stats(captured).misses == misses
    if count == 3:
        assert reasons(captured) == {"call into C"}
        assert stats(captured).misses <= 2 * count


def test_many_iterations_over_numbers_and_tensors_share_their_rests():
    def run(tensors):
        total = X * 0
        for number, tensor in zip(range(10, 500), tensors, strict=False):
            total = broken(total + tensor * number)
        return total

    tensors = [torch.rand(4) for _ in range(300)]
    captured = capture(run)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "moebius")
        assert torch.equal(captured(tensors), run(tensors))
    assert reasons(captured) == {"call into C"}
    assert stats(captured).misses < 100


class Counter:
    def __init__(self):
        self.number, self.iterations = itertools.count(7, 3), iter(range(100))
        self.seen = []

    def step(self, x):
        number = next(self.number)
        self.seen.append(f"step {number}")
        return x * number + next(self.iterations)


def test_a_count_is_a_number_of_the_graph():
    ours, theirs = Counter(), Counter()
    captured = capture(ours.step)
    for _ in range(6):
        assert torch.equal(captured(X), theirs.step(X))
    assert ours.seen == theirs.seen and repr(ours.number) == repr(theirs.number)
    assert list(ours.iterations) == list(theirs.iterations)
    assert not reasons(captured) and stats(captured).misses <= 4


# ----------------------------------------------------------------------------------------------------------------------
# What this rests on
# ----------------------------------------------------------------------------------------------------------------------


def taken_and_changed(items, it):
    first = next(it)
    items.append(4)
    return first, list(it), items


def taken_alone(it, numbered):
    return next(numbered), next(it), next(numbered)


def changes(captured, plain):
    for length in (2, 3, 2, 4):
        found = []
        for function in (captured, plain):
            items = list(range(length))
            it = iter(items)
            found.append((told(function, items, it), list(it), items))
        assert same(*found)


def parts(captured, plain):
    for _ in range(2):
        found = []
        for function in (captured, plain):
            it = iter("abcdef")
            found.append((told(function, it, enumerate(it)), list(it)))
        assert same(*found)


def test_what_it_goes_through_changes():
    changes(capture(taken_and_changed), taken_and_changed)


def test_a_part_of_it_is_advanced_alone():
    parts(capture(taken_alone), taken_alone)


@pytest.mark.parametrize("check, program", [(changes, taken_and_changed), (parts, taken_alone)])
def test_to_notice_that_is_needed(check, program, monkeypatch):
    monkeypatch.setattr(walks.Walks, "is_disturbed", lambda self, walk: False)
    with pytest.raises(AssertionError):
        check(capture(program), program)


def lengths(captured, plain):
    for length in (1, 3, 1, 0, 2):
        ours, theirs = iter(range(length)), iter(range(length))
        assert same(told(captured, ours), told(plain, theirs))
        assert list(ours) == list(theirs)


def one_and_the_rest(one, other):
    return next(one), list(other)


def grown_and_taken(items, it):
    items.append(4)
    return next(it, None), list(it)


def of_one_or_of_two(captured, plain):
    for is_one in (False, True, False, True):
        found = []
        for function in (captured, plain):
            items = [5, 5, 5, 6]
            it = iter(items)
            given = (it, it if is_one else iter([5, 5, 5, 6]))
            if plain is grown_and_taken:
                given = (items if is_one else [1], it)
            found.append((told(function, *given), list(it), items))
        assert same(*found)


@pytest.mark.parametrize("program", [one_and_the_rest, grown_and_taken])
def test_two_iterators_become_one(program):
    of_one_or_of_two(capture(program), program)


@pytest.mark.parametrize("program", [one_and_the_rest, grown_and_taken])
def test_to_guard_that_is_needed(program, monkeypatch):
    monkeypatch.setattr(walks.Walks, "keep_apart", lambda self: None)
    with pytest.raises(AssertionError):
        of_one_or_of_two(capture(program), program)


@pytest.mark.parametrize("switched_off", ["length", "advance"])
def test_the_end_and_the_effect_are_needed(switched_off, monkeypatch):
    lengths(capture(next_with_default), next_with_default)
    if switched_off == "advance":
        monkeypatch.setattr(walks, "advance", lambda iterator, count: None)
    else:
        check = GuardRecorder.check

        def unless_length(self, kind, *args, **kwargs):
            return kind == "length" or check(self, kind, *args, **kwargs)

        monkeypatch.setattr(GuardRecorder, "check", unless_length)
    with pytest.raises(AssertionError):
        lengths(capture(next_with_default), next_with_default)


# ----------------------------------------------------------------------------------------------------------------------
# What is inside of what C code goes through
# ----------------------------------------------------------------------------------------------------------------------


def added(a, b):
    return a + b


def half_a_chain(v):
    chain = itertools.chain.from_iterable((v, v))
    first = next(chain)
    broken(X)
    return first, list(chain)


GOES_THROUGH = {
    "reduce": lambda v: functools.reduce(added, v),
    "reduce from": lambda v: functools.reduce(added, v, 0),
    "enumerate": lambda v: list(enumerate(iterable=v)),
    "accumulate": lambda v: list(itertools.accumulate(iterable=v, func=added)),
    "combinations": lambda v: list(itertools.combinations(iterable=v, r=2)),
    "permutations": lambda v: list(itertools.permutations(iterable=v, r=2)),
    "compress": lambda v: list(itertools.compress(data=v, selectors=v)),
    "groupby": lambda v: [(key, list(group)) for key, group in itertools.groupby(iterable=v)],
    "deque": lambda v: list(collections.deque(iterable=v, maxlen=2)),
    "chain": lambda v: list(itertools.chain.from_iterable([v, v])),
    "chain of a generator": lambda v: list(itertools.chain.from_iterable(v for _ in range(2))),
    "half a chain": half_a_chain,
    "starmap": lambda v: list(itertools.starmap(added, [v[:2], v[1:3]])),
    "starmap of it": lambda v: list(itertools.starmap(max, [v])),
}


@pytest.mark.parametrize("name", GOES_THROUGH)
def test_another_list_in_its_place_is_noticed(name):
    function = GOES_THROUGH[name]
    captured = capture(function)
    for items in ([1, 2, 3], [1, 2, 3, 3], [2, 3, 4], [0, 5, 0]):
        assert same(captured(items), function(items))


class Asked:
    """Notes when it is asked for its iterator."""

    def __init__(self, noted, name):
        self.noted, self.name = noted, name

    def __iter__(self):
        self.noted.append(self.name)
        return iter([X, X + 1])


CHAINED = {
    "objects": lambda noted: (Asked(noted, "a"), Asked(noted, "b")),
    "a list and an object": lambda noted: ([X], Asked(noted, "b")),
    "no iterable": lambda noted: ([X], 3),
    "an object that is none": lambda noted: (Asked(noted, "a"), object()),
    "lists": lambda noted: ([X], (X, X)),
}


def goes_through(noted, chained):
    for item in chained:
        noted.append(float(item.sum()))
    return X + len(noted)


def half_of_it(noted, chained):
    first = next(chained)
    broken(X)
    return first, list(chained)


@pytest.mark.parametrize("use", [goes_through, half_of_it])
@pytest.mark.parametrize("name", CHAINED)
def test_a_chain_asks_for_each_iterator_as_its_turn_comes(name, use):
    def step(noted):
        return use(noted, itertools.chain(*CHAINED[name](noted)))

    captured = capture(step)
    for _ in range(3):
        ours, theirs = [], []
        assert same(told(captured, ours), told(step, theirs)) and ours == theirs

"""What C code would read of a container from outside, which the step changed, or somebody between two calls."""

from __future__ import annotations

import collections
import warnings

import pytest
import torch
from answers import same, told

import moebius
from moebius import capture, stats
from moebius.python import natives
from moebius.python.operators import Operators
from moebius.python.written_values import WrittenValues


class Words(dict):
    pass


class Numbers(list):
    pass


def counter():
    return collections.Counter("aab")


def ordered():
    return collections.OrderedDict(a=1, b=2)


def defaulting():
    return collections.defaultdict(int, a=1, b=2)


def rows():
    return [[1, 2], [3, 4]]


def chained():
    return collections.ChainMap({"a": 1}, {"b": 2})


def set_first(found, number):
    found["a"] = number


def append_to_row(found, number):
    found[0].append(number)


def append(found, number):
    found.append(number)



# what is made, how it is changed, how it is read
READS = {
    "repr of rows": (rows, append_to_row, repr),
    "text of rows": (rows, append_to_row, str),
    "f-string of rows": (rows, append_to_row, lambda c: f"{c}"),
    "percent of rows": (rows, append_to_row, lambda c: "%s" % (c,)),  # noqa: UP031
    "format of rows": (rows, append_to_row, "{}".format),
    "counter | dict": (counter, set_first, lambda c: c | {"o": 1}),
    "dict | counter": (counter, set_first, lambda c: {"o": 1} | c),
    "defaultdict == dict": (defaulting, set_first, lambda c: c == {"a": 1, "b": 2}),
    "dict != OrderedDict": (ordered, set_first, lambda c: {"a": 1, "b": 2} != c),
    "orders of two": (ordered, lambda c, n: c.move_to_end("a"), lambda c: c == ordered()),
    "nested dicts": (lambda: {"a": [1]}, lambda c, n: c["a"].append(n), lambda c: c == {"a": [1]}),
    "set == frozenset": (lambda: {1, 2}, lambda c, n: c.add(n), lambda c: c == frozenset({1, 2})),
    "length of a chain": (chained, set_first, len),
    "chain after setdefault": (chained, lambda c, n: c.setdefault("q", n), len),
    "union": (lambda: {"a": 1}, lambda c, n: c.update(z=n), lambda c: sorted(set().union(c, ["k"]))),
    "intersection": (lambda: [1, 2], append, lambda c: sorted({1, 5, 6, 7}.intersection(c))),
    "issubset": (lambda: [1, 2], append, lambda c: {1, 5}.issubset(c)),
    "derived dicts": (lambda: Words(a=1), set_first, lambda c: c == Words(a=5)),
    "derived lists": (lambda: Numbers([1, 2]), append, lambda c: (c < Numbers([1, 2, 5, 5]), c + [1], c * 2)),
    "list + by name": (lambda: [1, 2], append, lambda c: [0].__add__(c)),
}


def calls(recipe, wrap, inside):
    make, change, read = recipe
    found = make()

    def step(x, number):
        if inside:
            change(found, number)
        return x * 2, read(found)

    step = wrap(step)
    for number in (5, 5, 6, 5):
        yield told(step, torch.ones(2), number), repr(found)
        if not inside:
            change(found, number)


@pytest.mark.share(12)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", READS)
def test_reads(name, inside):
    for ours, plain in zip(calls(READS[name], capture, inside), calls(READS[name], lambda f: f, inside), strict=True):
        assert same(ours, plain)


def differ(names):
    """The programs among these that give something else than plain Python."""
    wrong = set()
    for name in names:
        for inside in (True, False):
            pairs = zip(calls(READS[name], capture, inside), calls(READS[name], lambda f: f, inside), strict=True)
            if not all(same(ours, plain) for ours, plain in pairs):
                wrong.add(name)
    return wrong


def test_operators_in_c_that_read_what_nobody_has_read(monkeypatch):
    monkeypatch.setattr(Operators, "native", lambda self, function, *args: function(*args))
    assert differ(["counter | dict", "dict | counter", "derived dicts", "derived lists"])


def test_lists_in_lists_that_nobody_has_read(monkeypatch):
    right, display = natives.specialised, WrittenValues.is_open_display
    monkeypatch.setattr(natives, "specialised", lambda value, known=None: right(value, lambda _: False))
    new_alone = lambda self, value: not self.calls.known(value) and display(self, value)  # noqa: E731
    monkeypatch.setattr(WrittenValues, "is_open_display", new_alone)
    assert differ(["repr of rows", "percent of rows"]) == {"repr of rows", "percent of rows"}


def test_defaults_that_the_step_changed():
    def scaled(x, *, factor=2):
        return x * factor

    def step(x, factor):
        if factor:
            scaled.__kwdefaults__["factor"] = factor
        return scaled(x)

    captured, x = capture(step), torch.ones(2)
    assert [captured(x, n).tolist() for n in (0, 3, 0, 3, 4, 0)] == [[n, n] for n in (2, 3, 3, 3, 4, 4)]


def test_which_predictions_were_right_is_learned_as_a_whole():
    """Each list has other answers in it: not one capture for each."""

    @moebius.disable
    def right(x):
        return (x > 0).tolist()

    def step(meter, x):
        meter["right"] += right(x)
        y = x * 2
        meter["seen"] += len(meter["right"])
        return y.sum() + sum(meter["right"])

    captured = capture(step, backend="eager")
    misses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(26):
            x = torch.randn(8, generator=torch.Generator().manual_seed(seed))
            ours, plain = ({"right": [], "seen": 0} for _ in range(2))
            assert torch.equal(captured(ours, x), step(plain, x)) and ours == plain
            misses.append(stats(captured).misses)
    assert misses[-1] == misses[-4]

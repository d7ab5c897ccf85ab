"""Numbers of data and sizes that C code takes: what Python gives, or a graph break, and no error of C's own, whose text
an exception in ``__index__`` does not survive (``itertools.islice``)."""

import array
import bisect
import collections
import decimal
import fractions
import functools
import heapq
import itertools
import math
import operator
import random
import statistics
import struct

import pytest
import torch

import moebius

FORMS = {
    "islice": lambda n: next(itertools.islice([1, 2, 3, 4, 5], n, None)),
    "islice2": lambda n: list(itertools.islice([1, 2, 3, 4, 5], n)),
    "repeat": lambda n: list(itertools.repeat(1, n)),
    "count": lambda n: next(itertools.count(n)),
    "combinations": lambda n: list(itertools.combinations([1, 2, 3], n)),
    "product": lambda n: len(list(itertools.product([1, 2], repeat=n))),
    "deque": lambda n: list(collections.deque([1, 2, 3], n)),
    "deque_rotate": lambda n: [q := collections.deque([1, 2, 3]), q.rotate(n), list(q)][1:],
    "bytes": lambda n: bytes(n),
    "bytearray": lambda n: len(bytearray(n)),
    "chr": lambda n: chr(n + 65),
    "round": lambda n: round(3.14159, n),
    "ljust": lambda n: "a".ljust(n),
    "mul": lambda n: "ab" * n,
    "list_mul": lambda n: [1] * n,
    "find": lambda n: "abcabc".find("a", n),
    "index": lambda n: [1, 2, 3, 1, 2].index(1, n - 1),
    "pop": lambda n: [1, 2, 3, 4].pop(n),
    "insert": lambda n: [items := [1, 2, 3], items.insert(n, 9)],
    "sum": lambda n: sum([1, 2], n),
    "enumerate": lambda n: list(enumerate("ab", n)),
    "bisect": lambda n: bisect.bisect([1, 2, 3], n),
    "bisect2": lambda n: bisect.bisect([1, 2, 3], 2, n),
    "struct": lambda n: struct.pack("i", n),
    "math.comb": lambda n: math.comb(5, n),
    "math.factorial": lambda n: math.factorial(n),
    "math.ldexp": lambda n: math.ldexp(1.0, n),
    "math.gcd": lambda n: math.gcd(12, n),
    "hex": lambda n: hex(n),
    "format": lambda n: format(n, "05d"),
    "pow": lambda n: pow(2, n, 7),
    "divmod": lambda n: divmod(7, n),
    "int_to_bytes": lambda n: (5).to_bytes(n + 1, "big"),
    "slice": lambda n: [1, 2, 3, 4][n:],
    "slice_indices": lambda n: slice(n).indices(10),
    "range_index": lambda n: range(10)[n],
    "range_contains": lambda n: n in range(3),
    "range_index2": lambda n: range(10).index(n),
    "itemgetter": lambda n: operator.itemgetter(n)([1, 2, 3, 4]),
    "nlargest": lambda n: heapq.nlargest(n, [1, 2, 3]),
    "split": lambda n: "a b c d".split(" ", n),
    "replace": lambda n: "aaaa".replace("a", "b", n),
    "array": lambda n: array.array("i", [n]).tolist(),
    "min": lambda n: min(n, 2),
    "hasattr": lambda n: n.real,
    "operator.index": lambda n: operator.index(n),
    "length_hint": lambda n: operator.length_hint([1], n),
    "tuple_index": lambda n: (1, 2, 3)[n],
    "str_index": lambda n: "abcdef"[n],
    "bytes_index": lambda n: b"abcdef"[n],
    "memoryview": lambda n: memoryview(b"abcdef")[n],
    "random": lambda n: random.Random(n).random(),
    "tuple_count": lambda n: (1, 2, 3).count(n),
    "dict_get": lambda n: {1: 2}.get(n, 5),
    "set": lambda n: n in {1, 2},
    "zfill": lambda n: "7".zfill(n),
    "percent": lambda n: "%d" % n,  # noqa: UP031
    "fstring": lambda n: f"{n:>4}",
    "starmap": lambda n: list(itertools.starmap(pow, [(2, n)])),
    "accumulate": lambda n: list(itertools.accumulate([1, 2], initial=n)),
    "reduce": lambda n: functools.reduce(operator.add, [1, n]),
    "batched_iter": lambda n: [*zip(*[iter([1, 2, 3, 4])] * n, strict=True)],
    "isqrt": lambda n: math.isqrt(n),
    "statistics": lambda n: statistics.mean([1, n]),
    "fractions": lambda n: float(fractions.Fraction(n, 3)),
    "decimal": lambda n: str(decimal.Decimal(n)),
    "datetime": lambda n: str(__import__("datetime").timedelta(seconds=n)),
    "permutations": lambda n: list(itertools.permutations([1, 2, 3], n)),
    "with_replacement": lambda n: list(itertools.combinations_with_replacement([1, 2, 3], n)),
    "islice_step": lambda n: list(itertools.islice([1, 2, 3, 4, 5], 0, None, n + 1)),
    "deque_maxlen": lambda n: list(collections.deque([1, 2, 3], maxlen=n)),
    "enumerate_start": lambda n: list(enumerate("ab", start=n)),
    "repeat_times": lambda n: list(itertools.repeat(object=1, times=n)),
}
NUMBERS = {
    "item": lambda x_T: x_T.argmax().item(),
    "of an item": lambda x_T: (x_T.argmax().item() + 1) % 4,
    "int": lambda x_T: int(x_T.argmax()) + 1,
    "a size that data decide": lambda x_T: (x_T > 0).nonzero().shape[0],
    "half of it": lambda x_T: (x_T > 0).nonzero().shape[0] // 2 + 1,
    "a size": lambda x_T: x_T.shape[0],
}


def told(step, x_T):
    try:
        return str(step(x_T))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.share(16)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("form", FORMS)
def test_c_code_gets_the_number(form, number):
    made, number_of = FORMS[form], NUMBERS[number]

    def step(x_T):
        n = number_of(x_T)
        return (x_T * 2).sum(), made(n)

    captured = moebius.capture(step, backend="eager")
    for seed in range(4):
        torch.manual_seed(seed)
        x_T = torch.randn(3 + seed % 3)
        assert told(captured, x_T) == told(step, x_T)


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value

    def __str__(self):
        return "itself"

    __repr__ = __str__


OBJECTS = {
    "repeat": lambda n: list(itertools.repeat(object=n, times=n)),
    "repeat times": lambda n: list(itertools.repeat(n, n)),
    "permutations": lambda n: list(itertools.permutations([1, 2, 3], n)),
    "permutations r": lambda n: list(itertools.permutations([1, 2, 3], r=n)),
    "combinations": lambda n: list(itertools.combinations([1, 2, 3], n)),
    "islice": lambda n: list(itertools.islice([1, 2, 3], n)),
    "product": lambda n: list(itertools.product([1, 2], repeat=n)),
    "deque": lambda n: collections.deque([1, 2, 3], n),
    "deque maxlen": lambda n: collections.deque([1, 2, 3], maxlen=n),
    "enumerate": lambda n: list(enumerate("ab", n)),
}


@pytest.mark.parametrize("form", OBJECTS)
def test_c_code_that_takes_no_index_gets_the_object(form):
    def step(x_T):
        try:
            return x_T.sum(), OBJECTS[form](Index(2))
        except TypeError as error:
            return x_T.sum(), str(error)

    captured, x_T = moebius.capture(step, backend="eager"), torch.ones(3)
    for _ in range(2):
        assert told(captured, x_T) == told(step, x_T)
    if "Error: " in told(step, x_T):
        return
    assert not [b.detail for b in moebius.explain(captured)(x_T).breaks if "a bug of moebius" in b.hint]

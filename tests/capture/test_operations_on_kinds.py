"""Each operation of the language, and each builtin, on each kind of value that is another one in each call: as plain
Python has it, errors and their texts included. Capture has stand-ins for such values; an operation that asks one of
them for its type, its length or its items in place of the value gives a wrong answer."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import io
import itertools
import linecache
import math
import re
import textwrap
import types

import numpy
import pytest
import torch

from moebius import capture, explain

STATEMENTS = {
    "star": "r = collect(*v)",
    "star twice": "r = collect(1, *v, *v)",
    "double star": "r = collect(**v)",
    "list display": "r = [0, *v, 0]",
    "dict display": "r = {**v}",
    "unpack": "a, b = v\nr = (a, b)",
    "unpack first": "a, *b = v\nr = (a, b)",
    "unpack last": "*a, b = v\nr = (a, b)",
    "for": "r = []\nfor i in v:\n    r.append(i)",
    "yield from": "def g():\n    yield from v\nr = list(g())",
    "set an item": "v[0] = 1\nr = 0",
    "delete an item": "del v[0]\nr = 0",
    "set an attribute": "v.foo = 1\nr = 0",
    "with": "with v as q:\n    r = 0",
    "match a sequence": "match v:\n    case [a, b]: r = (a, b)\n    case [a, *rest]: r = (a, rest)\n    case _: r = 0",
    "match a mapping": "match v:\n    case {'a': z}: r = z\n    case {**kw}: r = kw\n    case _: r = 'other'",
    "match a class": "match v:\n    case bool() | int(): r = 'int'\n    case str(): r = 'str'\n    case _: r = 'other'",
    "match a value": "match v:\n    case 1 | 2: r = '12'\n    case 'abc': r = 'text'\n    case _: r = 'no'",
    "raise": "raise v",
    "raise with": "raise ValueError(v)",
    "except": "try:\n    raise ValueError(1)\nexcept v:\n    r = 1",
    "except *": "try:\n    raise ExceptionGroup('g', [ValueError(1)])\nexcept* v:\n    r = 1",
    "except of several": "try:\n    raise ValueError(1)\nexcept (OSError, v):\n    r = 1",
    "assert": "assert not v, v\nr = 1",
    "add to itself": "q = v\nq += v\nr = q",
    "multiply in place": "q = v\nq *= 2\nr = q",
    "extend by itself": "v.extend(v)\nr = v",
    "insert itself": "v[1:1] = v\nr = v",
    "default": "def f(a=v): return a\nr = f()",
    "decorator": "@v\ndef f(): pass\nr = 0",
    "text": "r = f'{v}', f'{v!r}', '%s' % (v,), str(v)",
    "format": "r = f'{v:>12}'",
    "percent": "r = '%d' % v",
}
EXPRESSIONS = """
v[0]; v[-1]; v[0:2]; v[::-1]; 1 in v; v in [1, 'a', None]; v(); v(1); v.foo; v.real; not v; v and 5; v or 5;
v + 1; 1 + v; v + v; v * 2; v @ v; v ** 2; v / 2; v // 2; v % 2; v << 1; v & 1; v | v; v - v; -v; ~v; v < 1;
v < v; v == v; v is None; bool(v); int(v); float(v); repr(v); len(v); list(v); tuple(v); dict(v); sorted(v);
sum(v); min(v); max(v, 3); abs(v); round(v); hash(v) == hash(v); type(v).__name__;
isinstance(v, (list, tuple)); callable(v); next(iter(v)); list(reversed(v)); list(zip(v, v));
list(enumerate(v)); list(map(str, v)); any(v); all(v); [*range(v)][:9]; divmod(v, 2); chr(v);
hasattr(v, 'append'); format(v, ''); {v: 1}[v]; v in {v}; {1: 2, 'a': 3}.get(v);
[1, 2, 3, 4, 5, 6, 7, 8, 9][v]; [1, 2, 3, 4, 5, 6][:v]; ','.join(v); x + v; x * v; x[v]; x[:v]; x.reshape(v);
torch.full((2,), v); torch.zeros(v); torch.tensor(v); x.sum(v); torch.where(x > 0, x, v); torch.stack(v);
x.clamp(max=v); x.to(v); torch.arange(v); x.masked_fill(x > 0, v); copy.deepcopy(v); json.dumps(v);
list(itertools.chain(v, v)); math.sqrt(v); math.floor(v); numpy.asarray(v); v.count(1); v.upper();
list(v.items()); v.copy(); v.bit_length(); v.item(); v.tolist(); v._replace(a=1)
"""
PROGRAMS = STATEMENTS | {text.strip(): f"r = {text.strip()}" for text in EXPRESSIONS.split(";")}


@dataclasses.dataclass
class Pair:
    a: int
    b: int


class Letter(enum.Enum):
    A, B, C, D, E, F = range(6)


class Count(enum.IntEnum):
    A, B, C, D, E, F = range(6)


Named = collections.namedtuple("Named", "a b")

KINDS = {
    "int": lambda i: i * 2 + 1,
    "float": lambda i: i + 0.5,
    "bool": lambda i: i % 2 == 0,
    "int or None": lambda i: None if i % 2 else i,
    "long int": lambda i: 10**20 + i,
    "odd floats": lambda i: [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0][i],
    "str": lambda i: "ab" * i + "c",
    "bytes": lambda i: b"x" * i + b"y",
    "tuple": lambda i: tuple(range(i + 1)),
    "tuple of two": lambda i: (i, i + 1),
    "list": lambda i: list(range(i + 1)),
    "list of two": lambda i: [i, i + 1],
    "dict": lambda i: {f"k{i}": i, "a": i},
    "set": lambda i: {i, i + 1},
    "range": lambda i: range(i, i + 2),
    "deque": lambda i: collections.deque([1, i]),
    "namedtuple": lambda i: Named(i, 2),
    "namedtuple of tensors": lambda i: Named(torch.ones(i + 1), i),
    "dataclass": lambda i: Pair(i, 2),
    "enum": lambda i: list(Letter)[i],
    "intenum": lambda i: list(Count)[i],
    "namespace": lambda i: types.SimpleNamespace(foo=i),
    "numpy int": lambda i: numpy.int64(i),
    "numpy float": lambda i: numpy.float32(i + 0.25),
    "array": lambda i: numpy.arange(i + 1),
    "tensor of one int": lambda i: torch.tensor(i),
    "tensor of one float": lambda i: torch.tensor(i + 0.5),
    "tensor": lambda i: torch.arange(i + 2.0),
    "tensor of ints": lambda i: torch.arange(i + 2),
    "parameter": lambda i: torch.nn.Parameter(torch.ones(i + 1)),
    "sparse tensor": lambda i: torch.eye(i + 1).to_sparse(),
    "size": lambda i: torch.Size([i + 1, 1]),
    "dtype": lambda i: [torch.float32, torch.float64, torch.int64, torch.bool, torch.int32, torch.bfloat16][i],
    "function": lambda i: [len, sum, max, min, str, abs][i],
    "class": lambda i: [int, float, str, list, tuple, dict][i],
    "generator": lambda i: (k for k in range(i + 1)),
    "iterator": lambda i: iter([1, 2, i]),
    "exception": lambda i: ValueError(i),
    "exception class": lambda i: [ValueError, KeyError, TypeError, IndexError, OSError, EOFError][i],
}
PLACES = {
    "argument": ("v", lambda value: value),
    "attribute": ("o.v", lambda value: types.SimpleNamespace(v=value)),
    "item": ("o['v']", lambda value: {"v": value}),
}
ADDRESS = re.compile(r"0x[0-9a-f]+|frame #0.*", re.DOTALL)  # in texts of objects; what C++ says of its own frames


def collect(*args, **kwargs):
    return args, kwargs


def shown(value, depth: int = 0):
    """What is compared of a result: types all the way down."""
    if depth > 6:
        return "deep"
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.requires_grad, repr(value.detach().to_dense().tolist())
    if isinstance(value, numpy.ndarray):
        return str(value.dtype), value.shape, repr(value.tolist())
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, [shown(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return type(value).__name__, [(shown(k, depth + 1), shown(v, depth + 1)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, value))
    if isinstance(value, BaseException):
        return type(value).__name__, shown(value.args, depth + 1)
    if isinstance(value, (int, float, str, bytes, type(None), numpy.generic, enum.Enum, types.SimpleNamespace)):
        return type(value).__name__, repr(value)
    return type(value).__name__


def outcome(step, x, given):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            result = shown(step(x, given))
    except Exception as error:
        result = type(error).__name__, ADDRESS.sub("", str(error)), type(error.__cause__).__name__
        result = result, [type(argument).__name__ for argument in error.args]
    return ADDRESS.sub("", repr((result, printed.getvalue()))), ADDRESS.sub("", repr(shown(given)))


def program(operation: str, place: str):
    body = textwrap.indent(f"v = {PLACES[place][0]}\n" + PROGRAMS[operation], "    ")
    name = "v" if place == "argument" else "o"
    text = f"import copy, json\ndef step(x, {name}):\n{body}\n    return x * 2, r\n"
    file = f"<{operation}, {place}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    names = dict(globals())
    exec(compile(text, file, "exec"), names)
    return names["step"]


def cases():
    return [pytest.param(*case, id="-".join(case)) for case in itertools.product(PROGRAMS, KINDS, PLACES)]


@pytest.mark.share(40)
@pytest.mark.parametrize("operation, kind, place", cases())
def test_as_python_has_it(operation: str, kind: str, place: str) -> None:
    step, captured = program(operation, place), capture(program(operation, place), backend="eager")
    for i in (1, 2, 3, 4, 5, 1, 0):
        x = torch.linspace(-1, 1, 6)
        plain = outcome(step, x.clone(), PLACES[place][1](KINDS[kind](i)))
        assert outcome(captured, x.clone(), PLACES[place][1](KINDS[kind](i))) == plain


def steps_over_rows():
    def first(x):
        return next(iter(x))

    def starred(x):
        a, *b = x
        return a, len(b)

    def starred_first(x):
        *b, a = x
        return a, len(b)

    def yielded(x):
        def rows():
            yield from x

        return list(rows())

    return [first, starred, starred_first, yielded]


@pytest.mark.parametrize("step", steps_over_rows(), ids=lambda step: step.__name__)
def test_rows_of_a_tensor_of_any_length(step) -> None:
    """A graph break that says so, and not an error that Python would not raise."""
    captured = capture(step, backend="eager")
    for n in (2, 3, 4, 5, 3):
        x = torch.arange(n * 1.0)
        assert shown(captured(x)) == shown(step(x))
    assert {b.code for b in explain(captured)(x).breaks} <= {"MB003"}

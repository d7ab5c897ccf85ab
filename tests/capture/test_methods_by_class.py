"""Methods of numbers and texts that C defines: called on the class, or met as an object that holds the number."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

from moebius import capture, stats

X = torch.ones(2)
BOUND = {
    "int": [(5).bit_length, (50).bit_length, (500).bit_length, (5).__add__, (6).__add__],
    "float": [(3.5).as_integer_ratio, (4.5).as_integer_ratio, (5.0).hex, (6.0).hex, (7.0).is_integer, (7.5).is_integer],
    "complex": [(1j).conjugate, (2j).conjugate, (3j).conjugate],
    "str": ["abc".upper, "abd".upper, "abe".upper, "a".__len__, "ab".__len__],
    "bytes": [b"a".hex, b"b".hex, b"c".hex],
    "tuple": [(1, 2).__len__, (1, 2, 3).__len__, (1, 2).__repr__, (1, 3).__repr__],
    "list": [[1].copy, [2].copy, [2, 3].copy],
    "dict": [{1: 2}.copy, {1: 3}.copy, {2: 3}.copy],
    "frozenset": [frozenset([1]).copy, frozenset([2]).copy],
    "range": [range(3).__len__, range(4).__len__],
    "True and None": [True.__repr__, None.__repr__, False.__repr__],
    "torch.Size": [torch.Size([1]).numel, torch.Size([2]).numel],
    "slice": [slice(1, 2).__repr__, slice(1, 3).__repr__],
}


@pytest.mark.parametrize("kind", BOUND)
def test_a_bound_method_as_an_argument_is_that_of_its_number(kind):
    def step(x, method):
        try:
            return x * 2, method()
        except TypeError as error:
            return str(error)

    captured = capture(step, backend="eager")
    for method in (*BOUND[kind], *BOUND[kind]):
        assert repr(captured(X, method)) == repr(step(X, method))


# what gives the number or text, the class, and what is called: v is the value, T the class
CALLS = {
    "x.sum().item()": (
        float,
        "T.__abs__(v) T.__add__(v, 2) T.__repr__(v) T.is_integer(v) T.hex(v) T.__format__(v, '.2f') T.__round__(v, 1)"
        " T.__floor__(v) v.__ceil__() v.as_integer_ratio() v.__trunc__() v.__getnewargs__() T.__eq__(v, 3.0) T.real"
        " object.__repr__(v)[:7] object.__str__(v) object.__eq__(v, v) int.bit_length(v) v() v.real() T.__add__(v)"
        " v.__setattr__() v.__delattr__()",
    ),
    "x.long().sum().item()": (
        int,
        "T.bit_length(v) T.__index__(v) T.__mul__(v, 3) v.__pow__(2) T.to_bytes(v, 4, 'big')",
    ),
    "x.shape[0]": (int, "T.bit_length(v) T.__index__(v) T.__mul__(v, 3) v.__pow__(2) T.__str__(v) float.hex(v)"),
    "KEPT['n']": (int, "T.bit_length(v) T.__add__(v, 1) v.__repr__() T.__float__(v)"),
    "KEPT['s']": (
        str,
        "T.upper(v) T.__len__(v) T.__add__(v, 'a') v.__repr__() T.join(v, ['a', 'b']) object.__str__(v)",
    ),
    "f'{x.sum():.2f}'": (str, "T.upper(v) T.__len__(v) T.__add__(v, 'a') T.partition(v, '.')"),
}


def of(calls: str) -> list[str]:
    """Each of the calls, which stand one after the other."""
    return re.findall(r"\S+?(?:\([^)]*\))(?:\S*)|\S+", calls)


@pytest.mark.share(11)
@pytest.mark.parametrize(("value", "called"), [(v, c) for v, (_, calls) in CALLS.items() for c in of(calls)])
def test_a_method_called_on_the_class(value, called):
    worlds: list[dict[str, Any]] = []
    for _ in range(2):
        world = {"torch": torch, "T": CALLS[value][0], "KEPT": {"n": 1, "s": "abc"}}
        answer = f"  try: r = {called}\n  except Exception as e: r = type(e).__name__, str(e)\n"
        counted = "  KEPT['n'] += 1\n  KEPT['s'] += 'l'\n"
        exec(f"def step(x):\n{counted}  v = {value}\n  y = x * 2\n{answer}  return y, r, v", world)
        worlds.append(world)
    step = capture(worlds[0]["step"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(6):
            x = torch.ones(2 + n % 2) * (n + 1)
            ours, plain = step(x), worlds[1]["step"](x)
            assert repr(ours) == repr(plain), n
    assert stats(step).graphs


@pytest.mark.parametrize("call", ["v.{}(1, 2, 3, 4, 5)", "T.{}(v, 1, 2, 3, 4, 5)", "(m := v.{})(1, 2, 3, 4, 5)"])
@pytest.mark.parametrize("name", ["bit_length", "conjugate", "to_bytes", "__sizeof__", "__dir__", "__init_subclass__"])
def test_the_class_in_an_error_of_a_method(name: str, call: str) -> None:
    """CPython calls by its name what ``int`` has; what is bound first is the flag's."""
    world: dict[str, Any] = {"T": int}
    answer = f"  try: return {call.format(name)}\n  except Exception as e: return x * 2, type(e).__name__, str(e)\n"
    exec(f"def step(x, v):\n{answer}", world)
    captured = capture(world["step"], backend="eager")
    for v in (True, False, True, False):
        assert repr(captured(X, v)) == repr(world["step"](X, v))

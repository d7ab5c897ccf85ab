"""Builtins that C code answers, asked of tensors: Python's answer, or its own error for a handler in the step."""

from __future__ import annotations

import pytest
import torch

from moebius import capture

X = torch.arange(6.0).view(3, 2)


def filled(text, value):
    return text % value


ASKED = {
    "a tensor backwards": lambda x: reversed(x * 2) + 1,
    "a tensor without axes backwards": lambda x: reversed(x.sum()) + 1,
    "rows backwards": lambda x: torch.stack([row * 2 for row in reversed(x)]),
    "next of a tensor": lambda x: next(x),
    "next of an array": lambda x: next(x.numpy()),
    "next of a number of numpy's": lambda x: next(x.numpy()[0, 0]),
    "next of an iterator": lambda x: next(iter(x)) + next(iter(x.numpy())),
    "next of a list": lambda x: next([x]),
    "next of a text": lambda x: next("ab"),
    "reversed number": lambda x: reversed(1),
    "reversed twice": lambda x: reversed(x, 2),
    "reversed set": lambda x: reversed({1}),
    "reversed iterator": lambda x: reversed(iter([1])),
    "reversed list": lambda x: list(reversed([1, 2])),
    "reversed bytes": lambda x: list(reversed(b"ab")),
    "reversed dict": lambda x: list(reversed({1: 2, 3: 4})),
    "ascii of a tensor": lambda x: ascii(x),
    "ascii of a list with one": lambda x: ascii([x, 1]),
    "ascii of a size": lambda x: ascii([x.shape[0], "ü"]),
    "size with two axes": lambda x: x.size(0, 1),
    "a text without a place": lambda x: filled("a", x),
    "a text with a place": lambda x: filled("%s", x),
    "a text with two places": lambda x: filled("%s %s", x),
    "ascii of a text": lambda x: ascii("ö"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_builtin(name):
    asked = ASKED[name]

    def step(x, said):
        try:
            result = asked(x)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        said.append(result)
        return x + 1

    captured = capture(step, backend="eager")
    for number in range(2):
        mine, plain = [], []
        captured(X + number, mine)
        step(X + number, plain)
        if isinstance(plain[0], torch.Tensor):
            assert torch.equal(mine[0], plain[0])
        else:
            assert mine == plain

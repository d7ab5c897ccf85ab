"""Methods of containers called by their names, and texts read as numbers: each as plain Python does, None and all."""

from __future__ import annotations

import collections
import copy

import pytest
import torch

from moebius import capture

HELD = [{None, 1}, {2}, [None, 1], (1, 2), collections.deque([None]), {None: None}, {1: None}, frozenset((1, 2))]
METHODS = ("add", "discard", "remove", "append", "appendleft", "insert", "setdefault", "pop")
OTHERS = [None, 2, "a", (1, 2), [None, 1], {None, 1}, {1: None}, collections.deque([None]), frozenset((1, 2))]


def told(step, values: list) -> list:
    """What each call gave, or the error, and what it has made of the value."""
    found: list = []
    for value in values:
        value = copy.deepcopy(value)
        try:
            result = step(torch.zeros(1), value)[1]
            found.append((type(result).__name__, repr(result), repr(value)))
        except Exception as error:
            found.append((type(error).__name__, str(error), repr(value)))
    return found


@pytest.mark.parametrize(("held", "method"), [(held, name) for held in HELD for name in METHODS if hasattr(held, name)])
def test_none_is_an_item_as_any_other(held, method):
    given = (0, None) if method == "insert" else (None,) if type(held) is not list or method != "pop" else (0,)

    def step(x, value):
        return x + 1, getattr(value, method)(*given)

    assert told(capture(step, backend="eager"), [held] * 3) == told(step, [held] * 3)


@pytest.mark.parametrize("method", ["__eq__", "__ne__"])
@pytest.mark.parametrize("held", HELD, ids=repr)
def test_comparisons_by_name_answer_for_others_as_python_does(held, method):
    def step(x, value):
        return x + 1, [getattr(value, method)(other) for other in OTHERS], getattr([1], method)([1])

    def wrong(x, value):
        return x + 1, getattr(value, method)(1, 2)

    for asked in (step, wrong):
        assert told(capture(asked, backend="eager"), [held] * 3) == told(asked, [held] * 3)


@pytest.mark.parametrize("given", [(16,), (), (36,), ("x",)], ids=repr)
def test_a_text_that_varies_is_read_as_the_number_that_it_is(given):
    def step(x, text):
        number = int(text, *given) % 7
        return x * number, number

    texts = ["10", "11", "ff", "7", "12", "11", "zz", "10"]
    assert told(capture(step, backend="eager"), texts) == told(step, texts)


class Equal:
    def __init__(self, answer):
        self.answer = answer

    def __eq__(self, other):
        return self.answer if other is not None else NotImplemented


@pytest.mark.share(13)
@pytest.mark.parametrize("answer", [True, False, [1], [], NotImplemented, torch.tensor(True), torch.tensor([0, 1])])
@pytest.mark.parametrize("ask", ["a.__ne__(b)", "object.__ne__(a, b)", "super(Equal, a).__ne__(b)", "a != b"])
def test_not_equal_is_what_the_own_equal_says(answer, ask):
    one = Equal(answer)
    step = eval(f"lambda x, a, b: (x + 1, {ask})", {"Equal": Equal})
    captured = capture(step, backend="eager")
    for other in (1, None, one, Equal(True), 1):
        told = []
        for run in (step, captured):
            try:
                told.append(repr(run(torch.ones(1), one, other)[1]))
            except RuntimeError as error:
                told.append(str(error))
        assert told[0] == told[1], other

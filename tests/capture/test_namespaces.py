"""Functions that look at their own variables: locals(), vars(), dir(), eval(), exec(), globals(), frame objects."""

import inspect
import sys

import pytest
import torch

from moebius import capture, stats

FACTOR = 5


def evaluated(x):
    i = 2  # noqa: F841
    return x * eval("i") + eval("FACTOR"), [eval("k + 1") for k in range(2)], eval(compile("i * 2", "text", "eval"))


def executed(x):
    i = 2
    exec("j = i + 1\nk = x * j")
    return sorted(locals()), eval("i")


def listed(x):
    i = 2
    before = locals()
    found = sorted(before), dir(), sorted(vars()), before["i"], locals()["x"] * i
    late = i
    return *found, sorted(before), before is locals(), late


def with_a_cell(x):
    def inner():
        return x, q

    q = 3
    return inner()[1], sorted(locals()), eval("q")


def after_a_break(x):
    i = 2
    j = int(float(x.sum()))
    return x * eval("i + j"), sorted(locals()), dir()


def of_the_module(x):
    return x * globals()["FACTOR"], globals() is globals(), eval("FACTOR + 1")


def in_given_namespaces(x):
    made = {}
    exec("a = 1\nb = a + 1", made)
    return x * made["b"], eval("z + FACTOR", None, {"z": 4}), eval("z", {"z": 3})


def formatted(x, **named):
    y = x.sum().item()
    return "{x} {y}".format(**dict.fromkeys(locals(), 0)), sorted(vars()), y


def raised(x):
    try:
        return eval("1 / 0")
    except ZeroDivisionError as error:
        return str(error), x


def made_in_it(x):
    return eval("lambda q: q * 3")(x), eval("(new := 5)"), eval("[x for x in (1, 2)]")


def helper(y):
    k = 3
    return eval("k * y"), sorted(locals())


def in_a_call(x):
    return x * helper(2)[0], helper(3)


def by_another_name(x):
    i = 2  # noqa: F841
    look = eval
    print(end="")
    return look("i"), x


def of_its_frame(x):
    return sys._getframe().f_locals["x"] + 1, sys._getframe().f_code.co_name, inspect.currentframe().f_code.co_name


def who_calls():
    return sys._getframe(1).f_code.co_name


def asking_who_calls(x):
    return who_calls(), x * 2


class Configured(torch.nn.Module):
    def __init__(self, a=1, b=2):
        super().__init__()
        self.kept = {name: value for name, value in locals().items() if name not in ("self", "__class__")}


def configured(x):
    return x, Configured(3, 4).kept


STEPS = [
    evaluated, executed, listed, with_a_cell, after_a_break, of_the_module, in_given_namespaces, formatted, raised,
    made_in_it, in_a_call, by_another_name, of_its_frame, asking_who_calls, configured,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_it_sees_is_what_plain_python_sees(step):
    captured = capture(step)
    for n in range(3):
        x = torch.full((2,), 1.0 + n)
        assert str(captured(x)) == str(step(x))


def test_a_text_that_is_evaluated_is_part_of_the_graph():
    captured = capture(lambda x, i: x * eval("i + 1") + torch.sin(locals()["x"]))
    for n in range(3):
        assert captured(torch.ones(2), 2).tolist() == pytest.approx([3.84147, 3.84147], abs=1e-4), n
    assert stats(captured).graphs == 1 and stats(captured).hits == 2
    assert captured(torch.ones(2), 3).tolist() == pytest.approx([4.84147, 4.84147], abs=1e-4)

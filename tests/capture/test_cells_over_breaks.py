"""Variables of inner functions over graph breaks: comprehensions in the frame (3.12), cells of arguments (3.13)."""

# ruff: noqa: B023, F821 (the last value of a loop variable is what is asked for; a handler unsets its own)

import sys

import pytest
import torch
from answers import broken, same, told

from moebius import capture
from moebius.codegen import continuation_code

X = torch.arange(4.0)


def comprehension_behind_the_break(x):
    broken(x)
    calls = [lambda: i for i in range(3)]
    return x + sum(f() for f in calls)


def break_in_the_comprehension(x):
    i = 10
    calls = [(broken(x), lambda: i * 2)[1] for i in range(3)]
    return x + sum(f() for f in calls) + (lambda: i)()


def break_in_it_without_the_variable(x):
    return x + sum([(broken(x), i)[1] for i in range(3)])


def of_an_argument(i):
    calls = [lambda: i * 2 for i in range(3)]
    broken(X)
    return i + sum(f() for f in calls) + (lambda: i)()


def arguments_in_inner_functions(x, n=3):
    broken(x)
    inner = lambda: (n, x)  # noqa: E731
    broken(x)
    n = 4
    return inner()[0] + x


def argument_of_a_generator(x):
    def iterations(error):
        try:
            raise ValueError(x.sum().item())
        except ValueError as error:
            broken(x)

            def inner(i: int) -> str:
                nonlocal error
                return i

            yield inner(3)
            del error
        yield 5

    return [x * n for n in iterations(7)]


def comprehensions_of_one_variable(x):
    """What one puts in the frame's place of the variable is, in the other, a cell."""
    broken(x)
    found = {(n, str(n)): n for n in [(lambda: n)() for n in (1, 2)][:3] if n}
    return x + len(found), found


def closure_behind_a_value(x):
    broken(x)
    pair = (n := 3), lambda: x
    return pair[1]() + n + sum([n for n in (1, 2)]) + sum([(lambda: n)() for n in (4, 5)])


def breaks_in_both(x):
    found = [(broken(n), str(n)) for n in [(broken(x), lambda: n)[1]() for n in (1, 2)]]
    return x, found


def many_variables(x):
    """The first ones have places that one instruction names two of; behind the break they come last."""
    if x is None:
        r = s = t = 0
    a = b = c = d = e = f = g = h = 1
    i = j = k = l = m = n = o = p = q = 2  # noqa: E741
    broken(x)
    r, s = x, p
    t = x + r, r * s, x * s
    return t, r, s, [a, b, c, d, e, f, g, h], [i, j, k, l, m, n, o, p, q]


def unset(x):
    """What inner functions share, read and deleted where it is unset; the variable of a handler too."""
    found = []
    inner = lambda: (a, e)  # noqa: E731
    for i in range(4):
        try:
            if i == 1:
                a = x
            elif i == 2:
                del a
            broken(x)
            found.append(a)
            raise KeyError(i)
        except UnboundLocalError as error:
            found.append(error.args)
        except KeyError as e:
            broken(x)
            found.append(e.args)
        try:
            found.append(e)
        except UnboundLocalError as error:
            found.append((error.args, error.name, error.__traceback__.tb_lineno, error.__traceback__.tb_next))
        try:
            inner()
        except NameError as error:
            found.append((type(error), error.args, error.name))
    broken(x)
    try:
        del e
    except UnboundLocalError as error:
        found.append(error.args)
    return x, found, a


def unset_beside_a_comprehension(x):
    broken(lambda: a)
    try:
        return a
    except UnboundLocalError as error:
        return [a for a in (1, 2)], error.args, x


def generator_unset(x):
    def iterations():
        for iteration in range(2):
            try:
                if iteration:
                    broken(x)
                yield item
            except UnboundLocalError as error:
                yield broken(error.args)
            item = (lambda: item, 3)[1]
            yield item
            broken(item)
            del item

    return list(iterations())


def unset_by_an_inner_function(x):
    a = 1

    def end():
        nonlocal a
        del a

    broken(end())
    try:
        a += 1
    except UnboundLocalError as error:
        return x, error.args


def hidden_by_a_comprehension(x):
    """After it the variable is the frame's again."""
    y = x
    broken(x)
    return [(lambda: y)() for y in (1, 2)], y


def hidden_in_iterations(x):
    y, found = x, lambda: y
    for _ in range(2):
        y = y + broken(1)
        calls = [lambda: y for y in (1, 2)]
        broken(x)
    return [call() for call in calls], y, found()


FUNCTIONS = [
    unset_by_an_inner_function, hidden_by_a_comprehension, hidden_in_iterations,
    unset, generator_unset, *([unset_beside_a_comprehension] if sys.version_info < (3, 13) else []),
    many_variables,
    comprehensions_of_one_variable, closure_behind_a_value, breaks_in_both,
    comprehension_behind_the_break, break_in_the_comprehension, break_in_it_without_the_variable, of_an_argument,
    arguments_in_inner_functions, argument_of_a_generator,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_as_in_plain_python(function):
    captured = capture(function)
    for x in (X, X + 1, X):
        assert same(told(captured, x), told(function, x))


def test_not_asked_first_another_exception_is_raised(monkeypatch):
    monkeypatch.setattr(continuation_code, "unset_reads", lambda code: {})
    assert not same(told(capture(unset), X), told(unset, X))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="3.12 and later: comprehensions in the frame")
def test_a_continuation_would_not_put_it_back(monkeypatch):
    monkeypatch.setattr(continuation_code, "hidden_later", lambda *_: None)
    assert not same(told(capture(hidden_by_a_comprehension), X), told(hidden_by_a_comprehension, X))


@pytest.mark.skipif(sys.version_info < (3, 13), reason="3.13 and later")
def test_two_in_one_instruction_need_low_places(monkeypatch):
    monkeypatch.setattr(continuation_code, "one_by_one", lambda item: [item])
    assert not same(told(capture(many_variables), X), told(many_variables, X))

"""Deep recursion is a RecursionError, as natively, through Python calls and through C's callbacks; never a crash."""
from __future__ import annotations

import functools
import sys
import threading

import pytest

from moebius.interpreter import count_native_frames, interpret

pytestmark = pytest.mark.usefixtures("no_gc_callbacks")


def plainly(n):
    return plainly(n + 1)


def through_sorted(n):
    return sorted([n], key=lambda x: through_sorted(x + 1))


def through_map(n):
    return list(map(through_map, [n + 1]))


class Endless:
    def __hash__(self):
        return hash((self,))

    def __repr__(self):
        return repr([self])

    def __getattr__(self, name):
        return operator_getattr(self, name + "x")

    def __eq__(self, other):
        return [self] == [Endless()]

    def __iter__(self):
        return iter(list(self))


def operator_getattr(value, name):
    return functools.reduce(getattr, [value, name])


def through_generators(n):
    yield from through_generators(n + 1)


CALLS = {
    "plainly": lambda: plainly(0),
    "sorted": lambda: through_sorted(0),
    "map": lambda: through_map(0),
    "hash": lambda: hash(Endless()),
    "repr": lambda: str(Endless()),
    "getattr": lambda: Endless().x,
    "eq": lambda: Endless() == 1,
    "iter": lambda: list(Endless()),
    "generators": lambda: list(through_generators(0)),
    "exec": lambda: exec("def f(): exec('f()')\nf()", {}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("limit", [None, 20_000])
@pytest.mark.parametrize("where", ["main thread", "thread with a small stack"])
def test_endless_recursion_is_a_recursion_error(name, limit, where):
    found = []

    def body():
        before = sys.getrecursionlimit()
        if limit:
            sys.setrecursionlimit(limit)
        try:
            interpret(CALLS[name])()
        except BaseException as error:
            found.append(type(error))
        finally:
            sys.setrecursionlimit(before)
            found.append(sys.getrecursionlimit() == before)

    if where == "main thread":
        body()
    else:
        before = threading.stack_size(1 << 20)
        try:
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
        finally:
            threading.stack_size(before)
    assert found == [RecursionError, True]


def test_the_machine_works_after_it():
    for name, call in CALLS.items():
        def twice(call=call):
            try:
                call()
            except RecursionError:
                return "caught", sorted([3, 1], key=lambda x: -x)

        assert interpret(twice)() == ("caught", [3, 1]), name


def test_counting_is_no_crash_either():
    with count_native_frames() as seen, pytest.raises(RecursionError):
        interpret(CALLS["sorted"])()
    assert not seen


@pytest.mark.skipif(sys.version_info < (3, 12), reason="one limit for C code and Python together")
def test_nested_tuples_of_classes_have_the_limit_of_c_code() -> None:
    def deepest() -> int:
        least, most = 1, 1 << 17
        while least < most:
            depth, classes = (least + most) // 2, (int,)
            for _ in range(depth):
                classes = (classes,)  # type: ignore[assignment]
            try:
                isinstance("", classes)
                least = depth + 1
            except RecursionError:
                most = depth
        return least

    native, interpreted = deepest(), interpret(deepest)()
    assert native > sys.getrecursionlimit() and native - 50 < interpreted <= native

"""Methods of containers with arguments that they do not take: Python's errors, and nothing is changed."""

import collections

import pytest
from answers import told

from moebius import capture
from moebius.python import arity


class OwnDict(dict):
    pass


class OwnList(list):
    pass


def default_dict(items):
    return collections.defaultdict(int, items)


DICTS = dict, collections.OrderedDict, default_dict, collections.Counter, OwnDict
LISTS = list, OwnList, collections.deque
CALLS = {
    "pop": [(), (1, 2, 3)], "get": [(), (1, 2, 3)], "setdefault": [(), (1, 2, 3)], "update": [(1, 2)], "fromkeys": [()],
    "popitem": [(1, 2)], "clear": [(1,)], "items": [(1,)], "__getitem__": [()], "__setitem__": [(1,)],
    "__contains__": [()], "__delitem__": [()], "append": [(), (1, 2)], "extend": [(), (5,)], "sort": [(1,)],
    "insert": [(1,)], "remove": [(), (1, 2)], "index": [()], "reverse": [(1,)],
}  # fmt: skip


def attempts(kind, items, keywords):
    """The container after each call, with what came of it."""
    found = []
    for name, calls in CALLS.items():
        for args in calls:
            container = kind(items)
            if not hasattr(container, name):
                continue
            try:
                outcome = getattr(container, name)(*args, **keywords)
            except Exception as error:
                outcome = type(error).__name__  # (its text depends on how CPython has specialised the call)
            found.append((name, args, str(outcome), str(container)))
    return found


@pytest.mark.share(11)
@pytest.mark.parametrize("keywords", [{}, {"key": 1}, {"what": 1}], ids=str)
@pytest.mark.parametrize(
    "kind, items", [*((kind, {1: 2}) for kind in DICTS), *((kind, [1, 2]) for kind in LISTS)]
)
def test_arguments_that_do_not_fit(kind, items, keywords):
    assert told(capture(attempts), kind, items, keywords) == told(attempts, kind, items, keywords)


def popped(d):
    try:
        return d.pop()
    except TypeError as error:
        return str(error)


def got(d):
    try:
        return d.get(1, 2, 3)
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize("ask", [popped, got], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", DICTS)
def test_of_a_container_that_was_there(kind, ask):
    given, plain = kind({1: 2}), kind({1: 2})
    assert told(capture(ask), given) == told(ask, plain)
    assert given == plain


def test_with_the_check_switched_off_the_answer_is_another(monkeypatch):
    monkeypatch.setattr(arity, "check", lambda *_: None)
    assert told(capture(got), {1: 2}) != told(got, {1: 2})

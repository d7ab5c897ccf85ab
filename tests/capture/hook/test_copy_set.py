"""A copy of a set that keeps its hash table: the same order now, and after whatever is done to both."""

import gc
import random
import weakref

import pytest

from moebius.hook import copy_set


class Item:
    pass


def test_what_follows_is_the_same():
    rng = random.Random(0)
    for _ in range(300):
        items = {rng.randrange(200) for _ in range(rng.randrange(40))}
        for _ in range(rng.randrange(30)):
            rng.choice((items.add, items.discard))(rng.randrange(200))
        copy = copy_set(items)
        assert copy is not items and list(copy) == list(items)
        for _ in range(rng.randrange(60)):
            name, value = rng.choice(("add", "discard", "pop")), rng.randrange(200)
            for s in (items, copy):
                if name != "pop":
                    getattr(s, name)(value)
                elif s:
                    s.pop()
            assert list(copy) == list(items)


def test_set_copy_itself_is_another():
    """If this fails, `copy_set` is not needed any more."""
    items = set(range(0, 400, 8))
    for i in range(0, 320, 8):
        items.discard(i)
    assert list(copy_set(items)) == list(items)
    assert any(list(made) != list(made.copy()) for made in ({*range(i, 400, 9 + i)} for i in range(20)))


def test_references(growth):
    items = {Item() for _ in range(100)}
    for item in list(items)[::3]:
        items.discard(item)
    del item

    def run(items=items):
        copy_set(items)

    assert growth(run, 300) == 0
    gone = [weakref.ref(i) for i in items]
    copy = copy_set(items)
    run.__defaults__ = None
    del items
    gc.collect()
    assert all(ref() is not None for ref in gone)
    del copy
    assert all(ref() is None for ref in gone)


@pytest.mark.parametrize("value", [frozenset({1}), [1], {1: 2}.keys()])
def test_only_sets(value):
    with pytest.raises(TypeError, match="set"):
        copy_set(value)

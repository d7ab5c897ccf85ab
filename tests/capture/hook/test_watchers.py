"""A program compares only what was written to since (CPython 3.12 and later): every way of writing is told of."""

import collections
import gc
import weakref

import pytest

from moebius.hook import ABSENT, GuardProgram, features, use_watchers

FEATURES = features()
pytestmark = pytest.mark.skipif(not FEATURES["dict_watchers"], reason="this Python has no dict watchers")


class Node:
    """A module of a tree, as plain Python: children and switches in its ``__dict__``."""

    scale = 1

    def __init__(self, children=()):
        self.training = True
        self.children = children


def program(checks):
    return GuardProgram(0, (), [], checks)


def tree_program(nodes):
    checks = [("class", Node, {"scale": 1}, Node.__mro__)]
    for node in nodes:
        own = node.__dict__
        checks.append(("dict", own, {"training": True, "children": node.children}, None))
        checks.append(("instance", node, Node, own))
    return program(checks)


def own_table(node):
    """Its ``__dict__`` in a table of its own: 3.13.0 tells of no write to values that live inside the instance."""
    node.__dict__[0] = None
    del node.__dict__[0]
    return node


@pytest.fixture
def tree():
    return [own_table(Node()) for _ in range(256)]


def test_an_untouched_tree_is_not_compared(tree):
    p = tree_program(tree)
    assert p.n_compared == 257
    assert p.check(())
    assert p.n_compared == 0
    assert p.check(())


def test_only_what_was_written_to_is_compared(tree):
    p = tree_program(tree)
    assert p.check(())
    tree[7].unrelated = 1
    tree[7].unrelated = 2
    tree[99].training = 1
    tree[99].training = True
    assert p.n_compared == 2
    assert p.check(())
    assert p.n_compared == 0
    tree[200].training = False
    for _ in range(2):
        assert p.n_compared == 1
        assert not p.check(())
    assert p.explain(()) == 1 + 2 * 200
    tree[200].training = True
    assert p.check(())
    assert p.n_compared == 0
    Node.scale = 2
    try:
        assert p.n_compared == 1
        assert not p.check(())
    finally:
        Node.scale = 1
    assert p.check(()) and p.n_compared == 0


@pytest.mark.skipif(FEATURES["instance_dict_watchers"], reason="this Python tells of all writes to instances")
def test_what_nobody_tells_of_is_compared_each_time():
    nodes = [Node() for _ in range(20)]
    p = tree_program(nodes)
    assert p.check(())
    assert p.n_compared == 20
    nodes[3].training = False
    assert not p.check(())
    nodes[3].training = True
    assert p.check(())


def test_the_order_of_an_ordered_dict_is_compared_each_time():
    d = collections.OrderedDict(a=1, b=2)
    p = program([("dict", d, {}, ("a", "b"))])
    assert p.check(())
    assert p.n_compared == 1
    d.move_to_end("a")
    assert not p.check(())


WRITES = {
    "item": lambda d: d.__setitem__("a", 2),
    "del": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "update": lambda d: d.update(a=2),
    "update from pairs": lambda d: d.update([("a", 2)]),
    "update from a dict": lambda d: d.update({"a": 2}),
    "or": lambda d: d.__ior__({"a": 2}),
    "init": lambda d: d.__init__(a=2),
    "setdefault": lambda d: (d.pop("a"), d.setdefault("a", 2)),
    "emptied, then copied into": lambda d: (d.clear(), d.update({"a": 2})),
    "a bool for it": lambda d: d.__setitem__("a", True),
    "through exec": lambda d: exec("a = 2", d, d),
    "a missing key": lambda d: d.__setitem__("missing", 0),
    "a missing key, setdefault": lambda d: d.setdefault("missing", 0),
    "a missing key, by merge": lambda d: d.update({"missing": 0}),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_every_way_of_writing_to_a_dict(way, kind):
    d = kind(a=1)
    p = program([("dict", d, {"a": 1, "missing": ABSENT}, None)])
    for _ in range(3):
        assert p.check(()) and p.n_compared == 0
        WRITES[way](d)
        assert p.n_compared == 1
        assert not p.check(())
        d.clear()
        d["a"] = 1


def test_keys_in_order():
    d = {"a": 1, "b": 2}
    p = program([("dict", d, {}, ("a", "b"))])
    assert p.check(()) and p.n_compared == 0
    d["a"] = d.pop("a")
    assert not p.check(())


CLASS_WRITES = {
    "attribute": lambda base, cls: setattr(cls, "x", 2),
    "attribute of a base": lambda base, cls: setattr(base, "y", 2),
    "del": lambda base, cls: delattr(cls, "x"),
    "a missing one": lambda base, cls: setattr(base, "missing", 1),
    "__bases__": lambda base, cls: setattr(cls, "__bases__", (type("Other", (), {"y": 1}),)),
}


@pytest.mark.parametrize("way", CLASS_WRITES)
@pytest.mark.parametrize("looked_up", [False, True])
def test_every_way_of_writing_to_a_class(way, looked_up):
    base = type("Base", (), {"y": 1})
    cls = type("Class", (base,), {"x": 1})
    p = program([("class", cls, {"x": 1, "y": 1, "missing": ABSENT}, cls.__mro__)])
    assert p.check(()) and p.n_compared == 0
    base.unrelated = 1
    if looked_up:
        assert cls.x == 1
    assert p.n_compared == 1
    assert p.check(()) and p.n_compared == 0
    CLASS_WRITES[way](base, cls)
    assert not p.check(())


def test_a_class_whose_versions_are_used_up_is_compared_each_time():
    class C:
        x = 1

    p = program([("class", C, {"x": 1}, C.__mro__)])
    for i in range(3000):  # 3.13 gives one class a thousand versions, 3.12 has no such limit
        C.x = 1
        assert p.check(())
        C.x = 2
        assert not p.check(()), i


def test_two_programs_over_one_dict():
    d = {"a": 1}
    first, second = program([("dict", d, {"a": 1}, None)]), program([("dict", d, {"a": 2}, None)])
    assert first.check(()) and not second.check(())
    d["a"] = 2
    assert not first.check(()) and second.check(())
    del first
    d["a"] = 1
    assert not second.check(())
    d["a"] = 2
    assert second.check(())


def test_one_dict_twice_in_one_program():
    d = {"a": 1, "b": 1}
    p = program([("dict", d, {"a": 1}, None), ("dict", d, {"b": 1}, None)])
    assert p.check(()) and p.n_compared == 0
    d["b"] = 2
    assert p.n_compared == 2
    assert not p.check(()) and p.explain(()) == 1


def test_a_write_by_a_finaliser_in_the_middle_of_a_check():
    """An OrderedDict's keys are compared one by one, by an iterator: a collection may run in between."""
    d, victim = collections.OrderedDict(a=1, b=2), {"x": 1}
    p = program([("dict", victim, {"x": 1}, None), ("dict", d, {}, ("a", "b"))])
    assert p.check(())
    thresholds = gc.get_threshold()
    gc.freeze()  # what else the process has is not looked through each time
    gc.set_threshold(1)
    try:
        for _ in range(50):
            victim["x"] = 1
            cycle = Node()
            cycle.itself = cycle
            weakref.finalize(cycle, victim.__setitem__, "x", 2)
            del cycle
            p.check(())  # whatever it says: the next one must not believe what was written to meanwhile
            gc.collect()
            assert not p.check(())
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_nothing_is_left_behind(growth):
    nodes = [own_table(Node()) for _ in range(5)]

    def run():
        p = tree_program(nodes)
        assert p.check(())

    assert growth(run, 500) == 0


def test_objects_die_with_their_program():
    node = Node()
    gone = weakref.ref(node)
    p = tree_program([node])
    assert p.check(())
    del node
    assert gone() is not None
    del p
    assert gone() is None


def test_a_cycle_through_a_program_is_collected():
    node = own_table(Node())
    p = tree_program([node])
    assert p.check(())
    node.__dict__["program"] = p
    gone = weakref.ref(node)
    del node, p
    gc.collect()
    assert gone() is None


def test_off_and_on():
    d = {"a": 1}
    before = use_watchers(False)
    try:
        by_tag = program([("dict", d, {"a": 1}, None)])
    finally:
        assert use_watchers(before) is False
    assert by_tag.check(()) and by_tag.n_compared == 1
    assert by_tag.check(())
    d["a"] = 2
    assert not by_tag.check(())

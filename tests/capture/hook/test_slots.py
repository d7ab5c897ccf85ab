"""Every kind of slot: reaches what it should, fails when it cannot."""

import collections
import gc
import types

import pytest
from hook_programs import Plain, holds, program


def test_slot_arg():
    p = program([("arg", 1)], [("equal", 0, "x")], 2)
    assert p.check((0, "x"))
    assert not p.check(("x", 0))


def test_slot_const():
    box = [1]
    p = program([("const", box)], [("length", 0, 1)], 0)
    assert p.check(())
    box.append(2)
    assert not p.check(())


def test_slot_weak_fails_once_the_object_is_gone():
    owner = Plain(x=1)
    p = program([("weak", owner), ("attr", 0, "x")], [("equal", 1, 1)], 0)
    assert p.check(())
    owner.x = 2
    assert not p.check(())
    owner.x = 1
    assert p.check(())
    del owner
    gc.collect()
    assert not p.check(())


def test_slot_dict_item():
    d = {"a": 1}
    path = [("arg", 0), ("dict_item", 0, "a")]
    assert holds(path, ("equal", 1), d)
    d["a"] = 2
    assert not holds(path, ("equal", 1), d)
    del d["a"]
    assert not holds(path, ("equal", 1), d)
    assert not holds(path, ("equal", 1), [1])


def test_slot_instance_dict_runs_no_user_code():
    class Loud:
        def __getattribute__(self, name):
            raise AssertionError("user code ran")

    loud = Loud()
    object.__setattr__(loud, "x", 5)
    path = [("arg", 0), ("instance_dict", 0), ("dict_item", 1, "x")]
    assert holds(path, ("equal", 5), loud)
    object.__setattr__(loud, "x", 6)
    assert not holds(path, ("equal", 5), loud)
    assert not holds(path, ("equal", 5), object())


def test_slot_instance_dict_follows_dict_replacement():
    thing = Plain(x=1)
    p = program([("arg", 0), ("instance_dict", 0), ("dict_item", 1, "x")], [("equal", 2, 1)])
    assert p.check((thing,))
    thing.__dict__ = {"x": 2}
    assert not p.check((thing,))


def test_slot_instance_dict_of_a_class_and_of_builtin_types():
    class C:
        x = 1

    path = [("arg", 0), ("instance_dict", 0), ("dict_item", 1, "x")]
    assert holds(path, ("equal", 1), C)
    C.x = 2
    assert not holds(path, ("equal", 1), C)
    assert holds([("arg", 0), ("instance_dict", 0)], ("absent", "no such method"), int)
    assert not holds([("arg", 0), ("instance_dict", 0)], ("absent", "bit_length"), int)
    assert int.bit_length(5) == 3


def test_slot_list_item_and_tuple_item():
    for kind, make in (("list_item", list), ("tuple_item", tuple)):
        assert holds([("arg", 0), (kind, 0, 1)], ("equal", 8), make([7, 8]))
        assert holds([("arg", 0), (kind, 0, -1)], ("equal", 8), make([7, 8]))
        assert not holds([("arg", 0), (kind, 0, 1)], ("equal", 8), make([7, 9]))
        assert not holds([("arg", 0), (kind, 0, 2)], ("equal", 8), make([7, 8]))
        assert not holds([("arg", 0), (kind, 0, -3)], ("equal", 8), make([7, 8]))
        assert not holds([("arg", 0), (kind, 0, 0)], ("equal", 8), {0: 8})
    assert not holds([("arg", 0), ("list_item", 0, 0)], ("equal", 8), (8,))
    Pair = collections.namedtuple("Pair", "a b")
    assert holds([("arg", 0), ("tuple_item", 0, 1)], ("equal", 2), Pair(1, 2))


def test_slot_attr():
    class C:
        __slots__ = ("s",)

        @property
        def p(self):
            return self.s + 1

    c = C()
    assert not holds([("arg", 0), ("attr", 0, "s")], ("equal", 1), c)
    c.s = 1
    assert holds([("arg", 0), ("attr", 0, "s")], ("equal", 1), c)
    assert holds([("arg", 0), ("attr", 0, "p")], ("equal", 2), c)
    c.s = 2
    assert not holds([("arg", 0), ("attr", 0, "s")], ("equal", 1), c)
    assert not holds([("arg", 0), ("attr", 0, "p")], ("equal", 2), c)


def test_slot_cell():
    x = 1

    def f():
        return x  # noqa: F821 - deleted below

    (cell,) = f.__closure__
    p = program([("const", cell), ("cell", 0)], [("equal", 1, 1)], 0)
    assert p.check(())
    x = 2
    assert not p.check(())
    x = 1
    assert p.check(())
    del x
    assert not p.check(())
    assert not holds([("arg", 0), ("cell", 0)], ("equal", 1), 1)
    assert not holds([("arg", 0), ("cell", 0)], ("equal", 1), types.CellType())


def test_slot_type():
    assert holds([("arg", 0), ("type", 0)], ("is", int), 1)
    assert not holds([("arg", 0), ("type", 0)], ("is", int), True)


def test_slot_python():
    assert holds([("arg", 0), ("python", 0, len)], ("equal", 3), "abc")
    assert not holds([("arg", 0), ("python", 0, len)], ("equal", 3), "abcd")
    assert not holds([("arg", 0), ("python", 0, len)], ("equal", 3), 5)


@pytest.mark.parametrize("more", [1, 2, 9])
def test_slot_python_of_several(more: int):
    """What it is given is reached before it, also by way of another such slot, and in the order in which it stands."""
    others = [("python", 0, lambda x, y: x + y, 1) for _ in range(more)]
    slots = [("arg", 0), ("arg", 1), *others, ("python", 1, lambda *parts: parts, 0, *range(2, 2 + more))]
    assert holds(slots, ("equal", ("y", "x", *more * ["xy"])), "x", "y")
    assert not holds(slots, ("equal", ("x", "y", *more * ["xy"])), "x", "y")
    with pytest.raises(ValueError, match="before it"):
        program([("arg", 0), ("python", 0, len, 1)], [])


def test_a_slot_that_no_check_uses_must_be_reachable():
    p = program([("arg", 0), ("attr", 0, "x")], [("type", 0, Plain)])
    assert p.check((Plain(x=1),))
    assert not p.check((Plain(),))
    assert p.explain((Plain(),)) == 1 == p.n_checks


def test_slots_are_reached_only_once_the_checks_before_hold():
    calls = []

    def record(x):
        calls.append(x)
        return x

    p = program([("arg", 0), ("python", 0, record)], [("type", 0, int), ("equal", 1, 3)])
    assert not p.check(("x",))
    assert calls == []
    assert p.check((3,))
    assert calls == [3]

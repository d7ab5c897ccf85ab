"""Every kind of slot and check: holds when it should, fails for each kind of change."""

import collections
import decimal
import enum
import gc
import math
import types
import weakref

import pytest

from moebius.hook import ABSENT, GuardProgram, features


def program(slots, checks, n_positional=1, kwnames=()):
    return GuardProgram(n_positional, kwnames, slots, checks)


def holds(slot_path, check, *args):
    """A program whose last slot is looked at by `check` (its slot field is filled in)."""
    p = program(slot_path, [(check[0], len(slot_path) - 1, *check[1:])], n_positional=len(args))
    return p.check(args)


class Plain:
    def __init__(self, **values):
        self.__dict__.update(values)


# ---- arguments ----


def test_arity():
    p = program([], [], 2, ("k",))
    assert p.check((1, 2), {"k": 3})
    assert not p.check((1,), {"k": 3})
    assert not p.check((1, 2, 3), {"k": 3})
    assert not p.check((1, 2), {})
    assert not p.check((1, 2), {"j": 3})
    assert not p.check((1, 2), {"k": 3, "j": 4})
    assert p.explain((1,), {}) == -1
    assert p.explain((1, 2), {"k": 3}) is None


def test_keyword_order_and_names_that_are_not_interned():
    p = program([("arg", 0), ("arg", 1)], [("equal", 0, 1), ("equal", 1, 2)], 0, ("alpha", "beta"))
    assert p.check((), {"alpha": 1, "beta": 2})
    assert not p.check((), {"beta": 2, "alpha": 1})
    assert p.check((), {"".join(["al", "pha"]): 1, "".join(["be", "ta"]): 2})


# ---- slots ----


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
        return x

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


# ---- checks ----


def test_check_is():
    a, b = [], []
    assert holds([("arg", 0)], ("is", a), a)
    assert not holds([("arg", 0)], ("is", a), b)
    assert not holds([("arg", 0)], ("is", None), 0)


def test_check_is_weak():
    a = Plain()
    p = program([("arg", 0)], [("is_weak", 0, weakref.ref(a))])
    assert p.check((a,))
    assert not p.check((Plain(),))
    assert not p.check((None,))
    watch = weakref.ref(a)
    del a
    gc.collect()
    assert watch() is None
    assert not p.check((None,))


def test_check_type():
    class C:
        pass

    class D(C):
        pass

    thing = C()
    p = program([("arg", 0)], [("type", 0, C)])
    assert p.check((thing,))
    assert not p.check((D(),))
    thing.__class__ = D
    assert not p.check((thing,))
    assert not holds([("arg", 0)], ("type", int), True)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    pass


NAN = float("nan")
Pair = collections.namedtuple("Pair", "a b")
EQUAL = [
    (1, 1), (10**30, 10**30), (-5, -5), (True, True), (None, None), ("text", "te" + "xt"[0:2]), (b"x", bytes([120])),
    (0.5, 0.5), (0.0, 0.0), (-0.0, -0.0), (NAN, float("nan")), (NAN, NAN), (1j, 1j), (complex(NAN, -0.0), complex(NAN, -0.0)),
    ((), ()), ((1, (2.0, "x")), (1, (2.0, "x"))), (frozenset({1, "a"}), frozenset({"a", 1})), (..., ...),
    (slice(1, None, 2), slice(1, None, 2)), (range(3), range(0, 3)), (Colour.RED, Colour.RED), (Pair(1, 2), Pair(1, 2)),
    (decimal.Decimal("1.0"), decimal.Decimal("1.0")), (int, int),
]
DIFFERENT = [
    (1, True), (True, 1), (1, 1.0), (0, False), (0, None), (1, 2), (10**30, 10**30 + 1), ("a", "b"), ("a", b"a"), (b"a", "a"),
    ("text", Text("text")), (Text("text"), "text"), (0.0, -0.0), (-0.0, 0.0), (NAN, 0.0), (0.0, NAN), (0.0, 0), (1j, -1j),
    (complex(0.0, 0.0), complex(0.0, -0.0)), (complex(0.0, 0.0), complex(-0.0, 0.0)), (0j, 0.0), ((1,), (True,)),
    ((0.0,), (-0.0,)), ((1, 2), (1, 2, 3)), ((1, 2), [1, 2]), (((1,),), ((1.0,),)), ((1, 2), Pair(1, 2)), (Pair(1, 2), (1, 2)),
    (Pair(1, 2), Pair(1, True)), (frozenset({1}), frozenset({True})), (frozenset({1}), frozenset({1, 2})), (frozenset({1}), {1}),
    (frozenset({0.0}), frozenset({-0.0})),
    (slice(1), slice(True)), (slice(1), slice(2)), (range(0), range(2, 2)), (range(3), range(4)), (Colour.RED, Colour.BLUE),
    (Colour.RED, 1), (Level.LOW, 1), (1, Level.LOW), (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    (decimal.Decimal("0"), decimal.Decimal("-0")), (int, bool),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "actual"), EQUAL, ids=repr)
def test_check_equal_holds(expected, actual):
    assert holds([("arg", 0)], ("equal", expected), actual)


@pytest.mark.parametrize(("expected", "actual"), DIFFERENT, ids=repr)
def test_check_equal_fails(expected, actual):
    assert not holds([("arg", 0)], ("equal", expected), actual)


def test_check_equal_tells_numpy_zeros_apart():
    numpy = pytest.importorskip("numpy")
    assert holds([("arg", 0)], ("equal", numpy.float32(0.0)), numpy.float32(0.0))
    assert not holds([("arg", 0)], ("equal", numpy.float32(0.0)), numpy.float32(-0.0))
    assert not holds([("arg", 0)], ("equal", numpy.float64(0.0)), numpy.float64(-0.0))
    assert not holds([("arg", 0)], ("equal", numpy.float64(0.0)), 0.0)


def test_check_equal_refuses_what_can_change():
    for value in ([], {}, set()):
        with pytest.raises(TypeError):
            program([("arg", 0)], [("equal", 0, value)])


def test_check_length():
    for make in (list, tuple, set, lambda r: dict.fromkeys(r)):
        assert holds([("arg", 0)], ("length", 3), make(range(3)))
        assert not holds([("arg", 0)], ("length", 3), make(range(2)))
        assert not holds([("arg", 0)], ("length", 3), make(range(4)))
    assert not holds([("arg", 0)], ("length", 3), 3)


def test_check_keys():
    d = {"a": 1, "b": 2}
    p = program([("arg", 0)], [("keys", 0, ("a", "b"))])
    assert p.check((d,))
    d["a"] = 3
    assert p.check((d,))
    d["a"] = d.pop("a")  # deleted and added again: the order changed
    assert list(d) == ["b", "a"]
    assert not p.check((d,))
    assert not p.check(({"a": 1},))
    assert not p.check(({"a": 1, "b": 2, "c": 3},))
    assert not p.check((["a", "b"],))
    assert not holds([("arg", 0)], ("keys", (1,)), {True: 0})


def test_check_keys_sees_the_order_of_an_ordered_dict():
    d = collections.OrderedDict(a=1, b=2)
    p = program([("arg", 0)], [("keys", 0, ("a", "b"))])
    assert p.check((d,))
    d.move_to_end("a")
    assert not p.check((d,))


def test_check_absent():
    assert holds([("arg", 0)], ("absent", "k"), {"j": 1})
    assert not holds([("arg", 0)], ("absent", "k"), {"k": 1})
    assert not holds([("arg", 0)], ("absent", "k"), [])


def test_check_contents_of_a_list():
    a, b = object(), [1]
    box = [a, 1, "s", b]
    p = program([("arg", 0)], [("contents", 0, (a, 1, "s", b))])
    assert p.check((box,))
    b.append(2)  # shallow: the list inside is the same list
    assert p.check((box,))
    for change in (
        lambda x: x.__setitem__(1, True),
        lambda x: x.__setitem__(0, object()),
        lambda x: x.__setitem__(3, [1, 2]),
        lambda x: x.append(1),
        lambda x: x.pop(),
        lambda x: x.reverse(),
    ):
        other = list(box)
        change(other)
        assert not p.check((other,))
    assert not p.check(({0: a},))


def test_check_contents_of_tuples_and_sets():
    assert holds([("arg", 0)], ("contents", (1, 2)), (1, 2))
    assert not holds([("arg", 0)], ("contents", (1, 2)), (1, 2.0))
    s = {1, 2, 3}
    p = program([("arg", 0)], [("contents", 0, tuple(s))])
    assert p.check((s,))
    s.add(4)
    assert not p.check((s,))
    s.discard(4)
    assert p.check((s,))
    s.remove(1)
    s.add(True)
    assert not p.check((s,))


def test_check_contents_while_a_comparison_empties_the_list():
    class Evil(tuple):
        __slots__ = ()

    box = ["x" * 3, "y"]
    p = program([("arg", 0), ("python", 0, lambda b: b.clear())], [("is", 1, None), ("contents", 0, ("xxx", "y"))])
    assert not p.check((box,))


def dict_program(d, expected, order=None):
    return program([], [("dict", d, expected, order)], 0)


def test_check_dict():
    thing = object()
    d = {"a": thing, "n": 1}
    p = dict_program(d, {"a": thing, "n": 1, "gone": ABSENT})
    for _ in range(3):
        assert p.check(())
    d["other"] = 5  # not listed: looked at once, then quick again
    assert p.check(())
    d["n"] = True
    assert not p.check(())
    assert not p.check(())
    d["n"] = 1
    assert p.check(())
    d["a"] = object()
    assert not p.check(())
    d["a"] = thing
    d["gone"] = None
    assert not p.check(())
    del d["gone"]
    assert p.check(())
    del d["a"]
    assert not p.check(())
    d["a"] = thing  # deleted and added again; the order is not guarded
    assert p.check(())
    d.clear()
    assert not p.check(())
    d.update(a=thing, n=1)
    assert p.check(())


def test_check_dict_order():
    d = {"a": 1, "b": 2}
    p = dict_program(d, {}, ("a", "b"))
    assert p.check(())
    d["a"] = 7
    assert p.check(())
    d["a"] = d.pop("a")
    assert not p.check(())
    d["b"] = d.pop("b")
    assert p.check(())
    d["c"] = 1
    assert not p.check(())


def test_check_dict_order_of_an_ordered_dict():
    d = collections.OrderedDict(a=1, b=2)
    p = dict_program(d, {}, ("a", "b"))
    assert p.check(())
    assert p.check(())
    d.move_to_end("a")
    assert not p.check(())


@pytest.mark.parametrize("rounds", [1, 300])  # 300: CPython has specialised the stores
def test_check_dict_of_an_instance_sees_attribute_stores(rounds):
    thing = Plain()
    thing.training = True

    def store(value):
        thing.training = value

    p = dict_program(thing.__dict__, {"training": True})
    for _ in range(rounds):
        assert p.check(())
        store(False)
        assert not p.check(())
        store(True)
    assert p.check(())
    setattr(thing, "training", 1)  # noqa: B010
    assert not p.check(())
    thing.training = True
    assert p.check(())
    del thing.training
    assert not p.check(())


def test_check_dict_of_an_instance_with_values_set_in_init():
    class C:
        def __init__(self):
            self.training = True
            self.n = 1

    things = [C() for _ in range(50)]  # shared keys, inline values on 3.13

    def store(thing, value):
        thing.training = value

    for _ in range(20):
        for thing in things:
            p = dict_program(thing.__dict__, {"training": True})
            assert p.check(())
            store(thing, False)
            assert not p.check(())
            store(thing, True)
            assert p.check(())


def test_check_dict_of_globals():
    module = types.ModuleType("made_up")
    exec("limit = 3\ndef raise_limit(n):\n    global limit\n    limit = n", module.__dict__)
    p = dict_program(module.__dict__, {"limit": 3})
    for _ in range(100):
        assert p.check(())
        module.raise_limit(4)
        assert not p.check(())
        module.raise_limit(3)


def class_program(cls, expected, mro=None):
    return program([], [("class", cls, expected, mro or cls.__mro__)], 0)


def test_check_class():
    class A:
        x = 1

        def f(self):
            return 1

    class B(A):
        y = 2

    f = A.f
    p = class_program(B, {"x": 1, "f": f, "y": 2, "z": ABSENT})
    for _ in range(3):
        assert p.check(())
    A.other = 1
    assert p.check(())
    A.f = lambda self: 2
    assert not p.check(())
    A.f = f
    assert p.check(())
    B.f = f  # found elsewhere, but the same object
    assert p.check(())
    del B.f
    B.x = True
    assert not p.check(())
    del B.x
    assert p.check(())
    A.z = 0
    assert not p.check(())
    del A.z
    assert p.check(())
    del A.x
    assert not p.check(())


def test_check_class_mro():
    class A:
        pass

    class B:
        pass

    class C(A):
        pass

    p = class_program(C, {})
    assert p.check(())
    C.__bases__ = (A, B)
    assert not p.check(())
    C.__bases__ = (A,)
    assert p.check(())


def test_check_class_looked_up_natively_in_between():
    class A:
        x = 1

    p = class_program(A, {"x": 1})
    for i in range(2000):  # beyond the number of versions that 3.13 gives one class
        A.x = 1
        assert p.check(())
        A.x = 2
        assert A().x == 2
        assert not p.check(()), i


def test_check_instance():
    class C:
        pass

    class D(C):
        pass

    things = [C(), Plain(x=1), types.SimpleNamespace(a=1), types.ModuleType("m")]
    for thing in things:
        own = thing.__dict__
        p = program([], [("instance", thing, type(thing), own), ("dict", own, {}, None)], 0)
        for _ in range(3):
            assert p.check(())
        thing.attribute = 1
        assert p.check(())
    for thing in things[:2]:
        own, cls = thing.__dict__, type(thing)
        p = program([], [("instance", thing, cls, own)], 0)
        assert p.check(())
        thing.__dict__ = dict(own)
        assert not p.check(())
        assert p.explain(()) == 0
        thing.__dict__ = own
        assert p.check(())
        thing.__class__ = D
        assert not p.check(())
        thing.__class__ = cls
        assert p.check(())
        q = program([], [("instance", thing, cls, None)], 0)
        thing.__dict__ = {}
        assert q.check(())
        assert q.check(())
        assert not p.check(())
        thing.__class__ = D
        assert not q.check(())
        assert not program([], [("instance", thing, cls, {})], 0).check(())
    with pytest.raises(ValueError, match="class"):
        program([], [("instance", C, type, None)], 0)
    assert not program([], [("instance", 5, int, {})], 0).check(())
    assert program([], [("instance", 5, int, None)], 0).check(())


def test_check_instance_with_values_set_in_init():
    class C:
        def __init__(self):
            self.a = 1

    for _ in range(50):
        thing = C()
        p = program([], [("instance", thing, C, thing.__dict__)], 0)
        assert p.check(())
        thing.a = 2
        assert p.check(())
        thing.__dict__ = {"a": 2}
        assert not p.check(())


def test_check_distinct_and_same():
    a, b, c = [], [], []
    three = [("arg", 0), ("arg", 1), ("arg", 2)]
    p = program(three, [("distinct", 0, 1, 2)], 3)
    assert p.check((a, b, c))
    assert not p.check((a, b, a))
    assert not p.check((a, a, b))
    assert not p.check((b, a, a))
    p = program(three, [("same", 0, 2)], 3)
    assert p.check((a, b, a))
    assert not p.check((a, b, c))


def test_check_distinct_many():
    n = 40
    things = [object() for _ in range(n)]
    p = program([("arg", i) for i in range(n)], [("distinct", *range(n))], n)
    assert p.check(tuple(things))
    things[3] = things[31]
    assert not p.check(tuple(things))


def test_check_python():
    p = program([("arg", 0), ("arg", 1)], [("python", lambda a, b: a < b, 0, 1)], 2)
    assert p.check((1, 2))
    assert not p.check((2, 1))
    assert not p.check((2, "x"))
    flag = True
    p = program([], [("python", lambda: flag)], 0)
    assert p.check(())
    flag = False
    assert not p.check(())
    n = 12
    p = program([("arg", i) for i in range(n)], [("python", lambda *a: sum(a) == 66, *range(n))], n)
    assert p.check(tuple(range(n)))


# ---- errors, explain, time ----


def test_errors_fail_the_guard_and_are_cleared_but_interrupts_are_not():
    def fail(x):
        raise x

    p = program([("arg", 0)], [("python", fail, 0)])
    assert not p.check((ValueError(),))
    with pytest.raises(KeyboardInterrupt):
        p.check((KeyboardInterrupt(),))
    with pytest.raises(KeyboardInterrupt):
        p.explain((KeyboardInterrupt(),))
    p = program([("arg", 0), ("python", 0, fail)], [("is", 1, None)])
    assert not p.check((ValueError(),))
    with pytest.raises(KeyboardInterrupt):
        p.check((KeyboardInterrupt(),))


def test_explain_names_the_first_check_that_fails():
    d = {"k": 1}
    p = program(
        [("arg", 0), ("attr", 0, "x")], [("type", 0, Plain), ("dict", d, {"k": 1}, None), ("equal", 1, 5), ("is", 1, 5)]
    )
    assert p.explain((Plain(x=5),)) is None
    assert p.explain((5,)) == 0
    d["k"] = 2
    assert p.explain((Plain(x=5),)) == 1
    assert p.explain((5,)) == 0
    d["k"] = 1
    assert p.explain((Plain(x=6),)) == 2
    assert p.explain((Plain(),)) == 2
    assert p.explain((Plain(x=5), 1)) == -1


def test_time_gives_nanoseconds_for_each_check():
    d = {"k": 1}
    p = program(
        [("arg", 0), ("attr", 0, "x")], [("type", 0, Plain), ("dict", d, {"k": 1}, None), ("equal", 1, 5)]
    )
    times = p.time((Plain(x=5),), n=2000)
    assert len(times) == 3
    assert all(0 < t < 1e5 for t in times)
    with pytest.raises(ValueError, match="check 2"):
        p.time((Plain(x=6),))
    with pytest.raises(ValueError, match="arguments"):
        p.time(())


@pytest.mark.parametrize(
    ("slots", "checks", "message"),
    [
        ([("arg", 1)], [], "no such argument"),
        ([("arg", -1)], [], "no such argument"),
        ([("attr", 0, "x")], [], "slot that does not exist"),
        ([("arg", 0), ("attr", 1, "x")], [], "slot that does not exist"),
        ([("arg", 0), ("attr", 0, 1)], [], "must be a str"),
        ([("nonsense", 0)], [], "unknown kind"),
        ([("arg",)], [], "number of fields"),
        ([7], [], "must be a tuple"),
        ([], [("is", 0, None)], "slot that does not exist"),
        ([("arg", 0)], [("is", 0)], "number of fields"),
        ([("arg", 0)], [("nonsense", 0)], "unknown kind"),
        ([("arg", 0)], [("type", 0, 1)], "needs a class"),
        ([("arg", 0)], [("keys", 0, ["a"])], "must be a tuple"),
        ([], [("dict", [], {}, None)], "needs a dict"),
        ([], [("dict", {}, {}, ["a"])], "all keys"),
        ([], [("class", 1, {}, ())], "needs a class"),
        ([], [("python", 1)], "needs a callable"),
    ],
)
def test_bad_programs_are_refused(slots, checks, message):
    with pytest.raises(ValueError, match=message):
        program(slots, checks)


# ---- re-entrancy and memory ----


def test_a_guard_may_run_its_own_program_again():
    depth = 0

    def again(x):
        nonlocal depth
        if depth < 5:
            depth += 1
            assert p.check((x,))
        return x

    p = program([("arg", 0), ("python", 0, again), ("attr", 1, "real")], [("equal", 2, 3), ("type", 0, int)])
    assert p.check((3,))
    assert depth == 5


def test_a_guard_that_drops_what_it_looks_at():
    box = {"k": [1, 2, 3]}
    p = program(
        [("const", box), ("dict_item", 0, "k"), ("python", 1, lambda _: box.clear()), ("list_item", 1, 2)],
        [("is", 2, None), ("equal", 3, 3)],
        0,
    )
    assert p.check(())


def test_programs_are_collected_in_cycles():
    owner = Plain()
    owner.program = program(
        [("const", owner), ("attr", 0, "x")],
        [("is", 0, owner), ("dict", owner.__dict__, {"k": ABSENT}, None), ("python", owner.__init__), ("keys", 1, (owner,))],
        0,
    )
    watch = weakref.ref(owner)
    del owner
    gc.collect()
    assert watch() is None


def test_no_growth(growth):
    thing = Plain(x=5, y=[1, 2], z=(1, 2))
    d = {"k": 1}

    def cell_owner():
        return d

    p = program(
        [
            ("arg", 0), ("attr", 0, "x"), ("instance_dict", 0), ("dict_item", 2, "y"), ("list_item", 3, 0),
            ("attr", 0, "z"), ("tuple_item", 5, 1), ("const", cell_owner.__closure__[0]), ("cell", 7), ("type", 0),
            ("python", 0, lambda t: [t.x]), ("weak", thing),
        ],
        [
            ("type", 0, Plain), ("equal", 1, 5), ("length", 3, 2), ("contents", 3, (1, 2)), ("keys", 2, ("x", "y", "z")),
            ("absent", 2, "q"), ("equal", 5, (1, 2)), ("is", 9, Plain), ("contents", 10, (5,)), ("same", 0, 11),
            ("distinct", 1, 3, 5), ("python", lambda t: True, 0), ("dict", d, {"k": 1}, ("k",)),
            ("class", Plain, {"x": ABSENT}, Plain.__mro__), ("is", 8, d), ("instance", thing, Plain, thing.__dict__),
        ],
    )  # fmt: skip
    good, bad = (thing,), (Plain(x=5, y=[1, 3], z=(1, 2)),)
    assert p.explain(good) is None
    assert p.explain(bad) == 3

    def run():
        assert p.check(good)
        assert not p.check(bad)
        p.explain(good)
        p.explain(bad)
        d["j"] = 1
        p.check(good)
        del d["j"]

    assert growth(run, 10_000) == 0


def test_no_growth_of_programs(growth):
    def run():
        thing = Plain(x=1)
        p = program(
            [("const", thing), ("weak", thing), ("attr", 0, "x")],
            [("equal", 2, 1), ("distinct", 0, 2), ("dict", thing.__dict__, {"x": 1}, ("x",)), ("python", len, 2)],
            0,
        )
        assert p.explain(()) == 3
        with pytest.raises(ValueError):
            program([("const", thing), ("attr", 5, "x")], [])

    assert growth(run, 500) == 0


def test_features_say_what_this_python_allows():
    found = features()
    assert found["dict_tags"] is True
    assert found["class_tags"] is True
    assert isinstance(found["instance_dict_tags"], bool)
    assert math.isfinite(len(found["tensor_reading"]))

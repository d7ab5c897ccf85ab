"""Every kind of check: holds when it should, fails for each kind of change."""

import collections
import decimal
import enum
import gc
import weakref

import pytest
from hook_programs import Plain, holds, program


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
def shown(value):
    """As repr() does; a set's members in one order in every process."""
    return f"frozenset{sorted(value, key=repr)}" if isinstance(value, frozenset) else repr(value)


EQUAL = [
    (1, 1),
    (10**30, 10**30),
    (-5, -5),
    (True, True),
    (None, None),
    ("text", "te" + "xt"[0:2]),
    (b"x", bytes([120])),
    (0.5, 0.5),
    (0.0, 0.0),
    (-0.0, -0.0),
    (NAN, float("nan")),
    (NAN, NAN),
    (1j, 1j),
    (complex(NAN, -0.0), complex(NAN, -0.0)),
    ((), ()),
    ((1, (2.0, "x")), (1, (2.0, "x"))),
    (frozenset({1, "a"}), frozenset({"a", 1})),
    (..., ...),
    (slice(1, None, 2), slice(1, None, 2)),
    (range(3), range(0, 3)),
    (Colour.RED, Colour.RED),
    (Pair(1, 2), Pair(1, 2)),
    (decimal.Decimal("1.0"), decimal.Decimal("1.0")),
    (int, int),
]
DIFFERENT = [
    (1, True),
    (True, 1),
    (1, 1.0),
    (0, False),
    (0, None),
    (1, 2),
    (10**30, 10**30 + 1),
    ("a", "b"),
    ("a", b"a"),
    (b"a", "a"),
    ("text", Text("text")),
    (Text("text"), "text"),
    (0.0, -0.0),
    (-0.0, 0.0),
    (NAN, 0.0),
    (0.0, NAN),
    (0.0, 0),
    (1j, -1j),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    (complex(0.0, 0.0), complex(-0.0, 0.0)),
    (0j, 0.0),
    ((1,), (True,)),
    ((0.0,), (-0.0,)),
    ((1, 2), (1, 2, 3)),
    ((1, 2), [1, 2]),
    (((1,),), ((1.0,),)),
    ((1, 2), Pair(1, 2)),
    (Pair(1, 2), (1, 2)),
    (Pair(1, 2), Pair(1, True)),
    (frozenset({1}), frozenset({True})),
    (frozenset({1}), frozenset({1, 2})),
    (frozenset({1}), {1}),
    (frozenset({0.0}), frozenset({-0.0})),
    (slice(1), slice(True)),
    (slice(1), slice(2)),
    (range(0), range(2, 2)),
    (range(3), range(4)),
    (Colour.RED, Colour.BLUE),
    (Colour.RED, 1),
    (Level.LOW, 1),
    (1, Level.LOW),
    (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    (decimal.Decimal("0"), decimal.Decimal("-0")),
    (int, bool),
]


@pytest.mark.parametrize(("expected", "actual"), EQUAL, ids=shown)
def test_check_equal_holds(expected, actual):
    assert holds([("arg", 0)], ("equal", expected), actual)


@pytest.mark.parametrize(("expected", "actual"), DIFFERENT, ids=shown)
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


@pytest.mark.parametrize("n", [0, 1, 200])
def test_check_none_of(n):
    others = tuple(Plain() for _ in range(n))
    p = program([("arg", 0)], [("none_of", 0, others)])
    assert p.check((Plain(),))
    assert not any(p.check((o,)) for o in others)


def test_check_none_of_keeps_the_objects():
    other = Plain()
    alive = weakref.ref(other)
    p = program([("arg", 0)], [("none_of", 0, (other,))])
    del other
    assert not p.check((alive(),))
    del p
    gc.collect()
    assert alive() is None


def test_check_answers():
    answers = {"a": 1, "b": None}
    p = program([], [("answers", ((lambda: answers["a"], 1), (lambda: answers["b"], None)))], 0)
    assert p.check(())
    for a, b in ((2, None), (True, None), (1.0, None), (1, 0)):
        answers.update(a=a, b=b)
        assert not p.check(())
    del answers["a"]
    assert not p.check(())
    answers.update(a=1, b=None)
    assert p.check(())


@pytest.mark.parametrize("pairs", [[(len, 1)], ((1, 2),), (len,), ((len,),)])
def test_check_answers_refuses_what_is_no_pair(pairs):
    with pytest.raises(ValueError, match="check 0"):
        program([], [("answers", pairs)], 0)


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

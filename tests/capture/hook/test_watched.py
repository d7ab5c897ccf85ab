"""Checks on dicts, classes and instances known from the start: quick while nobody writes, never blind."""

import collections
import types

import pytest

from moebius.hook import ABSENT, GuardProgram, features, use_watchers


@pytest.fixture(params=["watchers", "version tags"] if features()["dict_watchers"] else ["version tags"], autouse=True)
def told_by(request):
    before = use_watchers(request.param == "watchers")
    yield
    use_watchers(before)


def program(slots, checks, n_positional=1, kwnames=()):
    return GuardProgram(n_positional, kwnames, slots, checks)


class Plain:
    def __init__(self, **values):
        self.__dict__.update(values)


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


def test_check_dict_order_of_an_ordered_dict_of_one():
    d = collections.OrderedDict(a=1)
    p = dict_program(d, {}, ("a",))
    assert p.check(())
    d.move_to_end("a")
    assert p.check(())
    d["b"] = 2
    assert not p.check(())
    del d["b"]
    assert p.check(())
    del d["a"]
    assert not p.check(())
    d["b"] = 1
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
    C.__bases__ = (B,)
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


def test_check_function():
    def f(x, y=2, *, z=3):
        return x

    def g(x, y=2, *, z=3):
        return x + 1

    code, defaults, keyword_defaults = f.__code__, f.__defaults__, f.__kwdefaults__
    p = program([], [("function", f, code, defaults, keyword_defaults)], 0)
    assert p.check(())
    f.note = 1
    f.__name__ = "h"
    assert p.check(())
    f.__code__ = g.__code__
    assert not p.check(())
    f.__code__ = code
    assert p.check(())
    f.__defaults__ = (4,)
    assert not p.check(()) and p.explain(()) == 0
    f.__defaults__ = defaults
    assert p.check(())
    f.__kwdefaults__ = {"z": 3}
    assert not p.check(())
    f.__kwdefaults__ = None
    assert not p.check(())
    del f.__defaults__
    bare = program([], [("function", f, code, None, None)], 0)
    assert bare.check(())
    f.__defaults__ = ()
    assert not bare.check(())


@pytest.mark.parametrize("spec", [("function", len, None, None, None), ("function", lambda: 0, None, None, None)])
def test_check_function_refuses_what_is_none(spec):
    with pytest.raises(ValueError, match="check 0"):
        program([], [spec], 0)


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

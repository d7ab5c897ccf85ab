"""The frame hook: which frames are taken, by what, and what is left as it was."""

import functools
import types

import pytest
from hook_programs import asking

from moebius.hook import (
    attach,
    attached,
    call_hooked,
    call_hooked_for,
    detach,
    evaluator,
    forget_frames,
    is_hooked,
    leave_alone,
    mark_skip,
    set_frame_callback,
)

pytestmark = pytest.mark.usefixtures("clean_frames")


def test_only_under_call_hooked():
    def f(x):
        return x

    def outer(x):
        assert evaluator() == "moebius"
        assert is_hooked()
        return f(x), f(x)

    asked = asking({"f": lambda x: ("taken", x)})
    assert f(1) == 1
    assert asked == []
    assert call_hooked(outer, 1) == (("taken", 1),) * 2
    assert asked == ["outer", "f"]
    assert call_hooked(outer, 2) == (("taken", 2),) * 2
    assert asked == ["outer", "f"]  # once per code object
    assert f(1) == 1


def test_arguments_in_the_order_of_varnames():
    def f(a, b=2, /, c=3, *args, k, j=5, **kw):
        return "native"

    def calls():
        return [f(1, k=4), f(1, 9, 8, 7, 6, k=4, j=0, z=1), f(*[1, 2], **{"c": 5, "k": 6})]

    attach(f, lambda *a: a)
    assert call_hooked(calls) == [
        (1, 2, 3, 4, 5, (), {}),
        (1, 9, 8, 4, 0, (7, 6), {"z": 1}),
        (1, 2, 5, 6, 5, (), {}),
    ]


def test_binding_errors_are_those_of_python():
    def f(a):
        return a

    attach(f, lambda a: a)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        call_hooked(lambda: f())


def test_arguments_that_are_cells():
    def f(x):
        def inner():
            return x

        return inner

    attach(f, lambda x: ("taken", x))
    assert call_hooked(lambda: f(3)) == ("taken", 3)


def test_methods_and_calls_from_c():
    class C:
        def m(self, x):
            return "native"

        def __add__(self, other):
            return "native"

        @property
        def p(self):
            return "native"

        def __init__(self, v=0):
            self.v = v

    def taken(*args):
        return ("taken", *args[1:])

    for f in (C.m, C.__add__, C.p.fget):
        attach(f, taken)
    c = C()
    assert call_hooked(lambda: c.m(1)) == ("taken", 1)
    assert call_hooked(c.m, 1) == ("taken", 1)
    assert call_hooked(lambda: c + 2) == ("taken", 2)
    assert call_hooked(lambda: c.p) == ("taken",)
    assert call_hooked(lambda: list(map(c.m, [1, 2]))) == [("taken", 1), ("taken", 2)]
    assert call_hooked(functools.partial(C.m, c), 5) == ("taken", 5)


def test_lambdas_and_defaults_and_keywords_to_call_hooked():
    f = lambda a, b=7: (a, b)  # noqa: E731
    attach(f.__code__, lambda a, b: ("taken", a, b))
    assert call_hooked(f, 1) == ("taken", 1, 7)
    assert call_hooked(f, b=1, a=2) == ("taken", 2, 1)
    with pytest.raises(TypeError):
        call_hooked()


def test_generators_and_coroutines_are_not_taken():
    def gen(n):
        yield from range(n)

    async def co():
        return 5

    async def agen():
        yield 1

    taken = lambda *a: "taken"  # noqa: E731
    for f in (gen, co, agen):
        attach(f, taken)

    def run():
        c = co()
        try:
            c.send(None)
        except StopIteration as stop:
            result = stop.value
        return list(gen(3)), result, type(agen())

    asked = asking({})
    assert call_hooked(run) == ([0, 1, 2], 5, types.AsyncGeneratorType)
    assert asked == ["run"]


def test_generators_that_are_resumed_under_the_hook_go_on():
    def helper(x):
        return x

    def gen():
        while True:
            try:
                yield helper(1)
            except ValueError:
                yield helper(2)

    attach(helper, lambda x: x + 10)
    g = gen()
    assert next(g) == 1
    assert call_hooked(next, g) == 11
    assert call_hooked(g.throw, ValueError()) == 12
    assert next(g) == 1
    g.close()


def test_class_bodies_modules_and_exec_are_not_asked():
    asked = asking({})

    def run():
        namespace = {}
        exec("x = 1\nclass C:\n    y = 2\n    def m(self): return 3\nr = C().m()", namespace)
        return namespace["r"]

    assert call_hooked(run) == 3
    assert "m" in asked
    assert "C" not in asked
    assert "<module>" not in asked


def test_none_means_never_again_until_forgotten():
    def f():
        return "native"

    asked = asking({})
    call_hooked(f)
    call_hooked(f)
    assert asked == ["f"]
    forget_frames()
    call_hooked(f)
    assert asked == ["f", "f"]
    detach(f)
    call_hooked(f)
    assert asked == ["f"] * 3


def test_mark_skip_attach_detach_attached():
    def f():
        return "native"

    asked = asking({"f": lambda: "asked"})
    mark_skip(f.__code__)
    assert call_hooked(f) == "native"
    assert asked == []
    forget_frames()  # skip marks stay
    assert call_hooked(f) == "native"
    assert attached(f) is None
    attach(f, mine := (lambda: "attached"))
    assert attached(f) is mine
    assert call_hooked(f) == "attached"
    detach(f)
    assert attached(f) is None
    assert call_hooked(f) == "asked"
    for bad in (1, len):
        with pytest.raises(TypeError):
            mark_skip(bad)
    with pytest.raises(TypeError):
        attach(f, 1)
    with pytest.raises(TypeError):
        set_frame_callback(1)


def test_what_is_left_alone_is_so_with_all_that_it_calls():
    def inner():
        return "native"

    def pieces():
        yield inner()

    def alone():
        return inner(), inner(), list(pieces())

    asked = asking({"inner": lambda: "asked"})
    leave_alone(alone)
    assert call_hooked(alone) == ("native", "native", ["native"]) and asked == []
    forget_frames()
    assert call_hooked(alone) == ("native", "native", ["native"]) and asked == []
    leave_alone(pieces)
    assert call_hooked(lambda: [*pieces(), inner()]) == ["native", "asked"]
    with pytest.raises(ZeroDivisionError):
        leave_alone(fails := lambda: 1 / 0)
        call_hooked(fails)
    assert call_hooked(inner) == "asked"


def test_functions_made_from_one_code_are_kept_apart():
    def make(n):
        def f(x):
            return n + x

        return f

    one, two = make(1), make(2)
    asked = asking({"f": lambda x: ("taken", x)})
    assert call_hooked(one, 5) == ("taken", 5)
    assert call_hooked(two, 5) == 7  # other cells: what was captured for `one` would be wrong here
    assert call_hooked(one, 5) == ("taken", 5)
    assert asked == ["f"]
    with pytest.raises(ValueError, match="free variables"):
        attach(one.__code__, len)
    attach(one, lambda function, x: ("told", function, x), pass_function=True)
    assert call_hooked(one, 5) == ("told", one, 5)
    assert call_hooked(two, 5) == ("told", two, 5)
    many = make(3)
    nine = lambda a, b, c, d, e, f, g, h, i: 0  # noqa: E731
    attach(nine, lambda *a: a, pass_function=True)
    assert call_hooked(nine, *range(9)) == (nine, *range(9))
    del many


def test_functions_with_other_globals_are_kept_apart():
    def f():
        return "native"

    twin = types.FunctionType(f.__code__, {"__builtins__": {}})
    asking({"f": lambda: "taken"})
    assert call_hooked(f) == "taken"
    assert call_hooked(twin) == "native"


def test_the_callback_may_attach_by_itself():
    def make(n):
        def f():
            return n

        return f

    def callback(function):
        attach(function, lambda g: ("told", g()), pass_function=True)
        return lambda: "not this one"

    set_frame_callback(callback)
    assert call_hooked(make(3)) == ("told", 3)


def test_each_owner_has_its_own():
    """Two captured functions with other options meet the same function below them."""

    def f():
        return "native"

    class Stand:
        def __init__(self, says):
            self.says = says

        def __call__(self):
            return self.says

    def outer():
        return f()

    stands, asked = {1: Stand("one"), 2: Stand("two")}, []
    now = 0

    def ask(function):
        if function is f:
            asked.append(now)
            return stands[now]
        return None

    set_frame_callback(ask)
    for now in (1, 2, 1, 2):
        assert call_hooked_for(now, None, outer) == stands[now].says
    assert asked == [1, 2]
    now = 1
    stands[1] = Stand("another")  # held weakly: the one before is gone
    assert call_hooked_for(1, None, outer) == "another" and asked == [1, 2, 1]
    assert call_hooked_for(2, None, outer) == "two" and asked == [1, 2, 1]
    with pytest.raises((TypeError, OverflowError)):
        call_hooked_for(-1, None, outer)
    with pytest.raises(TypeError):
        call_hooked_for(1, None)


def test_owners_that_are_gone_leave_nothing(growth):
    def f():
        return 1

    def outer():
        return f()

    serial = iter(range(1, 10**6))
    kept = []

    def ask(function):
        kept[:] = [functools.partial(int, 7)]
        return kept[0] if function is f else None

    set_frame_callback(ask)

    def once():
        assert call_hooked_for(next(serial), None, outer) == 7

    assert growth(once, 1000) == 0

"""Python functions that C code calls back are interpreted: the same answer as natively, and no frame ran natively."""
from __future__ import annotations

import bisect
import collections
import concurrent.futures
import contextlib
import contextvars
import copy
import functools
import gc
import heapq
import io
import itertools
import json
import operator
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from moebius.interpreter import InterpreterError, Machine, count_native_frames, interpret

CASES: list[Callable[[], Any]] = []

pytestmark = pytest.mark.usefixtures("no_gc_callbacks")


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES.append(function)
    return function


class Key:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value) % 3

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Key) and self.value == other.value

    def __lt__(self, other: Any) -> bool:
        return self.value < other.value

    def __repr__(self) -> str:
        return f"Key({self.value})"

    def __index__(self) -> int:
        return self.value

    def __add__(self, other: Any) -> Any:
        return Key(self.value + getattr(other, "value", other))

    __radd__ = __add__


@case
def sort_keys():
    return sorted("banana", key=lambda c: (-ord(c), c)), max([3, 1, 2], key=lambda x: -x), sorted([Key(2), Key(1)])


@case
def sort_by_cmp():
    items = [5, 3, 9]
    items.sort(key=functools.cmp_to_key(lambda a, b: b - a))
    return items


@case
def mapping_functions():
    lazy = map(lambda a, b: a * b, range(4), filter(lambda x: x % 2, range(9)))
    return list(lazy), functools.reduce(lambda a, b: a - b, [1, 2, 3]), list(itertools.starmap(pow, [(2, 3)]))


@case
def grouping():
    groups = itertools.groupby(range(6), key=lambda x: x // 2)
    return [(k, list(g)) for k, g in groups], list(itertools.accumulate([1, 2, 3], lambda a, b: a * b + 1))


@case
def dict_keys():
    table = {Key(i): i for i in range(6)}
    del table[Key(2)]
    table.update({Key(1): "one"})
    counted = collections.Counter(Key(i % 2) for i in range(5))
    return table[Key(1)], Key(2) in table, table.get(Key(5)), sorted(counted.values()), {Key(1)} | {Key(1), Key(2)}


@case
def list_searches():
    items = [Key(1), Key(2), Key(1)]
    return items.index(Key(2)), items.count(Key(1)), items == [Key(1), Key(2), Key(1)], (Key(1),) < (Key(3),)


@case
def searching_and_heaps():
    items = [Key(1), Key(3), Key(5)]
    heapq.heappush(items, Key(0))
    return bisect.bisect([1, 5, 7], 5, key=lambda x: -x), heapq.heappop(items), items


@case
def iteration_protocol():
    class Items:
        def __init__(self):
            self.n = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.n += 1
            if self.n > 3:
                raise StopIteration
            return self.n

        def __length_hint__(self):
            return 3

    return list(Items()), tuple(zip(Items(), Items(), strict=True)), dict(enumerate(Items())), sum(Items(), Key(0))


@case
def substitution():
    return re.sub(r"\d+", lambda m: str(int(m.group()) + 1), "a1b22"), re.compile("b").subn(lambda m: "x", "abba")


@case
def formatting():
    class Shown:
        def __format__(self, spec):
            return f"<{spec}>"

        def __repr__(self):
            return "shown"

    return f"{Shown():>3}", f"{Shown()!r:>7} {Shown():q}", operator.mod("%s%r", (Shown(), [Shown()])), str({1: Shown()})


@case
def printing_to_a_python_file():
    log = []

    class File:
        def write(self, text):
            log.append(text)

    with contextlib.redirect_stdout(File()):
        print("a", Key(1), file=File())
        print("b")
    return log


@case
def number_protocols():
    return range(Key(2), Key(5)), [10, 20, 30][Key(1)], int.from_bytes(bytes([Key(1)]), "big"), "ab" * Key(2)


@case
def class_creation():
    log = []

    class Named:
        def __set_name__(self, owner, name):
            log.append(("set_name", owner.__name__, name))

    class Meta(type):
        def __prepare__(name, bases, **kwargs):
            log.append(("prepare", name))
            return {}

        def __new__(meta, name, bases, namespace):
            log.append(("new", name))
            return super().__new__(meta, name, bases, namespace)

        def __call__(cls, *args):
            log.append(("call", cls.__name__, args))
            return super().__call__(*args)

        def mro(cls):
            log.append(("mro", cls.__name__))
            return super().mro()

    class Base(metaclass=Meta):
        def __init_subclass__(cls, **kwargs):
            log.append(("init_subclass", cls.__name__, kwargs))

        def __init__(self, x):
            log.append(("init", x))

    class Derived(Base):
        member = Named()

    list(map(Derived, [1, 2]))
    return log


@case
def descriptors_from_c():
    class Descriptor:
        def __get__(self, obj, owner):
            return ("got", obj is None)

        def __set__(self, obj, value):
            obj.log.append(value)

    class Owner:
        log: list = []
        member = Descriptor()

        @functools.cached_property
        def cached(self):
            return len(self.log)

        def __getattr__(self, name):
            return "dynamic " + name

    made = Owner()
    list(map(setattr, [made], ["member"], [3]))
    return operator.attrgetter("member", "cached", "absent")(made), made.log


@case
def caches_and_partials():
    calls = []

    @functools.lru_cache
    def cached(x):
        calls.append(x)
        return x * 2

    @functools.singledispatch
    def generic(x):
        return "any"

    @generic.register
    def _(x: int):
        return "int"

    part = functools.partial(lambda *a, **k: (a, k), 1, z=2)
    return cached(1), cached(1), calls, generic(1), generic(""), list(map(part, [5]))


@case
def factories():
    class Missing(dict):
        def __missing__(self, key):
            return key * 2

    default = collections.defaultdict(lambda: [0])
    default["a"].append(1)
    return default["a"], "{x}".format_map(Missing()), list(map(Missing().__getitem__, "ab"))


@case
def copying_and_pickling():
    made = copy.deepcopy([Key(1), {"a": Key(2)}])
    return made, pickle.loads(pickle.dumps({Key(3): [Key(4)]})), copy.copy(Key(5))


@case
def json_hooks():
    text = json.dumps({"a": Key(1)}, default=lambda k: k.value)
    return text, json.loads('{"a": [1, 2.5]}', object_hook=lambda d: sorted(d.items()), parse_float=lambda s: s)


@case
def contexts():
    variable = contextvars.ContextVar("variable", default=0)

    def inside(x):
        variable.set(x)
        return variable.get()

    return contextvars.copy_context().run(inside, 3), variable.get()


@case
def generators_walked_by_c():
    def numbers(n):
        for i in range(n):
            yield Key(i)

    return list(numbers(3)), dict(zip(numbers(2), map(Key, range(2)), strict=True)), max(numbers(4)), [*numbers(2)]


@case
def generator_made_by_c():
    def numbers(n):
        got = yield n
        yield got

    (made,) = map(numbers, [3])
    return next(made), made.send("sent"), type(made).__name__, made.gi_code.co_name


@case
def weakref_proxies():
    class Thing:
        def __len__(self):
            return 3

        def method(self):
            return "method"

        def __getattr__(self, name):
            return name

    thing = Thing()
    proxy = weakref.proxy(thing)
    return len(proxy), proxy.method(), proxy.other, bool(proxy)


@case
def abstract_checks():
    import abc

    class Sized(abc.ABC):  # noqa: B024
        @classmethod
        def __subclasshook__(cls, other):
            return hasattr(other, "size")

    class Box:
        size = 1

    class Claims:
        @property
        def __class__(self):
            return int

    return isinstance(Box(), Sized), issubclass(int, Sized), isinstance(Claims(), int)


@case
def exceptions_through_c():
    log = []

    def failing(x):
        if x == 2:
            raise ValueError(x)
        return x

    try:
        sorted([1, 2, 3], key=failing)
    except ValueError as error:
        log.append((error.args, error.__context__, [t for t in walk_lines(error)]))
    try:
        try:
            raise KeyError("first")
        except KeyError:
            list(map(failing, [2]))
    except ValueError as error:
        log.append(type(error.__context__).__name__)
    return log


def walk_lines(error):
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_name, trace.tb_lineno
        trace = trace.tb_next


@case
def frames_from_a_callback():
    def name(x):
        return sys._getframe(1).f_code.co_name, sys._getframe().f_code.co_name

    return list(map(name, [1]))


@case
def handled_exception_in_a_callback():
    try:
        raise KeyError(1)
    except KeyError:
        return list(map(lambda x: type(sys.exc_info()[1]).__name__, [1]))


@case
def standard_input_output():
    class Raw(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            buffer[:2] = b"ab"
            return 2 if not self.seen and not self.__dict__.update(seen=True) else 0

        seen = False

    return io.BufferedReader(Raw()).read()


@case
def code_run_by_c():
    namespace = {"__builtins__": __builtins__, "out": []}
    list(map(exec, ["out.append(1)\nclass A:\n    x = 1\nout.append(A.x)"], [namespace]))
    return namespace["out"], list(map(eval, ["(lambda: 5)()"]))


@case
def nested_callbacks():
    return sorted([3, 1, 2], key=lambda x: sum(map(lambda y: y * x, filter(lambda z: z > 1, range(4)))))


@case
def finalizers():
    log = []

    class Final:
        def __init__(self, name):
            self.name = name

        def __del__(self):
            log.append(self.name)

    def short():
        Final("local")

    short()
    one = Final("deleted")
    del one
    two = Final("overwritten")
    two = None
    cycle = Final("cycle")
    cycle.me = cycle
    del cycle
    gc.collect()

    class Late:
        pass

    Late.__del__ = lambda self: log.append("late")
    Late()

    class Derived(Final):
        pass

    Derived("derived")
    list(map(Final, ["c"]))
    return log, two


@case
def weakref_callbacks():
    log = []

    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing, lambda r: log.append(("ref", r() is None)))
    proxy = weakref.proxy(thing, lambda r: log.append("proxy"))
    weakref.finalize(thing, log.append, "finalize")
    table = weakref.WeakValueDictionary(x=thing)
    keys = weakref.WeakKeyDictionary({thing: 1})
    called = reference.__callback__ is not None
    del thing
    return sorted(map(str, log)), dict(table), dict(keys), called, type(proxy).__name__


@case
def threads():
    log = []
    thread = threading.Thread(target=lambda: log.append(sorted([2, 1], key=lambda x: x)))
    thread.start()
    thread.join()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return log, sorted(pool.map(lambda x: x * x, range(5))), pool.submit(lambda: {Key(1): 2}[Key(1)]).result()


@case
def looking_at_an_object_asks_it_nothing():
    log = []

    class Watched:
        def __getattribute__(self, name):
            log.append(name)
            return object.__getattribute__(self, name)

        def __call__(self):
            return 1

        def __getitem__(self, key):
            return key

    made = Watched()
    try:
        raise made
    except TypeError:
        pass
    return made(), made[2], hasattr(made, "x"), log


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_callbacks_are_interpreted(function):
    expected = repr(function())
    interpret(function)()  # imports and caches that are made once
    with count_native_frames() as seen:
        found = repr(interpret(function)())
    assert found == expected
    assert not seen


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_the_same_without_counting(function):
    assert repr(interpret(function)()) == repr(function())


def test_without_re_entry_the_callbacks_run_natively(monkeypatch):
    """The counter would see it: what the tests above rest on."""
    original = Machine.__init__

    def without(self, domain):
        type(domain).interprets_callbacks, before = False, type(domain).interprets_callbacks
        try:
            original(self, domain)
        finally:
            type(domain).interprets_callbacks = before

    monkeypatch.setattr(Machine, "__init__", without)
    with count_native_frames() as seen:
        interpret(dict_keys)()
    assert any(name.startswith("Key.__hash__") for name in seen)


def test_an_interpreter_error_in_a_callback_is_not_swallowed_by_c():
    def failing(x):
        sys.setprofile(print)

    def swallowing():
        class Quiet:
            def __del__(self):
                failing(1)

        made = [Quiet()]
        made.clear()  # CPython only prints what a __del__ raises
        return "went on"

    with pytest.raises(InterpreterError, match="setprofile"):
        interpret(swallowing)()

"""Entry: which target answers a call, what it looks like from outside, and that it keeps nothing alive."""

import copy
import functools
import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest

from moebius.hook import Entry, GuardProgram, disable, enable, evaluator, finish, is_disabled


def typed(cls, n=1):
    return GuardProgram(n, (), [("arg", 0)], [("type", 0, cls)])


def cold_calls():
    calls = []

    def cold(entry, args, kwargs):
        calls.append((args, kwargs))
        return "cold", entry

    return cold, calls


def test_cold_then_warm():
    cold, calls = cold_calls()
    entry = Entry(lambda x: x, cold)
    assert entry(1, k=2) == ("cold", entry)
    assert calls == [((1,), {"k": 2})]
    assert (entry.hits, entry.misses) == (0, 1)
    entry.add(typed(int), lambda x: ("int", x))
    entry.add(typed(str), lambda x: ("str", x))
    assert entry(1) == ("int", 1)
    assert entry("a") == ("str", "a")
    assert entry(1.0) == ("cold", entry)
    assert (entry.hits, entry.misses) == (2, 2)


def test_arguments_reach_the_target_as_they_were_given():
    entry = Entry(lambda *a, **k: None, lambda *a: "cold")
    entry.add(GuardProgram(1, ("b", "a"), [], []), lambda *args, **kwargs: (args, list(kwargs.items())))
    assert entry(1, b=2, a=3) == ((1,), [("b", 2), ("a", 3)])
    assert entry(1, a=3, b=2) == "cold"
    assert entry(*(1,), **{"b": 2, "a": 3}) == ((1,), [("b", 2), ("a", 3)])


def test_most_recently_hit_is_tried_first():
    order = []

    def program(name, value):
        return GuardProgram(1, (), [("arg", 0)], [("python", lambda x: order.append(name) or x == value, 0)])

    entry = Entry(lambda x: x, lambda *a: "cold")
    programs = {name: program(name, name) for name in "abc"}
    for name in "abc":
        entry.add(programs[name], lambda x: x)
    assert [p for p, _, _ in entry.targets] == [programs[n] for n in "cba"]
    entry("a")
    assert order == ["c", "b", "a"]
    order.clear()
    entry("a")
    assert order == ["a"]
    assert [(p, hits) for p, _, hits in entry.targets] == [(programs[n], h) for n, h in (("a", 2), ("c", 0), ("b", 0))]


def test_remove_and_clear():
    entry = Entry(lambda x: x, lambda *a: "cold")
    p, q = typed(int), typed(str)
    entry.add(p, lambda x: "p")
    entry.add(q, lambda x: "q")
    assert entry.remove(p) is True
    assert entry.remove(p) is False
    assert (entry(1), entry("s")) == ("cold", "q")
    entry.clear()
    assert entry("s") == "cold"
    assert entry.targets == []
    with pytest.raises(TypeError):
        entry.add("no program", len)
    with pytest.raises(TypeError):
        entry.add(p, 1)
    with pytest.raises(TypeError):
        Entry(1, len)
    with pytest.raises(TypeError):
        Entry(len, None)


def test_exceptions_pass_through():
    def fail(*args):
        raise LookupError("mine")

    entry = Entry(fail, fail)
    with pytest.raises(LookupError, match="mine"):
        entry(1)
    entry.add(typed(int), fail)
    with pytest.raises(LookupError, match="mine"):
        entry(1)

    def interrupt(x):
        raise KeyboardInterrupt

    entry.add(GuardProgram(1, (), [("arg", 0)], [("python", interrupt, 0)]), fail)
    with pytest.raises(KeyboardInterrupt):
        entry(1)


def test_it_looks_like_the_function():
    def function(a, b: int = 2, *, c="x") -> str:
        """The doc."""
        return f"{a}{b}{c}"

    function.mark = object()
    entry = Entry(function, lambda *a: "cold")
    assert entry.__wrapped__ is function
    assert entry.function is function
    assert entry.__name__ == "function"
    assert entry.__qualname__ == function.__qualname__
    assert entry.__module__ == __name__
    assert entry.__doc__ == "The doc."
    assert entry.mark is function.mark
    assert inspect.signature(entry) == inspect.signature(function)
    entry.other = 1
    assert entry.__dict__["other"] == 1
    assert "function" in repr(entry)
    assert callable(entry)
    assert functools.wraps(entry)(lambda: None).__name__ == "function"
    assert Entry(functools.partial(function, 1), len).__wrapped__.func is function


def test_it_binds_like_a_function():
    seen = []

    def cold(entry, args, kwargs):
        seen.append(args)
        return entry.function(*args, **kwargs)

    class C:
        def __init__(self):
            self.n = 5

        method = Entry(lambda self, x: self.n + x, cold)

    c = C()
    assert c.method(1) == 6
    assert C.method(c, 2) == 7
    assert seen == [(c, 1), (c, 2)]
    assert c.method.__self__ is c
    C.method.add(GuardProgram(2, (), [("arg", 0), ("attr", 0, "n")], [("equal", 1, 5)]), lambda self, x: "warm")
    bound = c.method
    assert (c.method(1), bound(1), C.method(c, 1)) == ("warm",) * 3
    c.n = 6
    assert (c.method(1), bound(1)) == (7, 7)


def by_name(x):
    return x


by_name = Entry(by_name, lambda e, a, k: "cold")


def test_it_is_copied_and_pickled_like_a_function():
    assert copy.copy(by_name) is by_name
    assert copy.deepcopy({"f": by_name})["f"] is by_name
    sys.modules.setdefault(__name__, types.ModuleType(__name__)).by_name = by_name
    assert pickle.loads(pickle.dumps(by_name)) is by_name
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(Entry(lambda: 1, len))


def test_disable():
    entry = Entry(lambda x: "native", lambda *a: "cold")
    entry.add(typed(int), lambda x: "warm")
    assert entry(1) == "warm"
    assert not is_disabled()
    disable()
    try:
        assert is_disabled()
        assert entry(1) == "native"
        assert entry("s") == "native"
    finally:
        enable()
    assert entry(1) == "warm"


@pytest.mark.parametrize(("value", "expected"), [("1", "True"), ("0", "False"), ("", "False")])
def test_the_environment_variable_disables(value, expected):
    code = "import moebius.hook as h; print(h.is_disabled())"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MOEBIUS_DISABLE": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == expected


def test_guards_may_change_the_entry_while_it_looks():
    entry = Entry(lambda x: "native", lambda *a: "cold")

    def clear(x):
        entry.clear()
        gc.collect()
        return False

    def remove_itself(x):
        entry.remove(self_removing)
        return True

    entry.add(typed(int), lambda x: "warm")
    entry.add(GuardProgram(1, (), [("arg", 0)], [("python", clear, 0)]), lambda x: "never")
    assert entry(1) == "warm"  # the call goes on with the targets that it started with
    assert entry.targets == []
    assert entry(1) == "cold"
    self_removing = GuardProgram(1, (), [("arg", 0)], [("python", remove_itself, 0)])
    entry.add(self_removing, lambda x: "hit")
    assert entry(1) == "hit"
    assert entry(1) == "cold"
    grow = GuardProgram(1, (), [("arg", 0)], [("python", lambda x: entry.add(typed(str), lambda x: "new"), 0)])
    entry.add(grow, lambda x: "never")
    assert entry("s") == "cold"
    assert entry("s") == "new"


def test_recursion_through_guards_and_targets():
    def target(n):
        return 1 if n == 0 else n * entry(n - 1)

    entry = Entry(target, lambda *a: "cold")
    entry.add(typed(int), target)
    assert entry(20) == 2432902008176640000
    assert entry.hits == 21

    def guard(n):
        return n == 0 or entry(n - 1) == "t"

    entry.clear()
    entry.add(GuardProgram(1, (), [("arg", 0)], [("python", guard, 0)]), lambda n: "t")
    assert entry(15) == "t"

    def forever(n):
        return entry(n)

    entry.clear()
    entry.add(typed(int), forever)
    with pytest.raises(RecursionError):
        entry(1)


def test_threads():
    entry = Entry(lambda x: x, lambda e, args, kwargs: args[0])
    stop, wrong = threading.Event(), []

    def caller(seed):
        values = [seed, str(seed), float(seed)]
        while not stop.is_set():
            for v in values:
                if entry(v) != v:
                    wrong.append(v)

    def changer():
        while not stop.is_set():
            programs = [typed(c) for c in (int, str, float)]
            for p in programs:
                entry.add(p, lambda x: x)
            time.sleep(0)
            for p in programs:
                entry.remove(p)

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(4)] + [threading.Thread(target=changer)]
    for t in threads:
        t.start()
    time.sleep(1.0)
    stop.set()
    for t in threads:
        t.join()
    assert wrong == []
    assert entry.hits > 0
    assert entry.misses > 0


def test_entries_are_collected():
    class Owner:
        pass

    def make():
        owner = Owner()

        def function(x):
            return owner

        owner.entry = Entry(function, lambda e, a, k: owner)
        owner.entry.add(GuardProgram(0, (), [("const", owner)], [("is", 0, owner)]), lambda: owner.entry)
        owner.entry()
        owner.entry(1)
        return weakref.ref(owner), weakref.ref(owner.entry)

    refs = make()
    gc.collect()
    assert [r() for r in refs] == [None, None]


def test_no_growth(growth):
    entry = Entry(lambda x: x, lambda e, a, k: a)
    entry.add(typed(int), lambda x: x)
    entry.add(typed(str), lambda x: x)

    def run():
        entry(1)
        entry("s")
        entry(1.0, k=1)

    assert growth(run, 10_000) == 0

    def change():
        p = typed(float)
        entry.add(p, lambda x: x)
        entry(1.0)
        entry.remove(p)
        Entry(lambda x: x, len).add(p, len)
        entry.targets  # noqa: B018

    assert growth(change, 2000) == 0


def test_a_warm_call_builds_no_frame_and_installs_no_hook():
    def cold(entry, args, kwargs):
        raise AssertionError("cold")

    entry = Entry(lambda x: x, cold)
    entry.add(typed(int), lambda x: (sys._getframe(1), evaluator()))
    caller, installed = entry(1)
    assert caller is sys._getframe()
    assert installed == "default"


def test_warm_overhead_is_small():
    """Against calling the same plain Python function: best of several rounds each, in one process."""

    def function(x):
        return x

    entry = Entry(function, lambda *a: None)
    entry.add(GuardProgram(1, (), [("arg", 0)], [("type", 0, int)]), function)

    def best(f):
        smallest = float("inf")
        for _ in range(15):
            start = time.perf_counter()
            for _ in range(5000):
                f(1)
            smallest = min(smallest, time.perf_counter() - start)
        return smallest

    ratio = best(entry) / best(function)
    assert ratio < 6, ratio


def test_a_call_that_is_put_off_is_made_when_the_frame_is_left():
    """10,000 calls, each the last thing that the one before does, need no more stack than one."""
    entries = {}

    def step(n, seen):
        seen.append(n)
        return entries["step"].later(n - 1, seen) if n else "end"

    def fails(n):
        return entries["fails"].later(n - 1) if n else 1 // 0

    def cold(entry, args, kwargs):
        return entry.function(*args, **kwargs)

    for function in (step, fails):
        entry = entries[function.__name__] = Entry(function, cold)
    seen = []
    assert entries["step"](10_000, seen) == "end" and seen == list(range(10_000, -1, -1))
    with pytest.raises(ZeroDivisionError):
        entries["fails"](10_000)
    assert finish(step(3, [])) == "end" and finish(7) == 7
    put_off = entries["step"].later(3, seen)
    assert type(put_off).__name__ == "Continuation"
    held = weakref.ref(entries.pop("step"))
    del put_off, entry, step
    gc.collect()
    assert held() is None

"""The frame hook: which frames are taken, by what, and what is left as it was."""

import functools
import gc
import subprocess
import sys
import threading
import traceback
import types
import weakref

import pytest

from moebius.hook import (
    Entry,
    GuardProgram,
    attach,
    attached,
    call_hooked,
    call_unhooked,
    detach,
    disable,
    enable,
    evaluator,
    forget_frames,
    is_hooked,
    mark_skip,
    set_frame_callback,
)


@pytest.fixture(autouse=True)
def clean():
    before = set_frame_callback(None)
    yield
    set_frame_callback(before)
    forget_frames()
    assert evaluator() == "default"
    assert not is_hooked()


def asking(answers):
    """A callback that records what it was asked and answers by name."""
    asked = []

    def callback(function):
        asked.append(function.__name__)
        return answers.get(function.__name__)

    set_frame_callback(callback)
    return asked


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


def test_exceptions():
    def f(x):
        return x

    def fail(x):
        raise LookupError(x)

    attach(f, fail)

    def caught():
        try:
            f(1)
        except LookupError as error:
            return error
        return None

    error = call_hooked(caught)
    assert error.args == (1,)
    assert [e.name for e in traceback.extract_tb(error.__traceback__)] == ["caught", "fail"]

    def chained():
        try:
            raise KeyError("first")
        except KeyError:
            f(2)

    with pytest.raises(LookupError) as info:
        call_hooked(chained)
    assert isinstance(info.value.__context__, KeyError)

    def clean_up(log):
        try:
            f(3)
        finally:
            log.append("finally")

    log = []
    with pytest.raises(LookupError):
        call_hooked(clean_up, log)
    assert log == ["finally"]
    assert evaluator() == "default"

    with pytest.raises(ZeroDivisionError):
        call_hooked(lambda: 1 / 0)
    assert evaluator() == "default"


def test_a_callback_that_fails_is_reported_and_the_function_runs_natively(monkeypatch):
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: reports.append(info.exc_value))

    def fail(function):
        raise RuntimeError("in the callback")

    def f():
        return "native"

    set_frame_callback(fail)
    assert call_hooked(f) == "native"
    assert call_hooked(f) == "native"
    assert [str(e) for e in reports] == ["in the callback"]

    def g():
        return "native"

    set_frame_callback(lambda function: 5)
    assert call_hooked(g) == "native"
    assert isinstance(reports[-1], TypeError)

    def interrupt(function):
        raise KeyboardInterrupt

    def h():
        return "native"

    set_frame_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        call_hooked(h)
    with pytest.raises(KeyboardInterrupt):
        call_hooked(lambda: [h()])
    assert evaluator() == "default"


def test_callables_and_callbacks_run_without_the_hook():
    states = []

    def helper():
        return "native"

    def f():
        return "native"

    def taken():
        states.append((is_hooked(), evaluator()))
        return helper()

    def callback(function):
        states.append((is_hooked(), evaluator()))
        helper()
        return taken if function.__name__ == "f" else None

    set_frame_callback(callback)

    def outer():
        return f(), is_hooked(), evaluator()

    assert call_hooked(outer) == ("native", True, "moebius")
    assert states == [(False, "default")] * 3


def test_an_entry_called_under_the_hook_switches_it_off():
    states = []

    def target():
        states.append((is_hooked(), evaluator()))
        return call_hooked(lambda: evaluator())

    entry = Entry(target, lambda e, a, k: (target(), "cold"))

    def outer():
        return entry(), is_hooked(), evaluator()

    assert call_hooked(outer) == (("moebius", "cold"), True, "moebius")
    entry.add(GuardProgram(0, (), [], []), target)
    assert call_hooked(outer) == ("moebius", True, "moebius")
    assert states == [(False, "default")] * 2


def test_nesting_recursion_and_call_unhooked():
    depth = []

    def f(n):
        return 0 if n == 0 else 1 + f(n - 1)

    def taken(n):
        depth.append(n)
        return 0 if n == 0 else 1 + call_hooked(f, n - 1)

    attach(f, taken)
    assert call_hooked(f, 30) == 30
    assert depth == list(range(30, -1, -1))
    assert call_hooked(lambda: call_hooked(lambda: (is_hooked(), call_unhooked(is_hooked), is_hooked()))) == (
        True,
        False,
        True,
    )
    assert call_hooked(lambda: call_unhooked(f, 3)) == 3


def test_recursion_errors():
    def f(n):  # runs natively once there is no room for what is attached
        return f(n + 1)

    def taken(n):
        return call_hooked(f, n + 1)

    attach(f, taken)
    with pytest.raises(RecursionError):
        call_hooked(f, 0)

    def native(n):
        return native(n + 1)

    with pytest.raises(RecursionError):
        call_hooked(native, 0)
    assert evaluator() == "default"
    assert call_hooked(lambda: 5) == 5


def test_disable_switches_the_hook_off_too():
    def f():
        return "native"

    attach(f, lambda: "taken")
    disable()
    try:
        assert call_hooked(f) == "native"
    finally:
        enable()
    assert call_hooked(f) == "taken"


def test_arguments_are_released():
    class Thing:
        pass

    def f(thing, *more, **kw):
        return None

    refs = []

    def taken(thing, more, kw):
        refs.append(weakref.ref(thing))
        return None

    attach(f, taken)
    call_hooked(lambda: f(Thing(), 1, 2, k=Thing()))
    assert refs[0]() is None


def test_locals_that_die_with_the_frame_may_call_back():
    log = []

    def f(x):
        return "native"

    class Loud:
        def __del__(self):
            log.append((f("again"), is_hooked()))

    def taken(x):
        return ("taken", x if isinstance(x, str) else None)

    attach(f, taken)
    assert call_hooked(lambda: f(Loud())) == ("taken", None)
    assert log == [(("taken", "again"), True)]


def test_notes_go_with_their_code():
    class Token:
        def __call__(self):
            return "taken"

    token = Token()
    ref = weakref.ref(token)
    namespace = {}
    exec("def f(): return 1", namespace)
    attach(namespace["f"], token)
    del token
    assert call_hooked(namespace["f"]) == "taken"
    namespace.clear()
    gc.collect()
    assert ref() is None


def test_no_growth(growth):
    def f(a, *args, k=1, **kw):
        return a

    def fail(a):
        return a

    def raises(a):
        raise ValueError(a)

    attach(f, lambda *a: a)
    attach(fail, raises)

    def outer():
        f(1, 2, z=3)
        try:
            fail([1])
        except ValueError:
            pass
        return [f(i) for i in range(3)]

    assert growth(lambda: call_hooked(outer), 10_000) == 0
    set_frame_callback(lambda function: None)

    def fresh():
        namespace = {}
        exec("def g(x): return x", namespace)
        call_hooked(namespace["g"], 1)
        attach(namespace["g"], len)
        call_hooked(namespace["g"], "abc")

    assert growth(fresh, 500) == 0


def test_threads_do_not_see_each_others_hook():
    def f():
        return "native"

    attach(f, lambda: "taken")
    inside, go, results = threading.Event(), threading.Event(), {}

    def hooked():
        def body():
            inside.set()
            go.wait(10)
            return f(), is_hooked()

        results["hooked"] = call_hooked(body)

    thread = threading.Thread(target=hooked)
    thread.start()
    inside.wait(10)
    results["plain"] = (f(), is_hooked(), evaluator())
    results["overlapping"] = call_hooked(lambda: f())
    results["after"] = (f(), is_hooked(), evaluator())
    go.set()
    thread.join()
    assert results == {
        "hooked": ("taken", True),
        "plain": ("native", False, "moebius"),
        "overlapping": "taken",
        "after": ("native", False, "moebius"),
    }
    assert evaluator() == "default"


def test_many_threads():
    def f(x):
        return x

    attach(f, lambda x: ("taken", x))
    wrong = []

    def work(seed):
        for i in range(400):
            if call_hooked(lambda: f(i)) != ("taken", i) or f(i) != i:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert evaluator() == "default"


def test_tracing_goes_on_around_taken_frames():
    events = []

    def f():
        return "native"

    attach(f, lambda: "taken")

    def outer():
        return f()

    def trace(frame, event, arg):
        if frame.f_code is outer.__code__ or frame.f_code is f.__code__:
            events.append((frame.f_code.co_name, event))
        return trace

    sys.settrace(trace)
    try:
        result = call_hooked(outer)
    finally:
        sys.settrace(None)
    assert result == "taken"
    assert ("outer", "call") in events
    assert ("outer", "return") in events
    assert ("f", "line") not in events


def test_a_subinterpreter_is_refused():
    """In a process of its own: a subinterpreter stays behind otherwise."""
    code = """
import sys, moebius.hook
path = [p for p in sys.path]
try:
    import _interpreters as interpreters  # 3.13
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
script = f'''
import sys
sys.path[:] = {path!r}
try:
    import moebius.hook.native
except ImportError as error:
    print("refused:", error)
else:
    print("imported")
'''
print(run(interpreters.create(), script))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "refused: " in out.stdout, out.stdout + out.stderr
    assert "main interpreter" in out.stdout, out.stdout + out.stderr

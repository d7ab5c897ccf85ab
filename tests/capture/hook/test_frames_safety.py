"""The frame hook under exceptions, recursion, threads and garbage collection; subinterpreters."""

import gc
import subprocess
import sys
import threading
import traceback
import weakref

import pytest

from moebius.hook import (
    Entry,
    GuardProgram,
    attach,
    call_hooked,
    call_unhooked,
    disable,
    enable,
    evaluator,
    is_hooked,
    set_frame_callback,
    set_own_tracer,
)

pytestmark = pytest.mark.usefixtures("clean_frames")


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
    set_frame_callback(lambda function: lambda x: x)  # a new callable for each
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
            if call_hooked(lambda i=i: f(i)) != ("taken", i) or f(i) != i:
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

    set_own_tracer(trace)  # (under any other frames are left alone)
    sys.settrace(trace)
    try:
        result = call_hooked(outer)
    finally:
        sys.settrace(None)
        set_own_tracer(None)
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

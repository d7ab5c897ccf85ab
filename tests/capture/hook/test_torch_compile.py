"""Our frame hook beside torch.compile's: each calls the other's, and what was installed before is there again after."""

import threading

import pytest

torch = pytest.importorskip("torch")

from moebius import capture  # noqa: E402
from moebius.hook import (  # noqa: E402
    Entry,
    attach,
    call_hooked,
    call_unhooked,
    evaluator,
    forget_frames,
    is_hooked,
    set_frame_callback,
    set_settler,
    settle,
)
from moebius.interpreter import interpret  # noqa: E402
from moebius.torch_facts.torch_private import set_eval_frame  # noqa: E402


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    before = set_frame_callback(None)  # capture's own, where another test has imported it
    set_settler(set_eval_frame)
    yield
    set_frame_callback(before)
    forget_frames()
    torch._dynamo.reset()
    assert evaluator() == "default"
    assert not is_hooked()


def counting_backend():
    """A torch.compile backend that counts the graphs that it is given."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    return backend, graphs


def test_compiled_calls_inside_hooked_ones():
    backend, graphs = counting_backend()

    def helper(x):
        return x + 1

    def body(x):
        return helper(x) * 2

    compiled = torch.compile(body, backend=backend)
    taken = []
    attach(helper, lambda x: taken.append(1) or x + 1)

    def outer(x):
        before = evaluator()
        y = compiled(x)
        return y, helper(x), before, evaluator(), is_hooked()

    x = torch.ones(3)
    for _ in range(3):
        y, h, before, after, hooked = call_hooked(outer, x)
        assert torch.equal(y, torch.full((3,), 4.0))
        assert torch.equal(h, x + 1)
        assert (before, after, hooked) == ("moebius", "moebius", True)
        assert evaluator() == "default"
    assert len(graphs) == 1
    assert len(taken) == 3  # torch inlines `helper` into its graph; the call beside it is ours
    assert torch.equal(compiled(x), torch.full((3,), 4.0))
    assert len(graphs) == 1


def test_hooked_calls_inside_compiled_ones():
    backend, graphs = counting_backend()

    def f(x):
        return x

    attach(f, lambda x: ("taken", evaluator()))

    @torch.compiler.disable
    def break_here(x):
        results.append((evaluator(), call_hooked(lambda: (f(x), evaluator())), evaluator()))
        return x + 1

    @torch.compile(backend=backend)
    def body(x):
        x = x * 2
        x = break_here(x)
        return x * 3

    for _ in range(3):
        results = []
        assert torch.equal(body(torch.ones(2)), torch.full((2,), 9.0))
        ((before, (taken, inside), after),) = results
        assert taken == ("taken", before)  # ours is off while what is attached runs: theirs is back
        assert inside == "moebius"
        assert after == before
        assert evaluator() == "default"
    assert len(graphs) == 2


def test_entries_inside_compiled_ones_inside_hooked_ones():
    backend, graphs = counting_backend()
    seen = []

    def f(x):
        return x

    attach(f, lambda x: seen.append(is_hooked()) or x)

    def target(x):
        return call_hooked(lambda: f(x)) + 1

    entry = Entry(lambda x: x + 1, lambda e, a, k: target(*a))

    @torch.compiler.disable
    def break_here(x):
        return entry(x) + call_hooked(inner, x)

    def inner(x):
        return torch.compile(lambda y: y * 5, backend=backend)(f(x))

    @torch.compile(backend=backend)
    def body(x):
        x = x * 2
        x = break_here(x)
        return x + 3

    def outer(x):
        return body(f(x)), is_hooked(), evaluator()

    for _ in range(4):
        y, hooked, installed = call_hooked(outer, torch.ones(2))
        assert torch.equal(y, torch.full((2,), 16.0))
        assert hooked
        assert installed == "moebius"
        assert evaluator() == "default"
    assert seen == [False] * 12
    assert torch.equal(body(torch.ones(2)), torch.full((2,), 16.0))
    assert len(graphs) >= 3


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_both_hooks_on_top_of_each_other_do_not_call_each_other_forever():
    """hooked > compiled (torch's hook on ours) > an entry at a graph break > hooked again (ours on torch's)."""
    backend, graphs = counting_backend()
    installed = []

    def native(x):
        installed.append(evaluator())
        return helper(x) + 1

    def helper(x):
        return x * 5

    def cold(entry, args, kwargs):
        installed.append(evaluator())
        return call_hooked(native, *args)

    entry = Entry(lambda x: x, cold)

    @torch.compile(backend=backend)
    def body(x):
        x = x * 2
        torch._dynamo.graph_break()
        x = entry(x)
        return x + 3

    def outer(x):
        return body(x), is_hooked(), evaluator()

    for _ in range(4):
        y, hooked, after = call_hooked(outer, torch.ones(2))
        assert torch.equal(y, torch.full((2,), 14.0))
        assert (hooked, after, evaluator()) == (True, "moebius", "default")
        assert torch.equal(body(torch.ones(2)), torch.full((2,), 14.0))
        assert evaluator() == "default"
    assert "moebius" in installed
    assert "other" in installed  # torch's was there when we came


def test_torch_compiles_frames_that_we_do_not_take():
    """Under torch's hook with ours on top, frames that we decline still reach torch."""
    backend, graphs = counting_backend()

    def native(x):
        return x * 7

    @torch.compiler.disable
    def call_native(x):
        return call_hooked(torch.compile(native, backend=backend), x)

    @torch.compile(backend=backend)
    def body(x):
        return call_native(x + 1) + 1

    for _ in range(2):
        assert torch.equal(body(torch.zeros(2)), torch.full((2,), 8.0))
    assert len(graphs) == 3
    assert evaluator() == "default"


def test_exceptions_through_both():
    backend, _ = counting_backend()

    def f(x):
        return x

    def fail(x):
        raise LookupError("mine")

    attach(f, fail)

    @torch.compiler.disable
    def break_here(x):
        return call_hooked(lambda: f(x))

    @torch.compile(backend=backend)
    def body(x):
        return break_here(x + 1)

    for _ in range(3):
        with pytest.raises(LookupError, match="mine"):
            call_hooked(body, torch.zeros(2))
        assert evaluator() == "default"
        with pytest.raises(LookupError, match="mine"):
            body(torch.zeros(2))
        assert evaluator() == "default"


def test_recompiles_inside_hooked_calls():
    backend, graphs = counting_backend()
    compiled = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)

    def outer(n):
        return compiled(torch.zeros(n)).shape[0], evaluator()

    for n in (1, 2, 3, 2):
        assert call_hooked(outer, n) == (n, "moebius")
    assert len(graphs) == 3


def test_threads_with_both_hooks():
    backend, _ = counting_backend()

    def f(x):
        return x

    attach(f, lambda x: x + 10)
    compiled = torch.compile(lambda x: x * 2, backend=backend)
    compiled(torch.ones(2))
    wrong = []

    def work():
        for _ in range(60):
            got = call_hooked(lambda: compiled(torch.ones(2)) + f(torch.ones(2)))
            if not torch.equal(got, torch.full((2,), 13.0)):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


class Iteration:
    """A compiled call in a thread of its own, which waits in its middle until it is told to leave."""

    def __init__(self):
        inside, self.leave, seen = threading.Event(), threading.Event(), []

        def body(x):
            y = x + 1
            seen.append(evaluator())
            inside.set()
            self.leave.wait(20)
            return y * 2

        compiled = torch.compile(body, backend="eager")
        self.thread = threading.Thread(target=lambda: seen.append(compiled(torch.ones(1)).item()))
        self.thread.start()
        assert inside.wait(60)
        self.seen = seen

    def end(self):
        self.leave.set()
        self.thread.join(60)
        assert self.seen[-1] == 4.0


def python_call():
    return evaluator()


@pytest.mark.parametrize("settled", [True, False])
def test_a_hook_that_threads_leave_behind_is_taken_away(settled):
    """Torch comes after ours and leaves while ours is on top of it again: what we put back then has nothing to do. (The
    second case shows that it would stay: nobody switches torch's hook off.)"""
    if not settled:
        set_settler(lambda switch: None)

    def outer():
        iteration = Iteration()
        assert call_unhooked(call_hooked, iteration.end) is None
        return is_hooked()

    assert call_hooked(outer)
    python_call()
    assert python_call() == ("default" if settled else "other")
    if not settled:
        set_settler(set_eval_frame)
        settle()
        python_call()


def test_a_thread_that_still_compiles_keeps_its_hook():
    def outer():
        first, second = Iteration(), Iteration()
        call_unhooked(call_hooked, first.end)
        return second

    second = call_hooked(outer)
    calls = []
    inside = torch.compile(lambda x: calls.append(1) or x + 1, backend="eager")
    assert python_call() == "other"
    assert inside(torch.ones(1)).item() == 2.0
    second.end()
    python_call()
    assert python_call() == "default"


def test_what_the_interpreters_hook_leaves_is_taken_away_by_the_next_cold_call():
    def iterations():
        iteration = Iteration()
        iteration.end()
        return len(iteration.seen)

    set_settler(lambda switch: None)  # (an earlier test may have left a look at it outstanding, which comes in between)
    assert interpret(iterations)() == 2
    python_call()
    assert python_call() == "other"
    set_settler(set_eval_frame)
    assert capture(lambda x: x + 1)(torch.ones(1)).item() == 2.0
    python_call()
    assert python_call() == "default"


def test_no_growth(growth):
    backend, _ = counting_backend()

    def f(x):
        return x

    attach(f, lambda x: x)
    compiled = torch.compile(lambda x: x * 2, backend=backend)
    x = torch.ones(2)
    assert growth(lambda: call_hooked(lambda: compiled(f(x))), 300) == 0

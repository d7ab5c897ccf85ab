"""Graph breaks: anywhere in a frame, with the graphs before and after kept and plain Python's results."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import inspect
import io
import logging
import os
import sys
import threading

import pytest
import torch
from answers import broken, same

from moebius import GraphBreakError, capture, disable, explain, stats
from moebius.hook import forget_frames

LOG: list = []
SINK = io.StringIO()


def unknown(x):
    """Something that capture cannot follow: it prints what is not plain."""
    LOG.append("unknown")
    print({}, file=SINK)
    return x + 1


@contextlib.contextmanager
def watched(name):
    LOG.append(f"enter {name}")
    try:
        yield name
    finally:
        LOG.append(f"exit {name}")


def straight(x):
    y = x * 2
    print({}, file=SINK)
    return y + 1


def in_loop(x):
    for i in range(4):
        x = x * 2
        if i % 2:
            print({}, file=SINK)
        x = x + i
    return x


def in_with(x):
    with watched("a") as name:
        x = x * 2
        print({}, file=SINK)
        x = x + len(name)
        with torch.no_grad():
            x = x * 3
            print({}, file=SINK)
            y = x + 1
    return x, y, torch.is_grad_enabled()


def in_try(x):
    log = []
    try:
        x = x * 2
        print({}, file=SINK)
        x = x + 1
        raise KeyError("k")
    except KeyError as error:
        log.append(str(error))
        x = x - 1
    else:
        log.append("else")
    finally:
        log.append("finally")
        x = x * 5
    return x, log


def in_handler(x):
    try:
        raise ValueError("v")
    except ValueError as error:
        x = x * 2
        print({}, file=SINK)
        x = x + len(str(error))
    return x * 3


def in_nested_handlers(x):
    log = []
    try:
        try:
            raise ValueError("v")
        except ValueError:
            try:
                raise KeyError("k")
            except KeyError:
                x = x * 2
                print({}, file=SINK)
                x = x + 1
                log.append(repr(sys.exception()))
            log.append(repr(sys.exception()))
            raise
    except ValueError as error:
        log.append((str(error), error.__context__))
    return x * 3, log, sys.exception()


def in_finally(x):
    log = []
    try:
        try:
            raise ValueError("v")
        finally:
            x = x * 2
            print({}, file=SINK)
            log.append("finally")
            x = x + 1
    except ValueError as error:
        log.append(repr(error))
        print({}, file=SINK)
        x = x * 3
    return x, log


class Protocols:
    """Every special method breaks the graph in its middle."""

    def __init__(self, x):
        self.a = x.sin()
        print({}, file=SINK)
        self.b = self.a.cos()

    @property
    def value(self):
        y = self.a.tan()
        print({}, file=SINK)
        return y.exp()

    def __getitem__(self, index):
        y = self.b.tan()
        print({}, file=SINK)
        return y.exp() + index

    def __enter__(self):
        LOG.append("enter")
        self.a = self.a.tan()
        print({}, file=SINK)
        self.a = self.a.exp()
        return self

    def __exit__(self, *error):
        LOG.append("exit")
        self.a = self.a.abs()
        print({}, file=SINK)
        self.a = self.a.neg()


def in_init(x):
    p = Protocols(x.abs())
    return p.a + p.b.neg()


def in_property(x):
    p = Protocols(x)
    return p.value.neg()


def in_item(x):
    p = Protocols(x)
    return p[3].neg()


def in_context_methods(x):
    with Protocols(x) as p:
        y = p.a.sin()
    return y + p.a


@contextlib.contextmanager
def breaking(x, log):
    log.append(x.sin())
    print({}, file=SINK)
    log.append(x.cos())
    yield
    log.append(x.tan())
    print({}, file=SINK)
    log.append(x.exp())


def in_context_generator(x):
    log = []
    with breaking(x.abs(), log):
        y = x.neg()
    return y, log


def level_three(x):
    x = x.abs().sqrt()
    print({}, file=SINK)
    return x.sigmoid()


def level_two(x):
    return level_three(x.neg()).cos()


def in_callees(x):
    with torch.no_grad():
        x = level_two(x.abs()).tan()
    return x.exp()


class Held:
    def __init__(self, x, scale=1):
        self.x, self.scale = x, scale


class Scaled(Held):
    def __init__(self, x, scale=2):
        y = x * 2
        print({}, file=SINK)
        if scale > 1:
            super().__init__(x=y, scale=scale)


class Reader(Held):
    def __init__(self, x):
        print({}, file=SINK)
        super().__init__(x)
        self.read = lambda: self.x


def before_super(x):
    return Scaled(x).x + Reader(x).read()


def iterator_from_outside(x, rows=(1, 2, 3)):
    it = iter(rows)
    first = next(it)
    print({}, file=SINK)
    return x * first + next(it) + sum(it)


def deep(x):
    def level_two(y):
        z = y * 3
        print({}, file=SINK)
        return z + 1

    def level_one(y):
        return level_two(y * 2) * 2

    return level_one(x + 1) + 1


def in_comprehension(x):
    return sum([unknown(x) * i for i in range(3)])


def in_generator(x):
    def numbers():
        for i in range(3):
            yield unknown(x) * i

    return sum(numbers())


def generator_alive(x):
    rows = (row * 2 for row in [x, x + 1, x + 2])
    first = next(rows)
    print({}, file=SINK)
    return first + sum(rows)


def conditional(x):
    y = x * 2
    y = y + unknown(y) if y.dim() > 1 else y
    if unknown(y).dim() > 1:
        y = y + 10
    else:
        y = y - 10
    return y * 2


def in_call_arguments(x):
    def f(a, b, *rest, c, **more):
        return a + b + sum(rest) + c + more["d"]

    return f(x, unknown(x), x, c=unknown(x) * 2, **{"d": unknown(x)})


def chained(x):
    return unknown(x).sum() * 2 < 100, [unknown(x), x][0], {"k": unknown(x)}


def cells(x):
    total = 0

    def add(v):
        nonlocal total
        total = total + v
        return total

    add(x)
    print({}, file=SINK)
    add(x * 2)
    later = add
    print({}, file=SINK)
    return later(x), total


def iterators(x):
    out = []
    for (i, a), b in zip(enumerate([x, x + 1, x + 2]), {"p": 1, "q": 2, "r": 3}.values(), strict=True):
        print({}, file=SINK)
        out.append(a * b + i)
    return out


def unpacking(x):
    a, (b, *c) = x, (unknown(x), 1, 2)
    d = e = unknown(x)
    return a, b, c, d, e, d is e


def recursion(x, n=3):
    if n == 0:
        return unknown(x)
    return recursion(x * 2, n - 1) + n


CASES = [
    straight,
    in_loop,
    in_with,
    in_try,
    in_handler,
    in_nested_handlers,
    in_finally,
    in_init,
    in_property,
    in_item,
    in_context_methods,
    in_context_generator,
    in_callees,
    iterator_from_outside,
    before_super,
    deep,
    in_comprehension,
    in_generator,
    generator_alive,
    conditional,
    in_call_arguments,
    chained,
    cells,
    iterators,
    unpacking,
    recursion,
]


def shown(value):
    if isinstance(value, torch.Tensor):
        return (value.tolist(), value.dtype, value.requires_grad)
    if isinstance(value, tuple | list):
        return (type(value), [shown(v) for v in value])
    if isinstance(value, dict):
        return {k: shown(v) for k, v in value.items()}
    return value


def outcome(function, x):
    LOG.clear()
    return function(x), list(LOG)


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_result_and_effects_are_those_of_plain_python(function):
    captured = capture(function)
    for value in (1.0, -1.0, 1.0):
        x = torch.full((2, 2), value)
        want, log = outcome(function, x)
        for _ in range(2):
            got, got_log = outcome(captured, x)
            assert shown(got) == shown(want)
            assert got_log == log
    assert stats(captured).breaks >= 1


@pytest.mark.parametrize(
    "function",
    [straight, in_loop, in_with, in_try, in_handler, in_nested_handlers, in_finally, conditional, cells, iterators],
    ids=lambda f: f.__name__,
)
def test_graphs_before_and_after_the_break_are_kept(function):
    report = explain(function)(torch.ones(2, 2))
    assert len(report.graphs) >= 2
    assert all("whole frame" not in b.detail for b in report.breaks)


@pytest.mark.parametrize(
    "function, operators",
    [
        (in_init, {"abs": 1, "sin": 1, "cos": 1, "neg": 1}),
        (in_property, {"sin": 1, "cos": 1, "tan": 1, "exp": 1, "neg": 1}),
        (in_item, {"sin": 1, "cos": 1, "tan": 1, "exp": 1, "neg": 1}),
        (in_context_methods, {"sin": 2, "cos": 1, "tan": 1, "exp": 1, "abs": 1, "neg": 1}),
        (in_callees, {"abs": 2, "neg": 1, "sqrt": 1, "sigmoid": 1, "cos": 1, "tan": 1, "exp": 1}),
        (deep, {"mul": 3, "add": 3}),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_callees_keep_their_graphs_around_a_break(function, operators):
    """Each operator of the function and of what it calls is in a graph, once."""
    forget_frames()  # (a callee is captured once for the process)
    report = explain(function)(torch.full((2, 2), 0.5))
    found: dict[str, int] = {}
    for graph in report.graphs:
        for node in graph.gm.graph.nodes:
            if node.op in ("call_function", "call_method"):
                name = node.target if isinstance(node.target, str) else node.target.__name__
                found[name] = found.get(name, 0) + 1
    assert {name: found.get(name, 0) for name in operators} == operators


def test_an_iterator_that_existed_before_is_not_advanced_by_tracing():
    rows = iter([10, 20, 30])

    @capture
    def step(x, it):
        return x * next(it)

    assert [step(torch.ones(1), rows).item() for _ in range(3)] == [10, 20, 30]


def test_a_break_inside_a_method_call_on_a_new_list_is_captured_once():
    @capture
    def step(x):
        log = []
        log.append(repr(os.getppid()))
        return x + len(log)

    for _ in range(4):
        assert step(torch.ones(1)).item() == 2
    assert not stats(step).recompiles and stats(step).breaks == 1


def helper_of_generators(x):
    return torch.relu(x.sin() + 1)


def test_generator_functions_keep_their_protocol():
    @capture
    def numbers(x, n):
        got = []
        for i in range(n):
            try:
                got.append((yield helper_of_generators(x) * i))
            except ValueError as error:
                got.append(str(error))
        return got

    assert inspect.isgeneratorfunction(numbers)
    x = torch.ones(2)
    want = helper_of_generators(x)
    for _ in range(2):
        it = numbers(x, 4)
        values = [next(it), it.send("a"), it.throw(ValueError("thrown")), it.send("b")]
        for i, value in enumerate(values):
            assert torch.equal(value, want * i)
        with pytest.raises(StopIteration) as stop:
            it.send("c")
        assert stop.value.value == ["a", "thrown", "b", "c"]
        early = numbers(x, 2)
        next(early)
        early.close()
        with pytest.raises(StopIteration):
            next(early)
    assert stats(numbers).graphs >= 1 and stats(numbers).hits >= 4


def test_coroutine_functions_can_be_awaited_at_once():
    @capture
    async def step(x):
        y = helper_of_generators(x)
        await asyncio.sleep(0)
        return helper_of_generators(y)

    assert inspect.iscoroutinefunction(step)

    async def both():
        return await asyncio.gather(step(torch.ones(2)), step(torch.zeros(3)))

    first, second = asyncio.run(both())
    assert torch.equal(first, helper_of_generators(helper_of_generators(torch.ones(2))))
    assert torch.equal(second, helper_of_generators(helper_of_generators(torch.zeros(3))))


def test_a_break_says_where_and_what_to_do():
    report = explain(deep)(torch.ones(2))
    (first, *_) = report.breaks
    assert first.reason == "print" and "not plain" in first.detail and first.hint
    assert first.file == __file__ and first.function.endswith("level_two")
    assert first.line == deep.__code__.co_firstlineno + 3
    assert [f for _, _, f in first.stack][0] == "deep"
    assert first.instruction.startswith("CALL")


def test_fullgraph_raises_with_the_break():
    captured = capture(straight, fullgraph=True)
    with pytest.raises(GraphBreakError, match="print") as caught:
        captured(torch.ones(2))
    assert caught.value.graph_break.line == straight.__code__.co_firstlineno + 2
    assert capture(lambda x: x + 1, fullgraph=True)(torch.ones(1)).item() == 2


def test_functions_below_a_native_call_are_captured():
    def helper(x):
        return torch.relu(x * 2) + 1

    def outer(x, run):
        return run(helper, x)

    class Runner:
        def __call__(self, function, x):
            print({}, file=SINK)
            return function(x)

    report = explain(outer)(torch.ones(3), Runner())
    assert any("relu" in g.gm.code and "__call__" in g.name for g in report.graphs)
    assert report.result.tolist() == [3, 3, 3]


def test_a_captured_function_that_calls_compiled_code_and_the_other_way_round():
    compiled = torch.compile(lambda x: x * 3, backend="eager")

    def calls_compiled(x):
        return compiled(x + 1) + 1

    inner = capture(lambda x: x * 3)
    outer = torch.compile(lambda x: inner(x + 1) + 1, backend="eager")
    captured = capture(calls_compiled)
    for _ in range(3):
        assert captured(torch.ones(1)).item() == 7
        assert outer(torch.ones(1)).item() == 7
        assert compiled(torch.ones(1)).item() == 3


def test_threads_capture_at_once():
    results = {}

    def work(i):
        function = capture(in_with)
        x = torch.full((2,), float(i))
        results[i] = [function(x)[0].tolist() for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: [in_with(torch.full((2,), float(i)))[0].tolist()] * 3 for i in range(4)}


def test_disabled_functions_run_natively():
    @disable
    def native(x):
        return x * 2

    def f(x):
        return native(x + 1) + 1

    report = explain(f)(torch.ones(1))
    assert report.result.item() == 5
    assert [b.reason for b in report.breaks] == ["disabled function"]
    assert not any("mul" in g.gm.code for g in report.graphs)


def test_a_frame_with_cells_is_not_captured_again_at_each_call():
    captured = capture(cells)
    for _ in range(6):
        captured(torch.ones(2))
    first = stats(captured).entries
    for _ in range(6):
        captured(torch.ones(2))
    assert stats(captured).entries == first and stats(captured).hits > 10


def test_torch_compile_beside_it_changes_nothing():
    class Sliced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            for layer in self.layers[:2]:  # makes a ModuleList
                x = layer(x)
            return x

    model, x = Sliced(), torch.ones(1, 2)
    compiled, captured = torch.compile(model, backend="eager"), capture(model)
    for _ in range(3):
        torch.testing.assert_close(captured(x), compiled(x))
    assert stats(captured).graphs == 1 and stats(captured).breaks == 0


# ----------------------------------------------------------------------------------------------------------------------
# What is_compiling() answers
# ----------------------------------------------------------------------------------------------------------------------


def test_a_step_that_asks_whether_it_is_compiled_gets_plain_pythons_answer():
    def step(x):
        return x * 3 if torch.compiler.is_compiling() else x * 2

    x = torch.randn(3)
    assert torch.equal(capture(step, backend="eager")(x), x * 2)
    assert stats(capture(step, backend="eager")).breaks == 0


def test_the_function_whose_control_flow_breaks_the_graph_is_told_that_it_is_compiled():
    def checked(x):
        if not torch.compiler.is_compiling() and (x > 100).any():
            raise ValueError("too large")
        return x + 1

    def scaled(x):
        return x * 3 if torch.compiler.is_compiling() else x * 2

    def step(x):
        return scaled(checked(x))

    captured = capture(step, backend="eager")
    x = torch.randn(3)
    assert torch.equal(captured(x), step(x))
    assert stats(captured).graphs == 1 and stats(captured).breaks == 0


def test_a_true_answer_that_only_leads_to_an_exception_is_not_given():
    def step(x, mask=None):
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(3)
        if (x > 100).any():
            x = x / 2
        return x * mask[:2]

    captured = capture(step, backend="eager")
    x = torch.randn(2)
    assert torch.equal(captured(x), step(x))


def test_a_side_exit_comes_before_a_true_answer():
    """As transformers' masks: a mask that hides nothing is None, unless the model is compiled."""

    def hiding(mask):
        if not torch.compiler.is_compiling() and mask.all():
            return None
        return mask

    def step(x, mask):
        hidden = hiding(mask)
        return x * 2 if hidden is None else x * 3 * hidden

    captured = capture(step, backend="eager")
    for some in ([True, True], [True, True], [True, False], [True, True]):
        x, mask = torch.randn(2), torch.tensor(some)
        assert torch.equal(captured(x, mask), step(x, mask))
    assert stats(captured).breaks == 0


def other_numbers(gm, _):
    """A backend of torch.compile's that rounds (or draws) otherwise, by far."""
    return lambda *args: [result + 1 for result in gm(*args)]


@pytest.mark.parametrize("when", ["before", "in the step"])
def test_a_function_that_leaves_its_work_to_torch_compile_is_not_told_that_it_is_compiled(when):
    """As heavyball's optimizers do: what is compiled has its backend's numbers, and its random numbers."""

    def plain(x):
        return x * 2

    compiled = torch.compile(plain, backend=other_numbers) if when == "before" else None

    def compilable(x):
        nonlocal compiled
        if torch.compiler.is_compiling():
            return plain(x)
        if compiled is None:
            compiled = torch.compile(plain, backend=other_numbers)
        return compiled(x)

    captured = capture(lambda x: compilable(x + 1) * 3, backend="eager")
    x = torch.randn(3)
    for _ in range(3):
        assert torch.equal(captured(x), ((x + 1) * 2 + 1) * 3)


def test_a_region_that_begins_inside_autocast_and_leaves_it():
    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
            print({}, file=SINK)
            z = y @ x
        return z, x @ x

    captured = capture(step, backend="eager")
    x = torch.randn(4, 4)
    for _ in range(2):
        (z, after), (native_z, native_after) = captured(x), step(x)
        assert z.dtype is torch.bfloat16 and torch.equal(z, native_z) and torch.equal(after, native_after)


class Base:
    def weigh(self, x, name):
        return x * (2 if name is None else 3)


class Derived(Base):
    def weigh(self, x, name):
        logging.getLogger("moebius.tests").log(1, "a graph break")
        return super().weigh(x, name)


class DerivedWithInner(Base):
    def weigh(self, x, name):
        logging.getLogger("moebius.tests").log(1, "a graph break")
        return (lambda: type(self).__name__ and super(DerivedWithInner, self))().weigh(x, name) + super().weigh(x, name)


@pytest.mark.parametrize("kind", [Derived, DerivedWithInner])
@pytest.mark.parametrize("name", [None, "a"])
def test_super_without_arguments_after_a_break(kind, name):
    """It reads the frame's first local, which no instruction after the break loads."""
    captured, obj = capture(lambda o, x, n: o.weigh(x, n)), kind()
    want = obj.weigh(torch.ones(2), name)
    for _ in range(3):
        torch.testing.assert_close(captured(obj, torch.ones(2), name), want)


def test_a_region_that_begins_at_an_instruction_with_an_extended_argument():
    """The loop's body is too long for one byte: the assembler lets the region begin behind the EXTENDED_ARG."""

    class Sequence:
        def __getitem__(self, index):
            return index

    def long_loop(log):
        try:
            for i in Sequence():  # not followed: each iteration asks again
                log.append(i)
                if i == 2:
                    raise ValueError(i)
                log.append((i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7, i + 8, i + 9, i + 10, i + 11, i + 12))
                log.append((i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7, i + 8, i + 9, i + 10, i + 11, i + 12))
                log.append((i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7, i + 8, i + 9, i + 10, i + 11, i + 12))
                log.append((i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7, i + 8, i + 9, i + 10, i + 11, i + 12))
                log.append((i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7, i + 8, i + 9, i + 10, i + 11, i + 12))
        except ValueError as error:
            log.append(str(error))
        return len(log)

    assert any(i.opname == "FOR_ITER" and i.arg > 255 for i in dis.get_instructions(long_loop))
    plain, log = [], []
    expected = long_loop(plain)
    captured = capture(long_loop)
    for _ in range(2):
        log.clear()
        assert captured(log) == expected and log == plain


OWNERS = {
    "argument": lambda b, x: b,
    "tensor": lambda b, x: x,
    "new list": lambda b, x: [],
    "new object": lambda b, x: type("Made", (), {})(),
    "module": lambda b, x: torch,
    "number": lambda b, x: 1,
}


@pytest.mark.parametrize("name", OWNERS)
def test_an_attribute_error_keeps_its_object_across_a_break(name):
    def step(b, x):
        owner = OWNERS[name](b, x)
        try:
            owner.missing  # noqa: B018
        except AttributeError as error:
            torch.tensor([1.0]).tolist()
            print(end="", file=io.StringIO())
            return x * 2, error.obj is owner, error.name, str(error)

    captured = capture(step)
    for _ in range(2):
        b, x = Exception(), torch.ones(1)
        assert captured(b, x)[1:] == step(b, x)[1:]
    assert stats(captured).breaks


RESULTS = iter(range(1000))


@disable
def another_result():
    number = next(RESULTS)
    return {number: [number] * number}


def dropped(x):
    y = x * 2
    another_result()
    with torch.no_grad():
        another_result()
        y = y + 1
    return y


def test_a_result_that_is_dropped_is_no_argument_of_the_rest():
    captured = capture(dropped)
    for _ in range(4):
        assert torch.equal(captured(torch.ones(2)), torch.ones(2) * 3)
    assert not stats(captured).recompiles


def test_a_tensors_method_that_waits_for_its_arguments():
    """`x.masked_fill(…, native())`: the method is half of a call, handed over to what follows the break."""

    def step(x):
        y = x * 2
        return y.masked_fill(broken(y) > 1, broken(0.5)).add_(broken(1.0)), x.clone().mul_(broken(x))

    captured = capture(step)
    for x in (torch.rand(4), torch.rand(4), torch.rand(6), torch.rand(4, dtype=torch.float64)):
        assert same(captured(x), step(x))
    assert {b.reason for b in explain(step)(torch.rand(4)).breaks} == {"call into C"}

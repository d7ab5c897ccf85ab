"""Parts of Python that users' models contain: one graph where a graph can hold them, else a break with a hint."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import io
import logging
import types
import typing
import warnings

import pytest
import torch

from moebius import capture, stats
from moebius.api import captured_of

LOG = logging.getLogger("moebius.tests.parts")
SETTINGS: dict = {"sizes": [1, 2], "more": {"scale": 3}}
SHARED = [1.0]


class Out(typing.NamedTuple):
    hidden: torch.Tensor
    count: int = 3


Pair = collections.namedtuple("Pair", "first second")


class Counter:
    __slots__ = ("kept", "seen")

    def __init__(self):
        self.seen, self.kept = 0, None


class Derived(Counter):
    __slots__ = ("extra",)


@dataclasses.dataclass(slots=True)
class Point:
    x: torch.Tensor
    k: int = 1


class Plain:
    def __init__(self, value):
        self.value, self.shared, self.again = value, SHARED, SHARED


class Color(enum.Enum):
    RED = 1


@torch.library.custom_op("moebius_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


@torch.library.custom_op("moebius_tests::raised", mutates_args=("x",))
def raised(x: torch.Tensor) -> None:
    x.add_(1)


class Tagged(torch.Tensor):
    pass


@contextlib.contextmanager
def set_for_a_while(value):
    SETTINGS["now"] = value
    try:
        yield value
    finally:
        SETTINGS.pop("now")


# ----------------------------------------------------------------------------------------------------------------------
# One graph
# ----------------------------------------------------------------------------------------------------------------------


def fields_of_named_tuples(x):
    out, pair = Out(x * 2), Pair(x, 2)._replace(second=5)
    return out.hidden + out.count + pair.first * pair.second, out, pair


def a_field_that_is_not_there(x):
    try:
        return Out(x).missing
    except AttributeError as error:
        return x * len(error.name)


def slots_of_new_objects(x):
    point, counter = Point(x), Derived()
    point.k, counter.extra = 4, 2
    counter.seen += point.k
    return point.x * counter.seen * counter.extra


def deep_copies(x):
    made = copy.deepcopy(SETTINGS)
    made["sizes"].append(3)
    nested = [1, (2, 3), Color.RED]
    other = copy.deepcopy([nested, nested])
    other[0].append(5)
    return x * len(made["sizes"]) * len(SETTINGS["sizes"]), other[1], other[0] is other[1], other[0][1] is nested[1]


def deep_copy_of_an_object(x):
    first = Plain([1, 2])
    second = copy.deepcopy(first)
    second.value.append(3)
    same = second.shared is second.again, second.shared is SHARED
    return x * len(first.value) * len(second.value), same


def an_identity(x):
    seen = {id(SETTINGS), id(SHARED)}
    return x * (id(SETTINGS) in seen)


def a_log_line_that_is_off(x):
    y = x * 2
    LOG.debug("shape %s", y.shape)
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("never")
    return y + 1


def no_grad(x):
    with torch.no_grad():
        y = x * 2
    return y + x


def a_profiler_range(x):
    with torch.autograd.profiler.record_function("mine"):
        y = x * 2
    return y + 1


def custom_operators(x):
    y = twice(x) + torch.ops.moebius_tests.twice(x)
    z = y * 1
    raised(z)
    return y + z


def context_managers(x):
    with set_for_a_while(3) as k, contextlib.nullcontext(), contextlib.suppress(KeyError):
        y = x * SETTINGS["now"] * k
    with contextlib.ExitStack() as stack:
        y = y * stack.enter_context(set_for_a_while(2))
    return y


def errors_that_c_code_raises(x):
    found = []
    for attempt in (lambda: int("zz"), lambda: {}["key"], lambda: [][3], lambda: next(iter(())), lambda: 1 // 0):
        try:
            attempt()
        except (ValueError, LookupError, StopIteration, ArithmeticError) as error:
            found.append((type(error).__name__, str(error), error.args))
    return x * len(found), found


def an_error_with_notes(x):
    try:
        try:
            int("zz")
        except ValueError as error:
            error.add_note("while reading")
            error.place = 7
            raise KeyError("a") from error
    except KeyError as error:
        cause = error.__cause__
        return x * cause.place, cause.__notes__, cause.args


def an_error_that_is_returned(x):
    try:
        int("zz")
    except ValueError as error:
        kept = error
    return x * 2, str(kept)


class Formatted:
    def __format__(self, spec):
        return f"<{spec}>"


def objects_with_a_format_of_their_own(x):
    return x * 2, f"{Formatted()} {Formatted():>4} {Color.RED}", format(Formatted()), format(Formatted(), "x")


def inference_mode_switched_off(x):
    with torch.inference_mode(False):
        torch.ones(2) * 2
    return x + 1


ONE_GRAPH = [
    inference_mode_switched_off,
    objects_with_a_format_of_their_own,
    fields_of_named_tuples, a_field_that_is_not_there, slots_of_new_objects, deep_copies, deep_copy_of_an_object,
    an_identity, a_log_line_that_is_off, no_grad, a_profiler_range, custom_operators, context_managers,
    errors_that_c_code_raises, an_error_with_notes, an_error_that_is_returned,
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# A break with a hint
# ----------------------------------------------------------------------------------------------------------------------


class Collecting(logging.Handler):
    def emit(self, record):
        pass


LOG.addHandler(Collecting())


def a_log_line_of_a_users_handler(x):
    y = x * 2
    LOG.error("size %d", x.shape[0])
    return y + 1


def a_tensor_subclass(x):
    return (x * 2).as_subclass(Tagged).sum() + 1


def an_error_of_an_operator(x):
    y = x * 2
    try:
        y = y @ torch.ones(7, 7)
    except RuntimeError as error:
        return y, str(error)


def an_identity_of_a_new_object(x):
    made = [x * 2]
    return x * len({id(made): 1})


def output_to_a_file(x):
    with contextlib.redirect_stdout(io.StringIO()) as file:
        print("a")
    return x * len(file.getvalue())


BREAKS = [
    a_log_line_of_a_users_handler, a_tensor_subclass, an_error_of_an_operator, an_identity_of_a_new_object,
    output_to_a_file,
]  # fmt: skip


def alike(first, second):
    if isinstance(first, torch.Tensor):
        return type(first) is type(second) and torch.equal(first, second)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(alike, first, second))
    return first == second


def three_calls(function):
    captured = capture(function)
    for n in range(3):
        x = torch.arange(4.0).reshape(2, 2) + n
        assert alike(captured(x), function(x))
    return captured


@pytest.mark.parametrize("function", ONE_GRAPH, ids=lambda f: f.__name__)
def test_one_graph(function):
    found = stats(three_calls(function))
    assert (found.graphs, found.breaks) == (1, 0)


@pytest.mark.parametrize("function", BREAKS, ids=lambda f: f.__name__)
def test_a_break_with_a_hint(function):
    captured = three_calls(function)
    breaks = [s.graph_break for member in captured_of(captured).family() for s in member.segments if s.graph_break]
    assert breaks and all(b.hint and "report" not in b.hint for b in breaks)


# ----------------------------------------------------------------------------------------------------------------------
# Slots of objects that existed before
# ----------------------------------------------------------------------------------------------------------------------


def test_slots_that_are_written():
    def step(x, counter, other):
        counter.seen += 1
        counter.kept = x * 2
        y = counter.kept * counter.seen
        other.seen = 10
        return y + counter.seen

    captured = capture(step)
    for separate in (True, True, True, True, False, True):
        results = []
        for function in (step, captured):
            counter = Derived()
            counter.seen = 5
            other = Derived() if separate else counter
            results.append((function(torch.ones(2), counter, other), counter.seen, counter.kept, other.seen))
        assert alike(*results)
    assert stats(captured).breaks == 0


def test_a_slot_that_counts_calls():
    counters = Counter(), Counter()

    def of(counter):
        def step(x):
            counter.seen += 1
            return x * counter.seen

        return step

    plain, captured = of(counters[0]), capture(of(counters[1]))
    for n in range(8):
        assert alike(captured(torch.ones(2) + n), plain(torch.ones(2) + n))
        assert counters[0].seen == counters[1].seen
    assert stats(captured).breaks == 0 and stats(captured).entries < 4


def test_a_slot_that_is_written_before_an_operator_fails():
    def step(x, rows, counter):
        counter.seen += 1
        y = x[rows]
        counter.seen += 1
        return y

    captured = capture(step)
    for rows in (0, 9, 1):
        seen = []
        for function in (step, captured):
            counter = Counter()
            with contextlib.suppress(IndexError):
                function(torch.ones(2), torch.tensor(rows), counter)
            seen.append(counter.seen)
        assert seen[0] == seen[1]


# ----------------------------------------------------------------------------------------------------------------------
# Warnings and log lines
# ----------------------------------------------------------------------------------------------------------------------


def warned(function, action, *args):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        try:
            result = function(*args)
        except Warning as error:
            result = type(error), str(error)
    return result, [(str(w.message), w.category, w.filename, w.lineno) for w in shown]


def deprecated(value):
    warnings.warn(f"value {value.sum().item():.1f}", DeprecationWarning, stacklevel=2)


def step_that_warns(x):
    y = x * 2
    warnings.warn(f"size {x.shape[0]}", stacklevel=1)
    deprecated(y)
    return y + 1


def step_that_catches(x):
    try:
        warnings.warn("careful", FutureWarning, stacklevel=1)
    except FutureWarning as error:
        return x * 2, str(error)
    return x * 3


@pytest.mark.parametrize("step", [step_that_warns, step_that_catches])
@pytest.mark.parametrize(
    "actions", [["always"] * 3, ["ignore", "always"], ["always", "error", "always"], ["error"] * 2], ids="-".join
)
def test_warnings(step, actions):
    """The same warnings of the same lines, whatever the filters say when the call is made."""
    captured = capture(step)
    for action in actions:
        x = torch.ones(2)
        assert alike(warned(captured, action, x), warned(step, action, x))
    assert stats(captured).breaks == 0


def test_a_warning_is_shown_once():
    def step(x):
        warnings.warn("only once", stacklevel=1)
        return x * 2

    captured = capture(step)
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        for _ in range(4):
            captured(torch.ones(2))
    assert len(shown) == 1


def test_a_warning_stands_between_prints(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print("warned", message))

    def step(x):
        print("before")
        warnings.warn("now", stacklevel=1)
        print("after")
        return x * 2

    captured = capture(step)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for function in (step, captured, captured):
            function(torch.ones(2))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["before", "warned now", "after"] * 3


def test_a_log_level_that_is_switched_on(caplog):
    captured = capture(a_log_line_that_is_off)
    x = torch.ones(2, 2)
    for level, lines in ((logging.WARNING, 0), (logging.DEBUG, 2), (logging.INFO, 1), (logging.ERROR, 0)):
        with caplog.at_level(level, LOG.name):
            caplog.clear()
            assert torch.equal(captured(x), x * 2 + 1)
            assert len(caplog.records) == lines


class Everything(type):
    def __instancecheck__(cls, value):
        return True


class Anything(metaclass=Everything):
    pass


def asked_of_a_metaclass(x):
    return isinstance(x, Anything), isinstance(x + 1, Anything), isinstance(3, Anything)


def unpacked_into_a_list(x):
    rows = [*x, 0]
    rows.extend(x)
    return len(rows), rows[0] + rows[-1]


@pytest.mark.parametrize("function", [asked_of_a_metaclass, unpacked_into_a_list])
def test_tensors_in_what_asks_their_class(function):
    x = torch.tensor([1.0, 2.0])
    for _ in range(2):
        assert str(capture(function)(x)) == str(function(x))


class Named(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            asked.append(name)
        raise AttributeError(name)


asked: list[str] = []


def test_a_guard_of_a_function_asks_nothing_of_what_is_none():
    def made():
        return lambda: made

    @capture
    def same(target):
        return target

    class Made(metaclass=Named):
        pass

    asked.clear()
    for target in (made(), Made, made(), Made):
        assert same(target) is target
    assert asked == []


NAMELESS = types.SimpleNamespace(), collections.deque([1]), collections.OrderedDict(), collections.defaultdict(int)
WRONG = {
    "attribute": lambda obj: obj.missing,
    "set": lambda obj: setattr(obj, "__class__", 3),
    "item": lambda obj: obj["a"]["b"],
    "length": lambda obj: len(obj.__init__),
    "call": lambda obj: obj(),
    "iterate": lambda obj: [*obj.__len__],
    "number": lambda obj: [1, 2][obj],
    "class": lambda obj: type(obj).missing,
    "attribute of a class, by object's own": lambda obj: object.__setattr__(type(obj), "a", 1),
}


@pytest.mark.parametrize("obj", NAMELESS, ids=lambda obj: type(obj).__name__)
@pytest.mark.parametrize("name", WRONG)
def test_errors_name_types_as_c_does(name, obj):
    """A type that is written in C has its module in messages."""

    def step(x):
        try:
            WRONG[name](obj)
        except (TypeError, AttributeError, KeyError, IndexError) as error:
            return x + 1, type(error), str(error)

    captured = capture(step)
    assert [captured(torch.ones(1))[1:] for _ in range(2)] == [step(torch.ones(1))[1:]] * 2

"""An operator that fails on a call's data, with a handler in a frame that C code, or an instruction, has called."""

from __future__ import annotations

import contextlib
import dis

import pytest
import torch
from answers import same, told
from torch import nn

from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.torch_facts import torch_private
from moebius.trace import may_raise as capture_fragile
from moebius.trace.frame_snapshots import connected

INDICES = (1, 1, 4, 1, 9, 0)


def walked(seen):
    def rows(x, i):
        for number in range(2):
            try:
                row = x[i + number]
            except IndexError as error:
                seen.append(str(error))
                row = x[:1]
            yield row

    return lambda x, i: [row * 2 for row in rows(x, i)]


def delegated(seen):
    def inner(x, i):
        try:
            yield x[i]
        except IndexError:
            seen.append("inner")
            yield x[:1]
        finally:
            seen.append("left")

    def outer(x, i):
        try:
            yield x
            yield from inner(x, i)
        finally:
            seen.append("outer")

    return lambda x, i: [row * 2 for row in outer(x, i)]


def advanced(seen):
    def rows(x, i):
        yield x
        try:
            with torch.no_grad():
                row = x[i]
        except IndexError:
            seen.append(torch.is_grad_enabled())
            row = x
        yield row
        seen.append("end")

    def step(x, i):
        walk = rows(x, i)
        held = [walk]
        first, second = next(walk), next(walk)
        return first, second, held[0] is walk, next(walk, None)

    return step


def in_a_handler(seen):
    def rows(x, i):
        try:
            raise KeyError(1)
        except KeyError:
            try:
                row = x[i]
            except IndexError as error:
                seen.append(type(error.__context__))
                row = x
            yield row

    def step(x, i):
        try:
            raise ValueError
        except ValueError:
            return [row + 1 for row in rows(x, i)]

    return step


def listed(seen):
    def rows(x, i):
        for number in range(2):
            try:
                row = x[i + number]
            except IndexError:
                seen.append(number)
                row = x[:1]
            yield row

    return lambda x, i: (list(rows(x, i)), torch.cat([*rows(x, i)]), sum(rows(x, i)))


class Owner:
    def __init__(self, x, i, seen):
        self.x, self.i, self.seen, self.iterations = x, i, seen, 0

    @property
    def first(self):
        try:
            return self.x[self.i]
        except IndexError:
            self.seen.append("property")
            return self.x

    def __getitem__(self, number):
        try:
            return self.x[self.i + number]
        except IndexError:
            self.seen.append("item")
            return self.x

    def __iter__(self):
        return self

    def __next__(self):
        try:
            row = self.x[self.i + self.iterations]
        except IndexError:
            raise StopIteration from None
        self.iterations += 1
        return row


def of_a_property(seen):
    return lambda x, i: Owner(x, i, seen).first * 2


def of_an_item(seen):
    return lambda x, i: Owner(x, i, seen)[1] * 2


def ended_by_the_error(seen):
    return lambda x, i: [row * 2 for row in Owner(x, i, seen)]


def of_a_sort_key(seen):
    def step(x, i):
        def key(number):
            try:
                return float(x[i + number].sum())
            except IndexError:
                seen.append(number)
                return 0.0

        return sorted([2, 1, 0], key=key)

    return step


def of_a_context(seen):
    @contextlib.contextmanager
    def block(x, i):
        try:
            row = x[i]
        except IndexError:
            seen.append("entered")
            row = x
        yield row

    def step(x, i):
        with block(x, i) as row:
            seen.append("in it")
            return row * 2

    return step


ON_FROM = [walked, delegated, advanced, in_a_handler]
BROKEN = [listed, of_a_property, of_an_item, ended_by_the_error, of_a_sort_key, of_a_context]


def calls(recipe, wrap):
    seen = []
    step = wrap(recipe(seen))
    for index in INDICES:
        x = torch.arange(4.0)
        yield told(step, x, torch.tensor([index])), x, list(seen)


@pytest.mark.parametrize("recipe", ON_FROM + BROKEN)
def test_handlers_run(recipe):
    for ours, plain in zip(calls(recipe, capture), calls(recipe, lambda step: step), strict=True):
        assert same(ours, plain)


@pytest.mark.parametrize("recipe", ON_FROM)
def test_a_generator_goes_on(recipe):
    captured = capture(recipe([]))
    captured(torch.arange(4.0), torch.tensor([1]))
    assert stats(captured).breaks == 0


@pytest.mark.parametrize("recipe", ON_FROM)
def test_without_generators_that_go_on_the_handler_is_lost(recipe, monkeypatch):
    monkeypatch.setattr("moebius.trace.failures.connected", lambda stopped, generators: connected(stopped))
    pairs = zip(calls(recipe, capture), calls(recipe, lambda step: step), strict=True)
    assert not all(same(ours, plain) for ours, plain in pairs)


# From 3.14 on a with-block calls __enter__ with an instruction of its own, and the frame goes on in it.
BY_WITH = [of_a_context] if "BEFORE_WITH" in dis.opmap else []


@pytest.mark.parametrize("recipe", [listed, of_a_property, of_an_item, *BY_WITH])
def test_without_the_break_the_handler_is_lost(recipe, monkeypatch):
    monkeypatch.setattr("moebius.trace.trace.refuse_lost_handler", lambda *given: None)
    pairs = zip(calls(recipe, capture), calls(recipe, lambda step: step), strict=True)
    assert not all(same(ours, plain) for ours, plain in pairs)


def test_what_cannot_fail_is_no_break():
    """Where all operators are sums and products, a handler has nothing to see."""

    class Pair:
        def __init__(self, x):
            self.x = x

        @property
        def sum(self):
            try:
                with torch.no_grad():
                    return self.x.sum() + self.x * 2
            finally:
                self.x = None

    captured = capture(lambda x: Pair(x).sum + 1)
    captured(torch.ones(3))
    assert stats(captured).breaks == 0


def test_a_switch_of_torch_is_no_handler():
    class Rows:
        def __init__(self, x, i):
            self.x, self.i = x, i

        @property
        def first(self):
            with torch.no_grad():
                return self.x[self.i]

    captured = capture(lambda x, i: Rows(x, i).first + 1)
    captured(torch.ones(3), torch.tensor([1]))
    assert stats(captured).breaks == 0
    with pytest.raises(IndexError):
        captured(torch.ones(3), torch.tensor([7]))
    assert torch.is_grad_enabled()


class Pick(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(4.0))

    def forward(self, i):
        return self.table.gather(0, i)


class Called:
    """What calls a function from an instruction that is no call."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, i):
        return self.function(i)


def hooked(add):
    """The step, its list of what hooks have seen, and how ``add`` gives the module a hook that writes there."""
    m, seen = Pick(), []
    m.register_forward_pre_hook(lambda *given: None)

    def late():
        m.register_forward_hook(lambda *given: seen.append("called"), always_call=True)

    if add == "always":
        late()
    elif add == "on success":
        m.register_forward_hook(lambda *given: seen.append("called"))
    return lambda i: Called(m)[i] * 2, seen, late


def hooked_calls(add, wrap):
    step, seen, late = hooked(add)
    step = wrap(step)
    for iteration, index in enumerate((1, 7, 2, 7, 7)):
        if iteration == 4 and add == "late":
            late()
        yield told(step, torch.tensor([index])), list(seen)


@pytest.mark.parametrize("add", ["none", "on success", "always", "late"])
def test_the_hooks_of_a_module_that_fails(add):
    for ours, plain in zip(hooked_calls(add, capture), hooked_calls(add, lambda step: step), strict=True):
        assert same(ours, plain)


@pytest.mark.parametrize("add", ["none", "on success"])
def test_a_module_without_hooks_for_errors_is_no_handler(add):
    captured = capture(hooked(add)[0])
    captured(torch.tensor([1]))
    assert stats(captured).breaks == 0


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("moebius.trace.may_raise.passes_on", lambda frame: True),
        ("moebius.python.calls.EAGER_ARITHMETIC", ("torch.optim",)),
    ],
)
def test_the_hooks_for_errors_rest_on_the_break(name, instead, monkeypatch):
    """And on the answer of is_compiling(), with which the module's call would be traced without its handler."""
    monkeypatch.setattr(name, instead)
    pairs = zip(hooked_calls("always", capture), hooked_calls("always", lambda step: step), strict=True)
    assert not all(same(ours, plain) for ours, plain in pairs)


def test_an_optimizer_and_a_range_of_the_profiler_are_no_handlers():
    """The powers of Adam may overflow; what stands around them has nothing to do then."""
    m = Pick()
    optimizer = torch.optim.Adam(m.parameters())

    def update(i):
        with torch.autograd.profiler.record_function("update"):
            optimizer.step()
            return m(i)

    def step(i):
        m(i).sum().backward()
        return Called(update)[i]

    captured = capture(step)
    for _ in range(4):
        captured(torch.tensor([1]))
    assert stats(captured).breaks == 0


def switched(x, i):
    torch.set_grad_enabled(False)
    try:
        with torch.autocast("cpu"):
            try:
                return Called(torch.enable_grad()(lambda number: x[number]))[i]
            except IndexError:
                return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    finally:
        torch.set_grad_enabled(True)


def test_the_handler_finds_the_switches_of_its_own_line():
    captured = capture(switched)
    for index in INDICES:
        given = torch.ones(4), torch.tensor([index])
        assert same(told(captured, *given), told(switched, *given))
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert stats(captured).breaks == 0


def test_the_switches_of_the_call_are_others(monkeypatch):
    at_first = torch_private.switches()
    monkeypatch.setattr(torch_private, "switches", lambda: at_first)
    assert capture(switched)(torch.ones(4), torch.tensor([1])).item() == 1
    captured = capture(switched)
    captured(torch.ones(4), torch.tensor([1]))
    assert captured(torch.ones(4), torch.tensor([7])) == (True, False)


def test_a_loop_that_an_error_ends():
    def step(x, i):
        iterations = 0
        while True:
            try:
                x[i + iterations]
            except IndexError:
                return iterations
            iterations += 1

    captured = capture(step)
    assert [captured(torch.ones(4), torch.tensor([n])) for n in (0, 1, 3)] == [4, 3, 1]
    (graph_break,) = report_of(captured_of(captured)).breaks
    assert graph_break.reason == "loop that an error may end" and str(capture_fragile.MAX_TURNS) in graph_break.detail

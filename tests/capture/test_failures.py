"""An operator that fails on real data, in the middle of a graph: what plain Python leaves behind is what we leave."""

from __future__ import annotations

import contextlib
import copy
import logging
import traceback

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moebius import capture, stats
from moebius.trace.assumptions import Assumptions


class Holder:
    def __init__(self):
        self.items = ["begin"]
        self.table = {"a": 1}
        self.count = 0


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x, i, h):
        self.calls += 1
        self.seen += 1
        h.items.append("layer")
        return self.linear(x)[i]


def effects_before_and_after(model, h, x, i):
    h.items.append(x * 2)
    h.count += 1
    h.table["b"] = [x, h.items]
    y = x[i]
    h.items.append(y)
    h.count += 1
    h.table["a"] = 2
    return y


def replaced_later(model, h, x, i):
    h.last = x * 2
    y = x[i]
    h.last = y
    return y.sum()


def writes_in_place(model, h, x, i):
    view = x[1:]
    view.add_(1)
    y = x[i]
    x.zero_()
    return y


def random_numbers(model, h, x, i):
    h.noise = torch.rand(3)
    noisy = x + torch.randn_like(x)
    y = noisy[i]
    return y + torch.rand(())


def handled(model, h, x, i):
    kept = x * 3
    try:
        h.items.append("try")
        y = x[i]
        h.items.append("never")
    except IndexError as error:
        h.items.append(type(error).__name__)
        y = kept
    else:
        h.items.append("else")
    finally:
        h.items.append("finally")
    return y + 1


def other_error_from_a_handler(model, h, x, i):
    try:
        return x[i]
    except IndexError as error:
        h.items.append("handler")
        raise ValueError("no such row") from error


def in_a_handler(model, h, x, i):
    try:
        raise KeyError("k")
    except KeyError:
        h.items.append("handler")
        return x[i]


@contextlib.contextmanager
def watched(h):
    h.items.append("enter")
    try:
        yield
    except IndexError:
        h.items.append("seen")
        raise
    finally:
        h.items.append("leave")


def in_contexts(model, h, x, i):
    with watched(h), torch.no_grad():
        y = x * 2
        with contextlib.suppress(KeyError):
            y = y[i]
    return y


def suppressed(model, h, x, i):
    y = x * 2
    with contextlib.suppress(IndexError):
        h.items.append("with")
        y = y[i]
    h.items.append("after")
    return y + 1


def third(h, x, i):
    h.items.append("third")
    try:
        return x[i] * 2
    finally:
        h.items.append(torch.is_grad_enabled())


def second(h, x, i):
    with torch.no_grad():
        return third(h, x + 1, i) * 2


def below_inlined_calls(model, h, x, i):
    try:
        result = second(h, x, i) + 1
    except IndexError:
        h.items.append(torch.is_grad_enabled())
        raise
    h.items.append("done")
    return result


def handled_by_a_caller(model, h, x, i):
    result = x
    for iteration in range(3):
        try:
            result = result + second(h, x, i + iteration).sum()
        except IndexError:
            h.items.append(iteration)
    return result


def without_gradients(model, h, x, i):
    """Which of no gradients could have, so that nobody needs the switch but who asks for it."""
    y = next(model.parameters()).sum() * 2
    with torch.no_grad():
        try:
            found = x.long()[i]
        finally:
            h.items.append(torch.is_grad_enabled())
    return y + found.sum()


def in_a_module(model, h, x, i):
    h.items.append("step")
    y = model(x, i, h)
    h.items.append("done")
    return y


def gradients(model, h, x, i):
    model.linear(x).sum().backward()
    h.norm = model.linear.weight.grad.norm()
    model.linear.bias.grad = None
    y = x[i]
    model.zero_grad()
    return y


def cells(model, h, x, i):
    total = 0

    def add(n):
        nonlocal total
        total += n
        return x[i + n]

    h.add = add
    add(0)
    add(50)
    return total


nameless = lambda model, h, x, i: effects_before_and_after(model, h, x, i)  # noqa: E731 (its name is no identifier)


def made_by_exec(model, h, x, i):
    return effects_before_and_after(model, h, x, i)


made_by_exec.__name__ = "two words"


CASES = [
    effects_before_and_after,
    nameless,
    made_by_exec,
    replaced_later,
    writes_in_place,
    random_numbers,
    handled,
    other_error_from_a_handler,
    in_a_handler,
    in_contexts,
    suppressed,
    below_inlined_calls,
    handled_by_a_caller,
    without_gradients,
    in_a_module,
    gradients,
    cells,
]


def shown(value):
    if isinstance(value, torch.Tensor):
        return ("tensor", value.detach().tolist(), value.requires_grad)
    if isinstance(value, tuple | list):
        return [shown(v) if v is not value else "itself" for v in value]
    if isinstance(value, dict):
        return {k: shown(v) for k, v in value.items()}
    return type(value).__name__ if callable(value) or isinstance(value, Holder) else value


def lines(error):
    """The user's lines in the traceback: those of this file, below the call."""
    places = traceback.extract_tb(error.__traceback__)
    return [(p.name, p.lineno) for p in places if p.filename == __file__ and p.name != "outcome"]


def outcome(function, model, bad):
    """Everything that a call leaves behind."""
    h = Holder()
    x = torch.arange(12.0).reshape(4, 3).clone()
    torch.manual_seed(3)
    i = torch.tensor([1, 77 if bad else 2])
    result = error = None
    try:
        result = shown(function(model, h, x, i))
    except Exception as caught:
        error = caught
    left = {
        "result": result,
        "holder": shown(h.__dict__),
        "aliased": h.table.get("b", [0, 0])[1] is h.items,
        "x": x.tolist(),
        "random": torch.rand(3).tolist(),
        "grad mode": torch.is_grad_enabled(),
        "buffers": (model.seen.item(), model.calls),
        "grads": [shown(p.grad) for p in model.parameters()],
    }
    if error is not None:
        left["error"] = (type(error), str(error), getattr(error, "__notes__", []))
        left["context"] = (type(error.__context__), type(error.__cause__))
        left["lines"] = lines(error)
    return left


@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_what_a_failed_call_leaves_behind(function, backend):
    torch.manual_seed(0)
    model = Layer()
    twin = copy.deepcopy(model)
    captured = capture(function, backend=backend)
    for bad in (True, False, True, True, True):
        want = outcome(function, model, bad)
        assert outcome(captured, twin, bad) == want
    assert stats(captured).graphs >= 1 and stats(captured).hits >= 1


def test_the_graph_did_fail_in_the_middle():
    """The cases above test what they say: the failing operator is in a graph, with others before it."""
    for function in CASES:
        captured = capture(function)
        outcome(captured, Layer(), True)
        assert stats(captured).breaks == 0, function.__name__


def test_the_backend_that_hides_its_operators_is_said_to():
    captured = capture(effects_before_and_after, backend=lambda gm, examples: lambda *inputs: Opaque(gm)(*inputs))
    with pytest.raises(IndexError) as caught:
        captured(Layer(), Holder(), torch.ones(4, 3), torch.tensor([1, 77]))
    assert any("which operator failed" in note for note in caught.value.__notes__)


class Opaque:
    """Runs a graph's nodes one by one, in code of its own."""

    def __init__(self, gm):
        self.gm = gm

    def __call__(self, *inputs):
        return torch.fx.Interpreter(self.gm).run(*inputs)


def test_a_value_that_is_gone_is_said_to_be():
    """Dropout's result is needed by the handler and by nothing after it: it cannot be computed again."""

    def step(x, i, log):
        noisy = torch.nn.functional.dropout(x)
        log.append(1)
        try:
            return x[i]
        except IndexError:
            return noisy

    log = []
    with pytest.raises(IndexError) as caught:
        capture(step)(torch.ones(4, 3), torch.tensor([77]), log)
    assert any("is needed" in note for note in caught.value.__notes__)


def test_nothing_is_kept_of_a_failed_call():
    """Neither the graph's values nor the arguments live on, once the exception is dropped."""
    import gc
    import weakref

    captured = capture(handled)
    x = torch.ones(4, 3)
    captured(Layer(), Holder(), x, torch.tensor([77]))
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_what_a_failed_call_was_given_dies_with_its_last_reference():
    """Not at the next garbage collection: the trace up to the operator lets go of it."""
    import gc
    import weakref

    for function in (handled, effects_before_and_after):
        captured, model = capture(function), Layer()
        for _ in range(2):
            x, h = torch.ones(4, 3), Holder()
            gc.collect()
            gc.disable()
            try:
                with contextlib.suppress(IndexError):
                    captured(model, h, x, torch.tensor([77]))
                vars(h).clear()
                dead = weakref.ref(x), weakref.ref(h)
                del x, h
                assert [ref() is None for ref in dead] == [True, True], function.__name__
            finally:
                gc.enable()


def one_hot_without_gradients(ids):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.one_hot(ids, 3)


def from_c(x, ids):
    return (x * 2).sum() + sum(map(one_hot_without_gradients, [ids])).sum()


def from_python(x, ids):
    return (x * 2).sum() + one_hot_without_gradients(ids).sum()


def interpreted(gm, example_inputs):
    """A backend that runs the graph's operators, but not its code: nobody knows which one failed."""
    return torch.fx.Interpreter(gm).run


@pytest.mark.parametrize("function", [from_c, from_python])
@pytest.mark.parametrize("backend", ["moebius", "eager", interpreted])
def test_a_failure_inside_contexts_leaves_no_switch_thrown(function, backend):
    step, x = capture(function, backend=backend), torch.ones(3, requires_grad=True)
    step(x, torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        step(x, torch.tensor([0, 7]))
    try:
        assert stats(step).graphs == 1 and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0
    finally:
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)


def needed_only_by_the_handler(x, i, k):
    first = k + 1
    try:
        x[i]
    except IndexError:
        return first


def test_an_argument_that_only_the_handler_needs_is_there():
    captured = capture(needed_only_by_the_handler)
    for k in (5, 6, 7):
        assert captured(torch.ones(2), torch.tensor([9]), k) == k + 1


def written_with_gradients(x, notes):
    notes.append("first")
    x.add_(LAYER(x))
    x.sum().backward()


def frozen_and_thawed(x, notes):
    notes.append("first")
    y = LAYER(x.requires_grad_()).exp()
    LAYER.requires_grad_(False)
    LAYER.weight.sub_(1)
    LAYER.requires_grad_(True)
    y.sum().backward()


LAYER = torch.nn.Linear(4, 4)


@pytest.mark.parametrize("function", [written_with_gradients, frozen_and_thawed])
def test_what_requires_gradients_has_changed_before_the_failure(function):
    """The trace up to the operator is of the inputs as they were when the graph began."""
    captured, notes = capture(function, backend="eager"), []
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        captured(torch.rand(3, 4), notes)
    assert notes == ["first"] and not getattr(caught.value, "__notes__", ())


def test_what_a_trace_tries_is_not_logged():
    """FakeTensorMode logs each operator that fails, with its traceback."""

    def step(x):
        try:
            return x @ x
        except RuntimeError:
            return x @ x.t()

    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        assert torch.equal(capture(step)(torch.ones(2, 3)), torch.full((2, 2), 3.0))
        assert not lines
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert lines
    finally:
        logger.removeHandler(handler)


def test_a_branch_whose_data_the_graph_has_written_goes_the_same_way_again():
    """``AveragedModel`` asks for its counter and counts: the second trace finds the counter as it is afterwards."""

    def step(count, x, notes):
        y = LAYER(x).exp()
        if bool(count == 0):
            notes.append("first")
        count.add_(1)
        y += 1
        y.sum().backward()
        notes.append("after")

    LAYER.requires_grad_(True)
    captured = capture(step, backend="eager")
    for run in (step, captured):
        notes, count = [], torch.zeros((), dtype=torch.long)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                run(count, torch.ones(2, 4), notes)
            assert not getattr(caught.value, "__notes__", ())
        assert notes == ["first"] and count == 2


def test_a_number_made_of_a_count_is_known_behind_the_failure():
    """The count is in the graph, and what was appended is made of it; nothing is lost where an operator fails."""

    class Counts:
        def __init__(self):
            self.calls, self.history = 3, [0.5]

    def step(counts, x, mean):
        y = x * 2
        counts.calls += 1
        counts.history.append(float(counts.calls))
        return torch.nn.functional.batch_norm(y + counts.calls, mean, torch.ones_like(mean))

    ours, theirs, captured = Counts(), Counts(), capture(step, backend="eager")
    for dtype in (torch.float32, torch.float32, torch.float32, torch.float64, torch.float64, torch.float32):
        arguments, outcomes = (torch.ones(4, 3), torch.ones(3, dtype=dtype)), []
        for function, counts in ((captured, ours), (step, theirs)):
            try:
                outcomes.append(repr(function(counts, *arguments)))
            except RuntimeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert vars(ours) == vars(theirs)


def test_a_failed_graph_is_traced_again_with_what_was_known_when_it_was_captured() -> None:
    """Nothing that is learnt later, of places, sizes, loops or branches, is told to it: it counts nodes as before."""
    assumptions = Assumptions(dynamic_dims={"L['x']": {0}}, varying={"L['n']": ("1, 2", "")})
    kept = assumptions.copied()
    assert kept == assumptions
    for name, held in vars(assumptions).items():
        if isinstance(held, set | dict | list):
            assert getattr(kept, name) is not held, name
    assumptions.dynamic_dims["L['x']"].add(1)
    assert kept.dynamic_dims == {"L['x']": {0}}


VIEWS = ("a[1:]", "a.view(3, 1)", "a.unsqueeze(0)", "a.expand(2, 3)[0]", "a.as_strided((2,), (1,), 1)", "a.split(2)[0]")
WRITES = ("u.mul_(2)", "a.add_(1)", "u[0] = 5", "a.copy_(torch.arange(3.))", "a.t_(); u.add_(1)", "a.mul_(h['w'])")


@pytest.mark.share(12)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_whose_memory_was_written_since_is_taken_again(view, write):
    source = f"""
def step(h, x, n):
    a = h["a"]
    try:
        u = h["u"] = {view}
        {write}
        x = x + torch.ones(3)[(x * 0 + n).long()]
        u = h["u"] = a[:1]
        {write}
    except IndexError:
        h["u"].sub_(1)
    return x + h["a"].flatten() * 2
"""
    space = {"torch": torch}
    exec(source, space)

    def seen(step):
        h, found = {"a": torch.ones(3), "w": torch.full((3,), 1.5)}, []
        for n in (0, 1, 2, 3, 4, 1):
            y = step(h, torch.ones(3), n)
            found.append((y.tolist(), h["a"].tolist(), h["u"].tolist(), h["u"]._base is h["a"]))
        return found

    assert seen(capture(space["step"], backend="eager")) == seen(space["step"])

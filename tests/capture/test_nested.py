"""Captured callables among others: inside of a captured step, copied, moved, and asked for what they are."""

from __future__ import annotations

import copy
import ctypes
import gc
import inspect
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from moebius import GraphBreakError, NotCapturableError, capture, explain, stats
from moebius.api import captured_of, report_of
from moebius.cache.below_native import MAX_MADE
from moebius.cache.captured import MAX_SEGMENTS


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def test_a_captured_function_inside_a_captured_step_is_part_of_its_graph():
    scale = {"by": 2}
    helper = capture(lambda x: x * scale["by"])
    model = capture(linear())

    @capture(fullgraph=True)
    def step(x):
        return helper(model(x)).sum()

    x = torch.randn(2, 3)
    for _ in range(3):
        assert torch.equal(step(x), (linear()(x) * 2).sum())
    assert stats(step).graphs == 1 and stats(helper).misses == 0
    scale["by"] = 3
    assert torch.equal(step(x), (linear()(x) * 3).sum())


def test_another_captured_function_in_its_place_is_noticed():
    helpers = [capture(lambda x: x * 2), capture(lambda x: x * 5)]

    @capture
    def step(x):
        return helpers[0](x) + 1

    assert step(torch.ones(1)).item() == 3
    helpers.reverse()
    assert step(torch.ones(1)).item() == 6


def test_other_options_are_a_break():
    helper = capture(lambda x: x * 2, backend="eager")
    report = explain(lambda x: helper(x) + 1)(torch.ones(1))
    assert report.result.item() == 3
    assert [b.reason for b in report.breaks] == ["captured function"]
    with pytest.raises(GraphBreakError, match="other options"):
        capture(lambda x: helper(x) + 1, fullgraph=True)(torch.ones(1))


def test_recursion_through_the_captured_name():
    @capture
    def power(x, n):
        return x if n == 0 else power(x * 2, n - 1)

    for _ in range(2):
        assert power(torch.ones(1), 4).item() == 16
    assert stats(power).graphs == 1


def test_a_captured_module_is_what_its_module_is():
    model = capture(linear())
    assert isinstance(model, nn.Linear) and list(model.state_dict()) == ["weight", "bias"]
    assert inspect.signature(model.__class__.forward) == inspect.signature(nn.Linear.forward)
    with pytest.raises(NotCapturableError, match="captured already"):
        capture(model)


def test_what_returns_the_module_returns_the_captured_one():
    model = capture(linear())
    for moved in (model.to(torch.float64), model.eval(), model.train(), model.requires_grad_(False)):
        assert moved is model
    assert model.weight.dtype is torch.float64 and not model.weight.requires_grad
    model.double()(torch.ones(1, 3, dtype=torch.float64))
    assert stats(model).graphs == 1


def test_a_copy_is_captured_too_and_shares_nothing():
    model = capture(linear(), backend="eager")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.weight.add_(1)
        x = torch.ones(1, 3)
        assert torch.equal(other(x), nn.functional.linear(x, other.weight, other.bias))
        assert stats(other).graphs == 1 and not torch.equal(other.weight, model.weight)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32)) for _ in range(4)
        )

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


out_of_the_graph = ctypes.pythonapi.PyObject_CallOneArg  # native code that calls Python's, and that nobody knows
out_of_the_graph.restype, out_of_the_graph.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.py_object]


def above(model, **options):
    """A captured step that calls the model from native code."""
    return capture(lambda x: out_of_the_graph(model, x) + 0, **options)


def test_what_is_met_below_native_code_has_the_options_of_who_met_it():
    """The note on the model's code was for the first captured function that came by, so that the second computed in its
    eight bits."""
    model, x = Experts(), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    coarse, exact = above(model, precision="mxfp8"), above(model)
    for _ in range(2):
        assert (coarse(x) - expected).abs().max() > 1e-3
        torch.testing.assert_close(exact(x), expected, rtol=1e-5, atol=1e-6)
    for step in (coarse, exact):  # and each reports what it captured
        assert [r.lowered for r in report_of(captured_of(step)).expert_regions] == [True]


def test_what_was_met_below_goes_with_who_met_it():
    model, x = Experts(), torch.randn(8, 32)
    step = above(model)
    step(x)
    kept = [weakref.ref(captured) for captured in captured_of(step).family()]
    assert len(kept) == 3  # the step, its rest, and the model's forward
    del step
    for _ in kept:  # (code is unknown to the collector: a rest is found to be garbage when the code before it is gone)
        gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    torch.testing.assert_close(above(model)(x), model(x), rtol=1e-5, atol=1e-6)


# What a function does that is met below native code, and what its caller does after that.
DONE = {
    "nothing": lambda y: y,
    "its size": lambda y: y.reshape(-1, 1) * y.shape[0],
    "a number of data": lambda y: y * torch.arange(int(y[0, 0].item() * 0) + 2).sum(),
    "a shape of data": lambda y: y[torch.where(y[:, 0] > 0)[0]],
    "a break": lambda y: y + len([out_of_the_graph(torch.relu, y)]),
    "two breaks": lambda y: y + len([out_of_the_graph(torch.relu, y)]) + len([out_of_the_graph(torch.tanh, y)]),
}


@pytest.mark.share(12)
@pytest.mark.parametrize("own", [False, True], ids=["met", "captured itself"])
@pytest.mark.parametrize("below", DONE)
@pytest.mark.parametrize("above", DONE)
def test_nothing_of_a_family_outlives_its_function(below, above, own):
    """Code holds what it goes on in, and the collector does not look into code: what lives as long as a capture must
    hold no code of the stack below which it was made (as torch's records of that do from CPython 3.13 on), and none
    of a family what leads to it."""

    class Body(nn.Module):
        def forward(self, x):
            return DONE[below](x * 2)

    model, here = capture(Body()) if own else Body(), DONE[above]
    step = capture(lambda x: here(out_of_the_graph(model, x) + 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (4, 5, 6):
            step(torch.ones(rows, 4))
    kept = [weakref.ref(captured) for captured in captured_of(step).family()]
    assert len(kept) >= (2 if own else 3)
    del step
    for _ in kept:
        gc.collect()
    assert not [ref for ref in kept if ref() is not None]


class Scaled(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(by)))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("decorated", [False, True], ids=["below native code", "decorated"])
def test_each_of_many_modules_of_one_class_is_captured(decorated):
    """More than a callable may have captures: they share one forward, and each has captures of its own."""

    class Decorated(Scaled):
        forward = capture(Scaled.forward)

    @capture
    def step(layers, x):
        return [out_of_the_graph(layer, x) for layer in layers]

    step = Decorated.forward if decorated else step
    layers = [(Decorated if decorated else Scaled)(by) for by in range(1, MAX_SEGMENTS + 3)]
    x = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it would say that it gave up
        misses = []
        for _ in range(MAX_MADE + 3):
            found = [layer(x) for layer in layers] if decorated else step(layers, x)
            assert [int(y[0]) for y in found] == [int(layer.weight) for layer in layers]
            misses.append(stats(step).misses)
    ours = [one for one in captured_of(step).family() if one.function.__name__ in ("forward", "out_of_the_graph")]
    assert [len(one.segments) for one in ours] == [len(layers)]
    assert misses[-1] == misses[-2]


def test_one_module_that_keeps_changing_is_given_up():
    layers = [Scaled(by) for by in range(3)]
    step = capture(Scaled.forward)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration in range(MAX_SEGMENTS + 3):
            for layer in layers:
                x = torch.ones((1,) * iteration)  # each number of dimensions is a capture of its own
                assert torch.equal(step(layer, x), x * layer.weight)
    assert any("runs natively now" in str(w.message) for w in caught)


class Trained:
    def __init__(self):
        torch.manual_seed(0)
        self.net, self.count = nn.Linear(4, 4), 0
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    @capture
    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.count += 1
        return loss.detach()

    @capture
    def twice(self, x):
        return self.step(x) + self.step(x)


@pytest.mark.parametrize("kind", ["method", "function", "super"])
def test_a_captured_method_is_part_of_what_calls_it(kind):
    """It is bound as a function is, whoever asks for it."""

    class Below(Trained):
        def step(self, x):
            return super().step(x) * 2

    trained, plain, x = (Below if kind == "super" else Trained)(), Trained(), torch.ones(3, 4)
    step = capture(lambda x: trained.step(x)) if kind != "method" else trained.twice
    for _ in range(3):
        expected = [Trained.step.__wrapped__(plain, x) for _ in range(2 if kind == "method" else 1)]
        assert torch.equal(step(x), sum(expected) * (2 if kind == "super" else 1))
    assert (stats(step).graphs, stats(step).breaks, trained.count) == (1, 0, plain.count)

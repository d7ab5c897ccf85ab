"""A function that was interpreted once is written again for like tensors, and only where it would do the same."""

from __future__ import annotations

import contextlib
import io
import sys
import types
import warnings

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.hook import ABSENT
from moebius.regions.module_reuse import ModuleReuse

SCALE = {"now": 2.0}
SEEN: list[int] = []


@pytest.fixture
def reused(monkeypatch):
    """Names of the functions that were written again."""
    found = []
    plain = ModuleReuse.write_again

    def counting(self, block, called, arguments):
        result = plain(self, block, called, arguments)
        if result is not ABSENT and type(called) is types.FunctionType:
            found.append(called.__name__)
        return result

    monkeypatch.setattr(ModuleReuse, "write_again", counting)
    return found


def rotated(q, k, angle):
    half = q.shape[-1] // 2
    turned = [torch.cat((-one[..., half:], one[..., :half]), -1) for one in (q, k)]
    return tuple(one * angle.cos() + other * angle.sin() for one, other in zip((q, k), turned, strict=True))


class Attention(nn.Module):
    """Keeps its keys in a cache that the step makes, so that the module itself is never written again."""

    def __init__(self, place):
        super().__init__()
        self.place, self.heads = place, 2
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, angle, cache):
        q, k = rotated(self.q(x), self.k(x), angle)
        cache.append((self.place, k))
        return x + attend(self, q, cache[-1][1])


def attend(module, q, k):
    return (q.view(-1, module.heads, 4) * k.view(-1, module.heads, 4)).sum(1).tanh().repeat(1, module.heads)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(i) for i in range(layers))

    def forward(self, x, angle):
        cache = []
        for layer in self.layers:
            x = layer(x, angle, cache)
        return x, [k for _, k in cache], sum(place for place, _ in cache)


X, ANGLE = torch.linspace(-1, 1, 24).reshape(3, 8), torch.linspace(0, 3, 8)


@pytest.mark.parametrize("training", [True, False])
def test_what_layers_call_is_interpreted_once_though_they_fill_a_cache(reused, training):
    model = Model(5)

    def step(x, angle):
        x, kept, places = model(x, angle)
        return torch.autograd.grad(x.sum() + kept[2].sum(), [*model.parameters()]) if training else (x, kept, places)

    with contextlib.nullcontext() if training else torch.no_grad():
        captured = capture(step)
        for _ in range(2):
            torch.testing.assert_close(captured(X, ANGLE), step(X, ANGLE))
    assert stats(captured).graphs == 1 and not stats(captured).breaks
    assert reused.count("rotated") == 4 and reused.count("attend") == 4


def test_a_model_whose_layers_differ_in_what_a_function_reads(reused):
    model = Model(4)
    model.layers[2].heads = 1
    model.layers[3].register_forward_pre_hook(lambda module, args: None)
    captured = capture(model)
    wanted = pytest.raises(RuntimeError, model, X, ANGLE)
    assert str(wanted.value) in str(pytest.raises(RuntimeError, captured, X, ANGLE).value)
    model.layers[2].heads = 2
    torch.testing.assert_close(captured(X, ANGLE), model(X, ANGLE))
    assert "attend" in reused


def counts(x, seen):
    SEEN.append(len(SEEN))
    return x * len(SEEN)


def fills(x, seen):
    seen.append(x)
    return x * len(seen)


def writes(x, seen):
    SCALE["now"] += 1.0
    return x * SCALE["now"]


def reads(x, seen):
    return x * SCALE["now"]


def in_place(x, seen):
    return x.mul_(2)


def gives_itself(x, seen):
    return x


def view(x, seen):
    return x[1:]


def warns(x, seen):
    warnings.warn("careful", stacklevel=2)
    return x * 2


def prints(x, seen):
    print("here", tuple(x.shape))
    return x * 2


def draws(x, seen):
    return x + torch.rand_like(x)


def stops_gradients(x, seen):
    return x.detach() * 2


def knows_its_caller(x, seen):
    return x * (sys._getframe(1).f_lineno % 7)


def keeps_between_calls(x, seen, kept=[]):  # noqa: B006
    kept.append(1)
    return x * len(kept)


def sets_an_attribute(x, seen):
    x.label = getattr(x, "label", 0) + 1
    return x * x.label


def yields(x, seen):
    def each():
        yield x * 2

    return next(each())


KINDS = [counts, fills, writes, reads, in_place, gives_itself, view, warns, prints, draws, stops_gradients,
         knows_its_caller, keeps_between_calls, sets_an_attribute, yields]  # fmt: skip


def outcome(step, function):
    SEEN.clear()
    SCALE["now"] = 2.0
    if function.__defaults__:
        function.__defaults__[0].clear()
    torch.manual_seed(3)
    said, x = io.StringIO(), X.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as told, contextlib.redirect_stdout(said):
        warnings.simplefilter("always")
        results = step(x)
    grads = torch.autograd.grad(sum(r.sum() for r in results) + x.sum(), x)
    return results, grads, (list(SEEN), dict(SCALE), said.getvalue(), [(str(w.message), w.lineno) for w in told])


@pytest.mark.parametrize("where", ["arguments", "closure", "between"])
@pytest.mark.parametrize("function", KINDS, ids=lambda f: f.__name__)
def test_functions_that_do_more_than_compute(function, where):
    """where: what the step made is given as an argument, reached by a closure, or changed between two calls."""

    def step(x):
        made, y = [], x * 1.5
        seen = made if where == "arguments" else None

        def call(x):
            return function(x, made)

        def chosen(x, seen):
            return call(x) if where == "closure" else function(x, made if function is fills else seen)

        first = chosen(y * 1.0, seen)
        if where == "between":
            SCALE["now"] += 0.5
            y.label = 4
        second = chosen(y * 1.0, seen)

        third = chosen(y * 1.0, seen)
        return first, second, third

    captured = capture(step)
    for _ in range(3):
        (*found, log), (*want, wanted_log) = outcome(captured, function), outcome(step, function)
        torch.testing.assert_close(found, want)
        assert log == wanted_log


def test_without_it_each_call_is_interpreted(reused, monkeypatch):
    monkeypatch.setattr(ModuleReuse, "key_of", lambda self, called, *rest: None)
    model = Model(3)
    captured = capture(model)
    torch.testing.assert_close(captured(X, ANGLE), model(X, ANGLE))
    assert not reused

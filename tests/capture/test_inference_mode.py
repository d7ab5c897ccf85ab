"""``torch.inference_mode`` inside a captured step: one node of the graph, in which it is what it is in Python."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moebius import capture, disable, explain, stats

LINEAR = nn.Linear(4, 4)
MARKS: list[object] = []


@disable
def native(x):
    return x


def context(x):
    with torch.inference_mode():
        y = LINEAR(x) * 2
        z = y.relu()
    return y, z, x * 3


@torch.inference_mode()
def evaluated(x):
    return LINEAR(x).sum(-1)


def decorator(x):
    y = LINEAR(x)
    return evaluated(y), y


def two(x):
    with torch.inference_mode():
        a = x * 2
    b = LINEAR(x)
    with torch.inference_mode(True):
        c = a + b
    return a, b, c, torch.is_inference_mode_enabled()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 4)), nn.Parameter(torch.randn(3, 4, 6))
        self.router = nn.Linear(4, 3)

    def forward(self, x):
        weights, chosen = torch.topk(self.router(x).softmax(-1), 2)
        out = torch.zeros_like(x)
        for expert in range(3):
            token, slot = torch.where(chosen == expert)
            y = F.linear(F.silu(F.linear(x[token], self.up[expert])), self.down[expert])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


EXPERTS = Experts()


def experts(x):
    with torch.inference_mode():
        y = EXPERTS(x)
    return y, x.sum()


ONE_GRAPH = [context, decorator, two, experts]


def a_break_inside(x):
    with torch.inference_mode():
        y = native(x * 2) + 1
        MARKS.append(y.is_inference())
    return y, x * 2


def nested(x):
    with torch.inference_mode():
        y = x * 2
        with torch.inference_mode(False):
            z = y.clone() * LINEAR.weight.sum()
        w = evaluated(x)
    return y, z, w


def off(x):
    with torch.no_grad(), torch.inference_mode(False):
        return LINEAR(x)


def said(x):
    with torch.inference_mode():
        y = x * 2
        print("inside", y.shape)
    return y + 1


def left_by_an_exception(x):
    try:
        with torch.inference_mode():
            y = x * 2
            raise ValueError("out")
    except ValueError:
        MARKS.append(torch.is_inference_mode_enabled())
    return y, LINEAR(x)


def buffer_changed(x):
    seen = x.detach().clone()
    with torch.inference_mode():
        seen.add_(1)
        y = seen * 2
    return seen, y


def view_of_an_argument_changed(x):
    seen = x.detach().clone()
    with torch.inference_mode():
        seen.view(-1)[1:].mul_(2)
        y = seen[(x.sum() > 100).long() * 900]  # fails for many rows
    return seen, y


def used_by_autograd(x):
    with torch.inference_mode():
        y = x * 2
    return LINEAR(x) * y


def fails_inside(x):
    MARKS.append("before")
    try:
        with torch.inference_mode():
            y = x * 2
            y = y[torch.tensor(len(x) + 3) - (x.sum() < 100).long() * 3 - 1]
        MARKS.append("done")
        return y
    except IndexError as error:
        MARKS.append(torch.is_inference_mode_enabled())
        return str(error)


def kept(x):
    mode = torch.inference_mode()
    with mode:
        y = x * 2
    return y, mode.mode


def raises_out(x):
    with torch.inference_mode():
        y = x * 2
        raise ValueError(len(y))


@functools.lru_cache
def words(text, count):
    return text.split(), count


def cached_inside(x):
    """A cached function asks whether the step has written to what it reads: in the mode nobody counts writes."""
    with torch.inference_mode():
        y = LINEAR(x * 2)
        y.add_(1)
        z = y * words("a b", 2)[1]
    return z, z.clone() * 2


def then_raises(x):
    """The graph ends where the exception began, in the mode."""
    with torch.inference_mode():
        y = x * 2
        y = y + len(words(y, 2))  # a tensor has no split()
    return y


EVERY = [*ONE_GRAPH, raises_out, cached_inside, then_raises]
EVERY += [a_break_inside, nested, off, said, left_by_an_exception, buffer_changed, used_by_autograd]
EVERY += [fails_inside, kept, view_of_an_argument_changed]


def shown(value):
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.requires_grad, value.is_inference()
    return [shown(v) for v in value] if isinstance(value, tuple) else value


def outcome(function, x):
    MARKS.clear()
    try:
        result = shown(function(x))
    except Exception as error:
        result = type(error), str(error)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    return result, [*MARKS]


@pytest.mark.share(14)
@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)
def test_it_is_what_python_does(function, backend):
    captured = capture(function, backend=backend)
    for n in (3, 3, 200, 3):
        x = torch.ones(n, 4)
        found, want = outcome(captured, x), outcome(function, x)
        if function is experts:  # other kernels than the loop's
            torch.testing.assert_close(function(x), captured(x), rtol=1e-4, atol=1e-4)
        else:
            assert found == want


@pytest.mark.parametrize("function", ONE_GRAPH, ids=lambda f: f.__name__)
def test_these_are_one_graph(function):
    captured = capture(function)
    captured(torch.ones(3, 4))
    assert stats(captured).graphs == 1 and not stats(captured).breaks


def test_experts_in_it_are_one_operator():
    assert [region.lowered for region in explain(experts)(torch.ones(3, 4)).expert_regions] == [True]


def test_what_breaks_says_so():
    for function in (a_break_inside, off, said):
        assert all(b.hint for b in explain(function)(torch.ones(3, 4)).breaks)
    assert any("InferenceMode" in b.detail for b in explain(a_break_inside)(torch.ones(3, 4)).breaks)


def switched_off(x):
    with torch.inference_mode(False):
        y = LINEAR(x) * 2
        return y, torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("backend", ["moebius", "eager"])
def test_a_mode_that_is_switched_off(backend, gradients):
    """Outside of inference mode it does nothing but record gradients; without those the graph breaks."""
    captured = capture(switched_off, backend=backend)
    for _ in range(3):
        x = torch.randn(3, 4)
        with torch.set_grad_enabled(gradients):
            (found, *modes), (expected, *plain) = captured(x), switched_off(x)
        assert modes == plain and torch.equal(found, expected) and found.requires_grad == expected.requires_grad
    assert bool(stats(captured).breaks) == (not gradients)


MET = {
    "a parameter": lambda m, x: m.weight * 2,
    "a module": lambda m, x: m(x),
    "its view": lambda m, x: m.weight.view(-1),
    "detached": lambda m, x: m.weight.detach(),
    "a buffer": lambda m, x: m.table + 1,
}


def trained(m, x, y):
    m(x + y.sum()).sum().backward()
    return m.weight.grad


def derived(m, x, y):
    return torch.autograd.grad(m(x).sum(), [m.weight])[0]


def hooked(m, x, y):
    handle = m.weight.register_hook(lambda g: g * 3)
    m(x).sum().backward()
    handle.remove()
    return m.weight.grad


def switched_on(m, x, y):
    m.table.requires_grad_()
    (m(x) * m.table).sum().backward()
    found, m.table.grad = m.table.grad, None
    m.table.requires_grad_(False)
    return found


def written(m, x, y):
    with torch.no_grad():
        m.weight.add_(1)
    m.table.mul_(2)
    return m.weight * 1, m.weight._version, m.table._version


def told(m, x, y):
    return m.weight.is_inference(), m.weight.requires_grad, y.is_inference(), y.requires_grad


@pytest.mark.share(14)
@pytest.mark.parametrize("then", [trained, derived, hooked, switched_on, written, told], ids=lambda f: f.__name__)
@pytest.mark.parametrize("met", MET)
def test_a_tensor_that_is_first_met_in_it_can_be_trained_after(met, then):
    def outcomes(backend):
        torch.manual_seed(0)
        m = nn.Linear(4, 4)
        m.register_buffer("table", torch.randn(4))

        def step(x):
            with torch.inference_mode():
                y = MET[met](m, x)
            return then(m, x, y)

        step = step if backend is None else capture(step, backend=backend)
        found = []
        for _ in range(3):
            m.zero_grad()
            found.append(shown(step(torch.randn(3, 4))))
        return found, shown(m.weight)

    assert outcomes("eager") == outcomes(None)


# Around the step: autograd counts no writes, the trace does. How experts are counted, what is written, what is asked.
COUNTED = {
    "bincount": lambda chosen: torch.bincount(chosen.flatten(), minlength=3),
    "one_hot": lambda chosen: F.one_hot(chosen.flatten(), 3).sum(0),
    "marks": lambda chosen: torch.zeros(len(chosen), 3, dtype=torch.long).scatter_(1, chosen, 1).sum(0),
    "compared": lambda chosen: (chosen.flatten() == torch.arange(3)[:, None]).sum(1),
}
BEFORE = {
    "nothing": lambda chosen, counts: None,
    "the index": lambda chosen, counts: chosen.sub_(1).clamp_(min=0),
    "the counts": lambda chosen, counts: counts.sub_(1),
    "a view": lambda chosen, counts: counts[1:].zero_(),
    "data": lambda chosen, counts: counts.data.zero_(),
}


def skipped(x, chosen, counts):
    out, numbers = torch.zeros_like(x), counts.tolist()
    for expert in range(3):
        if numbers[expert] == 0:
            continue
        token, slot = torch.where(chosen == expert)
        out[token] += LINEAR(x[token])
    return out


def listed(x, chosen, counts):
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, slot = torch.where(chosen == expert)
        out[token] += LINEAR(x[token]) * counts[expert]
    return out


def signs(x, chosen, counts):
    return [n + 1 if n >= 0 else -n for n in counts.tolist()], counts


@pytest.mark.share(4)
@pytest.mark.parametrize("asked", [skipped, listed, signs], ids=lambda f: f.__name__)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("counted", COUNTED)
def test_writes_count_in_it_as_outside(counted, before, asked):
    def step(x):
        chosen = torch.topk(x[:, :3], 2)[1]
        counts = COUNTED[counted](chosen)
        BEFORE[before](chosen, counts)
        return asked(x, chosen, counts)

    torch.manual_seed(0)
    batches = [torch.randn(rows, 4) for rows in (5, 6, 1, 2, 5, 6)]
    found = {}
    for mode in (torch.no_grad, torch.inference_mode):
        captured = capture(step, backend="eager")
        with mode():
            for x in batches:
                assert str(captured(x)) == str(step(x))
        found[mode] = stats(captured).graphs, stats(captured).breaks, stats(captured).misses
    assert found[torch.inference_mode] == found[torch.no_grad]


def test_without_the_traces_count_the_experts_are_not_known(monkeypatch):
    nobody = lambda t: float("nan") if t.is_inference() else t._version  # noqa: E731
    monkeypatch.setattr("moebius.lowering.experts.routing.version_of", nobody)
    with pytest.raises(AssertionError):
        test_writes_count_in_it_as_outside("bincount", "nothing", skipped)

"""A block that was seen before with other weights is written again, and only where it is the same."""

from __future__ import annotations

import contextvars

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.hook import ABSENT
from moebius.python.domain import TrackingDomain
from moebius.regions.module_reuse import ModuleReuse

MODE = contextvars.ContextVar("mode", default=1.0)
SCALES = {"now": 1.0}


class Layer(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("shift", torch.rand(width))
        self.scale, self.options, self.table = 2.0, [1, 2], {"k": 0.5}
        self.optional = None
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, other=None):
        h = self.norm(x)
        if self.optional is not None:
            h = h + self.optional
        h = torch.relu(self.a(h)) * self.scale + sum(self.options)
        for value in self.table.values():
            h = h * value
        h = self.dropout(h)
        return x + self.b(h) + self.shift.to(x.dtype) + (0 if other is None else other)


class Stack(nn.Module):
    def __init__(self, count, kind=Layer):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def reused(monkeypatch):
    """Classes of the modules that were written again."""
    found = []
    plain = ModuleReuse.write_again

    def counting(self, block, module, arguments):
        result = plain(self, block, module, arguments)
        if result is not ABSENT:
            found.append(type(module).__name__)
        return result

    monkeypatch.setattr(ModuleReuse, "write_again", counting)
    return found


def same(model, captured, x, grads=True):
    """Result, gradients and random state are plain Python's."""
    torch.manual_seed(5)
    model.zero_grad()
    want = model(x)
    if grads:
        want.sum().backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()], torch.rand(1)
    torch.manual_seed(5)
    model.zero_grad()
    got = captured(model, x)
    if grads:
        got.sum().backward()
    assert torch.equal(got, want) and got.requires_grad == want.requires_grad
    assert torch.equal(torch.rand(1), expected[1])
    for p, gradient in zip(model.parameters(), expected[0], strict=True):
        assert (p.grad is None) == (gradient is None)
        assert gradient is None or torch.allclose(p.grad, gradient)


def run(model, x):
    return model(x)


@pytest.mark.parametrize("training", [False, True])
def test_equal_layers_are_interpreted_once(reused, training):
    torch.manual_seed(0)
    model = Stack(6).train(training)
    captured = capture(run)
    for _ in range(2):
        same(model, captured, torch.rand(3, 4))
    assert reused.count("Layer") == 4  # (the first layer's argument is the step's own; the others' have a gradient)
    assert stats(captured).graphs == 1 and stats(captured).hits == 1


def attribute(layer):
    layer.scale = 3.0


def constant_of_another_type(layer):
    layer.options = [1, 2.5]


def longer_list(layer):
    layer.options = [1, 2, 3]


def order_of_a_dict(layer):
    layer.table = {"k": 0.5, "l": 0.25}


def minus_zero(layer):
    layer.scale = -0.0


def training_flag(layer):
    layer.dropout.train(not layer.dropout.training)


def hook(layer):
    layer.a.register_forward_hook(lambda module, args, out: out * 2)


def pre_hook(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def shape_of_a_weight(layer):
    layer.a, layer.b = nn.Linear(4, 7), nn.Linear(7, 4)


def dtype_of_a_buffer(layer):
    layer.shift = layer.shift.double()


def frozen(layer):
    layer.a.weight.requires_grad_(False)


def tied(layer):
    layer.b = layer.a


def tied_to_another(layer):
    layer.b.weight = layer.a.weight


def another_class(layer):
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layer.a = Doubled(4, 4)


def own_forward(layer):
    layer.forward = lambda x: x * 2


def optional_present(layer):
    layer.optional = nn.Parameter(torch.rand(4))


def without_bias(layer):
    layer.a = nn.Linear(4, 4, bias=False)


def stride_of_a_weight(layer):
    layer.a.weight = nn.Parameter(torch.rand(4, 4).T)


CHANGES = [
    attribute,
    constant_of_another_type,
    longer_list,
    order_of_a_dict,
    minus_zero,
    training_flag,
    hook,
    pre_hook,
    shape_of_a_weight,
    dtype_of_a_buffer,
    frozen,
    tied,
    tied_to_another,
    another_class,
    own_forward,
    optional_present,
    without_bias,
    stride_of_a_weight,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_layer_that_differs_is_interpreted(reused, change):
    torch.manual_seed(0)
    model = Stack(4).eval()
    change(model.layers[2])
    same(model, capture(run), torch.rand(3, 4))
    assert reused.count("Layer") == 1  # the last one, like the second


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_was_reused_is_guarded(change):
    torch.manual_seed(0)
    model = Stack(4).eval()
    captured = capture(run)
    same(model, captured, torch.rand(3, 4))
    change(model.layers[2])
    same(model, captured, torch.rand(3, 4))


class Counting(Layer):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x) * self.calls


class Accumulating(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x) * self.seen


class InPlace(Layer):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class View(Layer):
    def forward(self, x):
        return x[:]


class Shared(Layer):
    log: list = []

    def forward(self, x):
        self.log.append(1)
        return super().forward(x) * len(self.log)


class ReadsContext(Layer):
    def forward(self, x):
        return super().forward(x) * MODE.get()


class KnowsItsPlace(Layer):
    first = None

    def forward(self, x):
        return super().forward(x) * (2 if self is KnowsItsPlace.first else 3)


class Drawing(Layer):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x)


@pytest.mark.parametrize(
    "kind",
    [Counting, Accumulating, InPlace, View, Shared, ReadsContext, KnowsItsPlace, Drawing],
    ids=lambda k: k.__name__,
)
def test_layers_that_do_more_than_compute(kind):
    torch.manual_seed(0)
    one, two = Stack(4, kind).eval(), Stack(4, kind).eval()
    two.load_state_dict(one.state_dict())
    captured = capture(run)
    for _ in range(3):
        Shared.log.clear()
        KnowsItsPlace.first = one.layers[0]
        x = torch.rand(3, 4)
        torch.manual_seed(1)
        want = one(x.clone())
        Shared.log.clear()
        KnowsItsPlace.first = two.layers[0]
        torch.manual_seed(1)
        assert torch.equal(captured(two, x.clone()), want)
        assert [b.tolist() for b in one.buffers()] == [b.tolist() for b in two.buffers()]


def test_what_changes_between_two_layers():
    """Globals, context variables and objects of the step's own, changed between one layer and the next."""

    class Reads(nn.Module):
        def __init__(self, box):
            super().__init__()
            self.linear, self.box = nn.Linear(4, 4), box

        def forward(self, x):
            return self.linear(x) * SCALES["now"] + self.box[-1]

    box = [0.0]
    first, second, third = Reads(box), Reads(box), Reads(box)

    def step(x):
        SCALES["now"] = 1.0
        x = first(x)
        SCALES["now"] = 5.0
        x = second(x)
        box.append(7.0)
        x = third(x)
        box.pop()
        return x

    captured = capture(step)
    x = torch.rand(2, 4)
    for _ in range(2):
        assert torch.equal(captured(x), step(x))


def test_arguments_that_are_one_object_or_two():
    a, b = Layer().eval(), Layer().eval()

    def step(x, y):
        return a(x, x) + b(x, y)

    captured = capture(step)
    x, y = torch.rand(2, 4), torch.rand(2, 4)
    assert torch.equal(captured(x, y), step(x, y))


def test_grad_mode_between_layers():
    a, b = Layer().eval(), Layer().eval()

    def step(x):
        y = a(x)
        with torch.no_grad():
            z = b(x)
        return y, z

    y, z = capture(step)(torch.rand(2, 4))
    assert y.requires_grad and not z.requires_grad


def test_a_gradient_that_stops():
    """A result that is detached from one weight: backward leaves that weight alone in each layer."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) + self.b(x).detach(), self.b(x)

    class Two(Stack):
        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(x)
            return x

    model = Two(3, Half)
    same(model, capture(run), torch.rand(2, 4))

    def train(model, x):
        model(x).sum().backward()
        return [p.grad is None for p in model.parameters()]

    model.zero_grad()
    want = train(model, torch.rand(2, 4))
    model.zero_grad()
    assert capture(train)(model, torch.rand(2, 4)) == want and any(want)


def test_sizes_that_vary(reused):
    model = Stack(3).eval()
    captured = capture(run)
    for rows in (3, 5, 6, 7):
        same(model, captured, torch.rand(rows, 4))
    assert stats(captured).graphs <= 2


def test_a_failure_inside_a_block_that_was_written_again(reused):
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, rows):
            y = self.linear(x)
            return y[rows]

    model = nn.ModuleList(Picks() for _ in range(3))

    def step(x, rows, log):
        for n, layer in enumerate(model):
            log.append(n)
            x = layer(x, rows[n].clone())
        log.append("end")
        return x

    captured = capture(step)
    good = torch.tensor([[0, 1], [1, 0], [1, 1]])
    bad = torch.tensor([[0, 1], [1, 0], [1, 9]])
    for rows in (good, bad, bad):
        logs = [], []
        for function, log in zip((step, captured), logs, strict=True):
            try:
                function(torch.ones(2, 4), rows, log)
            except IndexError as error:
                log.append((str(error), getattr(error, "__notes__", None)))
        assert logs[0] == logs[1]
    assert "Picks" in reused


def test_only_distinct_layers_are_interpreted(monkeypatch):
    """40 equal layers take hardly more interpreted instructions than 4 do."""
    counted = [0]
    observe = TrackingDomain.observe

    def counting(self, frame):
        counted[0] += 1
        observe(self, frame)

    monkeypatch.setattr(TrackingDomain, "observe", counting)

    def instructions(count):
        counted[0] = 0
        model = Stack(count).eval()
        capture(run, backend="eager")(model, torch.rand(3, 4))
        return counted[0]

    assert instructions(40) < 2 * instructions(4)
    monkeypatch.setattr(ModuleReuse, "write_again", lambda *_: ABSENT)
    assert instructions(40) > 5 * instructions(4)


class GivesContainers(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.table, self.pair, self.how = nn.Linear(4, 4), [1.0], (1, 2), how

    def forward(self, x):
        y = self.linear(x)
        if self.how == "new":
            return y, [y, None]
        if self.how == "twice":
            listed = [y]
            return listed, listed
        return y, self.table if self.how == "own" else self.pair


@pytest.mark.parametrize("how", ["new", "own", "tuple", "twice"])
def test_lists_and_tuples_that_a_layer_gives_are_those_that_it_gives(reused, how):
    def step(layers, x):
        found = []
        for layer in layers:
            first, second = layer(x)
            found.append((second is layer.table, second is layer.pair, first is second))
            if isinstance(second, list):
                second.append(2.0)
            x = first[0] if isinstance(first, list) else first
        return x, found, [list(layer.table) for layer in layers]

    torch.manual_seed(0)
    layers = nn.ModuleList(GivesContainers(how) for _ in range(4))
    captured, x = capture(step), torch.rand(2, 4)
    for _ in range(2):
        for layer in layers:
            layer.table = [1.0]
        want = step(layers, x)
        for layer in layers:
            layer.table = [1.0]
        got = captured(layers, x)
        assert torch.equal(got[0], want[0]) and got[1:] == want[1:]
    assert ("GivesContainers" in reused) == (how == "new")

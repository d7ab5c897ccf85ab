"""A backward that the caller runs asks for what it reads once more: an attribute, a method, a default, a class.

Where that has changed since the captured call there is an error, and what has the backward runs natively from then on;
plain Python's gradient comes from the new one.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moebius
from moebius import capture, stats
from moebius.cache.captured import LEADING_BACK
from moebius.hook import ABSENT
from moebius.regions.later_reads import AskedLater
from moebius.regions.module_reuse import ModuleReuse


def two(x):
    return x * 2


def three(x):
    return x * 3


def seven(x):
    return x * 7


def made_by_a_factory():
    def scaled(x, factor=2.0):
        return x * factor

    return scaled


class State:
    """What a layer's code finds, and what changes there."""

    def __init__(self):
        class Base:
            def scaled(self, x):
                return x * 2

        class Held(Base):
            pass

        def helper(x, factor=2.0, *, shift=0.0):
            return x * factor + shift

        self.held, self.Held, self.Other = Held(), Held, type("Other", (), {"scaled": lambda self, x: x * 5})
        self.helper, self.functions, self.table = helper, [two], {"f": two}
        self.twins = [made_by_a_factory() for _ in range(2)]
        self.pair, self.cell, self.named = (two, three), two, {two}


KINDS = {  # how it is read, and how it is changed
    "attribute that is a function": (lambda s, x: s.cell(x), lambda s: setattr(s, "cell", seven)),
    "attribute that may miss": (
        lambda s, x: x * (7 if hasattr(s, "special") else 2),
        lambda s: setattr(s, "special", True),
    ),
    "item of a list": (lambda s, x: s.functions[0](x), lambda s: s.functions.__setitem__(0, seven)),
    "item of a dict": (lambda s, x: s.table["f"](x), lambda s: s.table.update(f=seven)),
    "keys of a dict": (lambda s, x: x * len(list(s.table)), lambda s: s.table.update(g=seven)),
    "item of a tuple": (lambda s, x: s.pair[0](x), lambda s: setattr(s, "pair", (seven, three))),
    "membership": (lambda s, x: x * (2 if two in s.named else 3), lambda s: s.named.discard(two)),
    "method of a class": (lambda s, x: s.held.scaled(x), lambda s: setattr(s.Held, "scaled", lambda self, x: x * 7)),
    "method of an object": (lambda s, x: s.held.scaled(x), lambda s: setattr(s.held, "scaled", seven)),
    "class of an object": (lambda s, x: s.held.scaled(x), lambda s: setattr(s.held, "__class__", s.Other)),
    "what an object is": (lambda s, x: x * (2 if isinstance(s.held, s.Held) else 3), lambda s: setattr(s, "held", 0)),
    "default": (lambda s, x: s.helper(x), lambda s: setattr(s.helper, "__defaults__", (7.0,))),
    "default of one of two with the same code": (
        lambda s, x: s.twins[1](s.twins[0](x)),
        lambda s: setattr(s.twins[1], "__defaults__", (7.0,)),
    ),
    "default by name": (lambda s, x: s.helper(x), lambda s: s.helper.__kwdefaults__.update(shift=7.0)),
    "code": (lambda s, x: s.helper(x), lambda s: setattr(s.helper, "__code__", tripled.__code__)),
}
WAYS = ("function", "checkpointed", "reentrant")
LOGGER = logging.getLogger(__name__)


def tripled(x, factor=2.0, *, shift=0.0):
    return x * 3


class Layer(nn.Module):
    def __init__(self, read, way):
        super().__init__()
        self.w, self.state, self.read, self.way = nn.Parameter(torch.rand(3)), State(), read, way

    def part(self, x):
        return self.read(self.state, x * self.w).sin()

    def forward(self, x):
        if self.way == "function":
            return Scaled.apply(x * self.w, self)
        return checkpoint(self.part, x, use_reentrant=self.way == "reentrant")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x * 2

    @staticmethod
    def backward(ctx, g):
        layer = ctx.layer
        return layer.read(layer.state, g), None


def trained(read, change, way, which, wrap):
    torch.manual_seed(0)
    model = nn.ModuleList([Layer(read, way) for _ in range(3)])

    def forward(x):
        for layer in model:
            x = layer(x)
        return x

    step, found = wrap(forward), []
    for i in range(5):
        loss = step(torch.rand(2, 3, requires_grad=True)).sum()
        if i in (2, 4):
            change(model[which].state)
        try:
            loss.backward()
        except moebius.StateChangedError as error:
            found.append(str(error))
        else:
            found.append([p.grad.tolist() for p in model.parameters()])
        model.zero_grad()
        if i == 2:
            model[which].state = State()
    return found, step


@pytest.mark.share(14)
@pytest.mark.parametrize("kind, way, which", [*itertools.product(KINDS, WAYS, (0, 2))])
def test_what_changed_is_an_error_and_then_native(kind, way, which):
    read, change = KINDS[kind]
    want, _ = trained(read, change, way, which, lambda step: step)
    got, step = trained(read, change, way, which, lambda step: capture(step, backend="eager"))
    assert got[:2] == want[:2] and got[3:] == want[3:] and want[2] != want[1]
    if way == "function" and kind == "keys of a dict":  # it reads texts: it runs natively from the start
        assert got[2] == want[2]
        return
    assert "was changed after the captured call" in got[2]
    assert any(one.new == "changed" for one in stats(step).recompiles)


@pytest.mark.parametrize("way", WAYS)
def test_without_the_question_the_gradient_is_that_of_before(way, monkeypatch):
    """The test above bites."""
    monkeypatch.setattr(AskedLater, "__call__", lambda self: None)
    read, change = KINDS["method of a class"]
    want, _ = trained(read, change, way, 0, lambda step: step)
    got, _ = trained(read, change, way, 0, lambda step: capture(step, backend="eager"))
    assert got[:2] == want[:2] and got[2] != want[2] and type(got[2]) is list


UNREAD = {
    "another attribute": lambda s: setattr(s, "note", "seen"),
    "another key": lambda s: s.table.update(other=1),
    "another method": lambda s: setattr(s.Held, "unused", lambda self: 0),
    "the same again": lambda s: setattr(s, "cell", s.cell),
    "another item": lambda s: s.functions.append(seven),
    "an equal tuple": lambda s: setattr(s, "pair", s.pair),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("unread", UNREAD)
def test_what_is_not_read_may_change(unread, way):
    def read(state, x):
        return state.cell(state.held.scaled(state.helper(state.table["f"](state.pair[1](x)))))

    want, _ = trained(read, UNREAD[unread], way, 1, lambda step: step)
    got, step = trained(read, UNREAD[unread], way, 1, lambda step: capture(step, backend="eager"))
    assert got == want
    assert stats(step).breaks == 0 and not any(one.new == "changed" for one in stats(step).recompiles)


@pytest.mark.parametrize("way", WAYS)
def test_training_between_is_no_change(way):
    """Optimizer, ``zero_grad`` and another batch between the call and its backward."""

    def run(wrap):
        torch.manual_seed(0)
        model = nn.ModuleList([Layer(KINDS["method of a class"][0], way) for _ in range(3)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def forward(x):
            for layer in model:
                x = layer(x)
            return x

        step, losses = wrap(forward), []
        for _ in range(4):
            first = step(torch.rand(2, 3, requires_grad=True)).sum()
            second = step(torch.rand(2, 3, requires_grad=True)).sum()
            optimizer.zero_grad()
            first.backward()
            second.backward()
            optimizer.step()
            losses.append((first.item(), second.item()))
        return losses, step

    want, _ = run(lambda step: step)
    got, step = run(lambda step: capture(step, backend="eager"))
    assert got == want and stats(step).breaks == 0


class LeadsBack(nn.Module):
    """A module to which its parts lead back, by a hook and a list."""

    def __init__(self):
        super().__init__()
        self.w, self.inner = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)
        self.inner.register_forward_hook(self.hook)
        self.inner.owner = [self]
        self.state, self.read = State(), KINDS["method of a class"][0]

    def hook(self, *_):
        return None

    def forward(self, x):
        return Scaled.apply(checkpoint(self.inner, x * self.w, use_reentrant=False), self)


def test_the_guards_for_backward_keep_no_model_alive():
    step = capture(lambda model, x: model(x), backend="eager")
    model = LeadsBack()
    for _ in range(2):
        step(model, torch.rand(2, 3)).sum().backward()
    assert stats(step).breaks == 0
    held = weakref.ref(model)
    del model
    gc.unfreeze()
    for _ in range(2):
        LEADING_BACK.rest_until = 0.0  # (a look is followed by a rest)
        gc.collect()
    assert held() is None


def test_the_question_is_shared_by_copies_of_a_graph():
    asked = AskedLater("backward of F", "F", types.SimpleNamespace(program=None))
    assert copy.deepcopy({"asked": asked})["asked"] is asked


@pytest.mark.parametrize("way", WAYS)
def test_what_the_step_has_set_before_it_is_read_is_asked_again(way):
    def run(wrap):
        torch.manual_seed(0)
        layer = Layer(lambda state, x: state.cell(x), way)

        def forward(x):
            layer.state.cell = three
            return layer(x)

        step, found = wrap(forward), []
        for i in range(4):
            loss = step(torch.rand(2, 3, requires_grad=True)).sum()
            if i == 2:
                layer.state.cell = seven
            try:
                loss.backward()
            except moebius.StateChangedError as error:
                found.append(str(error))
            else:
                found.append(layer.w.grad.tolist())
            layer.zero_grad()
        return found

    want, got = run(lambda step: step), run(lambda step: capture(step, backend="eager"))
    assert got[:2] == want[:2] and got[3] == want[3]
    assert "layer.state.cell" in got[2]


@pytest.mark.parametrize("way", WAYS)
def test_like_layers_are_still_written_again(way, monkeypatch):
    """What is told for backward is no reason to interpret the second of two like layers."""
    written = []
    write_again = ModuleReuse.write_again

    def counted(self, *args):
        written.append(found := write_again(self, *args))
        return found

    monkeypatch.setattr(ModuleReuse, "write_again", counted)
    shared = State()
    model = nn.Sequential(*(Layer(lambda s, x: s.held.scaled(two(x)), way) for _ in range(3)))
    for layer in model:
        layer.state, layer.read = shared, model[0].read
    step = capture(lambda x: model(x), backend="eager")
    step(torch.rand(2, 3, requires_grad=True)).sum().backward()
    assert written and ABSENT not in written
    loss = step(torch.rand(2, 3, requires_grad=True)).sum()
    shared.Held.scaled = lambda self, x: x * 7
    with pytest.raises(moebius.StateChangedError):
        loss.backward()


@pytest.mark.parametrize("way", ["checkpointed", "reentrant"])
def test_a_read_that_nobody_can_name_keeps_no_call_out_of_the_graph(way):
    """Whether a logger is on cannot be asked as a place; what the step sets after the call is another matter."""
    layer = Layer(lambda state, x: x * (2 if LOGGER.isEnabledFor(logging.DEBUG) else 3), way)

    def forward(x):
        found = layer(x)
        layer.calls = 1
        return found

    step = capture(forward, backend="eager")
    for _ in range(3):
        step(torch.rand(2, 3, requires_grad=True)).sum().backward()
    assert stats(step).graphs == 1 and stats(step).breaks == 0

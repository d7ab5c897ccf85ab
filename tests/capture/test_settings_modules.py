"""Modules that answer from what they keep: a class of modules with ``__getattr__`` (torch's settings are such), and a
module's own. What the answer is made of is guarded."""

import contextvars
import types

import pytest
import torch

from moebius import capture, stats

DEFAULTS = {"width": 2, "deep": {"more": 3}}
CHOSEN = contextvars.ContextVar("chosen")


class Settings(types.ModuleType):
    chosen: dict

    def __getattr__(self, name):
        if name in self.chosen:
            return self.chosen[name]
        if name == "per_context":
            return CHOSEN.get(7)
        return DEFAULTS[name]


def of_class():
    module = Settings("settings")
    module.chosen = {}
    return module


def of_its_own():
    module = types.ModuleType("lazy")
    module.chosen = {}
    module.__getattr__ = lambda name: Settings.__getattr__(module, name)
    return module


@pytest.mark.parametrize("make", [of_class, of_its_own])
@pytest.mark.parametrize("read", [lambda m: m.width, lambda m: m.deep["more"], lambda m: m.per_context])
def test_an_answer_is_followed_and_guarded(make, read):
    module = make()
    step = capture(lambda x: x * read(module), fullgraph=True, backend="eager")
    x = torch.ones(3)
    assert torch.equal(step(x), x * read(module))
    assert torch.equal(step(x), x * read(module)) and stats(step).hits == 1
    token = CHOSEN.set(11)
    module.chosen.update(width=5, deep={"more": 6})
    try:
        assert torch.equal(step(x), x * read(module))
        module.chosen.clear()
        assert torch.equal(step(x), x * read(module))
    finally:
        CHOSEN.reset(token)


def test_shapes_that_meet_ask_torch_for_its_settings():
    step = capture(lambda x: x * len(torch.broadcast_shapes(x.shape, (2, 1))), fullgraph=True, backend="eager")
    assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0))

"""Modules that answer from what they keep: a class of modules with ``__getattr__`` (torch's settings are such), and a
module's own. What the answer is made of is guarded, and what is done for it is done in each call."""

import contextvars
import importlib
import types
from typing import Any

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


def no_answer(name: str) -> Any:
    raise AttributeError(name)


ANSWERS: dict[str, Any] = {
    "a number": lambda name: 7, "a list": lambda name: [name], "a class": lambda name: Settings, "none": no_answer,
}  # fmt: skip
ASKED: dict[str, Any] = {
    "read": lambda m: m.v, "getattr": lambda m: getattr(m, "v", 1), "hasattr": lambda m: hasattr(m, "v"),
}  # fmt: skip


def as_it_was(m, answer):
    pass


def set_in_the_step(m, answer):
    m.__getattr__ = answer


def set_behind_an_attribute(m, answer):
    m.v = 3
    m.__getattr__ = answer
    del m.v


def taken_away_in_the_step(m, answer):
    m.__getattr__ = answer
    del m.__getattr__


@pytest.mark.parametrize(
    "change", [as_it_was, set_in_the_step, set_behind_an_attribute, taken_away_in_the_step], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("given", ANSWERS)
def test_what_an_answer_does_is_done_where_it_is_asked(given, asked, change):
    def run(wrap):
        log = []

        def answer(name):
            log.append(name)
            return ANSWERS[given](name)

        def step(x):
            change(module, answer)
            log.append("asks")
            return x * 2, ASKED[asked](module)

        module, call = types.ModuleType("answers"), wrap(step)
        module.__getattr__ = answer
        for _ in range(4):
            try:
                log.append(call(torch.ones(2))[1])
            except AttributeError as error:
                log.append(str(error))
        return repr(log)

    assert run(lambda step: capture(step, backend="eager")) == run(lambda step: step)


def test_a_module_that_loads_a_part_is_loaded_while_tracing():
    def load(name):
        if name != "part":
            raise AttributeError(name)
        return importlib.import_module("colorsys")

    module = types.ModuleType("loads")
    module.__getattr__ = load
    step = capture(lambda x: x * module.part.rgb_to_hsv(0, 0, 3)[2], fullgraph=True, backend="eager")
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 3.0))

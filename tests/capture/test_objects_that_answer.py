"""Objects whose class has Python code for ``__class__`` or for every attribute: it runs when the program asks, only."""

import abc
from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from torch import nn

from moebius import capture, stats


class Watched:
    """Writes down every attribute that is read of it, as lazy modules and tracing proxies do."""

    def __init__(self, **values):
        object.__getattribute__(self, "__dict__").update(values, log=[])

    def __getattribute__(self, name):
        namespace = object.__getattribute__(self, "__dict__")
        namespace["log"].append(name)
        return object.__getattribute__(self, name)


class Proxy:
    """Says that it is what it stands for, as werkzeug's LocalProxy does."""

    def __init__(self, target):
        self.target, self.asked = target, 0

    @property
    def __class__(self):
        self.asked += 1
        return type(self.target)

    def __getattr__(self, name):
        return getattr(self.target, name)


class Settings:
    def __init__(self, scale):
        self.scale = scale


class Base(abc.ABC):
    @abc.abstractmethod
    def rows(self):
        """Of what is registered nobody asks it."""


Base.register(Settings)


def log_of(value):
    return object.__getattribute__(value, "__dict__")["log"]


def scaled(config, x):
    if isinstance(config, dict):
        return x
    return x * config.scale


def reads(config, x):
    return scaled(config, x) + config.shift


def many_ways(config, x):
    kept = {"config": config, "all": [config, (config, 1)]}
    y = scaled(kept["all"][0], x) if hasattr(config, "scale") else x
    if kept["config"] is config and isinstance(config, Mapping | nn.Module | str):
        y = y + 1
    if isinstance(config, nn.Parameter | Base) or callable(config):
        y = y + 2
    return y + getattr(config, "missing", 3) + (config == kept["config"]) + len([c for c in (config,) if c])


def holds(config, x):
    module = nn.Module()
    module.settings = config
    return x * module.settings.scale


@pytest.mark.parametrize("function", [reads, many_ways, holds])
def test_what_is_read_of_an_object_is_what_the_program_reads(function):
    x = torch.ones(2)
    plain, caught = (Watched(scale=2, shift=1) for _ in range(2))
    captured = capture(function)
    for _ in range(3):
        assert torch.equal(captured(caught, x), function(plain, x))
        assert log_of(caught) == log_of(plain)
    assert stats(captured).breaks == 0


@pytest.mark.parametrize("cls", [Settings, Base, Mapping, Settings | int, (int, Base), nn.Parameter, dict, Proxy])
def test_a_proxy_is_what_it_says(cls):
    def step(value, x):
        return x * 2 if isinstance(value, cls) else x * value.scale

    x = torch.ones(2)
    plain, caught = (Proxy(Settings(5)) for _ in range(2))
    captured = capture(step)
    for _ in range(3):
        assert torch.equal(captured(caught, x), step(plain, x))
        assert caught.asked == plain.asked
    caught.target, plain.target = (Watched(scale=7) for _ in range(2))
    assert torch.equal(captured(caught, x), step(plain, x))


def test_a_mock_of_a_tensor_is_no_tensor():
    value = mock.Mock(spec=torch.Tensor)
    value.scale = 3.0

    def step(value, x):
        return x * value.scale if isinstance(value, torch.Tensor) else x

    x = torch.ones(2)
    assert torch.equal(capture(step)(value, x), step(value, x))

"""A configuration object with fields of every kind, one level and two levels deep."""

import dataclasses
import enum
from typing import Any

import torch


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2
    NONE = 3


@dataclasses.dataclass
class Inner:
    slope: float = 0.5
    steps: int = 2

    def twice(self):
        return self.slope * 2


@dataclasses.dataclass
class Config:
    width: int = 4
    scale: float = 2.0
    bias: float = 0.0
    kind: str = "relu"
    enabled: bool = True
    extra: Any = None
    mode: Mode = Mode.SUM
    dtype: torch.dtype = torch.float32
    inner: Inner = dataclasses.field(default_factory=Inner)
    factor = 3.0

    @property
    def both(self):
        return self.scale + self.bias

    @staticmethod
    def shift(x):
        return x + 1.0

    @classmethod
    def of_class(cls, x):
        return x * cls.factor


def f(config, x):
    y = torch.relu(x) if config.kind == "relu" else torch.tanh(x)
    y = y * config.both if config.enabled else y
    if str(config.bias).startswith("-"):
        y = -y
    if config.extra is not None:
        y = y + config.extra
    for _ in range(config.inner.steps):
        y = y + config.inner.twice()
    if config.mode is Mode.MEAN:
        y = y.mean(0)
    y = config.of_class(config.shift(y))
    return y.to(config.dtype).reshape(-1, config.width)


def make():
    return f, [Config(), torch.randn(3, 4)], {}

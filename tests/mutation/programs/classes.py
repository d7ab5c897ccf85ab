"""Inheritance, super, descriptors, __getattr__, slots in two classes, metaclasses, class-level state."""

import torch


class Clamp:
    """A data descriptor written in Python."""

    def __init__(self, name, low):
        self.name, self.low = name, low

    def __get__(self, obj, owner=None):
        return self if obj is None else max(obj.__dict__[self.name], self.low)

    def __set__(self, obj, value):
        obj.__dict__[self.name] = value


class Meta(type):
    offset = 1.0

    @property
    def kind_number(cls):
        return 2.0


class Root(metaclass=Meta):
    scale = 2.0
    registry = {"a": 1.0}

    def __init__(self):
        self._raw = 3.0

    raw = Clamp("_raw", 0.5)

    def apply(self, x):
        return x * self.scale

    @classmethod
    def made(cls):
        return cls.scale + cls.offset

    @staticmethod
    def free(x):
        return x - 0.25


class Child(Root):
    bonus = 0.75

    def apply(self, x):
        return super().apply(x) + self.bonus + self.raw

    def __getattr__(self, name):
        if name.startswith("auto_"):
            return len(name) * 0.5
        raise AttributeError(name)


class Slots:
    __slots__ = ("a",)

    def __init__(self):
        self.a = 1.5


class MoreSlots(Slots):
    __slots__ = ("b",)

    def __init__(self):
        super().__init__()
        self.b = [2.0]


def f(child, slots, x, kind):
    y = child.apply(child.free(x)) + child.made() + type(child).kind_number
    y = y + child.auto_gain + slots.a + sum(slots.b) + Root.registry["a"]
    if isinstance(slots, MoreSlots) and issubclass(kind, Root) and hasattr(child, "raw"):
        y = y * 2
    return y * getattr(child, "missing", 4.0) if not hasattr(child, "other") else y


def make():
    return f, [Child(), MoreSlots(), torch.randn(2, 2), Child], {}

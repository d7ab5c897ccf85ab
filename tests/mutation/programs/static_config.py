"""The same kinds of state, but reached from a module and from globals instead of an argument."""

import torch


class Plain:
    """Nothing of an instance is read but its class."""

    @property
    def constant(self):
        return 2.5

    def add(self, x):
        return x + 1.5


class Slotted:
    __slots__ = ("gain", "names")

    def __init__(self):
        self.gain = 2.0
        self.names = ["a", "b"]

    @property
    def constant(self):
        return 4.5


class Empty:
    __slots__ = ()

    def add(self, x):
        return x - 2.5


class Sized:
    def __init__(self):
        self.n = 3

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i * 2.0

    def __contains__(self, item):
        return item == 2

    def __bool__(self):
        return self.n > 0

    def __call__(self, x):
        return x * 1.25

    def __eq__(self, other):
        return other == 3.0

    __hash__ = None


PLAIN = Plain()
SLOTTED = Slotted()
EMPTY = Empty()
SIZED = Sized()
SCALE = 2.0
TABLE = {"a": 1.0, "b": 2.0, "inner": {"c": 3.0}}
NAMES = ["a", "b"]
POINT = (1.0, [2.0, 3.0], {"k": 4.0})


def helper(x, power=2, *, offset=0.5):
    return x**power + offset


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.slotted, self.empty, self.sized = Plain(), Slotted(), Empty(), Sized()
        self.gain = 1.5

    def forward(self, x):
        x = self.plain.add(x * self.plain.constant)
        x = self.empty.add(x * self.slotted.constant * self.slotted.gain)
        x = x * len(self.sized) + self.sized[2]
        if self.sized and 2 in self.sized and self.sized == 3.0:
            x = self.sized(x)
        return x * self.gain


def f(holder, x):
    x = PLAIN.add(x * PLAIN.constant) * SLOTTED.gain * SLOTTED.constant
    x = EMPTY.add(x) + len(SIZED) + SIZED[1]
    for name in NAMES:
        x = x + TABLE[name]
    for name in SLOTTED.names:
        x = x * TABLE[name]
    x = x + TABLE["inner"]["c"] + POINT[0] + sum(POINT[1]) + POINT[2].get("k", 7.0)
    return holder(helper(x) * SCALE)


def make():
    return f, [Holder(), torch.randn(2, 3)], {}

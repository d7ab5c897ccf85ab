"""Which object it is: arguments that are, or are not, what globals, attributes and tables hold."""

from __future__ import annotations

import torch


class Box:
    def __init__(self, gain):
        self.gain = gain
        self.tag = "box"

    def __repr__(self):  # sets are compared by what their items print
        return "a box"


class Holder:
    def __init__(self):
        self.current = Box(1.25)
        self.spare = Box(0.75)
        self.last = None


def double(x):
    return x * 2


def scaled(by):
    def scale(x):
        return x * by

    return scale


DEFAULT = Box(2.0)
ANCHOR = [1.0, 2.0]
PAIR = (Box(0.5), 3.0)
HOLDER = Holder()
FUNCTION = scaled(1.5)
WEIGHTS = {HOLDER.current: 2.0, HOLDER.spare: 4.0, FUNCTION: 8.0}
SEEN = {DEFAULT}


def f(box, current, anchor, pair, function, other, title, x, rival):
    y = x * box.gain
    if box is DEFAULT:
        y = y + 1
    if current == HOLDER.current:
        y = y + 2
    y = y * WEIGHTS.get(current, 3.0) + WEIGHTS.get(function, 5.0)
    if anchor is ANCHOR:
        y = y - 1
    if pair is PAIR:
        y = y * 1.5
    if other in SEEN or other in (DEFAULT, HOLDER.spare):
        y = y - 4
    y = function(y) + len({box, current, other}) + [DEFAULT, current, other].index(other)
    y = y + {box: 1.0}.get(DEFAULT, 6.0) + (2.0 if (box, 1) == (DEFAULT, 1) else 7.0)
    if rival is DEFAULT:
        y = y * 2
    HOLDER.last = other
    other.gain = other.gain + 1.0
    return double(y) * HOLDER.spare.gain, pair, title


def make():
    x = torch.arange(6.0).view(2, 3)
    return f, (DEFAULT, HOLDER.current, ANCHOR, PAIR, FUNCTION, Box(3.0), "title", x, Box(3.5)), {}

"""Closures, defaults, keyword defaults, partials, bound methods, callbacks as arguments."""

import functools

import torch


def make_step(scale, table):
    count = 2

    def inner(x, extra=1.0, *, slope=0.5):
        return x * scale + extra * slope + count

    def step(x, callback, power=2, *, flag=True, config={"gain": 2.0}):  # noqa: B006
        y = inner(x) + table["a"] * 1.5
        y = callback(y) ** power
        return y * config["gain"] if flag else y

    return step


class Holder:
    def __init__(self):
        self.weight = 3.0

    def method(self, x):
        return x + self.weight


def plain(x, by=1.0):
    return x - by


def outer(x, step, bound, part):
    def local(z):
        return z * 2.0 + bias

    bias = 0.5
    return part(bound(step(local(x), plain)))


def make():
    holder = Holder()
    return outer, [torch.randn(3), make_step(2.0, {"a": 1.0}), holder.method, functools.partial(plain, by=2.0)], {}

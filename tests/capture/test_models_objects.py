"""Objects in models: decorators, descriptors, attribute look-up of their own, generators, texts, errors."""

# ruff: noqa: B007, B018, B028, B904, B905, E731, E741, E742, F841, UP031, UP042 (the programs are as users write them)

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence

import plain_python
import pytest
import torch
from torch import nn


def partials():
    def f(x, a, b=1, *, c=2):
        return x * a + b * c

    g = functools.partial(f, a=3)
    h = functools.partial(g, c=5)

    @functools.singledispatch
    def d(v):
        return "obj"

    @d.register
    def _(v: int):
        return "int"

    @d.register(torch.Tensor)
    def _(v):
        return v * 2

    class C:
        def __init__(self):
            self.n = 0

        @functools.cached_property
        def slow(self):
            self.n += 1
            return self.n + 10

        @functools.singledispatchmethod
        def m(self, v):
            return v

        @m.register
        def _(self, v: str):
            return len(v)

        pm = functools.partialmethod(lambda self, x, k: x * k, k=4)

    c = C()

    def step(x):
        k = C()
        return (
            h(x, b=2),
            d(1),
            d(x),
            d("s"),
            c.slow,
            c.n,
            k.slow + k.slow,
            c.m("abc"),
            c.m(1),
            c.pm(x),
            g.func is f,
            g.keywords,
            functools.reduce(lambda a, b: a + b, [x, x * 2]),
        )

    return step, [c]


def wraps_():
    log = []

    def timed(f):
        @functools.wraps(f)
        def w(*a, **k):
            log.append(f.__name__)
            return f(*a, **k)

        w.calls = 0
        return w

    def counted(f):
        @functools.wraps(f)
        def w(*a, **k):
            w.calls += 1
            return f(*a, **k)

        w.calls = 0
        return w

    class M(nn.Module):
        @timed
        @counted
        def forward(self, x, *, k=1):
            return x * k

        @staticmethod
        @counted
        def s(x):
            return x + 1

        @classmethod
        @counted
        def c(cls, x):
            return x - 1

        @property
        @counted
        def p(self):
            return 3

    m = M()

    def step(x):
        return m(m.s(m.c(x)), k=m.p), M.s.calls, M.forward.__wrapped__.__name__

    return step, [m, log]


def lru_tensor():
    @functools.lru_cache(maxsize=2)
    def table(n, d):
        return torch.arange(n * d).view(n, d).float()

    def step(x):
        return x + table(len(x), 4), table.cache_info().currsize

    return step, []


def cells_default():
    class Cfg(dict):
        def __getattr__(self, k):
            try:
                return self[k]
            except KeyError:
                raise AttributeError(k)

        def __setattr__(self, k, v):
            self[k] = v

    c = Cfg(a=2, b=Cfg(d=3))

    def step(x):
        c.n = c.get("n", 0) + 1
        return x * c.a * c.b.d, hasattr(c, "zz"), c.n

    return step, [c]


def getattr_chain():
    class L:
        def __getattr__(self, n):
            if n.startswith("_"):
                raise AttributeError(n)
            return n.upper()

        def __getattribute__(self, n):
            if n == "special":
                return 42
            return object.__getattribute__(self, n)

    o = L()

    def step(x):
        return x * o.special, o.abc, getattr(o, "_z", None), hasattr(o, "_q")

    return step, [o]


def descs():
    class D:
        def __set_name__(self, o, n):
            self.n = "_" + n

        def __get__(self, i, o=None):
            return self if i is None else getattr(i, self.n, 7)

        def __set__(self, i, v):
            setattr(i, self.n, v * 2)

    class A:
        d = D()
        __slots__ = ("_d", "k")

        def __init__(self):
            self.k = 1

        def __len__(self):
            return 3

        def __contains__(self, v):
            return v == 1

        def __getitem__(self, i):
            return i * 2

        def __iter__(self):
            return iter([1, 2])

        def __bool__(self):
            return False

        def __eq__(self, o):
            return True

        def __hash__(self):
            return 3

        def __call__(self, x):
            return x + 1

        def __enter__(self):
            return self

        def __exit__(self, *a):
            self.k += 1

        def __format__(self, s):
            return "F" + s

        def __int__(self):
            return 5

        def __float__(self):
            return 2.5

        def __index__(self):
            return 1

        def __rmul__(self, o):
            return o * 3

        def __str__(self):
            return "S"

    a = A()

    def step(x):
        a.d = len(a)
        with a as b:
            y = b(x)
        return (
            y * a.d,
            1 in a,
            a[4],
            list(a),
            bool(a),
            a == 3,
            f"{a:x}",
            int(a),
            float(a),
            [5, 6][a],
            2 * a,
            str(a),
            a.k,
            {a: 1}[a],
        )

    return step, [a]


def gens():
    def gen(x, n):
        for i in range(n):
            got = yield x * i
            if got:
                yield got

    def step(x):
        g = gen(x, 3)
        a = next(g)
        b = g.send(5)
        r = list(g)

        def co():
            v = yield from gen(x, 2)
            return 3

        return (
            a,
            b,
            r,
            [*co()],
            sum(t.sum() for t in gen(x, 2)),
            dict(zip("ab", gen(x, 2))),
            max(len(t) for t in gen(x, 2)),
        )

    return step, []


def tensors_as_keys():
    def step(x):
        d = {x: 1}
        s = {x, x}
        y = x * 2
        return d[x], len(s), y in [y], id(x) == id(x), [x, y].index(x), x is not y

    return step, []


def type_checks():

    def step(x):
        return (
            x,
            isinstance({}, Mapping),
            isinstance([], Sequence),
            isinstance(step, Callable),
            isinstance(x, (list, torch.Tensor)),
            issubclass(nn.Linear, nn.Module),
            type(x).__name__,
            x.__class__ is torch.Tensor,
            isinstance(x, torch.FloatTensor),
            torch.is_tensor(x),
            isinstance(x.shape, tuple),
            isinstance(nn.Parameter(torch.ones(2)), nn.Parameter),
            hasattr(x, "shape"),
            callable(x.sum),
            isinstance(3, (int | str)),
        )

    return step, []


def strs():
    def step(x):
        n = len(x)
        return (
            x,
            f"{n:>4}|{x.dtype}|{x.shape}|{tuple(x.shape)!r}",
            "%s-%d" % ("a", n),
            f"{1.234:.2f} {n}",
            "a,b".split(","),
            ",".join(map(str, [1, 2])),
            "abc".upper().startswith("A"),
            str(x.device),
            repr(torch.float32),
            "x".join(["a"] * 3),
            b"ab".decode(),
            "q" in "quit",
            "ab"[::-1],
            str(None),
            f"{x.shape[0]}",
            str(torch.Size([1, 2])),
        )

    return step, []


def env_time():

    def step(x):
        t = time.time()
        p = time.perf_counter()
        e = os.environ.get("HOME") is not None
        os.environ["COLD_T"] = str(len(x))
        return x * 2, t > 0, p > 0, e, os.getenv("COLD_T"), os.path.join("a", "b"), os.path.exists("/")

    return step, []


def try_all():
    log = []

    def step(x):
        try:
            try:
                y = x * 2
                raise ValueError("a") from KeyError("k")
            except ValueError as e:
                log.append((str(e), type(e.__cause__).__name__))
                raise RuntimeError("b")
            finally:
                log.append("f")
        except RuntimeError as e:
            log.append(type(e.__context__).__name__)
            y = y + 1
        else:
            log.append("no")
        try:
            y.no_attr
        except AttributeError as e:
            log.append(str(e))
        try:
            {}["k"]
        except KeyError as e:
            log.append(e.args)
        try:
            [][0]
        except IndexError as e:
            log.append(str(e))
        try:
            int("z")
        except ValueError as e:
            log.append(str(e))
        try:
            x @ torch.ones(3)
        except RuntimeError as e:
            log.append(str(e))
        try:
            raise ExceptionGroup("g", [ValueError(1), TypeError(2)])
        except* ValueError as g:
            log.append(len(g.exceptions))
        except* TypeError:
            log.append("t")
        return y

    return step, [log]


CASES = [
    partials,
    wraps_,
    lru_tensor,
    cells_default,
    getattr_chain,
    descs,
    gens,
    tensors_as_keys,
    type_checks,
    strs,
    env_time,
    try_all,
]
UNBROKEN = {"wraps_", "cells_default", "getattr_chain", "gens", "strs"}


@pytest.mark.share(8)
@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_three_calls_are_plain_pythons(recipe, backend):
    found = plain_python.compare(recipe, backend)
    assert recipe.__name__ not in UNBROKEN or not found.breaks

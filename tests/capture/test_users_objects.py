"""Steps in the style that users write them: classes, copies of state, containers of their own.

Six calls of each beside plain Python: results, gradients, what the step changed, what was printed, random
state.
"""

# ruff: noqa: B006, B007, B008, B012, B018, B023, B028, B904, B905, E701, E702, E731, E741, E742, F841, UP031 (as users write)

from __future__ import annotations

import abc
import array
import collections
import datetime
import decimal
import fractions
import functools
import json
import re
import string
import types
import typing

import plain_python
import pytest

ROWS = (3, 3, 3, 4, 4, 5)


def sub_containers():
    class L(list):
        def __init__(self, *a):
            super().__init__(*a)
            self.tag = "l"

    class D(dict):
        def __missing__(self, k):
            self[k] = len(self)
            return self[k]

    class Dq(collections.deque):
        pass

    d = D()
    keep = {}

    def step(x):
        l = L([x.shape[0]])
        l.append(d["a"])
        l.extra = d[x.shape[0]]
        q = Dq([1], maxlen=2)
        q.append(2)
        q.append(3)
        q.note = "n"
        keep["l"] = l
        keep["q"] = q
        return x * sum(l), l, q, d

    return step, [d, keep]


def func_objects():
    keep = {}

    def step(x):
        def inner(a: int, *, b: str = "z") -> float:
            "doc of inner"
            return a

        inner.tag = x.shape[0]

        @functools.wraps(inner)
        def outer(*a, **k):
            return inner(*a, **k)

        p = functools.partial(inner, 3, b="q")
        p.tag = 1
        keep["i"], keep["o"], keep["p"] = inner, outer, p
        return (
            x * outer(2),
            inner.__doc__,
            inner.__annotations__,
            inner.__kwdefaults__,
            outer.__wrapped__ is inner,
            outer.__name__,
        )

    def check(x):
        r = step(x)
        i, o, p = keep["i"], keep["o"], keep["p"]
        return (
            r,
            i.__doc__,
            i.__annotations__,
            i.__kwdefaults__,
            i.tag,
            o.__wrapped__ is i,
            o.__doc__,
            o.__dict__.keys(),
            p.tag,
            p(),
            i.__module__,
            i.__qualname__,
            i(1, b="s"),
        )

    return step, [types.SimpleNamespace(keep=keep)]


def exc_objects():
    errs = []

    class E(Exception):
        def __init__(self, code, **kw):
            super().__init__(code)
            self.code = code
            self.kw = kw

    def step(x):
        try:
            try:
                raise E(x.shape[0], a=[1])
            except E as e:
                e.add_note("note")
                e.late = x.detach().sum()
                raise RuntimeError("outer") from e
        except RuntimeError as e:
            errs.append(e.__cause__)
            errs[-1].__traceback__ = None
            c = e.__cause__
        return x * c.code, c.kw, c.__notes__, c.args, c.late

    return step, [types.SimpleNamespace(e=errs)]


def gens_returned():
    st = {"n": 0}

    def g(x):
        for i in range(3):
            st["n"] += 1
            yield x * i + st["n"]

    def step0(x):
        a = g(x)
        first = next(a)
        return (
            first,
            a,
            (v * 2 for v in [x, x + 1]),
            zip([1, 2], [x, x]),
            enumerate([x]),
            map(str, [1, 2]),
            iter([1, 2, 3]),
            reversed([1, 2]),
        )

    def step(x):
        first, *its = inner(x)
        return first, [list(i) for i in its]

    inner = step0
    return step, [st]


def formats():
    st = {"n": 0}

    def step(x):
        st["n"] += 1
        n, b = st["n"], x.shape[0]
        s = f"{n:03d}|{b:>5}|{n / 3:.2f}|{b:x}|{n!r}|{x.dtype}|{'a':^5}|{[n, b]}|{(n,)}|{{}}"
        t = (
            "%d-%s-%5.1f-%r" % (n, b, n / 7, "q")
            + "{0}{1[0]}{k}".format(n, [b], k="z")
            + string.Template("$a").substitute(a=n)
        )
        return (
            x * n,
            s,
            t,
            s.split("|")[1].strip(),
            t.upper().count("Z"),
            f"{x.shape}",
            f"{tuple(x.shape)}",
            str(b) + repr(n),
            "-".join(str(i) for i in range(n)),
            json.dumps({"n": n, "b": [b]}),
            re.sub(r"\d", "#", s),
        )

    return step, [st]


def dict_mutation_iter():
    d = {1: 1, 2: 2}
    log = []

    def step(x):
        try:
            for k in d:
                d[k + 10] = 1
        except RuntimeError as e:
            log.append(str(e))
        for k in list(d):
            if k > 5:
                del d[k]
        for k, v in d.items():
            d[k] = v + 1
        e = dict(d)
        e.update(a=1, **{"b": 2})
        e |= {"c": x.shape[0]}
        k, v = e.popitem()
        return x * sum(d.values()), len(log), e, k, v, {**d, **e} == {**d, **e}, d.keys() & e.keys(), list(d.items())[0]

    return step, [d, log]


def loops_else():
    log = []

    def step(x):
        for i in range(3):
            if i == x.shape[0]:
                break
        else:
            log.append("else")
        n = 0
        while True:
            n += 1
            if n % 2:
                continue
            if n > 4:
                break
        else:
            log.append("never")
        out = [(i, j) for i in range(3) if i % 2 == 0 for j in range(i)]
        fs = [lambda v, k=k: v * k for k in range(3)]
        gs = [lambda v: v * k for k in range(3)]
        if (m := x.shape[0]) > 3:
            x = x + m
        return sum(f(x) for f in fs) + gs[0](x), out, 1 < m <= 4 < 5, [*range(2), *"ab"], {**{"a": 1}}, n

    return step, [log]


def abstract():
    class Base(abc.ABC):
        reg = {}

        def __init_subclass__(cls, **k):
            super().__init_subclass__(**k)
            Base.reg[cls.__name__] = cls

        @abc.abstractmethod
        def f(self, x): ...
        @classmethod
        def make(cls, n):
            return cls.reg[n]()

        @staticmethod
        def s(x):
            return x + 1

        @property
        def p(self):
            return 3

    class A(Base):
        def f(self, x):
            return self.s(x) * self.p

    class B(A):
        p = 5

        def f(self, x):
            return super().f(x) + 1

    class P(typing.Protocol):
        def f(self, x): ...

    @functools.singledispatch
    def disp(v):
        return 1

    @disp.register
    def _(v: int):
        return 2

    @disp.register(list)
    def _(v):
        return 3

    def step(x):
        bs = [Base.make(n) for n in ("A", "B")]
        try:
            Base()
        except TypeError as e:
            msg = str(e)[:20]
        return (
            sum(b.f(x) for b in bs),
            msg,
            isinstance(bs[0], Base),
            disp(1),
            disp([1]),
            disp("a"),
            sorted(Base.reg),
            issubclass(B, A),
        )

    return step, [Base.reg]


def descriptors():
    class Typed:
        def __set_name__(self, o, n):
            self.n = "_" + n

        def __get__(self, o, t):
            return self if o is None else getattr(o, self.n, 0)

        def __set__(self, o, v):
            o.log.append(v)
            setattr(o, self.n, v)

        def __delete__(self, o):
            delattr(o, self.n)

    class C:
        a = Typed()
        log = []

        def __init__(self):
            self.b = 1

        def __getattr__(self, n):
            if n.startswith("dyn"):
                return len(n)
            raise AttributeError(n)

        def __setattr__(self, n, v):
            object.__setattr__(self, n, v * 2 if n == "b" else v)

        def __len__(self):
            return 3

        def __iter__(self):
            yield from range(3)

    c = C()

    def step(x):
        c.a = c.a + 1
        c.b = x.shape[0]
        if c.a == 4:
            del c.a
        return (
            x * c.a + c.b + c.dynamo,
            list(c),
            len(c),
            list(C.log),
            hasattr(c, "zz"),
            getattr(c, "q", None),
            type(c).a.n,
            *c,
        )

    return step, [c, C.log]


def is_caches():
    st = {"a": None, "t": (1, 2), "same": []}

    def step(x):
        b = st["a"]
        st["a"] = [x.shape[0]]
        st["same"].append(b is not None and b is st["a"])
        t = st["t"]
        st["t"] = t + (3,) if len(t) < 4 else t
        c = x
        c = c * 1
        d = [c] * 2
        return c, d[0] is d[1], t is st["t"], st["a"] == b, x is c, st["same"][-1]

    return step, [st]


def lambda_registry():
    reg = []

    def on(f):
        reg.append(f)
        return f

    @on
    def a(s, x):
        s["n"] += 1
        return x * s["n"]

    @on
    def b(s, x):
        s.setdefault("l", []).append(len(s["l"]) if "l" in s else 0)
        return x + len(s["l"])

    s = {"n": 0}

    def step(x):
        for f in reg:
            x = f(s, x)
        if s["n"] == 2:
            reg.append(lambda s, x: x * 3)
        if s["n"] == 4:
            reg.pop(0)
            s["n"] = 0
        return x, len(reg)

    return step, [s]


def ctx_state():
    import contextvars

    v = contextvars.ContextVar("v", default=0)

    def step(x):
        t = v.set(v.get() + 1)
        y = x * v.get()
        if x.shape[0] == 4:
            v.reset(t)
        ctx = contextvars.copy_context()
        return y, v.get(), ctx.run(lambda: (v.set(100), v.get())[1]), v.get()

    return step, []


def odd_types():
    st = {
        "d": decimal.Decimal("1.5"),
        "f": fractions.Fraction(1, 3),
        "t": datetime.timedelta(seconds=1),
        "c": 1 + 2j,
        "b": bytearray(b"ab"),
        "a": array.array("i", [1, 2]),
    }

    def step(x):
        st["d"] += 1
        st["f"] *= 2
        st["t"] = st["t"] * 2
        st["c"] = st["c"].conjugate() * 1j
        st["b"].append(x.shape[0])
        st["a"].append(len(st["b"]))
        return (
            x * float(st["d"]) + float(st["f"]),
            st["t"].total_seconds(),
            st["c"],
            bytes(st["b"]),
            st["a"].tolist(),
            str(st["d"]),
        )

    return step, [types.SimpleNamespace(d=st["a"].tolist() and 0)]


CASES = [
    sub_containers,
    func_objects,
    exc_objects,
    gens_returned,
    formats,
    dict_mutation_iter,
    loops_else,
    abstract,
    descriptors,
    is_caches,
    lambda_registry,
    ctx_state,
    odd_types,
]


@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_six_calls_are_plain_pythons(recipe):
    plain_python.compare(recipe, sizes=ROWS)

"""What users' models call of Python's library: contexts, logging, ``functools``, iterators, checks, texts.

Six calls of each beside plain Python (``tests/support/tables.py``).
"""

# ruff: noqa: B006, B007, B008, B010, B018, B023, B024, B028, B904, B905, E701, E702, E731, E741, E742, F841, UP031, UP042 (as users write)

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import logging
import operator
import statistics
import sys
import types

import pytest
import torch
from tables import hold, net


def ctxs():
    log = []

    @contextlib.contextmanager
    def cm(name):
        log.append("in " + name)
        try:
            yield name.upper()
        except ValueError as e:
            log.append(str(e))
        finally:
            log.append("out " + name)

    class K(contextlib.ContextDecorator):
        def __enter__(self):
            log.append("k")
            return self

        def __exit__(self, *a):
            log.append(a[0].__name__ if a[0] else "-")
            return False

    @K()
    def dec(x):
        return x * 2

    @cm("deco")
    def dec2(x):
        return x * 3

    def step(x):
        with cm("a") as a, cm("b") as b:
            y = x * 2
        with cm("c"):
            raise ValueError("swallowed")
        with contextlib.suppress(KeyError):
            {}["k"]
        with contextlib.nullcontext(5) as n:
            y = y * n
        try:
            with K():
                raise KeyError("z")
        except KeyError:
            pass
        return dec(y) + dec2(y), a, b

    return step, [log]


def exitstack():
    log = []

    @contextlib.contextmanager
    def cm(name):
        log.append("in " + name)
        try:
            yield name
        finally:
            log.append("out " + name)

    def step(x):
        with contextlib.ExitStack() as st:
            for n in "abc":
                st.enter_context(cm(n))
            st.callback(log.append, "cb")
            st.callback(lambda: log.append("cb2"))
            if x.shape[0] > 3:
                st.enter_context(torch.no_grad())
            y = x * 2
        with contextlib.ExitStack() as st:
            st.push(lambda *a: log.append(a[0] is None))
            k = st.pop_all()
        k.close()
        try:
            with contextlib.ExitStack() as st:
                st.enter_context(cm("z"))
                raise RuntimeError("q")
        except RuntimeError as e:
            log.append(str(e))
        return y, y.requires_grad

    return step, [log]


def closing():
    class R:
        def __init__(self):
            self.c = 0

        def close(self):
            self.c += 1

    r = R()

    def step(x):
        with contextlib.closing(r) as q:
            y = x * (1 + q.c)
        return y

    return step, [r]


def logging_lazy():
    lg = logging.getLogger("moebius.test_table_types")
    lg.setLevel(logging.INFO)
    lg.propagate = False
    lg.handlers[:] = []
    buf = io.StringIO()
    lg.addHandler(logging.StreamHandler(buf))

    def step(x):
        lg.info("loss %.3f rows %d", x.sum().item(), x.shape[0])
        lg.debug("skip %s", x)
        lg.warning("w %s %%", "q")
        lg.info("tensor %s", x.shape)
        if lg.isEnabledFor(logging.DEBUG):
            x = x * 100
        return x * 2

    return step, [types.SimpleNamespace(b=_Buf(buf))]


class _Buf:
    def __init__(self, b):
        self.b = b

    @property
    def __dict__(self):
        return {"t": self.b.getvalue()}


def fpartial():
    m = net()

    def f(a, b, *, c=1, d=2):
        return m(a) * b + c - d

    p = functools.partial(f, b=2)
    q = functools.partial(p, c=5)

    class C:
        def meth(self, x, k, j=1):
            return x * k + j

        dbl = functools.partialmethod(meth, 2)
        trp = functools.partialmethod(meth, k=3, j=4)

    c = C()

    def step(x):
        r = functools.partial(torch.add, alpha=2)
        return (
            q(x, d=7),
            p.keywords,
            q.func is f,
            c.dbl(x),
            c.trp(x),
            r(x, x),
            functools.partial(max, 3)(4),
            list(map(functools.partial(pow, 2), [1, 2])),
        )

    return step, [m]


def fcached():
    class C:
        def __init__(self):
            self.n = 0
            self.w = 3.0

        @functools.cached_property
        def val(self):
            self.n += 1
            return self.w * 2

        @functools.cached_property
        def tens(self):
            return torch.ones(4) * self.w

    c = C()

    def step(x):
        y = x * c.val + c.tens
        return y

    def outer(x):
        y = step(x)
        if x.shape[0] == 4:
            if "val" in c.__dict__:
                del c.val
            c.w += 1
        return y, c.n

    return outer, [c]


def flru():
    @functools.lru_cache(maxsize=2)
    def f(n):
        return n * 2

    @functools.cache
    def g(n, k="a"):
        return (n, k)

    def step(x):
        return x * f(x.shape[0]), g(3), g(3, k="b"), f(1)

    def outer(x):
        r = step(x)
        return r, f.cache_info(), g.cache_info().hits

    return step, []


def fsingle():
    @functools.singledispatch
    def f(v):
        return "obj"

    @f.register
    def _(v: int):
        return "int"

    @f.register(torch.Tensor)
    def _(v):
        return v * 2

    @f.register(list)
    def _(v):
        return [f(i) for i in v]

    class C:
        @functools.singledispatchmethod
        def g(self, v):
            return "o"

        @g.register
        def _(self, v: str):
            return "s"

    c = C()

    def step(x):
        return f(x), f(3), f([1, x, "s"]), f(None), c.g("a"), c.g(1)

    return step, []


def fwraps():
    m = net()
    log = []

    def timed(fn):
        @functools.wraps(fn)
        def w(*a, **k):
            log.append(fn.__name__)
            return fn(*a, **k)

        w.calls = 0
        return w

    def param(k):
        def deco(fn):
            @functools.wraps(fn)
            def w(*a, **kw):
                w.calls = getattr(w, "calls", 0) + 1
                return fn(*a, **kw) * k

            return w

        return deco

    @timed
    @param(3)
    def f(x):
        "doc"
        return m(x)

    def step(x):
        return f(x), f.__name__, f.__doc__, f.__wrapped__.__name__

    return step, [m, log]


def freduce():
    def step(x):
        return (
            functools.reduce(operator.add, [x, x * 2, x * 3]),
            functools.reduce(lambda a, b: a * b, range(1, 5)),
            functools.reduce(torch.maximum, [x, -x], x),
        )

    return step, []


def ftotal():
    @functools.total_ordering
    class V:
        def __init__(s, v):
            s.v = v

        def __eq__(s, o):
            return s.v == o.v

        def __lt__(s, o):
            return s.v < o.v

    def step(x):
        return (
            x,
            V(1) <= V(2),
            V(1) >= V(2),
            max(V(1), V(3), key=lambda v: v.v).v,
            sorted([V(3), V(2)], key=functools.cmp_to_key(lambda a, b: a.v - b.v))[0].v,
            sorted([V(3), V(2)])[0].v,
        )

    return step, []


def tcheck():
    def step(x):
        torch._check(x.shape[0] > 2)
        torch._check(x.dim() == 2, lambda: f"dim {x.dim()}")
        torch._check_is_size(x.shape[0])
        try:
            torch._check(x.shape[0] == 3, lambda: f"rows {x.shape[0]}")
        except RuntimeError as e:
            return x, str(e)
        torch._check_value(x.shape[1] == 4, lambda: "v")
        return x * 2

    return step, []


def tcheck_data():
    def step(x):
        n = int((x > 0.5).sum().item())
        torch._check(n >= 0)
        torch._check_is_size(n)
        return x.new_zeros(n), x.sum()

    return step, []


def tassert():
    def step(x):
        assert x.shape[0] < 5, f"rows {x.shape[0]}"
        torch._assert(x.shape[1] == 4, "four")
        torch._assert_async(x.sum() > -1000)
        return x * 2

    return step, []


def looked_for():
    ls, ts, log = [1, 2, 3, 2], (1, 2, 3, 2), []

    class Counts:
        n = 0

        def __eq__(self, other):
            self.n += 1
            return NotImplemented

    c = Counts()

    def step(x):
        for ask in (
            lambda: ls.index(2, 2),
            lambda: ls.index(2, -1),
            lambda: ls.index(2, 2, 3),
            lambda: ts.index(2, 1),
            lambda: ts.index(7),
            lambda: ls.index(9, 1),
            lambda: ls.remove(9),
            lambda: [1, c].count(c),
            lambda: [1, c, 2].count(2),
        ):
            try:
                log.append(ask())
            except ValueError as e:
                log.append(str(e))
        return x * 2

    return step, [log, c]


def iterators_that_call_back():
    ls, log, st = [1, 2, 3, 2], [], {"k": 2}

    def step(x):
        st["k"] += x.shape[0] == 4
        for ask in (
            lambda: list(itertools.accumulate(ls, lambda a, b: a * b + st["k"])),
            lambda: list(itertools.accumulate(ls, func=operator.mul, initial=st["k"])),
            lambda: [(k, list(g)) for k, g in itertools.groupby(ls)],
            lambda: [(k, len(list(g))) for k, g in itertools.groupby(ls, key=lambda v: v > st["k"] - 1)],
            lambda: statistics.mean(ls),
            lambda: x.nbytes,
        ):
            try:
                log.append(ask())
            except Exception as e:
                log.append(str(e))
        return x * 2

    return step, [log]


def iterators_that_call_back_after_a_break():
    st = {"k": 2}

    def step(x):
        kept = itertools.takewhile(lambda v: v < 3 + st["k"], [1, 2, 3, 4, 5, 6])
        mapped = map(lambda v: v * st["k"], [1, 2, 3])
        first = next(kept) + next(mapped)
        total = x.tolist()[0][0]
        st["k"] += 1
        return x * total, first, list(kept), list(mapped)

    return step, [st]


def a_tensor_copied():
    def step(x):
        y = copy.copy(x.detach())
        y.mul_(2)
        return y, x * 2

    return step, []


def a_batch_asked_for():
    m = net()
    batches = iter([torch.full((2, 4), float(i)) for i in range(10)])

    def step(x):
        return m(x).sum() + m(next(batches)).sum()

    return step, [m]


def sizes_in_texts():
    def step(x):
        print(x.shape, "is", x.size())
        print("%s %r %.2f" % (x.shape, x.shape, x.sum().item()))
        print(f"{x.shape} {x.sum().item():.2f}", " ".join([str(x.shape), f"{x.sum().item()}"]))
        print(x.shape[0] / 2, x.dtype, x.shape[0])
        return x * 2

    return step, []


TABLE = {
    ctxs: None,
    exitstack: ("sys.exc_info()", "natively") if sys.version_info < (3, 13) else None,
    closing: None,
    logging_lazy: None,
    fpartial: None,
    fcached: None,
    flru: None,
    fsingle: None,
    fwraps: None,
    freduce: None,
    ftotal: ("sorting values that are not plain", "plain keys"),
    tcheck: None,
    tcheck_data: None,
    tassert: ("exception", "natively"),
    looked_for: None,
    a_tensor_copied: ("tensor copied by copy", "tensor.clone()"),
    a_batch_asked_for: None,
    iterators_that_call_back: None,
    iterators_that_call_back_after_a_break: ("tensor read as a number", "keep them in tensors"),
    sizes_in_texts: None,
}


@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break_that_says_what_to_do(recipe):
    hold(recipe, TABLE[recipe])

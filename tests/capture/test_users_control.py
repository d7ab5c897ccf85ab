"""Steps in the style that users write them: exceptions, generators, threads, scopes.

Six calls of each beside plain Python: results, gradients, what the step changed, what was printed, random
state.
"""

# ruff: noqa: B006, B007, B008, B012, B018, B023, B028, B904, B905, E701, E702, E731, E741, E742, F841 (as users write)

from __future__ import annotations

import itertools
import threading
import types
import weakref

import plain_python
import pytest
import torch

ROWS = (3, 3, 3, 4, 4, 5)

COUNT = 0
LOSSES: list = []
TABLE: dict = {}


def exc_midstep():
    st = {"n": 0, "log": []}
    buf = torch.zeros(4)

    def step(x):
        st["n"] += 1
        buf.add_(1)
        print("at", st["n"])
        st["log"].append(x.shape[0])
        if st["n"] % 3 == 0:
            raise ValueError(f"bad {st['n']}")
        return x * buf

    return step, [st, buf]


def exc_operator():
    st = []
    w = torch.ones(4)

    def step(x):
        st.append(1)
        w.add_(1)
        idx = torch.tensor([0, len(st)])
        try:
            y = x[idx]
        except IndexError as e:
            st.append("caught")
            return x * 2, str(e)[:20]
        finally:
            st.append("fin")
        return y * w

    return step, [st, w]


def exc_uncaught_op():
    st = []
    w = torch.ones(4)

    def step(x):
        st.append(1)
        w.add_(1)
        y = torch.embedding(x.detach(), torch.tensor([len(st)]))
        st.append(2)
        return y

    return step, [st, w]


def closures():
    n = 0
    total = torch.zeros(())

    def step(x):
        nonlocal n, total

        def bump(k):
            nonlocal n
            n += k

            def inner():
                return n * k

            return inner

        fs = [bump(i) for i in range(3)]
        total = total + x.detach().sum()
        return x * sum(f() for f in fs), n, total

    return step, []


def gen_input():
    def batches(x):
        for i in range(3):
            yield x * i

    def step(x):
        t = 0
        for b in batches(x):
            t = t + b
        g = batches(x)
        first = next(g)
        return t, sum(b.sum() for b in g), first

    return step, []


def gen_alive():
    def counter():
        i = 0
        while True:
            got = yield i
            i += 1 if got is None else got

    g = counter()
    next(g)

    def step(x):
        k = g.send(2)
        return x * k, next(g)

    return step, []


def gen_alive_tensor():
    state = torch.zeros(4)

    def ema():
        m = state
        while True:
            v = yield m
            m = 0.9 * m + 0.1 * v

    g = ema()
    next(g)

    def step(x):
        return x * g.send(x.detach().mean(0))

    return step, []


def data_iter():
    it = iter([torch.ones(4) * i for i in range(20)])

    def step(x):
        a = next(it)
        b, c = next(it), next(it)
        return x * a + b - c

    return step, []


def cyc():
    it = itertools.cycle([1, 2, 3])
    c = itertools.count(10)

    def step(x):
        return x * next(it) + next(c)

    return step, []


def early_stop():
    st = {"best": None, "bad": 0, "stop": False}

    def step(x):
        if st["stop"]:
            return None
        l = (x.sum() * (st["bad"] + 1)).item()
        if st["best"] is None or l < st["best"]:
            st["best"] = l
            st["bad"] = 0
        else:
            st["bad"] += 1
            if st["bad"] >= 2:
                st["stop"] = True
        return x * l

    return step, [st]


def nested_try_with():
    log = []

    class C:
        def __init__(self, n, sw=False):
            self.n, self.sw = n, sw

        def __enter__(self):
            log.append("+" + self.n)
            return self

        def __exit__(self, t, e, tb):
            log.append((self.n, None if t is None else t.__name__))
            return self.sw

    def step(x):
        with C("a", True), C("b") as b:
            with C("c"):
                y = x * 2
                if y.sum().item() > 0:
                    raise RuntimeError("r")
        return y, len(log)

    return step, [log]


def gen_close():
    log = []

    def g(x):
        try:
            for i in range(5):
                yield x * i
        finally:
            log.append("closed")

    def step(x):
        for i, v in enumerate(g(x)):
            if i == 2:
                break
        it = g(x)
        next(it)
        it.close()
        return v, len(log)

    return step, [log]


def recursion():
    memo = {}

    def fib(n):
        if n in memo:
            return memo[n]
        memo[n] = n if n < 2 else fib(n - 1) + fib(n - 2)
        return memo[n]

    def tree(x, d):
        return x if d == 0 else tree(x * 2, d - 1) + tree(x, d - 1)

    k = [3]

    def step(x):
        k[0] += 1
        return x * fib(k[0]) + tree(x, 3)

    return step, [memo, k]


def finally_break():
    log = []

    def step(x):
        try:
            log.append("t")
            k = int((x.sum() * 100).item())
            if k % 2:
                raise KeyError(k)
            y = x * k
        except KeyError as e:
            log.append(e.args[0])
            y = x
        else:
            log.append("else")
        finally:
            log.append("f")
        return y

    return step, [log]


def finally_return():
    log = []

    def inner(x):
        for i in range(3):
            try:
                log.append(i)
                if i == 1:
                    return x * i
                continue
            finally:
                log.append("f")
                if len(log) > 14:
                    break
        return x

    def step(x):
        return inner(x)

    return step, [log]


def thread_work():
    out = {}

    def step(x):
        def work():
            out["s"] = x.detach().sum()

        t = threading.Thread(target=work)
        t.start()
        t.join()
        return x * out["s"]

    return step, [out]


def lock():
    l = threading.Lock()
    n = [0]

    def step(x):
        with l:
            n[0] += 1
            y = x * n[0]
        return y, l.locked()

    return step, [n]


def thread_local():
    tl = threading.local()

    def step(x):
        tl.n = getattr(tl, "n", 0) + 1
        return x * tl.n

    return step, []


def tl_dict():
    tl = threading.local()
    tl.n = 1

    def step(x):
        v = vars(tl)
        v["n"] += 1
        return x * tl.n * tl.__dict__["n"], hasattr(tl, "zz"), hasattr(tl, "n")

    return step, []


def proxy():
    class O:
        n = 0

        def f(self):
            return self.n

    o = O()
    p = weakref.proxy(o)

    def step(x):
        p.n += 1
        return x * p.f(), o.n

    return step, [o]


def exc_str():
    class E(Exception):
        def __str__(self):
            return 1 / 0 and ""

    n = [0]

    def step(x):
        n[0] += 1
        if n[0] == 2:
            try:
                raise E("k")
            except E as e:
                return x
        if n[0] == 4:
            raise KeyError(n[0])
        return x * n[0]

    return step, [n]


def dels():
    cache = {}
    ns = types.SimpleNamespace(a=1)

    def step(x):
        y = x * 2
        cache["y"] = y
        cache["n"] = cache.get("n", 0) + 1
        del cache["y"]
        z = y + 1
        del y
        try:
            y
        except NameError as e:
            msg = str(e)
        ns.b = 3
        del ns.b
        if hasattr(ns, "a"):
            del ns.a
        else:
            ns.a = 2
        return z, msg, vars(ns).copy()

    return step, [cache, ns]


def globals_():
    global COUNT
    COUNT = 0
    LOSSES.clear()
    TABLE.clear()

    def step(x):
        global COUNT
        COUNT += 1
        l = (x * COUNT).sum()
        LOSSES.append(l.item())
        TABLE[COUNT] = l.detach()
        if len(LOSSES) > 2:
            LOSSES.pop(0)
        return l, list(LOSSES), sum(TABLE.values())

    return step, [LOSSES, TABLE]


CASES = [
    exc_midstep,
    exc_operator,
    exc_uncaught_op,
    closures,
    gen_input,
    gen_alive,
    gen_alive_tensor,
    data_iter,
    cyc,
    early_stop,
    nested_try_with,
    gen_close,
    recursion,
    finally_break,
    finally_return,
    thread_work,
    lock,
    thread_local,
    tl_dict,
    proxy,
    exc_str,
    dels,
    globals_,
]


@pytest.mark.share(15)
@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_six_calls_are_plain_pythons(recipe):
    plain_python.compare(recipe, sizes=ROWS)

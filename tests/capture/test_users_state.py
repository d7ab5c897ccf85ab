"""Steps in the style that users write them, which keep their state in Python's objects.

Six calls of each beside plain Python: results, gradients, what the step changed, what was printed, random
state.
"""

# ruff: noqa: B006, B007, B008, B012, B018, B023, B028, B904, B905, E701, E702, E731, E741, E742, F841 (as users write)

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
import types

import plain_python
import pytest
import torch
from torch import nn

ROWS = (3, 3, 3, 4, 4, 5)


def two_names():
    a = [1]
    b = a
    holder = {"a": a, "b": b}

    def step(x):
        a.append(len(a))
        holder["b"].append(100)
        return x * sum(holder["a"]), holder["a"] is b, len(b)

    return step, [holder, a]


def props():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)
            self._n = 0
            self.hist = []

        @property
        def n(self):
            self.hist.append(self._n)
            return self._n

        @n.setter
        def n(self, v):
            self._n = v

        @functools.cached_property
        def scale(self):
            return float(self.l.in_features)

        def forward(self, x):
            self.n = self.n + 1
            return self.l(x) * self.scale + self.n

    m = M()

    def step(x):
        return m(x), m.n, "scale" in m.__dict__

    return step, [m]


def getattr_mod():
    class W(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.calls = collections.Counter()

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                self.calls[name] += 1
                return getattr(self.inner, name)

        def forward(self, x):
            return self.inner(x)

    m = W(nn.Linear(4, 4))

    def step(x):
        return m(x) * m.in_features + m.weight.sum(), m.calls["weight"], hasattr(m, "zzz")

    return step, [m]


def class_attr():
    class C:
        count = 0
        names = []
        best = None

        def f(self, x):
            C.names.append(len(x))
            type(self).best = x.detach().max()
            return x

    c = C()

    def step(x):
        y = c.f(x)
        C.count += 1
        return y * C.count, C.best, len(C.names)

    class R:
        pass

    r = R()
    r.c = C
    return step, [C.names]


def loss_tensors():
    losses = []

    def step(x):
        l = (x**2).mean()
        losses.append(l.detach())
        return l + torch.stack(losses).mean()

    return step, [losses]


def running_loss():
    st = types.SimpleNamespace(run=0.0, n=0, best=float("inf"), t=None)

    def step(x):
        l = (x**2).mean()
        st.run += l.item()
        st.n += 1
        if l.item() < st.best:
            st.best = l.item()
        st.t = l.detach() if st.t is None else st.t + l.detach()
        if st.n % 2 == 0:
            print(f"avg {st.run / st.n:.4f}")
        return l, st.t, st.run / st.n

    return step, [st]


def containers():
    dd = collections.defaultdict(list)
    c = collections.Counter()
    dq = collections.deque(maxlen=3)
    s = set()
    od = collections.OrderedDict()

    def step(x):
        nonlocal s
        dd[x.shape[0]].append(len(dd))
        dd["t"].append(x.detach().sum())
        c.update([x.shape[0], "a"])
        c["b"] += 2
        dq.append(x.detach().mean())
        s.add(x.shape[0])
        s |= {1}
        od[x.shape[0]] = len(od)
        od.move_to_end(x.shape[0], last=False)
        return x * sum(dq) + c.total(), c.most_common(1), sorted(s), len(dq), list(od), dq[0]

    return step, [dd, c, dq, s, od]


def default_mut():
    def acc(x, seen=[], cfg={"n": 0}):
        seen.append(x.shape[0])
        cfg["n"] += 1
        return x * len(seen) + cfg["n"]

    def step(x):
        return acc(x)

    return step, [acc.__defaults__[0]]


def func_attr():
    def f(x):
        f.calls += 1
        return x * f.calls

    f.calls = 0

    def step(x):
        step.n = getattr(step, "n", 0) + 1
        return f(x), f.calls

    return step, [f.__dict__]


def str_state():
    st = {"phase": "warmup", "hist": ""}

    def step(x):
        st["hist"] += str(x.shape[0]) + ","
        if len(st["hist"]) > 5:
            st["phase"] = "main"
        match st["phase"]:
            case "warmup":
                y = x
            case "main":
                y = x * 3
        return y, f"{st['phase']:>8}|{st['hist']}"

    return step, [st]


def matchcase():
    @dataclasses.dataclass
    class Op:
        kind: str
        arg: float

    ops = [Op("scale", 2.0), Op("shift", 1.0)]

    def step(x):
        for o in ops:
            match o:
                case Op(kind="scale", arg=a):
                    x = x * a
                case Op("shift", a) if a > 0:
                    x = x + a
        ops[0].arg += 1
        ops.reverse()
        return x

    return step, [ops]


def slots_state():
    class S:
        __slots__ = ("n", "t", "__dict__")

        def __init__(self):
            self.n = 0
            self.t = None

    s = S()

    def step(x):
        s.n += 1
        s.extra = s.n * 2
        s.t = x.detach() if s.t is None or s.t.shape != x.shape else s.t + x.detach()
        return x * s.t + s.extra

    return step, [s]


def dunder_state():
    class V:
        def __init__(self, n):
            self.n = n
            self.ops = []

        def __add__(self, o):
            self.ops.append("+")
            return V(self.n + (o.n if isinstance(o, V) else o))

        __radd__ = __add__

        def __iadd__(self, o):
            self.ops.append("i")
            self.n += o
            return self

        def __len__(self):
            return self.n

        def __bool__(self):
            return self.n > 2

        def __getitem__(self, k):
            return self.n * k

        def __contains__(self, k):
            return k == self.n

        def __call__(self, x):
            return x * self.n

        def __eq__(self, o):
            return self.n == o

        def __hash__(self):
            return 3

        def __enter__(self):
            self.ops.append("in")
            return self

        def __exit__(self, *e):
            self.ops.append("out")

    v = V(0)

    def step(x):
        nonlocal v
        v += 1
        with v as w:
            y = w(x)
        return y * (2 if v else 1), (v + 2).n, sum([v, v]).n, len(v), v[3], 2 in v, v == 2, {v: 1}[v]

    return step, [v]


def sort_key():
    xs = [{"n": 3, "t": torch.ones(4)}, {"n": 1, "t": torch.zeros(4)}]
    calls = []

    def step(x):
        xs.sort(key=lambda d: (calls.append(d["n"]), d["n"])[1])
        xs[0]["n"] += 3
        return x * xs[0]["t"] + max(xs, key=operator.itemgetter("n"))["n"]

    return step, [xs, calls]


def dynamic_setattr():
    class Cfg:
        pass

    c = Cfg()

    def step(x):
        for i in range(3):
            setattr(c, f"a{i}", getattr(c, f"a{i}", 0) + i)
        c.__dict__.update(z=len(vars(c)))
        return x * c.a2, sorted(c.__dict__.items())

    return step, [c]


def slices():
    hist = []

    def step(x):
        hist.extend([len(x)] * 2)
        hist[1:3] = [9]
        hist[::2] = [7] * len(hist[::2])
        del hist[5:]
        hist.insert(0, x.shape[0])
        return x * sum(hist[-2:]), hist[::-1], hist * 2

    return step, [hist]


def multi_assign():
    st = {"a": 1}
    l = [0, 0, 0]

    def step(x):
        i = st["a"] = (st["a"] + 1) % 3
        l[i], l[(i + 1) % 3] = l[(i + 1) % 3] + 1, l[i] + 2
        a, *b, c = l
        (d := st)["w"] = c
        return x * a + c, b, d is st

    return step, [st, l]


def int_overflow():
    st = {"n": 2**62, "f": 0.1, "b": True}

    def step(x):
        st["n"] = st["n"] * 3 + 1
        st["f"] = st["f"] * 3 % 1
        st["b"] = not st["b"]
        return x * (st["n"] % 7) + st["f"], st["b"], st["n"] >> 3, -7 // 2, divmod(st["n"], 5)

    return step, [st]


def nan_inf():
    st = {"v": 0.0}

    def step(x):
        st["v"] = float("nan") if st["v"] == float("inf") else float("inf") if st["v"] > 1 else st["v"] + 1
        ok = st["v"] != st["v"]
        return x * 2 if ok else x, math.isnan(st["v"]), [st["v"]] == [st["v"]]

    return step, [st]


def meth_attr():
    class O:
        def f(self):
            "doc"
            return 1

        f.tag = "t"

    o = O()

    def step(x):
        m = o.f
        return x * m(), m.__name__, m.tag, m.__doc__, m.__self__ is o, hasattr(m, "zz"), m.__qualname__, m.__func__.tag

    return step, [o]


CASES = [
    two_names,
    props,
    getattr_mod,
    class_attr,
    loss_tensors,
    running_loss,
    containers,
    default_mut,
    func_attr,
    str_state,
    matchcase,
    slots_state,
    dunder_state,
    sort_key,
    dynamic_setattr,
    slices,
    multi_assign,
    int_overflow,
    nan_inf,
    meth_attr,
]


@pytest.mark.share(14)
@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_six_calls_are_plain_pythons(recipe):
    plain_python.compare(recipe, sizes=ROWS)

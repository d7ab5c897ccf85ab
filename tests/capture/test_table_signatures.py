"""Signatures, mapping proxies and copies: captured, or a graph break whose hint says what to do.

Six calls of each beside plain Python (``tests/support/tables.py``).
"""

# ruff: noqa: B006, B007, B008, B018, B023, B028, B904, B905, E731, E741, E742, F841 (as users write)

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import types

import pytest
import torch
from tables import hold, net
from torch import nn


def sig_filter():
    m = net()

    def f(x, mask=None, scale=2.0, **kw):
        return m(x) * scale

    def step(x):
        params = inspect.signature(f).parameters
        kw = {k: v for k, v in {"scale": 3.0, "bogus": 1}.items() if k in params}
        return f(x, **kw), list(params)

    return step, [m]


def sig_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x, attention_mask=None, output=False):
            return self.l(x)

    m = M()

    def step(x):
        accepts = "attention_mask" in set(inspect.signature(m.forward).parameters.keys())
        n = len(inspect.signature(M.forward).parameters)
        return m(x, attention_mask=1) * n if accepts else m(x)

    return step, [m]


def sig_bind():
    def f(a, b=2, *, c=3):
        return a * b + c

    def step(x):
        b = inspect.signature(f).bind(x, c=5)
        b.apply_defaults()
        return f(*b.args, **b.kwargs), b.arguments["b"]

    return step, []


def sig_wrapped():
    @functools.lru_cache(None)
    def names(fn):
        return tuple(inspect.signature(fn).parameters)

    def deco(fn):
        @functools.wraps(fn)
        def w(*a, **k):
            ps = inspect.signature(fn).parameters
            if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in ps.values()):
                return fn(*a, **k)
            return fn(*a, **{n: v for n, v in k.items() if n in ps})

        return w

    @deco
    def f(x, s=1):
        return x * s

    @deco
    def g(x, **k):
        return x + len(k)

    def step(x):
        return f(x, s=2, t=3) + g(x, q=1, r=2) + len(names(f.__wrapped__))

    return step, []


def sig_has_arg():
    def loss_fn(out, target, num_items_in_batch=None):
        return (out - target).pow(2).sum() / (num_items_in_batch or 1)

    m = net()

    def step(x):
        kw = {}
        if "num_items_in_batch" in inspect.signature(loss_fn).parameters:
            kw["num_items_in_batch"] = x.shape[0]
        return loss_fn(m(x), x, **kw)

    return step, [m]


def sig_default():
    def f(a, b=7, c=inspect.Parameter.empty):
        return a

    def step(x):
        p = inspect.signature(f).parameters["b"]
        k = p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
        return x * p.default, p.name, k, p.default is inspect.Parameter.empty, str(inspect.signature(f))

    return step, []


def sig_outside_change():
    class M(nn.Module):
        def forward(self, x, a=1):
            return x

    m = M()
    fs = [lambda x, mask=None: 1, lambda x: 2]
    n = [0]

    def step(x):
        n[0] += 1
        f = fs[n[0] % 2]
        return (
            x * ("mask" in inspect.signature(f).parameters),
            "a" in inspect.signature(m.forward).parameters,
            len(inspect.signature(m).parameters) > 0,
        )

    return step, [n]


def state_dict_out():
    m = net()

    def step(x):
        o = collections.OrderedDict(a=x.detach())
        o.tag = [x.shape[0]]
        m(x).sum().backward()
        return o, {k: v.clone() for k, v in m.state_dict().items()}, dict(m.state_dict()._metadata)

    return step, [m]


def state_dict_load():
    m = net()
    n = net()

    def step(x):
        n.load_state_dict(copy.deepcopy(m.state_dict()))
        with torch.no_grad():
            m[0].weight.add_(1)
        return n(x)

    return step, [m, n]


def dc_default():
    d = collections.defaultdict(list)
    d["a"].append(torch.ones(2))

    def step(x):
        e = copy.deepcopy(d)
        e["b"].append(1)
        e["a"][0].add_(1)
        return x, e, d["a"][0].sum(), type(e).__name__

    return step, [d]


def dc_grad():
    m = nn.Linear(4, 4)

    def step(x):
        m(x).sum().backward()
        g = copy.deepcopy(m.weight.grad)
        gs = {k: copy.deepcopy(p.grad) for k, p in m.named_parameters()}
        m.zero_grad()
        return g, gs

    return step, [m]


def dc_statedict():
    m = net()
    best = {}

    def step(x):
        y = m(x).sum()
        best["sd"] = copy.deepcopy(m.state_dict())
        best["x"] = {k: v.clone() for k, v in m.state_dict().items()}
        return y

    return step, [m, best]


def dc_alias():
    l = [torch.ones(2)]
    d = {"a": l, "b": l}

    def step(x):
        c = copy.deepcopy(d)
        c["a"].append(1)
        d["a"][0].add_(1)
        return x * c["b"][0].sum(), len(c["b"]), len(l), c["a"] is c["b"]

    return step, [d]


def dc_dataclass():
    @dataclasses.dataclass
    class S:
        m: torch.Tensor
        n: int = 0
        h: list = dataclasses.field(default_factory=list)

    s = S(torch.zeros(4))

    def step(x):
        old = copy.deepcopy(s)
        s.m += x.detach().sum(0)
        s.n += 1
        s.h.append(old.n)
        t = copy.copy(s)
        t.n = 100
        return x * s.m - old.m, old.n, t.n, s.n, t.h is s.h

    return step, [s]


def sig_changes():
    st = {"n": 0}

    def f(a, b=1):
        return a * b

    def g(a, b=1, c=2):
        return a * c

    def step(x):
        st["n"] += 1
        if st["n"] == 3:
            f.__defaults__ = (5,)
        if st["n"] == 5:
            f.__code__ = g.__code__
            f.__defaults__ = (1, 2)
        p = inspect.signature(f).parameters
        return x * len(p), p["b"].default, list(p)

    return step, [st]


def sig_partial_class():
    class C:
        def __init__(self, d, e=1):
            self.d = d

        def __call__(self, x, y=0):
            return x + y

    c = C(1)
    p = functools.partial(c, y=2)

    def step(x):
        return p(x), *(list(inspect.signature(one).parameters) for one in (C, c, p))

    return step, []


def sig_kept():
    keep = {}

    def f(a, b=2, *args, k, **kw):
        return a

    def step(x):
        s = inspect.signature(f)
        keep["p"] = s.parameters
        keep["s"] = s
        for name, p in s.parameters.items():
            if p.default is not p.empty:
                x = x * p.default
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                x = x + 1
        b = x.data_ptr() > 0
        return x, len(s.parameters), "k" in s.parameters, b

    return step, [keep]


def mapping_proxy():

    d = {"a": 1}

    def step(x):
        p = types.MappingProxyType(d)
        d["n"] = d.get("n", 0) + 1
        q = types.MappingProxyType({"x": x})
        return x * p["n"], list(p), len(p), "a" in p, p.get("zz"), q["x"] * 2, sorted(p.items()), [k for k in p.keys()]

    return step, [d]


def dc_shared():
    def step(x):
        y = x.detach() * 2
        d = copy.deepcopy([y, y[0], y])
        d[0].add_(1)
        e = copy.deepcopy(y[1])
        f = copy.deepcopy(y.t())
        g = copy.deepcopy(y.expand(2, *y.shape))
        return x, d, d[0] is d[2], e, e._is_view(), f, f.stride(), g.stride()

    return step, []


def dc_attr():
    t = torch.ones(4)
    t.tag = "a"

    def step(x):
        u = copy.deepcopy(t)
        return x * u, u.tag, u is t

    return step, [t]


def dc_batch():
    def step(x):
        b = {"x": x.detach(), "n": 1, "l": [x.detach()]}
        c = copy.copy(b)
        c["x"] = c["x"] * 2
        c["l"].append(1)
        d = copy.deepcopy(b)
        return c["x"] + d["x"] + x, len(b["l"]), d["l"][0] is d["x"], b["l"][0] is b["x"]

    return step, []


def dc_param():
    p = nn.Parameter(torch.ones(4))

    def step(x):
        q = copy.deepcopy(p)
        q.data.add_(1)
        return (x * q).sum() + (x * p).sum(), type(q).__name__, q.requires_grad, q is p

    return step, [p]


def dc_requires():
    p = nn.Parameter(torch.ones(4))

    def step(x):
        try:
            y = copy.deepcopy(x * 1)
        except RuntimeError as e:
            return x * p, str(e)[:30]
        return y

    return step, [p]


def dc_module():
    m = net()
    keep = {}

    def step(x):
        e = copy.deepcopy(m)
        for p in e.parameters():
            p.requires_grad_(False)
        keep["e"] = e
        return m(x) + e(x)

    return step, [m, keep]


def copy_replace():
    P = collections.namedtuple("P", "a b")

    def step(x):
        p = P(x, [1])
        q = copy.copy(p)
        r = copy.deepcopy(P(x.detach(), [1, {2: 3}]))
        return q.a * 2, q is p, r.b, r.a

    return step, []


TABLE = {
    sig_filter: None,
    sig_forward: None,
    sig_bind: None,
    sig_wrapped: None,
    sig_has_arg: None,
    sig_default: None,
    sig_outside_change: None,
    state_dict_out: None,
    state_dict_load: None,
    dc_default: None,
    dc_grad: None,
    dc_statedict: None,
    dc_alias: None,
    dc_dataclass: ("container that changes from call to call", "append() alone"),  # its list is copied
    sig_changes: ("slot or C attribute is set", "ordinary attributes"),
    sig_partial_class: ("inspect.signature", "before the step"),
    sig_kept: ("tensor read as a number", "keep them in tensors"),
    mapping_proxy: None,
    dc_shared: ("tensor copied by copy", "clone()"),
    dc_attr: ("tensor copied by copy", "clone()"),
    dc_batch: ("tensor copied by copy", "clone()"),
    dc_param: None,
    dc_requires: ("tensor copied by copy", "clone()"),
    dc_module: None,
    copy_replace: ("pickling in the step", "outside of the step"),
}


@pytest.mark.share(9)
@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break_that_says_what_to_do(recipe):
    hold(recipe, TABLE[recipe])

"""Plain data in models: dataclasses, ModelOutput, tuples with names, enums, keyword arguments, signatures."""

# ruff: noqa: B007, B018, B028, B904, B905, E731, E741, E742, F841, UP031, UP042 (the programs are as users write them)

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
from dataclasses import dataclass, field
from typing import NamedTuple

import plain_python
import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Flag(enum.Flag):
    A = 1
    B = 2
    C = 4


class Kind(enum.IntEnum):
    ONE = 1
    TWO = 2


class Act(str, enum.Enum):
    RELU = "relu"
    GELU = "gelu"


def dc_frozen():
    @dataclass(frozen=True)
    class Cfg:
        scale: float = 2.0
        names: tuple = ("a", "b")

    cfg = Cfg()

    def step(x):
        c = dataclasses.replace(cfg, scale=3.0)
        return x * c.scale * cfg.scale, dataclasses.asdict(c), c

    return step, [cfg]


def dc_frozen_write():
    @dataclass(frozen=True)
    class Cfg:
        scale: float = 2.0

    cfg = Cfg()

    def step(x):
        try:
            cfg.scale = 3
        except dataclasses.FrozenInstanceError as e:
            return x * 2, str(e)
        return x

    return step, [cfg]


def dc_slots():
    @dataclass(slots=True)
    class P:
        x: object
        n: int = 1
        l: list = field(default_factory=list)

    p = P(None)

    def step(x):
        q = P(x * 2)
        q.l.append(3)
        q.n += 1
        p.n += 1
        p.l.append(len(x))
        return q, q.x * q.n, p.n

    return step, [p]


def dc_factories():
    calls = []

    @dataclass
    class P:
        a: torch.Tensor
        l: list = field(default_factory=lambda: [1, 2])
        d: dict = field(default_factory=dict)
        k: int = field(default=3, kw_only=True)

        def __post_init__(self):
            calls.append(self.k)
            self.total = self.a.sum()

    def step(x):
        p = P(x, k=5)
        p.d["x"] = x
        q = P(x)
        return (
            p.total * 2 + q.total,
            p.l is q.l,
            [f.name for f in dataclasses.fields(p)],
            dataclasses.is_dataclass(p),
            p == p,
            repr(q.k),
            dataclasses.astuple(P(1 if False else x))[3],
        )

    return step, [calls]


def dc_order_hash():
    @dataclass(order=True, unsafe_hash=True)
    class P:
        a: int
        b: int = 1

    ps = [P(3), P(1), P(2)]

    def step(x):
        return x * sorted(ps)[0].a, hash(P(1)) == hash(P(1)), {P(1): 2}[P(1)], P(1) < P(2), max(ps).a

    return step, [ps]


def model_output():
    from transformers.modeling_outputs import BaseModelOutput
    from transformers.utils import ModelOutput

    @dataclass
    class O(ModelOutput):
        loss: torch.Tensor = None
        logits: torch.Tensor = None
        hidden: tuple = None

    def step(x):
        o = O(loss=x.sum(), logits=x * 2)
        o.hidden = (x,)
        o["logits"] = o.logits + 1
        b = BaseModelOutput(last_hidden_state=x * 3)
        return (
            o,
            o[0],
            o.to_tuple()[1],
            list(o.keys()),
            "loss" in o,
            b.last_hidden_state,
            b.hidden_states is None,
            o[:2][1],
            len(o),
        )

    return step, []


def namedtuples():
    class P(NamedTuple):
        a: torch.Tensor
        n: int = 3

        @property
        def twice(self):
            return self.a * 2

    Q = collections.namedtuple("Q", "a b", defaults=[4])

    def step(x):
        p = P(x)
        a, n = p
        q = Q(x)
        r = Q._make([x, 1])
        s = p._replace(n=7)
        return (
            p,
            p.twice * n,
            q.b,
            r._asdict(),
            s.n,
            P._fields,
            isinstance(p, tuple),
            p[0] is x,
            p == p,
            s.a + p.a,
            q._asdict()["a"],
        )

    return step, []


def enums():
    def step(x):
        f = Flag.A | Flag.B
        out = x
        if f & Flag.A:
            out = out * 2
        if Flag.C in f:
            out = out * 100
        m = {"relu": F.relu, "gelu": F.gelu}[Act("gelu").value]
        return (
            m(out) * Kind.TWO,
            [k.name for k in Kind],
            f"{Act.RELU}",
            Act.RELU == "relu",
            Kind.TWO > Kind.ONE,
            f,
            ~f,
            Flag(3),
            Flag.A.value,
            Act["RELU"].name,
            str(f),
            repr(Kind.ONE),
            len(Act),
            Act.GELU in Act,
            hash(Kind.ONE) == hash(1),
            isinstance(Act.RELU, str),
        )

    return step, []


def ordered():
    t = collections.OrderedDict(b=1, a=2)

    def step(x):
        t["c"] = len(x)
        t.move_to_end("b")
        first = t.popitem(last=False)
        o = collections.OrderedDict([("q", x), ("r", x * 2)])
        o.move_to_end("q")
        o2 = collections.OrderedDict(reversed(list(o.items())))
        t[first[0]] = first[1]
        return (
            list(t),
            o["q"] + o2["r"],
            list(o),
            o == o2,
            collections.Counter([1, 1, 2]),
            collections.ChainMap({"a": 1}, {"b": 2})["b"],
        )

    return step, [t]


def kwargs_plumbing():
    def outer(x, *a, **k):
        k.setdefault("scale", 2)
        k.pop("junk", None)
        return inner(x, *a[1:], **{**k, "bias": a[0]})

    def inner(x, p=1, /, *, scale, bias=0, **rest):
        return x * scale + bias + p + len(rest)

    opts = {"alpha": 1}

    def step(x, **k):
        k["beta"] = 3
        return outer(x, 1, 2, junk=3, **opts, **k), sorted(k), opts

    return step, [opts]


def inspects():
    class M(nn.Module):
        def forward(self, x, mask=None, **kw):
            return x * 2

    m = M()

    def step(x):
        s = inspect.signature(m.forward)
        names = list(s.parameters)
        ok = "mask" in s.parameters
        b = inspect.signature(m.forward).bind(x, mask=3)
        b.apply_defaults()
        kw = {k: v for k, v in {"mask": 1, "zz": 2}.items() if k in names}
        return (
            m(x, **kw),
            names,
            ok,
            b.arguments["mask"],
            inspect.isfunction(step),
            inspect.ismodule(inspect),
            inspect.getfullargspec(M.forward).args,
            s.parameters["mask"].default,
            inspect.isclass(M),
            inspect.ismethod(m.forward),
            inspect.getdoc(M) is None,
            m.forward.__name__,
            step.__qualname__,
            M.forward.__code__.co_argcount,
        )

    return step, [m]


CASES = [
    dc_frozen,
    dc_frozen_write,
    dc_slots,
    dc_factories,
    dc_order_hash,
    model_output,
    namedtuples,
    enums,
    ordered,
    kwargs_plumbing,
    inspects,
]
UNBROKEN = {"dc_frozen_write", "model_output", "kwargs_plumbing"}


@pytest.mark.share(9)
@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_three_calls_are_plain_pythons(recipe, backend):
    found = plain_python.compare(recipe, backend)
    assert recipe.__name__ not in UNBROKEN or not found.breaks

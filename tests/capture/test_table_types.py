"""What users' models are written with: named tuples, enumerations, dataclasses, classes that are asked about.

Six calls of each beside plain Python (``tests/support/tables.py``).
"""

# ruff: noqa: B006, B007, B008, B010, B018, B023, B024, B028, B904, B905, E701, E702, E731, E741, E742, F841, UP031, UP042 (as users write)

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import enum
import functools
import numbers
import types
import typing

import pytest
import torch
import torch.nn.functional as F
from tables import hold, net
from torch import nn


class Out(typing.NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor
    aux: typing.Any = None

    def total(self):
        return self.loss + (self.aux or 0)


def nt_return():
    m = net()

    def step(x):
        y = m(x)
        o = Out(y.sum(), y)
        o = o._replace(aux=2.0)
        return o, o.total(), o._fields, o._asdict()["aux"], Out._make([1, 2, 3])

    return step, [m]


def nt_arg_unpack():
    m = net()

    def inner(o):
        l, *rest = o
        return l * len(rest) + o[0] + o[-1]

    def step(x):
        return inner(Out(x.sum(), x, 3)), isinstance(Out(1, 2), tuple), Out(1, 2) == (1, 2, None)

    return step, [m]


def nt_kept():
    keep = {"o": Out(torch.zeros(1), torch.zeros(1))}

    def step(x):
        o = keep["o"]
        keep["o"] = o._replace(loss=o.loss + x.sum().detach())
        return keep["o"].loss * 2

    return step, [keep]


def nt_generic():
    P = collections.namedtuple("P", ["a", "b"], defaults=[4])

    def step(x):
        p = P(x)
        q = P(*p)
        d = {P(1, 2): "k"}
        return p.a * p.b, q, d[P(1, 2)], repr(P(1)), hash(P(1)) == hash(P(1, 4)), sorted([P(3), P(1)])

    return step, []


class Mode(enum.Enum):
    TRAIN = "train"
    EVAL = "eval"

    @property
    def is_train(self):
        return self is Mode.TRAIN

    @classmethod
    def parse(cls, s):
        return cls(s)


class Kind(enum.IntEnum):
    A = 1
    B = 2


class S(str, enum.Enum):
    X = "x"
    Y = "y"


class SE(enum.StrEnum):
    P = enum.auto()
    Q = enum.auto()


class Fl(enum.Flag):
    R = enum.auto()
    W = enum.auto()
    RW = R | W


class IFl(enum.IntFlag):
    R = 1
    W = 2


def enums():
    cfg = types.SimpleNamespace(mode=Mode.TRAIN, kind=Kind.B, s=S.X, se=SE.Q, fl=Fl.R | Fl.W, ifl=IFl.R)

    def step(x):
        y = x
        if cfg.mode is Mode.TRAIN:
            y = y * 2
        if cfg.mode.is_train:
            y = y + 1
        y = y * cfg.kind + int(cfg.kind)
        if cfg.s == "x":
            y = y + 1
        if cfg.se == SE.Q:
            y = y - 1
        if Fl.W in cfg.fl:
            y = y * 3
        if cfg.ifl & IFl.R:
            y = y / 2
        table = {Mode.TRAIN: 1, Mode.EVAL: 2}
        return (
            y * table[cfg.mode],
            cfg.mode.name,
            cfg.mode.value,
            Mode("eval"),
            Mode["EVAL"],
            Mode.parse("train"),
            list(Mode),
            f"{cfg.se}",
            f"{cfg.kind}",
            str(cfg.mode),
            repr(cfg.fl),
            len(Kind),
            Kind(2),
            cfg.fl | Fl.R,
            ~Fl.R,
            cfg.kind + 1,
            SE.P.upper(),
        )

    def outer(x):
        cfg.mode = Mode.EVAL if cfg.mode is Mode.TRAIN else Mode.TRAIN
        return step(x)

    return outer, [cfg]


def enum_dispatch():
    class Act(enum.Enum):
        RELU = enum.member(functools.partial(F.relu))  # (a bare partial is no member from 3.13 on)
        GELU = enum.member(functools.partial(F.gelu))

        def __call__(self, x):
            return self.value(x)

    def step(x):
        return Act.RELU(x) + Act.GELU(x), [a.name for a in Act], Act.__members__["RELU"] is Act.RELU

    return step, []


def enum_match():
    cfg = types.SimpleNamespace(mode=Mode.TRAIN)

    def step(x):
        match cfg.mode:
            case Mode.TRAIN:
                y = x * 2
            case Mode.EVAL:
                y = x * 3
        cfg.mode = Mode.EVAL
        return y

    return step, [cfg]


def enum_bad():
    def step(x):
        try:
            Mode("nope")
        except ValueError as e:
            return x, str(e)

    return step, []


def ordered():
    od = collections.OrderedDict(a=1, b=2)

    def step(x):
        od.move_to_end("a")
        o = collections.OrderedDict([("x", x), ("y", x * 2)])
        o.move_to_end("x", last=False)
        k, v = o.popitem(last=False)
        o["z"] = v
        return (
            list(o),
            list(od),
            o == collections.OrderedDict(o),
            reversed(o).__next__(),
            o["z"],
            list(reversed(od)),
            od | {"c": 1},
            collections.OrderedDict.fromkeys("ab"),
        )

    return step, [od]


@dataclasses.dataclass
class DC:
    loss: typing.Any = None
    logits: typing.Any = None
    extra: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.extra["n"] = 1


@dataclasses.dataclass(frozen=True)
class Fz:
    a: int = 1
    b: typing.Any = None


@dataclasses.dataclass(slots=True, kw_only=True)
class Sl:
    a: int = 1
    b: typing.Any = None


@dataclasses.dataclass(order=True)
class Od:
    a: int
    b: int = dataclasses.field(compare=False, default=3)


def dcs():
    def step(x):
        d = DC(loss=x.sum())
        e = dataclasses.replace(d, logits=x)
        f = Fz(b=x)
        try:
            f.a = 2
        except dataclasses.FrozenInstanceError as err:
            msg = str(err)
        s = Sl(b=x * 2)
        s.a = 5
        return (
            d.loss + e.logits.sum() + f.b.sum() + s.b.sum() * s.a,
            msg,
            [fl.name for fl in dataclasses.fields(d)],
            Od(1) < Od(2),
            Od(1) == Od(1, 5),
            dataclasses.is_dataclass(d),
            repr(Od(1)),
            e,
        )

    return step, []


def dc_asdict():
    def step(x):
        d = DC(loss=1, logits=[1, {"k": 2}])
        return x * 2, dataclasses.asdict(d), dataclasses.astuple(Od(1)), hash(Fz()) == hash(Fz())

    return step, []


def dc_asdict_tensor():
    def step(x):
        d = Fz(b=x.detach() * 1)
        return x * 2, dataclasses.asdict(d)

    return step, []


def model_output():
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class MO(ModelOutput):
        loss: typing.Any = None
        logits: typing.Any = None
        hidden: typing.Any = None

    m = net()

    def step(x):
        y = m(x)
        o = MO(loss=y.sum(), logits=y)
        l, lg = o[:2]
        o.hidden = (y,)
        o["loss"] = o.loss * 2
        return (
            o.loss + o["logits"].sum() + o[0],
            list(o.keys()),
            o.to_tuple(),
            len(o),
            "hidden" in o,
            {k: v for k, v in o.items()},
            o,
        )

    return step, [m]


def kwargs_plumbing():
    m = net()

    def attn(x, *, scale=1.0, mask=None, **kw):
        return m(x) * scale, kw

    def layer(x, **kwargs):
        kwargs.setdefault("scale", 2.0)
        kwargs.pop("unused", None)
        return attn(x, **kwargs)

    def step(x, **kw):
        opts = dict(flag=True, **{"unused": 3})
        y, left = layer(x, **opts, **kw)
        z, _ = layer(x, **{**opts, "scale": 3.0})
        try:
            attn(x, **{"scale": 1}, **{"scale": 2})
        except TypeError as e:
            msg = str(e)
        try:
            attn(x, 3)
        except TypeError as e:
            msg2 = str(e)
        return y + z, left, msg, msg2

    return step, [m]


def isinst():
    cabc = collections.abc
    m = net()

    class P(typing.Protocol):
        def forward(self, x): ...

    @typing.runtime_checkable
    class HasLen(typing.Protocol):
        def __len__(self): ...

    def step(x):
        r = []
        for v in (x, [x], (x,), {"a": x}, m, 3, 3.0, True, "s", None, m[0].weight, x.shape, range(3), len):
            r.append(
                (
                    isinstance(v, torch.Tensor),
                    isinstance(v, (list, tuple)),
                    isinstance(v, cabc.Mapping),
                    isinstance(v, cabc.Sequence),
                    isinstance(v, nn.Module),
                    isinstance(v, numbers.Number),
                    isinstance(v, int | str),
                    isinstance(v, nn.Parameter),
                    isinstance(v, cabc.Iterable),
                    isinstance(v, cabc.Sized),
                    callable(v),
                    isinstance(v, HasLen),
                    isinstance(v, cabc.Callable),
                    isinstance(v, cabc.Hashable),
                )
            )
        return x * 2, r, issubclass(nn.Linear, nn.Module), issubclass(dict, cabc.Mapping)

    return step, [m]


def hasattrs():
    m = net()

    class C:
        __slots__ = ("a",)

    class G:
        def __getattr__(self, n):
            if n == "dyn":
                return 5
            raise AttributeError(n)

    c, g = C(), G()

    def step(x):
        r = [
            hasattr(m, "weight"),
            hasattr(m[0], "weight"),
            hasattr(c, "a"),
            hasattr(g, "dyn"),
            hasattr(g, "no"),
            hasattr(x, "grad_fn"),
            hasattr(x, "nope"),
            hasattr(m, "forward"),
            getattr(m, "zip", 3),
            g.dyn,
            hasattr([], "append"),
            hasattr(x, "requires_grad"),
            hasattr(3, "real"),
        ]
        c.a = 1
        return x, r, hasattr(c, "a")

    return step, [m, c]


def slots_that_are_empty():
    class Config:
        __slots__ = ("a", "b")

    c, st = Config(), {"n": 0}
    c.a = 1

    def step(x):
        return x * getattr(c, "b", 10) * getattr(c, "a", 20), hasattr(c, "b")

    def outer(x):
        y = step(x)
        st["n"] += 1
        if st["n"] == 1:
            c.b = 3
        if st["n"] == 2:
            del c.a
        if st["n"] == 3:
            c.a = 7
        return y

    return outer, [c]


TABLE = {
    nt_return: None,
    nt_arg_unpack: None,
    nt_kept: None,
    nt_generic: ("sorting values that are not plain", "plain keys"),
    enums: None,
    enum_dispatch: None,
    enum_match: None,
    enum_bad: None,
    ordered: None,
    dcs: ("id()", "as a key"),
    dc_asdict: None,
    dc_asdict_tensor: None,
    model_output: None,
    kwargs_plumbing: None,
    isinst: None,
    hasattrs: None,
    slots_that_are_empty: ("descriptor is deleted", "outside of the step"),
}


@pytest.mark.share(11)
@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break_that_says_what_to_do(recipe):
    hold(recipe, TABLE[recipe])

"""Change each thing that a capture relied on: the captured call still gives what plain Python gives, every time."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
from typing import Any

import numpy
import pytest
import torch

from moebius import capture, explain, stats

SCALE = 2.0
TABLE: dict[str, Any] = {"factor": 3.0, "names": ["a", "b"]}


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


class Config:
    def __init__(self):
        self.width, self.bias, self.kind, self.mode = 3, 0.0, "relu", Mode.SUM


class Block(torch.nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.config = Config()
        self.order = [1.0, 2.0]
        self.extra = collections.OrderedDict(a=1.0, b=2.0)
        self.register_buffer("offset", torch.ones(4))
        self.flag = 0.0

    @property
    def twice(self):
        return self.factor * 2

    def act(self, x):
        return torch.relu(x) if self.config.kind == "relu" else torch.tanh(x)

    def forward(self, x, *, scale=1.0):
        h = self.act(self.linear(x)) * scale * self.twice + self.offset
        for step, value in enumerate(self.order):
            h = h + value * step
        for name, value in self.extra.items():
            h = h * value if name == "a" else h - value
        if self.config.mode is Mode.MEAN:
            h = h.mean(0, keepdim=True)
        if str(self.flag).startswith("-"):
            h = -h
        if self.training:
            h = h * SCALE
        return h * TABLE["factor"] + len(TABLE["names"]) + self.config.bias


def run(block, x, scale=1.0):
    return block(x, scale=scale)


def make():
    block, x = Block(), torch.randn(6, 4)
    return block, x, capture(run)


def agree(captured, *args):
    """Two captured calls (the cold one and the warm one) give what the plain call gives."""
    want = run(*args)
    for _ in range(2):
        torch.testing.assert_close(captured(*args), want, rtol=0, atol=0, equal_nan=True)


def rebind_function(block):
    def act(self, x):
        return torch.sigmoid(x)

    block.__class__ = type("Other", (Block,), {"act": act})


def change_class_attribute(block):
    Block.factor = 5.0


def replace_method(block):
    block.act = torch.tanh


def set_default(block, value=7.0):
    defaults = Block.forward.__kwdefaults__
    assert defaults is not None
    defaults["scale"] = value


CHANGES = {
    "config field": lambda b: setattr(b.config, "bias", 2.5),
    "config string": lambda b: setattr(b.config, "kind", "tanh"),
    "config object": lambda b: setattr(b, "config", type("C", (Config,), {})()),
    "enum": lambda b: setattr(b.config, "mode", Mode.MEAN),
    "list item": lambda b: b.order.__setitem__(0, 9.0),
    "list length": lambda b: b.order.append(4.0),
    "list itself": lambda b: setattr(b, "order", [3.0]),
    "dict item": lambda b: b.extra.__setitem__("a", 4.0),
    "dict key": lambda b: b.extra.__setitem__("c", 4.0),
    "dict order": lambda b: b.extra.move_to_end("a"),
    "training flag": lambda b: b.eval(),
    "parameter": lambda b: setattr(b.linear, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    "parameter in place": lambda b: b.linear.weight.data.fill_(0.5),
    "parameter dtype": lambda b: b.double(),
    "parameter's data": lambda b: setattr(b.linear.weight, "data", torch.ones(4, 8)[:, ::2]),
    "requires_grad": lambda b: b.linear.weight.requires_grad_(False),
    "buffer": lambda b: setattr(b, "offset", torch.zeros(4)),
    "submodule": lambda b: setattr(b, "linear", torch.nn.Linear(4, 4, bias=False)),
    "module hook": lambda b: b.linear.register_forward_hook(lambda m, a, out: out + 1),
    "class": rebind_function,
    "class attribute": change_class_attribute,
    "instance attribute over a class's": lambda b: setattr(b, "factor", 4.0),
    "method on the instance": replace_method,
    "keyword default": set_default,
    "minus zero": lambda b: setattr(b, "flag", -0.0),
    "True for 1.0": lambda b: setattr(b, "flag", True),
    "global": lambda b: globals().__setitem__("SCALE", 11.0),
    "global dict": lambda b: TABLE.__setitem__("factor", 5.0),
    "global list": lambda b: TABLE["names"].append("c"),
}


@pytest.fixture(autouse=True)
def restored():
    """Put back the module-level state that the changes touch."""
    yield
    global SCALE
    SCALE = 2.0
    TABLE.update(factor=3.0, names=["a", "b"])
    Block.factor = 1.0
    set_default(None, 1.0)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_object_is_noticed(change):
    block, x, captured = make()
    agree(captured, block, x)
    assert stats(captured).hits >= 1, "nothing was captured, so nothing was tested"
    change(block)
    if block.linear.weight.dtype is torch.float64:
        x = x.double()
    agree(captured, block, x)


INPUTS = {
    "size": lambda x: torch.randn(3, 4),
    "one row": lambda x: torch.randn(1, 4),
    "no rows": lambda x: torch.randn(0, 4),
    "rank": lambda x: torch.randn(2, 3, 4),
    "stride": lambda x: torch.randn(4, 6).t(),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "storage offset": lambda x: torch.randn(7, 4)[1:],
    "parameter": lambda x: torch.nn.Parameter(x.clone()),
    "not a leaf": lambda x: x.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("change", INPUTS.values(), ids=INPUTS)
def test_a_changed_input_is_noticed(change):
    block, x, captured = make()
    agree(captured, block, x)
    agree(captured, block, change(x))
    agree(captured, block, x)


@pytest.mark.parametrize("scale", [1, True, 2.0, 1.5, -0.0, float("inf")])
def test_a_changed_number_is_noticed(scale):
    block, x, captured = make()
    agree(captured, block, x, 1.0)
    agree(captured, block, x, scale)


def test_grad_mode_is_noticed():
    block, x, captured = make()
    agree(captured, block, x)
    with torch.no_grad():
        assert not captured(block, x).requires_grad
    assert captured(block, x).requires_grad


def test_autocast_and_default_dtype_are_noticed():
    def f(x):
        return (x @ x.t()) + torch.ones(1)

    captured, x = capture(f), torch.randn(4, 4)
    assert captured(x).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert captured(x).dtype is f(x).dtype
        torch.testing.assert_close(captured(x), f(x), rtol=0, atol=0)
    torch.set_default_dtype(torch.float64)
    try:
        assert captured(x).dtype is f(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert captured(x).dtype is torch.float32


def test_closure_cell_and_default_are_noticed():
    factor = 2.0

    def f(x, power=1):
        return (x * factor) ** power

    captured, x = capture(f), torch.randn(3) + 3
    for factor in (2.0, 3.0, 4.0):  # noqa: B007
        for _ in range(2):
            torch.testing.assert_close(captured(x), f(x))
    f.__defaults__ = (2,)
    torch.testing.assert_close(captured(x), f(x))
    assert not torch.equal(captured(x), x * factor)


def test_the_function_itself_is_noticed():
    def helper(x):
        return x + 1

    def f(x):
        return helper(x)

    captured, x = capture(f), torch.zeros(2)
    assert captured(x).tolist() == [1, 1]

    def other(x):
        return x + 2

    helper.__code__ = other.__code__
    assert captured(x).tolist() == [2, 2]
    helper = other  # the cell
    assert captured(x).tolist() == [2, 2]


def test_aliases_are_noticed():
    def f(a, b):
        a.add_(1)
        return a + b

    captured = capture(f)
    for _ in range(2):
        x, y = torch.zeros(2), torch.zeros(2)
        assert captured(x, y).tolist() == [1, 1]
        z = torch.zeros(2)
        assert captured(z, z).tolist() == [2, 2]

    def lists(a, b):
        a.append(1.0)
        return torch.ones(1) * len(b)

    captured = capture(lists)
    for _ in range(2):
        assert captured([], [2.0]).item() == 1
        same: list[float] = []
        assert captured(same, same).item() == 1
        assert same == [1.0]


def test_none_gradient_is_a_fact_of_its_own_place():
    def f(p, q):
        return (0 if p.grad is None else p.grad) + torch.ones(2) * (1 if q.grad is None else q.grad)

    p, q = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    captured = capture(f)
    for grads in [(None, None), (None, 3.0), (2.0, None), (2.0, 3.0), (None, None)]:
        for t, g in zip((p, q), grads, strict=True):
            t.grad = None if g is None else torch.full((2,), g)
        for _ in range(2):
            torch.testing.assert_close(captured(p, q), f(p, q))


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_ten_sizes(dynamic):
    def f(x):
        y = x[: x.shape[0] // 2 + 1] * x.shape[0]
        return y.view(-1).sum() + torch.arange(x.shape[1], device=x.device).sum() if x.shape[0] > 4 else y.sum()

    captured = capture(f, dynamic=dynamic)
    for rows in (8, 5, 6, 7, 12, 9, 3, 4, 2, 30):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(captured(x), f(x))
    if dynamic is not False:
        assert stats(captured).graphs <= 3, [r.guard for r in stats(captured).recompiles]


def test_a_list_given_whole_to_a_tensor_method():
    """What torch reads of a list is a fact of each call, though no bytecode reads it."""

    def f(x, sizes):
        first, *rest = x.split(sizes, dim=0)
        return torch.Tensor.repeat(first, [len(rest), sizes[0]]) + x.sum()

    captured = capture(f)
    for sizes in ([1, 9], [2, 8], [4, 4, 2], (3, 7), [1, 9]):
        x = torch.arange(10.0)[:, None]
        assert torch.equal(captured(x, sizes), f(x, sizes)), sizes


# ----------------------------------------------------------------------------------------------------------------------
# Containers that only C code reads
# ----------------------------------------------------------------------------------------------------------------------


class OwnList(list):
    pass


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize("kind", [list, tuple, OwnList, Pair._make])
@pytest.mark.parametrize(
    "step",
    [
        lambda x, sizes: x.split(sizes)[0],
        lambda x, sizes: torch.Tensor.split(x, sizes)[0],
        lambda x, sizes: torch.split(x, sizes)[0],
        lambda x, sizes: x[sizes],
        lambda x, sizes: x.clone().index_fill_(0, torch.tensor(sizes), 7.0),
        lambda x, sizes: torch.nn.functional.pad(x, sizes),
    ],
    ids=["method", "unbound method", "function", "index", "tensor of them", "pad"],
)
def test_numbers_in_a_list_that_an_operator_reads_are_guarded(step, kind):
    captured = capture(step, backend="eager")
    x = torch.randn(6, 6)
    for sizes in ([2, 4], [3, 3], [2, 4], [1, 5]):
        assert torch.equal(captured(x, kind(sizes)), step(x, kind(sizes)))


def test_values_assigned_from_a_list_are_guarded():
    def step(x, values):
        y = x.clone()
        y[0] = torch.as_tensor(values)
        return y

    captured = capture(step, backend="eager")
    for values in ([1.0, 2.0], [3.0, 4.0]):
        assert torch.equal(captured(torch.zeros(2, 2), values), step(torch.zeros(2, 2), values))
@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda x, n: x * float(n + 1), [decimal.Decimal(1), decimal.Decimal(2)]),
        (lambda x, n: x * float(-n), [decimal.Decimal(1), decimal.Decimal(2)]),
        (lambda x, n: x * (2 if n > 1 else 1), [decimal.Decimal(1), decimal.Decimal(2)]),
        (lambda x, n: x * (2 if n == 1 else 1), [decimal.Decimal(1), decimal.Decimal(2)]),
        (lambda x, n: x * (n - datetime.timedelta(1)).days, [datetime.timedelta(3), datetime.timedelta(5)]),
        (lambda x, n: x * (n + 1), [numpy.int64(1), numpy.int64(2)]),
        (lambda x, n: x[:n].sum() + x, [numpy.int64(1), numpy.int64(2)]),
    ],
)
def test_values_that_c_objects_hold(function, values):
    """Nothing guards what is inside a Decimal: arithmetic with one that came from outside is not captured."""
    captured = capture(function)
    for value in (*values, *values):
        x = torch.ones(3)
        assert torch.equal(captured(x, value), function(x, value))


class Hidden:
    __slots__ = ("gain",)


class Hiding(Hidden):
    __slots__ = ("gain",)

    def behind(self):
        return super().gain


class Answering:
    __slots__ = ("gain",)

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return value + 1.0 if name == "gain" else value


def test_a_slot_that_its_name_does_not_lead_to_is_a_break():
    def f(box, x):
        return x * box.behind() * box.gain

    box = Hiding()
    box.gain = 3.0
    Hidden.gain.__set__(box, 5.0)
    step, x = capture(f), torch.ones(2)
    assert torch.equal(step(box, x), torch.full((2,), 15.0))
    Hidden.gain.__set__(box, 7.0)
    assert torch.equal(step(box, x), torch.full((2,), 21.0))
    assert explain(step)(box, x).breaks


def test_a_slot_under_the_class_own_getattribute():
    def f(box, x):
        return x * box.gain

    box = Answering()
    box.gain = 1.0
    step, x = capture(f), torch.ones(2)
    assert torch.equal(step(box, x), torch.full((2,), 2.0))
    box.gain = 4.0
    assert torch.equal(step(box, x), torch.full((2,), 5.0))
    assert "hidden slot" in {b.reason for b in explain(step)(box, x).breaks}

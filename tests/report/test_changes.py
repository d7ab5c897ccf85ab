"""What the page of each code says to change is changed: the graph break is there before, and gone after."""

from __future__ import annotations

import array
import builtins
import copy
import decimal
import functools
import logging
import math
import re
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from moebius import capture, disable, explain
from moebius.report.codes import CODES

# There is nothing to change, it is a bug of ours, or it takes several ranks (tests/lowering/distribution).
WITHOUT = {20, 33, 34}
ARRAY, NUMPY, CONFIG = array.array("d", [2.0, 3.0]), np.ones(3), {"width": 2}
SEEN: list[Any] = []
EXPERTS = torch.arange(18.0).reshape(2, 3, 3)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    monkeypatch.setattr(sys, "breakpointhook", lambda: None)


def weight() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


class Counter:
    def __init__(self) -> None:
        self.tag = ""


COUNTER = Counter()


@disable
def native(x):
    return x + 1


def routed(x):
    mask = F.one_hot(torch.tensor([0, 1]), 2).T
    return mask, torch.zeros_like(x), mask.sum(1).nonzero()[:, 0]


def mb001(x):
    mask, out, hit = routed(x)
    for expert in hit:
        (token,) = torch.where(mask[expert])
        if out.sum() > 5:
            break
        out.index_add_(0, token, x[token] @ EXPERTS[expert].T)
    return out


def mb001_changed(x):
    mask, out, hit = routed(x)
    for expert in hit:
        (token,) = torch.where(mask[expert])
        rows = x[token] @ EXPERTS[expert].T
        out.index_add_(0, token, torch.where(out.sum() > 5, torch.zeros_like(rows), rows))
    return out


def mb002(x):
    return x * max(x.repeat(1, 40)[0].tolist())


def mb002_changed(x):
    return x * x.repeat(1, 40)[0].max()


def mb003(x):
    return sum(list(x[x > 2]))


def mb003_changed(x):
    return torch.where(x > 2, x, 0.0).sum()


def mb004(x):
    print(COUNTER)
    return x


def mb004_changed(x):
    print(x.sum())
    return x


def mb005(x):
    logging.getLogger("changes").warning("%s", COUNTER)
    return x


def mb005_changed(x):
    return x


def mb006(x):
    return native(x * 2)


def mb006_changed(x):
    return x * 2 + 1


def mb007(x):
    return x * int(decimal.Decimal(2))


TWO = int(decimal.Decimal(2))


def mb007_changed(x):
    return x * TWO


def mb008(x):
    for factor in ARRAY:
        x = x * factor
    return x


LIST = list(ARRAY)


def mb008_changed(x):
    for factor in LIST:
        x = x * factor
    return x


WEIGHT = weight()
WEIGHT.grad = torch.ones(3)


def mb009(x):
    (WEIGHT * x).sum().backward(create_graph=True)
    return x


def mb009_changed(x):
    (WEIGHT * x).sum().backward()
    return x


def mb010(x):
    y = x * weight()
    y.sum().backward()
    return x if y.grad is None else x + y.grad


def mb010_changed(x):
    y = x * weight()
    y.sum().backward()
    return x


class Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        SEEN.append(1)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Computes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + ctx.saved_tensors[0] * 0


def mb011(x):
    w = weight()
    Notes.apply(w * x).sum().backward()
    return w.grad


def mb011_changed(x):
    w = weight()
    Computes.apply(w * x).sum().backward()
    return w.grad


def mb012(x):
    w = weight()
    y = w * x
    y.register_hook(lambda gradient: SEEN.append(1))
    y.sum().backward()
    return w.grad


def mb012_changed(x):
    w = weight()
    y = w * x
    y.register_hook(lambda gradient: gradient * 2)
    y.sum().backward()
    return w.grad


def mb013(x):
    w = weight()

    def inner(y):
        SEEN.append(1)
        return y * w

    checkpoint(inner, x, use_reentrant=False).sum().backward()
    return w.grad


def mb013_changed(x):
    w = weight()
    checkpoint(lambda y: y * w, x, use_reentrant=False).sum().backward()
    return w.grad


def mb014(x):
    mask, out, hit = routed(x)
    for expert in hit:
        (token,) = torch.where(mask[expert])
        out.index_add_(0, token, x[token] @ EXPERTS[expert].T)
        break
    return out


def mb014_changed(x):
    mask, out, hit = routed(x)
    for expert in hit:
        (token,) = torch.where(mask[expert])
        out.index_add_(0, token, x[token] @ EXPERTS[expert].T * (expert == hit[0]))
    return out


def mb015(x):
    mask, out, hit = routed(x)
    counts = []
    for expert in hit:
        (token,) = torch.where(mask[expert])
        counts.append(len(token))
        out.index_add_(0, token, x[token] @ EXPERTS[expert].T)
    return out, counts


def mb015_changed(x):
    mask, out, hit = routed(x)
    counts = torch.zeros(2, dtype=torch.long)
    for expert in hit:
        (token,) = torch.where(mask[expert])
        counts[expert] = token.numel()
        out.index_add_(0, token, x[token] @ EXPERTS[expert].T)
    return out, counts


def mb016(x):
    return map(torch.relu, [x])


def mb016_changed(x):
    return [torch.relu(x)]


def mb017(x):
    return x * hash(x[x > 2].shape[0])


def mb017_changed(x):
    return x * (x > 2).sum()


def mb018(x):
    return x * len(str(COUNTER))


def mb018_changed(x):
    return x * len(str(CONFIG["width"]))


def mb019(x):
    COUNTER.tag += "."  # (a text is another in each call; a number would be an input)
    return {COUNTER.tag: 1}, x * 2


def mb019_changed(x):
    return x * 2


def mb021(x):
    try:
        raise ValueError
    except ValueError:
        return x * (sys.exc_info()[0] is ValueError)


def mb021_changed(x):
    try:
        raise ValueError
    except ValueError as error:
        return x * (type(error) is ValueError)


class Kind(torch.Tensor):
    pass


KIND = torch.ones(3).as_subclass(Kind)
PLAIN = KIND.as_subclass(torch.Tensor)


def mb022(x):
    return x * KIND


def mb022_changed(x):
    return x * PLAIN


torch.library.define("moebius_changes::bare", "(Tensor x) -> Tensor")
torch.library.define("moebius_changes::described", "(Tensor x) -> Tensor")
for operator in ("bare", "described"):
    torch.library.impl(f"moebius_changes::{operator}", "cpu")(lambda x: x * 2)
torch.library.register_fake("moebius_changes::described")(torch.empty_like)


def mb023(x):
    return torch.ops.moebius_changes.bare(x)


def mb023_changed(x):
    return torch.ops.moebius_changes.described(x)


def mb024(x):
    return copy.copy(x) * 2


def mb024_changed(x):
    return x * 2


def mb025(x):
    taken = torch.from_numpy(NUMPY)
    taken.add_(1)
    return x * taken


def mb025_changed(x):
    return x * TAKEN


TAKEN = torch.from_numpy(NUMPY.copy()) + 1


def mb026(x):
    class Scale:
        def __init_subclass__(cls):
            pass

        factor = 3

    return x * Scale.factor


class Scale:
    factor = 3


def mb026_changed(x):
    return x * Scale.factor


def mb027(x):
    return x * (id(x) > 0)


PLACE = id(CONFIG) > 0


def mb027_changed(x):
    return x * PLACE


def replaced(*args, **kwargs):
    return IMPORT(*args, **kwargs)


IMPORT = builtins.__import__


def mb028(x):
    builtins.__import__ = replaced
    try:
        import math
    finally:
        builtins.__import__ = IMPORT
    return x * math.pi


def mb028_changed(x):
    return x * math.pi


def mb029(x):
    return torch.vmap(lambda row: row * 2 if SEEN.append(1) is None else row)(x)


def mb029_changed(x):
    return torch.vmap(lambda row: row * 2)(x)


def mb030(x):
    total = 0
    for part in {x, x * 2}:
        total = total + part
    return total


def mb030_changed(x):
    total = 0
    for part in [x, x * 2]:
        total = total + part
    return total


@functools.lru_cache
def double(x):
    return x * 2


def mb031(x):
    return double(x)


def mb031_changed(x):
    return x * 2


def mb032(x):
    y = x * 2
    breakpoint()
    return y


def mb032_changed(x):
    return x * 2


PROGRAMS = {int(name[2:]): (globals()[name], globals()[f"{name}_changed"]) for name in list(globals())
            if re.fullmatch(r"mb\d+", name)}  # fmt: skip
CALLS = {19: 12}  # what varies is known to after some calls


def test_every_code_has_a_program_with_it_and_one_without() -> None:
    assert PROGRAMS.keys() | WITHOUT == {code.number for code in CODES} and not PROGRAMS.keys() & WITHOUT


@pytest.mark.parametrize("number", sorted(PROGRAMS))
def test_the_change_that_a_code_names_takes_its_break_away(number: int) -> None:
    breaks, changed = PROGRAMS[number]
    x = torch.arange(1.0, 7.0).reshape(2, 3)
    captured = capture(breaks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # (that it varies)
        for _ in range(CALLS.get(number, 0)):
            captured(x)
        found = explain(captured)(x).breaks
    assert f"MB{number:03}" in [item.code for item in found], found
    report = explain(capture(changed))(x)
    assert report.status == "captured" and not report.breaks, report.breaks
    torch.testing.assert_close(report.result, changed(x))

"""Tensors that tracing does not follow, as arguments: a frame may hold them and pass them on; where it does anything
with one itself, it runs natively."""

from __future__ import annotations

import copy
import types
import warnings

import pytest
import torch
from answers import broken, same, told

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.trace import trace


class Own(torch.Tensor):
    pass


def kinds():
    return {
        "subclass": torch.arange(4.0).as_subclass(Own),
        "sparse": torch.eye(4).to_sparse(),
        "conjugate": torch.ones(4, dtype=torch.complex64).conj(),
        "parameter": torch.ones(4).as_subclass(Own).requires_grad_(),
    }


HOLDER = types.SimpleNamespace()


def kept(x, y):
    HOLDER.kept = [x, y]
    return {"a": (y * 2, x)}, [x] * 2


def asked(x, y):
    return x is None, isinstance(x, Own), isinstance(x, (int, torch.Tensor)), type(x).__name__, callable(x)


def around_a_break(x, y):
    z = y * 2
    broken(x)
    return z + 1, x


def in_a_loop(x, y):
    for kept in [x, x]:
        y = y + (broken(kept) is kept)
    return y, kept


def captured_by_a_function(x, y):
    return (lambda: x)(), list(x for _ in range(2))


def added(x, y):
    return (y * 2) + x


def other_way(x, y):
    return x * 2, y


def asked_for_its_size(x, y):
    return x.shape, len(x), hasattr(x, "shape")


def compared(x, y):
    return x is x, x is y, x in [x], hash(x) == hash(x), {x: 1}[x]


def shown(x, y):
    return str(x), f"{x}", repr([x])


def decides(x, y):
    return y if x.to_dense().abs().sum() > 0 else -y


def indexes(x, y):
    return x[0], [*x.to_dense()]


def summed(x, y):
    return sum([x, x]), torch.stack([x, x]), max([1, 2])


def written(x, y):
    y += 1
    return y.add_(x.to_dense()) if not x.is_complex() else y


OURS = {"tensor subclass", "tensor layout"}
PASSED_ON = [kept, asked, around_a_break, in_a_loop, captured_by_a_function]
USED = [added, other_way, asked_for_its_size, compared, shown, decides, indexes, summed, written]


def asked_to(function, *args):
    HOLDER.kept = None
    return [told(function, *args), HOLDER.kept]


def check(program):
    captured = capture(program)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "moebius")
        for kind, x in (kinds() | {"plain": torch.ones(4)}).items():
            for given in (x, copy.copy(x)):
                ours, theirs = torch.arange(4.0), torch.arange(4.0)
                assert same(asked_to(captured, given, ours), asked_to(program, given, theirs)), kind
                assert torch.equal(ours, theirs)
    return report_of(captured_of(captured)).breaks


@pytest.mark.parametrize("program", PASSED_ON)
def test_passed_on(program):
    assert {found.reason for found in check(program)} <= {"call into C"} | (OURS if program is in_a_loop else set())


@pytest.mark.parametrize("program", USED)
def test_used(program):
    breaks = [found for found in check(program) if found.reason in OURS]
    assert breaks and all("runs natively" in found.detail for found in breaks)


def test_each_operation_would_be_one_break_more(monkeypatch):
    monkeypatch.setattr(trace, "uses_one", lambda *_: False)
    assert not any("runs natively" in found.detail for found in check(added))


def test_the_very_object_comes_back():
    captured = capture(kept)
    for x in kinds().values():
        (result, again), _ = asked_to(captured, x, torch.ones(4))
        assert result["a"][1] is x and again[0] is again[1] is x


def test_two_of_them_may_be_one():
    def one(x, y):
        return x is y

    captured = capture(one)
    x, y = torch.ones(2).as_subclass(Own), torch.ones(2).as_subclass(Own)
    assert [captured(x, y), captured(x, x), captured(y, x), captured(y, y)] == [False, True, False, True]


def test_a_parameter_of_a_subclass_is_a_parameter():
    """torch marks such a tensor, and its metaclass looks for the mark."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(2).as_subclass(Own))
    module.plain = torch.ones(2).as_subclass(Own)

    def step(x):
        kinds = (torch.nn.Parameter, Own, torch.Tensor, torch.nn.Parameter | int, (int, torch.nn.Parameter))
        return x + 1, [isinstance(held, kind) for held in (module.weight, module.plain) for kind in kinds]

    assert capture(step)(torch.ones(1))[1] == step(torch.ones(1))[1]


def test_a_view_whose_base_was_written_without_gradients():
    """Torch does not say how such a view was computed; what may still be done with it works."""

    def shrink(view):
        with torch.no_grad():
            view[:2].mul_(0.5)
            return view.sum()

    def doubled(view):
        return view * 2

    for step in (shrink, doubled):
        weights, captured = [torch.nn.Parameter(torch.arange(12.0).view(3, 4)) for _ in range(2)], capture(step)
        views = []
        for weight in weights:
            with torch.no_grad():
                views.append(weight.view(4, 3))
        for iteration in range(4):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert repr(told(captured, views[0])) == repr(told(step, views[1]))
            assert torch.equal(*weights)
            if iteration == 1:
                for weight in weights:
                    with torch.no_grad():
                        weight.add_(1)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("place", ["first", "second", "in a list", "by name"])
def test_an_operator_on_one_below_the_root_frame_is_a_break_with_its_reason(place, guarded):
    uses = {
        "first": lambda x, y: torch.mm(y, x),
        "second": lambda x, y: torch.add(x, y),
        "in a list": lambda x, y: torch.stack([y.to_dense(), x]) + torch.cat([y, y]).to_dense().sum(),
        "by name": lambda x, y: torch.add(x, other=y),
    }

    def inner(x, y):
        if not guarded:
            return uses[place](x, y)
        try:
            return uses[place](x, y)
        except TypeError:
            return None

    def step(x, y):
        return inner(x + 1, y) * 2

    captured = capture(step)
    x, y = torch.rand(4, 4), torch.eye(4).to_sparse()
    for _ in range(3):
        assert torch.equal(captured(x, y), step(x, y))
    assert {b.reason for b in report_of(captured_of(captured)).breaks} == {"tensor layout"}

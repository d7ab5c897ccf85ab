"""Operators on fakes that are answered from what an equal call did: each against torch's own answer."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.torch_facts.torch_fakes import Fakes, FakeWorld
from moebius.torch_facts.torch_known import KnownResults

T = torch.Tensor
CALLS: dict[str, tuple[Callable, tuple, dict[str, Any]]] = {
    "mul_": (T.mul_, ("x", 0.5), {}),
    "add_": (T.add_, ("x", "y"), {"alpha": 2}),
    "add_ itself": (T.add_, ("x", "x"), {}),
    "lerp_": (T.lerp_, ("x", "y", 0.1), {}),
    "addcdiv_": (T.addcdiv_, ("x", "y", "z"), {"value": -0.1}),
    "addcmul_ twice": (T.addcmul_, ("x", "y", "y"), {"value": 0.1}),
    "iadd": (operator.iadd, ("x", 1), {}),
    "copy_": (T.copy_, ("x", "y"), {}),
    "zero_": (T.zero_, ("x",), {}),
    "sqrt": (T.sqrt, ("x",), {}),
    "truediv": (operator.truediv, ("x", 3.0), {}),
    "gt": (operator.gt, ("x", 0), {}),
    "sum": (T.sum, ("x", -1), {"keepdim": True}),
    "sum along another": (T.sum, ("x", 0), {"keepdim": False}),
    "matmul": (torch.matmul, ("x", "y"), {}),
    "argmax": (T.argmax, ("x",), {}),
    "to": (T.to, ("x", torch.float64), {}),
    "to itself": (T.to, ("x", torch.float32), {}),
    "cat": (torch.cat, (["x", "y"],), {}),
    "maximum": (torch.maximum, ("x", "y"), {"out": "z"}),
    "add of types": (torch.add, ("x", True), {}),
    "view": (T.view, ("x", -1), {}),
    "t_": (T.t_, ("x",), {}),
    "unsqueeze_": (T.unsqueeze_, ("x", 0), {}),
    "detach": (T.detach, ("x",), {}),
    "resize_": (T.resize_, ("x", (7, 9)), {}),
    "normal_": (T.normal_, ("x",), {}),
    "dropout": (torch.dropout, ("x", 0.5, True), {}),
    "unbind": (T.unbind, ("x",), {}),
    "wrong sizes": (T.add_, ("x", "w"), {}),
    "zeros": (torch.zeros, (2, 3), {}),
    "requires_grad_": (T.requires_grad_, ("x",), {}),
}
MADE: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(4, 4),
    "parameter": lambda: nn.Parameter(torch.randn(4, 4)),
    "transposed": lambda: torch.randn(4, 4).t().contiguous().t(),
    "part": lambda: torch.randn(8, 4)[2:6],
    "expanded": lambda: torch.randn(1, 4).expand(4, 4),
    "integers": lambda: torch.arange(16).view(4, 4).clone(),
    "half": lambda: torch.randn(4, 4, dtype=torch.float16),
    "0-d": lambda: torch.tensor(2.0),
    "empty": lambda: torch.randn(0, 4),
    "conjugate": lambda: torch.randn(4, 4, dtype=torch.complex64).conj(),
}
AROUND = {"no_grad": torch.no_grad, "enable_grad": torch.enable_grad, "autocast": lambda: torch.autocast("cpu")}


def told(value: Any, given: list[torch.Tensor]) -> Any:
    """All that can be asked of a result; which of the given tensors it is, or shares memory with."""
    if not isinstance(value, torch.Tensor):
        return [told(v, given) for v in value] if isinstance(value, tuple | list) else repr(value)
    memory = value.untyped_storage()
    return (
        [value is one for one in given],
        [memory._cdata == one.untyped_storage()._cdata for one in given],
        (type(value), value.dtype, value.device, value.shape, value.stride(), value.storage_offset(), value.layout),
        (memory.nbytes(), value.requires_grad, value.is_leaf, value._version, value.is_conj(), value._base is None),
    )


def called(world: FakeWorld, call: str, made: str, around: str) -> Any:
    """What a call gives and leaves, over new fakes."""
    function, args, kwargs = CALLS[call]
    real = {name: MADE[made]() for name in "xyz"} | {"w": torch.randn(3)}
    with AROUND[around]():
        fakes = {name: world.fakify(tensor, name) for name, tensor in real.items()}

        def put_in(value: Any) -> Any:
            return [put_in(v) for v in value] if isinstance(value, list) else fakes.get(value, value) if isinstance(
                value, str) else value  # fmt: skip

        before = [world.writes_into(fake) for fake in fakes.values()]
        given = list(fakes.values())
        try:
            result = world.call(function, tuple(map(put_in, args)), {k: put_in(v) for k, v in kwargs.items()})
        except Exception as error:
            result = (type(error), str(error))
    writes = [world.writes_into(fake) - n for fake, n in zip(given, before, strict=True)]
    return told(result, given), [told(fake, given) for fake in given], writes


@pytest.fixture(scope="module")
def worlds():
    """One that asks torch, one that knows: of all calls, so that what is known of one must not answer for another."""
    return FakeWorld(), FakeWorld()


@pytest.mark.share(12)
@pytest.mark.parametrize("call", CALLS)
def test_a_known_result_is_torchs(call, worlds, monkeypatch):
    answered = 0
    again = KnownResults.again

    def counting(self: Any, key: Any, fakes: Any) -> Any:
        nonlocal answered
        found = again(self, key, fakes)
        answered += found is not None
        return found

    monkeypatch.setattr(KnownResults, "again", counting)
    torchs, shared = worlds
    for _ in range(2):
        for made, around in itertools.product(MADE, AROUND):
            with monkeypatch.context() as off:
                off.setattr(KnownResults, "again", lambda *_: None)
                called(torchs, call, made, around)  # (the first time, torch runs some operators twice)
                wanted = called(torchs, call, made, around)
            assert called(shared, call, made, around) == wanted, (made, around)
    assert bool(answered) == (call not in NEVER), answered


# Views, what changes a tensor's own metadata, several operators in one, what torch itself doesn't keep, what fails.
NEVER = {"view", "t_", "unsqueeze_", "detach", "resize_", "unbind", "wrong sizes", "requires_grad_", "copy_", "maximum",
         "dropout"}  # fmt: skip


@pytest.mark.parametrize("call", [torch.neg, torch.add, T.mul_])
def test_views_are_read_from_what_is_known_and_never_written(call, monkeypatch):
    answers = []
    again = KnownResults.again

    def counting(self: Any, key: Any, fakes: Any) -> Any:
        answers.append(again(self, key, fakes))
        return answers[-1]

    monkeypatch.setattr(KnownResults, "again", counting)
    world = FakeWorld()
    for _ in range(4):
        x = world.fakify(torch.randn(4, 4), "x")
        with world.mode:
            views = [x.view(2, 8), x[1:], x.t(), x.view(16)[::2], x.unsqueeze(0).expand(3, 4, 4)]
        for view in views[:-1] if call is T.mul_ else views:
            given = {torch.neg: (view,), torch.add: (view, view), T.mul_: (view, 0.5)}[call]
            before = x._version
            result = world.call(call, given, {})
            assert x._version == view._version == before + (call is T.mul_)
            with world.mode:
                like = torch.neg(view)
            if call is not T.mul_:
                assert (result.shape, result.stride(), result._base) == (like.shape, like.stride(), None)
    assert any(found is not None for found in answers) == (call is not T.mul_)


@pytest.mark.parametrize("name", ["detach", "data"])
@pytest.mark.parametrize("call", ["mul_", "add_"])
@pytest.mark.parametrize("first", [False, True])
def test_what_shares_memory_is_written_once(name, call, first):
    """A tensor, another one of the same memory, in turns with two that have each their own."""
    worlds = FakeWorld(), FakeWorld()
    worlds[0].known.again = lambda *_: None
    function, given, kwargs = CALLS[call]
    with torch.no_grad():
        for share in (first, first, not first, not first, first):
            found = []
            for world in worlds:
                x = world.fakify(torch.randn(4, 4), "x")
                with world.mode:
                    shared = x.detach() if name == "detach" else x.data
                    y = shared if share else torch.randn(4, 4)
                counts = []
                for _ in range(3):
                    world.call(function, tuple({"x": x, "y": y}.get(value, value) for value in given), kwargs)
                    counts.append((x._version, y._version, world.writes_into(x), world.writes_into(shared)))
                found.append(counts)
            assert found[0] == found[1], share


def test_a_transform_and_a_mode_hear_of_each():
    heard = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            heard.append(function)
            return function(*args, **(kwargs or {}))

    world = FakeWorld()
    x = world.fakify(torch.randn(4, 4), "x")
    with torch.no_grad():
        for _ in range(3):
            world.call(T.mul_, (x, 2.0), {})
        with Mode():
            world.call(T.mul_, (x, 2.0), {})
    assert T.mul_ in heard
    assert x._version == 4


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_equal_parameters_ask_torch_for_no_more_operators(kind, monkeypatch):
    ran = 0
    dispatch = Fakes.dispatch

    def counting(self: Any, *args: Any) -> Any:
        nonlocal ran
        ran += 1
        return dispatch(self, *args)

    monkeypatch.setattr(Fakes, "dispatch", counting)

    counts = []
    for n in (4, 8, 40):
        parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(n)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer = kind(parameters, lr=0.1, foreach=False)
        step = capture(lambda optimizer=optimizer: optimizer.step(), backend="eager")
        ran = 0
        step()
        counts.append(ran)
        assert stats(step).graphs == 1 and not stats(step).breaks
    assert 0 < counts[0] and counts[2] == counts[1], counts

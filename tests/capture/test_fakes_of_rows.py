"""Fake operators on rows of unknown number: what is repeated is what torch's own fake operators give.

Every operator of torch's that calls itself pointwise, with operands of several dtypes and forms; numbers of several
types where the operator takes a number.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from seeds import examples, some
from torch._subclasses.fake_tensor import FakeTensorMode

from moebius import capture
from moebius.torch_facts import torch_pointwise
from moebius.torch_facts.torch_fakes import Fakes, FakeWorld

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
# sizes of two operands; "n" is a number of rows that nobody knows, "m" another one
FORMS = [
    (("n", 8), ("n", 8)), (("n", 8), ("n", 1)), (("n", 1), ("n", 8)), (("n", 8), (8,)), (("n", 8), (1, 8)),
    (("n",), ("n",)), (("n", 4, 8), ("n", 4, 8)), (("n", 4, 8), ("n", 1, 8)), (("n", 1, 8), ("n", 4, 1)),
    (("n", 8), ("m", 8)), (("n", 8), ()), (("n", 1), ("n", 1)), ((1, 8), ("n", 8)), ((4, 8), (4, 8)),
]  # fmt: skip


def operators() -> list[Any]:
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            if torch_pointwise.is_pointwise(getattr(packet, overload)):
                found.append(getattr(packet, overload))
    return found


OPERATORS = operators()


def rows(world: FakeWorld, form: tuple, dtype: torch.dtype, sizes: dict[str, Any]) -> torch.Tensor:
    for name in form:
        if isinstance(name, str) and name not in sizes:
            sizes[name] = world.unknown_count()
    with world.mode:
        return torch.zeros([sizes.get(size, size) for size in form], dtype=dtype)


def described(function: Any, args: list, kwargs: dict, world: FakeWorld) -> tuple:
    """What a fake operator gives, or the type of its error."""
    try:
        with world.mode:
            out = function(*args, **kwargs)
    except Exception as error:  # (torch raises whatever it likes)
        return (type(error),)
    strides = [stride.node.expr if isinstance(stride, torch.SymInt) else stride for stride in out.stride()]
    return torch_pointwise.sizes(out), strides, out.dtype, out.device, out.storage_offset(), out.layout


def arguments(function: Any, operands: list[torch.Tensor], number: Any) -> tuple[list, dict]:
    given, args, kwargs = itertools.cycle(operands), [], {}
    for each in function._schema.arguments:
        kind = str(each.type)
        value = next(given) if kind == "Tensor" else number if kind == "number" else each.default_value
        if each.default_value is None and kind == "int":
            value = 2
        if each.kwarg_only:
            kwargs[each.name] = value
        else:
            args.append(value)
    return args, kwargs


@pytest.mark.share(12)
@pytest.mark.parametrize("function", OPERATORS, ids=str)
def test_what_is_repeated_is_what_torch_gives(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = FakeWorld()
    numbers = [2, 0.5, True] if any(str(a.type) == "number" for a in function._schema.arguments) else [2]
    cases = list(itertools.product(FORMS, itertools.product(DTYPES, DTYPES), numbers))
    for form, dtypes, number in some(cases, examples(len(cases) // 4), str(function)):
        for again in range(2):
            sizes: dict[str, Any] = {}
            operands = [rows(ours, part, dtype, sizes) for part, dtype in zip(form, dtypes, strict=True)]
            args, kwargs = arguments(function, operands, number)
            found = described(function, args, kwargs, ours)
            with monkeypatch.context() as patch:
                patch.setattr(Fakes, "dispatch", FakeTensorMode.dispatch)
                expected = described(function, args, kwargs, ours)
            assert found == expected, (function, form, dtypes, number, again)


def test_most_operators_are_there() -> None:
    names = {str(function) for function in OPERATORS}
    assert {"aten.mul.Tensor", "aten.add.Tensor", "aten.gelu.default", "aten.silu.default", "aten._to_copy.default",
            "aten.silu_backward.default", "aten.where.self"} <= names
    assert len(OPERATORS) > 150 and not names & {"aten.mul_.Tensor", "aten.mul.out", "aten.mm.default"}


def test_an_expert_loop_asks_torch_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four experts ask for hardly more than two do; each operator of each expert is asked for without the shortcut."""

    def step(x, index, weights):
        out = torch.zeros_like(x)
        for expert, weight in enumerate(weights):
            token = torch.where(index == expert)[0]
            out = out.index_add(0, token, torch.nn.functional.silu(x[token] @ weight) * 2.0 + 1.0)
        return out

    asked: list[Any] = []
    under = FakeTensorMode.dispatch

    def counted(mode: Any, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return under(mode, func, *rest)

    def count(experts: int) -> int:
        asked.clear()
        weights = [torch.randn(8, 8) for _ in range(experts)]
        capture(step)(torch.randn(16, 8), torch.randint(0, experts, (16,)), weights)
        return sum(torch_pointwise.is_pointwise(func) for func in asked)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    two, four = count(2), count(4)
    assert 0 < two and four - two <= 4, (two, four)

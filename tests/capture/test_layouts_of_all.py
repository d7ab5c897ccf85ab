"""The strides that torch's fakes tell, of all of its functions, beside those that its operators give.

Where they differ, a captured program that asks is answered as in plain Python. A part of the functions, another one for
each state of the code; MOEBIUS_LAYOUTS=all for all of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from seeds import seed_of_the_code
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from moebius import capture, reset
from moebius.tensors import layouts

PART = 40
KNOWN = ("torch.logical_and", "torch.roll", "torch.isin", "functional.logsigmoid", "functional.unfold", "torch.angle")
# They change what all of Python sees, give numbers that nothing has written, or want other arguments than tensors.
LEFT_OUT = (
    "set_", "init", "compile", "save", "load", "seed", "manual_seed", "_", "use_", "get_", "import", "from_", "fork",
    "export", "vmap", "cond", "while", "empty", "resize", "sparse", "quantize", "q_", "fbgemm", "mkldnn", "cudnn",
    "miopen", "gru", "lstm", "rnn", "segment_reduce", "scaled", "grouped", "lu", "lstsq", "wait", "profiler",
    "autocast", "handle", "boolean",
)  # fmt: skip
ARGUMENTS: tuple[Callable[..., tuple], ...] = (
    lambda x, y, n, b: (x,),
    lambda x, y, n, b: (n,),
    lambda x, y, n, b: (x, y),
    lambda x, y, n, b: (x, y[:, :1]),
    lambda x, y, n, b: (torch.tensor(2.0), x),
    lambda x, y, n, b: (x, 2.0),
    lambda x, y, n, b: (x, 1),
    lambda x, y, n, b: (n, n),
    lambda x, y, n, b: (b, b[:1]),
    lambda x, y, n, b: (x, 1, 0),
    lambda x, y, n, b: ((x, y), 1),
    lambda x, y, n, b: (torch.complex(x, y),),
)
LAYOUTS = {"last": (0, 2, 3, 1), "reversed": (3, 2, 1, 0), "swapped": (0, 2, 1, 3)}
SHAPES = ((2, 4, 2, 2), (2, 1, 2, 2))


def public() -> dict[str, Any]:
    modules = {"torch": torch, "functional": functional, "special": torch.special, "fft": torch.fft}
    found = {}
    for where, module in modules.items():
        for name in sorted(dir(module)):
            function = getattr(module, name)
            if callable(function) and not isinstance(function, type) and not name.startswith(LEFT_OUT):
                found[f"{where}.{name}"] = function
    return found


FUNCTIONS = public()


def chosen() -> list[str]:
    if os.environ.get("MOEBIUS_LAYOUTS") == "all":
        return sorted(FUNCTIONS)
    rest = sorted(set(FUNCTIONS) - set(KNOWN))
    return [*KNOWN, *random.Random(seed_of_the_code()).sample(rest, PART)]


def laid_out(value: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return value.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])


def calls() -> Iterator[tuple[Callable[..., tuple], list[torch.Tensor]]]:
    for shape in SHAPES:
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) % 2
        plain = [torch.rand(shape) + 0.5, torch.rand(shape) + 1.5, numbers, numbers.bool()]
        for order in LAYOUTS.values():
            for arguments in ARGUMENTS:
                yield arguments, [laid_out(value, order) for value in plain]


def asked(value: Any) -> list[Any]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [(v.stride(), v.is_contiguous()) for v in values if isinstance(v, torch.Tensor)]


def strides(function: Any, arguments: Callable[..., tuple], values: list[torch.Tensor]) -> Any:
    """What the call's results answer; None where it is an error, or gives no tensors."""
    try:
        return asked(function(*arguments(*values))) or None
    except Exception:
        return None


def differing(function: Any) -> list[tuple[Callable[..., tuple], list[torch.Tensor]]]:
    """The calls of which the fake tells other strides."""
    found, fakes = [], FakeTensorMode()
    for arguments, values in calls():
        if (real := strides(function, arguments, values)) is None:
            continue
        with fakes:
            told = strides(function, arguments, [fakes.from_tensor(value) for value in values])
        if told is not None and told != real:
            found.append((arguments, values))
    return found


def answered_wrongly(function: Any) -> tuple[int, list[Any]]:
    """How many calls the fake is wrong of, and those of which capture is: the first few are asked."""
    different, wrong = differing(function), []
    for arguments, values in different[:3]:
        reset()
        step = lambda *given: asked(function(*arguments(*given)))  # noqa: B023, E731
        ours, plain = capture(step, backend="eager")(*values), step(*values)
        if ours != plain:
            wrong.append((plain, ours))
    return len(different), wrong


@pytest.mark.share(17)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", chosen())
def test_strides_are_the_operators(name: str) -> None:
    count, wrong = answered_wrongly(FUNCTIONS[name])
    assert not wrong
    assert count or name not in KNOWN


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KNOWN)
def test_answered_by_the_fakes_it_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts.Layouts, "refuse_unsure", lambda *_: None)
    assert answered_wrongly(FUNCTIONS[name])[1]

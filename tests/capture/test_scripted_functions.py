"""Functions compiled by ``torch.jit.script`` are one node each: what they give is what they give in plain Python."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moebius import capture, stats

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def swish(x):
        return x * torch.sigmoid(x)

    @torch.jit.script
    def dropped(x: torch.Tensor, bias: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        y = F.dropout(x + bias, p, training)
        if training:
            y = y * 2
        for i in range(3):
            y = y + i
        return y

    @torch.jit.script
    def of_sizes(x: torch.Tensor):
        return x.view(-1, x.size(0)), x.sum(0)

    @torch.jit.script
    def two(x: torch.Tensor, n: int):
        if n < 0:
            raise ValueError("fewer than none")
        return [x * n, x]

    @torch.jit.script
    def view(x: torch.Tensor):
        return x[:, :2]

    @torch.jit.script
    def nested(x: torch.Tensor):
        return swish(x) + swish(x * 2)

    @torch.jit.script
    def writes(x: torch.Tensor):
        return x.add_(1)

    @torch.jit.script
    def prints(x: torch.Tensor):
        print("here")
        return x + 1

    @torch.jit.script
    def by_value(x: torch.Tensor):
        if bool(x.sum() > 0):
            return x * 2
        return x - 1

    traced = torch.jit.trace(lambda x: x * 2 if len(x) > 2 else x, torch.ones(3, 3))

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "swish": lambda x: swish(x),
    "dropout in it": lambda x: dropped(x, x.sum(0), 0.3, True),
    "not training": lambda x: dropped(x, x[0], 0.3, False),
    "sizes in it": lambda x: of_sizes(x)[0] + 0 * of_sizes(x)[1].sum(),
    "a list": lambda x: sum(two(x, 3)),
    "a view that is written into": lambda x: (view(y := x * 1).mul_(2), y)[1],
    "nested": lambda x: nested(x),
}
BREAKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "writes": lambda x: writes(x * 1),
    "prints": lambda x: prints(x),
    "by_value": lambda x: by_value(x),
    "traced": lambda x: traced(x),
}


@pytest.mark.share(10)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("name", CALLS | BREAKS)
def test_a_compiled_function_gives_what_it_gives(name: str, backend: str, capfd: pytest.CaptureFixture) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = (CALLS | BREAKS)[name](x * w)
        y.sum().backward()
        return y.detach()

    captured, ways, written = capture(step, backend=backend), [], []
    for run in (step, captured):
        torch.manual_seed(0)
        draw, w, results = torch.Generator().manual_seed(0), torch.ones(3, requires_grad=True), []
        for rows in (3, 5, 2, 4, 6):
            results.append(run(torch.randn(rows, 3, generator=draw), w))
        ways.append([*results, w.grad, torch.rand(2)])
        written.append(capfd.readouterr().out)
    assert all(torch.equal(a, b) for a, b in zip(*ways, strict=True)) and written[0] == written[1]
    counts = stats(captured)
    assert name in BREAKS or (counts.breaks, counts.misses <= 3) == (0, True), counts


def test_another_compiled_function_is_another_capture() -> None:
    def step(x: torch.Tensor, function: Any) -> torch.Tensor:
        return function(x)

    captured, x = capture(step, backend="eager"), torch.randn(2, 3)
    for function in (swish, nested, swish, view):
        assert torch.equal(captured(x, function), function(x))


def test_what_it_raises_is_raised() -> None:
    captured, x = capture(lambda x, n: two(x, n)[0] + 1, backend="eager"), torch.randn(2, 3)
    for n in (1, 2, 3, 4):
        assert torch.equal(captured(x, n), x * n + 1)
    with pytest.raises(torch.jit.Error, match="fewer than none"):
        captured(x, -1)


@pytest.mark.filterwarnings("ignore")
def test_a_capture_keeps_no_function_that_nobody_else_has() -> None:
    function = torch.jit.script(lambda_of())
    captured, gone = capture(lambda x, f: f(x), backend="eager"), weakref.ref(function)
    captured(torch.ones(3), function)
    del function
    captured(torch.ones(3), swish)
    gc.collect()
    assert gone() is None or len(gc.get_referrers(gone())) <= 2


def lambda_of() -> Any:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    return inner

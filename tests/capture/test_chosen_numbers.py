"""Numbers between which a branch on values decides: as plain Python has them, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.regions import chosen_numbers

CALLS = 12


def ternary(x, n, kept):
    best = kept.best
    kept.best = best = n if n < best else best
    return best


def one_side(x, n, kept):
    best = kept.best
    if n < best:
        best = n
    kept.best = best
    return best + 1


def attribute(x, n, kept):
    if n < kept.best:
        kept.best = n
    return n


def entry(x, n, kept):
    if n < kept.table["best"]:
        kept.table["best"] = n
    return x * kept.table["best"]


def two_sides(x, n, kept):
    a = b = kept.best
    if n > 0.0:
        a, c = n, 0.5
    else:
        b, c = n, 2.0
    kept.best = b
    return a, b, c, x * c


def both_attributes(x, n, kept):
    if n < kept.best:
        kept.best, kept.last = n, 1.0
    else:
        kept.last = n
    return kept.best, kept.last


def either(x, n, kept):
    value = (n > 0.0 and n) or kept.best
    return value


def of_a_tensor(x, n, kept):
    rate = 0.1 if x.sum() > 0 else 0.01
    kept.best = rate
    return x * rate


def after_a_write(x, n, kept):
    y = x.sum()
    rate = kept.best
    if y > 0:
        y.mul_(-1)
        rate = n
    return y, rate


def computed_in_it(x, n, kept):
    if n > 0.0:
        kept.best = n * 2
    return kept.best


def of_two_types(x, n, kept):
    return 1 if n > 0.0 else n


def nested(x, n, kept):
    rate = 1.0
    if n > 0.0:
        if n > 1.0:
            rate = 2.0
        else:
            rate = kept.best
    return rate, x * rate


def a_tensor_as_well(x, n, kept):
    rate = kept.best
    if n > 0.0:
        x, rate = x * 2, n
    return x, rate


PROGRAMS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (ternary, one_side, attribute, entry, two_sides, both_attributes, either, of_a_tensor, after_a_write,
              computed_in_it, of_two_types, nested, a_tensor_as_well)
}  # fmt: skip
ONE_GRAPH = ("ternary", "one_side", "attribute", "entry", "two_sides", "both_attributes", "of_a_tensor")


def numbers(kind: str) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(CALLS, 3, generator=generator)
    return [*(drawn if kind == "float" else drawn.double())]


def the_number(x: torch.Tensor, kind: str) -> Any:
    return x.sum().item() if kind == "float" else x.sum().numpy() * 1.0


def kept_things() -> SimpleNamespace:
    return SimpleNamespace(best=1e9, last=0.0, table={"best": 1e9})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


@pytest.mark.share(12)
@pytest.mark.parametrize("kind", ["float", "numpy"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_plain_python_has_them(name: str, kind: str) -> None:
    program = PROGRAMS[name]

    def step(x: torch.Tensor, kept: SimpleNamespace) -> Any:
        return program(x, the_number(x, kind), kept)

    captured, kept, wanted = capture(step, backend="eager"), kept_things(), kept_things()
    for x in numbers(kind):
        assert same(captured(x.clone(), kept), step(x.clone(), wanted))
        assert same((kept.best, kept.last, kept.table["best"]), (wanted.best, wanted.last, wanted.table["best"]))
    if kind == "float" and name in ONE_GRAPH:
        assert len(stats(captured).recompiles) <= 1, stats(captured).recompiles
        assert report_of(captured_of(captured)).breaks == []


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_switched_off_the_branch_leaves_the_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_numbers, "is_left", lambda *_: False)
    monkeypatch.setattr(chosen_numbers, "in_tensors", lambda *_: None)
    program = PROGRAMS[name]
    captured, kept = capture(lambda x, kept: program(x, x.sum().item(), kept), backend="eager"), kept_things()
    for x in numbers("float"):
        captured(x, kept)
    assert any(r.guard == "branch on data" for r in stats(captured).recompiles)


def test_numbers_of_numpys_are_made_and_written() -> None:
    @capture(backend="eager")
    def step(x: torch.Tensor) -> Any:
        x = x.clone()
        x[x == 0] = np.finfo(float).eps
        x[1] = np.int64(3)
        return x, np.finfo(np.float32).eps, np.iinfo("int16").max, np.dtype(float).itemsize

    for _ in range(3):
        x = torch.arange(3.0)
        assert same(step(x), step.__wrapped__(x))
    with pytest.raises(TypeError):
        capture(lambda x: x.__setitem__(0, np.float32(2)))(torch.ones(2))

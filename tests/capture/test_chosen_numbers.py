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


def ternary(x, l, kept):
    best = kept.best
    kept.best = best = l if l < best else best
    return best


def one_side(x, l, kept):
    best = kept.best
    if l < best:
        best = l
    kept.best = best
    return best + 1


def attribute(x, l, kept):
    if l < kept.best:
        kept.best = l
    return l


def entry(x, l, kept):
    if l < kept.table["best"]:
        kept.table["best"] = l
    return x * kept.table["best"]


def two_sides(x, l, kept):
    a = b = kept.best
    if l > 0.0:
        a, c = l, 0.5
    else:
        b, c = l, 2.0
    kept.best = b
    return a, b, c, x * c


def both_attributes(x, l, kept):
    if l < kept.best:
        kept.best, kept.last = l, 1.0
    else:
        kept.last = l
    return kept.best, kept.last


def either(x, l, kept):
    value = (l > 0.0 and l) or kept.best
    return value


def of_a_tensor(x, l, kept):
    rate = 0.1 if x.sum() > 0 else 0.01
    kept.best = rate
    return x * rate


def after_a_write(x, l, kept):
    y = x.sum()
    rate = kept.best
    if y > 0:
        y.mul_(-1)
        rate = l
    return y, rate


def computed_in_it(x, l, kept):
    if l > 0.0:
        kept.best = l * 2
    return kept.best


def of_two_types(x, l, kept):
    return 1 if l > 0.0 else l


def nested(x, l, kept):
    rate = 1.0
    if l > 0.0:
        if l > 1.0:
            rate = 2.0
        else:
            rate = kept.best
    return rate, x * rate


def a_tensor_as_well(x, l, kept):
    rate = kept.best
    if l > 0.0:
        x, rate = x * 2, l
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


@pytest.mark.parametrize("kind", ["float", "numpy"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_plain_python_has_them(name: str, kind: str) -> None:
    program = PROGRAMS[name]

    def step(x: torch.Tensor, kept: SimpleNamespace) -> Any:
        return program(x, the_number(x, kind), kept)

    captured, kept, wanted = capture(step, backend="eager"), kept_things(), kept_things()
    for x in numbers(kind):
        assert same(captured(x.clone(), kept), step(x.clone(), wanted))
        assert all(same(a, b) for a, b in zip(vars(kept).values(), vars(wanted).values(), strict=True)) or name == "entry"
        assert kept.table == wanted.table
    if kind == "float" and name in ONE_GRAPH:
        assert len(stats(captured).recompiles) <= 1, stats(captured).recompiles
        assert report_of(captured_of(captured)).breaks == []


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_switched_off_the_branch_leaves_the_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_numbers, "is_left", lambda *_: False)
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

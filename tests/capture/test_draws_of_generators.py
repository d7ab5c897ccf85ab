"""One number drawn from Python's generator or numpy's: a number of the graph, drawn where the program draws it.

What draws × what is done with it, with ranges that vary: plain Python's bits and states of the generators, no break.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moebius import capture, stats

WHOLE: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "randint": lambda x, n: random.randint(1, n),
    "randint from below": lambda x, n: random.randint(-n, 3),
    "randrange of a size": lambda x, n: random.randrange(len(x)),
    "randrange by steps": lambda x, n: random.randrange(0, 2 * n, 2),
    "numpy's randint": lambda x, n: np.random.randint(n),
    "numpy's randint of two": lambda x, n: np.random.randint(1, n),
    "numpy's randint of a size": lambda x, n: np.random.randint(0, len(x)),
    "numpy's binomial": lambda x, n: np.random.binomial(5, 0.5),
    "numpy's poisson of a rate": lambda x, n: np.random.poisson(n),
}
REAL: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "random": lambda x, n: random.random(),
    "uniform": lambda x, n: random.uniform(0, n),
    "rand": lambda x, n: np.random.rand(),
    "numpy's uniform": lambda x, n: np.random.uniform(0.5, n),
    "beta": lambda x, n: np.random.beta(0.4, 0.4),
    "normal": lambda x, n: np.random.normal(),
    "normal of a scale": lambda x, n: np.random.normal(0.5, n / 4),
    "triangular of ends": lambda x, n: np.random.triangular(-n, 0.5, n),
    "gamma": lambda x, n: np.random.gamma(2.0),
    "standard_normal": lambda x, n: np.random.standard_normal(),
}
USES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "factor": lambda x, r: x * r,
    "mixed": lambda x, r: r * x + (1 - r) * x.flip(0),
    "decides": lambda x, r: x * 2 if r > 1 else x,
    "tensor of it": lambda x, r: x + torch.tensor(float(r)),
}
PLACES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "slice": lambda x, r: x[: r % 3 + 1].sum() + x,
    "row": lambda x, r: x[r % 4] + x,
    "roll": lambda x, r: x.roll(r, 0),
}


def compare(draw: Callable, use: Callable, calls: int = 24) -> Any:
    def step(x: torch.Tensor, w: torch.Tensor, n: int) -> torch.Tensor:
        y = use(x * w, draw(x, n))
        y.sum().backward()
        return y.detach()

    captured, ways = capture(step, backend="eager"), []
    for run in (step, captured):
        random.seed(0)
        np.random.seed(0)
        drawn, w, results = torch.Generator().manual_seed(0), torch.ones(3, requires_grad=True), []
        for i in range(calls):
            results.append(run(torch.randn(4 + i * 3 % 5, 3, generator=drawn), w, 5 + i))
        ways.append([*results, w.grad, torch.tensor([random.random(), np.random.rand()])])
    assert all(torch.equal(a, b) for a, b in zip(*ways, strict=True))
    return stats(captured)


@pytest.mark.share(23)
@pytest.mark.parametrize(
    ("draw", "use"), [*itertools.product(WHOLE | REAL, USES), *itertools.product(WHOLE, PLACES)], ids=lambda name: name
)
def test_a_draw_is_a_number_of_the_graph(draw: str, use: str) -> None:
    counts = compare((WHOLE | REAL)[draw], (USES | PLACES)[use])
    assert (counts.breaks, counts.misses <= 6) == (0, True), counts


@pytest.mark.parametrize("draw", [
    lambda x, n: random.randint(n, 3), lambda x, n: np.random.randint(n, 3), lambda x, n: np.random.beta(-1.0, 1.0),
    lambda x, n: np.random.normal(0, 3 - n), lambda x, n: np.random.beta(3 - n, 1.0),
    lambda x, n: np.random.uniform(0, 1e308 * n),
])  # fmt: skip
def test_an_empty_range_raises_what_it_raises_in_plain_python(draw: Callable) -> None:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * draw(x, n)

    captured = capture(step, backend="eager")
    for n in (1, 2, 3, 5, 6, 2):
        outcomes = []
        for run in (step, captured):
            random.seed(n)
            np.random.seed(n)
            try:
                outcomes.append(run(torch.ones(3), n).tolist())
            except (ValueError, OverflowError) as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_a_generator_of_ones_own_and_arrays_are_what_they_are_in_plain_python() -> None:
    own, arrays = random.Random(0), np.random.RandomState(0)
    draws = [lambda x, n: own.randint(0, n), lambda x, n: arrays.rand(), lambda x, n: float(np.random.rand(n)[0])]
    for draw in draws:
        own.seed(0)
        arrays.seed(0)

        def step(x: torch.Tensor, n: int, draw: Callable = draw) -> torch.Tensor:
            return x * draw(x, n)

        ways = []
        for run in (step, capture(step, backend="eager")):
            own.seed(0)
            arrays.seed(0)
            np.random.seed(0)
            ways.append([run(torch.ones(3), n).tolist() for n in range(3, 12)])
        assert ways[0] == ways[1]

"""Generators of random numbers are inputs of the graph, wherever they come from; so are their seeds and states.

Cross-product: where the generator comes from × what the step does with it × who runs the graph. Each program runs six
times, plain and captured, with another generator or another seed each time; what it gives and all that is drawn
afterwards are compared.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, explain, stats

Generator = torch.Generator
Program = Callable[[torch.Tensor, Generator, int], Any]
HELD = Generator()


class Owner:
    generator: Generator


OWNER = Owner()


def stored(generator: Generator) -> Generator:
    OWNER.generator = generator
    return OWNER.generator


def again(generator: Generator, seed: int) -> Generator:
    return Generator("cpu").manual_seed(seed + 5)


# name: what gives the step its generator, of the one that it is called with
ORIGINS: dict[str, Callable[[Generator, int], Generator]] = {
    "an argument": lambda generator, seed: generator,
    "a global": lambda generator, seed: HELD,
    "torch's own": lambda generator, seed: torch.default_generator,
    "an attribute that the step sets": lambda generator, seed: stored(generator),
    "one or the other": lambda generator, seed: generator if seed < 100 else HELD,
    "made in the step": again,
    "made in the step, without a seed": lambda generator, seed: Generator(),
}


def noise(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    return x + torch.randn(x.shape, generator=generator)


def in_place(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    return torch.empty_like(x).normal_(generator=generator), torch.ones(4).bernoulli_(0.5, generator=generator)


def shuffled(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    return x[torch.randperm(len(x), generator=generator)], torch.multinomial(x.abs() + 0.1, 2, generator=generator)


def seeded(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    first = torch.rand(3, generator=generator)
    return generator.manual_seed(seed * 7), first + torch.rand(3, generator=generator)


def of_two(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    return torch.rand(3, generator=generator), torch.rand(3), torch.rand(3, generator=generator)


def put_back(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    state = generator.get_state()
    first = torch.rand(3, generator=generator)
    generator.set_state(state)
    return first, torch.rand(3, generator=generator), state


def forked(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = torch.rand(3, generator=generator)
    return first, torch.nn.functional.dropout(x, 0.5)


def escapes(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    return x + torch.rand(5, generator=generator), {"next": generator}


def asked(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    return x, generator.device, generator is HELD, generator or None, torch.rand(2, generator=generator)


def in_a_loop(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    return torch.stack([torch.rand(2, generator=generator.manual_seed(seed + i)) for i in range(3)])


def across_a_break(x: torch.Tensor, generator: Generator, seed: int) -> Any:
    first = torch.rand(3, generator=generator)
    with contextlib.suppress(AttributeError):
        hash(x.sum().item())  # a graph break
    return first + torch.rand(3, generator=generator)


USES = {f.__name__: f for f in (
    noise, in_place, shuffled, seeded, of_two, put_back, forked, escapes, asked, in_a_loop, across_a_break,
)}  # fmt: skip


def told(value: Any) -> Any:
    """What can be compared: of a generator its state."""
    if isinstance(value, Generator):
        return value.get_state().tolist()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    return [told(item) for item in value] if isinstance(value, tuple | list) else value


def run(step: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(0)
    HELD.manual_seed(1)
    seen = []
    for seed in range(6):
        generator = Generator().manual_seed(seed)
        seen.append(told(step(torch.linspace(-1, 1, 5), generator, seed)))
        seen.append(told((generator, HELD, torch.default_generator)))
    return seen


@pytest.mark.share(25)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize(("origin", "use"), list(itertools.product(ORIGINS, USES)))
def test_a_generator_of_any_origin(origin: str, use: str, backend: str) -> None:
    find, does = ORIGINS[origin], USES[use]

    def step(x: torch.Tensor, generator: Generator, seed: int) -> Any:
        return does(x, find(generator, seed), seed)

    captured = capture(step, backend=backend)
    assert run(captured) == run(step)
    if use != "across_a_break":
        assert stats(captured).breaks == 0
        assert stats(captured).misses <= 3


def test_each_layer_draws_from_its_own() -> None:
    class Layer(nn.Module):
        def __init__(self, seed: int):
            super().__init__()
            self.weight, self.generator = nn.Parameter(torch.ones(3) * seed), Generator().manual_seed(seed)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + torch.rand(3, generator=self.generator)

    found = []
    for wrap in (lambda f: f, capture):
        net = nn.Sequential(*[Layer(i) for i in range(4)])
        step = wrap(lambda x, net=net: net(x).detach())
        found.append([step(torch.ones(3)).tolist() for _ in range(4)])
    assert found[0] == found[1] and len({str(each) for each in found[0]}) == 4


@pytest.mark.parametrize("seed", [2**70, -(2**70)])
def test_what_fails_leaves_what_plain_python_leaves(seed: int) -> None:
    def step(generator: Generator, seed: int) -> Any:
        first = torch.rand(3, generator=generator)
        generator.manual_seed(seed)
        return first

    found = []
    for run_it in (step, capture(step)):
        generator = Generator().manual_seed(1)
        with pytest.raises((ValueError, RuntimeError, OverflowError)) as failure:
            run_it(generator, seed)
        found.append((type(failure.value), str(failure.value), told(generator)))
    assert found[0] == found[1]


def test_another_backend_breaks_there() -> None:
    def step(x: torch.Tensor, generator: Generator) -> Any:
        return x + torch.rand(3, generator=generator)

    report = explain(step, backend="aot_eager")(torch.ones(3), Generator().manual_seed(1))
    assert [item.code for item in report.breaks] == ["MB024"]
    assert torch.equal(report.result, step(torch.ones(3), Generator().manual_seed(1)))

"""``random.Random(seed)`` made in a step: what it draws is known, and where it lives on, it goes on from there."""

from __future__ import annotations

import random

import pytest
import torch

from moebius import capture, stats

KEPT: list[random.Random] = []
SEED = [3]


def on(x):
    return x + 1


def native(x):
    return x + len(str(id(x))) * 0  # a graph break


def drawn(x):
    generator = random.Random(SEED[0])
    return x * generator.random() + generator.randint(1, 9) + generator.gauss(0, 1)


def shuffled(x):
    order = [*range(6)]
    random.Random(7).shuffle(order)
    return x[torch.tensor(order[:2]) % 2] * order[0] + random.Random(8).choice(order)


def seeded_by_words(x):
    return x * random.Random("words").random()


def sampled(x):
    generator = random.Random(5)
    return x * sum(generator.sample(range(99), 4)) + generator.uniform(1, 2) + generator.choices([1, 2, 3])[0]


def kept(x):
    generator = random.Random(2)
    y = x * generator.random()
    generator.gauss(0, 1)
    KEPT.append(generator)
    return y


def over_a_break(x):
    generator = random.Random(2)
    y = x * generator.random()
    y = native(y)
    other = generator
    return y * generator.random() + other.random()


def twice_named(x):
    generator = random.Random(4)
    both = {"a": generator, "b": generator}
    x = x * both["a"].random()
    return x, both


def seeded_again(x):
    generator = random.Random(1)
    state = generator.getstate()
    first = generator.random()
    generator.setstate(state)
    second = generator.random()
    generator.seed(9)
    return x * first - second + generator.random()


def in_a_loop(x):
    generator = random.Random(1)
    x = torch.arange(24.0).reshape(8, 3) + x.sum()
    out, mask = torch.zeros_like(x), torch.nn.functional.one_hot(torch.arange(8) % 4).T
    for expert in mask.sum(1).nonzero()[:, 0]:
        token = torch.where(mask[expert])[0]
        out.index_add_(0, token, x[token] * generator.random())
    return out


def by_the_data(x):
    generator = random.Random(1)
    if x.sum() > 10:
        x = x * generator.random()
    return x * generator.random()


def with_an_attribute(x):
    generator = random.Random(1)
    generator.gauss_next = x * 2
    generator.mine = [x]
    return generator


def from_the_system(x):
    return x * (random.Random().random() < 2)


STEPS = [
    drawn, shuffled, sampled, kept, over_a_break, twice_named, seeded_again, in_a_loop, by_the_data, with_an_attribute,
    from_the_system, seeded_by_words,
]  # fmt: skip


def told(value):
    if isinstance(value, random.Random):
        return [value.getstate()[:2], {k: told(v) for k, v in vars(value).items()}, value.random()]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [told(v) for v in value]
    return {k: told(v) for k, v in value.items()} if isinstance(value, dict) else value


def outcomes(run):
    KEPT.clear()
    random.seed(0)
    found = []
    for iteration in range(4):
        SEED[0] = 3 if iteration < 2 else iteration
        found.append(told(run(torch.full((2, 3), float(iteration)))))
    return repr((found, told(KEPT), random.random()))


@pytest.mark.parametrize("step", STEPS)
def test_what_is_drawn(step):
    captured = capture(step, backend="eager")
    assert outcomes(captured) == outcomes(step)
    if step in (shuffled, sampled, kept, twice_named, seeded_again):
        assert stats(captured).graphs == 1 and not stats(captured).breaks and stats(captured).hits == 3


def test_without_its_state_it_would_begin_again(monkeypatch):
    monkeypatch.setattr(random.Random, "setstate", lambda self, state: None)
    assert outcomes(capture(kept, backend="eager")) != outcomes(kept)


@pytest.mark.parametrize("name", ["Categorical", "Bernoulli", "Normal", "OneHotCategorical"])
def test_distributions_made_in_the_step(name):
    """Their constructors look at lazy properties of the class."""
    cls = getattr(torch.distributions, name)

    def step(logits):
        made = cls(logits, logits.exp()) if name == "Normal" else cls(logits=logits)
        action = made.sample()
        return made.log_prob(action).sum() + made.entropy().sum(), action

    found = []
    for run in (step, capture(step, backend="eager")):
        torch.manual_seed(0)
        found.append([[part.tolist() for part in run(torch.randn(4, 3))] for _ in range(3)])
    assert found[0] == found[1] and stats(run).graphs and not stats(run).breaks


def test_a_cached_function_after_the_step_has_changed_something():
    """It makes objects of its own, and changes those."""
    import functools

    @functools.lru_cache
    def plan(text):
        parts: list[str] = []
        for letter in text:
            parts.append(letter * 2)
        return tuple(parts)

    log: list[int] = []
    found = []

    def step(x):
        log.append(1)
        return x * len(plan("abc"))

    captured = capture(step, backend="eager")
    found = [captured(torch.ones(2)).tolist() for _ in range(3)]
    assert found == [[3.0, 3.0]] * 3 and log == [1] * 3
    assert stats(captured).graphs == 1 and not stats(captured).breaks


def seeded_by_the_system(generator):
    generator.seed()


def seeded_by_the_system_in_c(generator):
    super(random.Random, generator).seed()


@pytest.mark.parametrize("seeded", [seeded_by_the_system, seeded_by_the_system_in_c])
def test_what_the_system_seeds_is_drawn_anew(seeded):
    def step(x):
        generator = random.Random(3)
        seeded(generator)
        return x * generator.random()

    captured = capture(step, backend="eager")
    assert len({captured(torch.ones(1)).item() for _ in range(4)}) == 4

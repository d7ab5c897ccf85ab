"""Some generated training steps: the same ones each time, fresh ones, what once differed. `make steps` runs many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.choices import SeededChoices
from seeds import seed_of_the_code

from moebius.codegen.effect_replay import EffectReplay
from moebius.guards import program
from moebius.trace.failures import FailureHandler
from steps.compare import compared
from steps.grammar import generate

FIXED, FRESH = 10, 6
KEPT = sorted((Path(__file__).parent / "kept").glob("*.txt"))


@pytest.mark.share(1)
@pytest.mark.parametrize("seed", range(FIXED))
def test_the_same_steps(seed: int) -> None:
    source = generate(SeededChoices(seed))
    seen = compared(source)
    assert not seen.differs, f"{seen.differs}\n{source}"
    assert seen.calls == 5


@pytest.mark.share(1)
@pytest.mark.parametrize("number", range(FRESH))
def test_fresh_steps(number: int) -> None:
    seed = 10**6 + seed_of_the_code() * FRESH + number
    source = generate(SeededChoices(seed))
    seen = compared(source)
    assert not seen.differs, f"seed {seed}: {seen.differs}\n{source}"


@pytest.mark.share(6)
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_what_once_differed(path: Path, backend: str) -> None:
    seen = compared(path.read_text(), backend)
    assert not seen.differs and not seen.until, seen.differs


def test_most_calls_are_captured() -> None:
    """What runs natively is equal, and shows nothing."""
    found = [compared(generate(SeededChoices(seed))) for seed in range(3)]
    assert all(seen.graphs >= 1 for seen in found)


def without_guards(*kinds: str) -> Callable[[pytest.MonkeyPatch], None]:
    def off(patch: pytest.MonkeyPatch) -> None:
        original = program.GuardProgram

        def build(n_positional: int, kwnames: tuple, slots: list, checks: list) -> Any:
            return original(n_positional, kwnames, slots, [c if c[0] not in kinds else ("answers", ()) for c in checks])

        patch.setattr(program, "GuardProgram", build)

    return off


def lists_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = EffectReplay.replay
    replay = lambda self, record, name: type(record.obj) is list or real(self, record, name)  # noqa: E731
    patch.setattr(EffectReplay, "replay", replay)


def nothing_before_a_failure(patch: pytest.MonkeyPatch) -> None:
    def handle(self: Any, failed: list, args: tuple, kwargs: dict, inputs: tuple) -> Any:
        error = failed.pop()
        return [lambda: self.raise_again(error)]

    patch.setattr(FailureHandler, "__call__", handle)


# with the seed of a program that shows it
FAULTS = {
    "tensors": (without_guards("tensor"), 16),
    "values": (without_guards("dict", "class", "equal"), 6),
    "lists": (lists_forgotten, 0),
    "failures": (nothing_before_a_failure, 12),
}


@pytest.mark.share(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off, seed = FAULTS[fault]
    source = generate(SeededChoices(seed))
    assert not compared(source).differs
    off(monkeypatch)
    assert compared(source).differs

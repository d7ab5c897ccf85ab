"""Some small generated programs: the same ones each time and fresh ones. `make small` runs many."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
from fuzz.choices import SeededChoices
from seeds import seed_of_the_code

from moebius.codegen import continuation_code
from moebius.guards import program
from moebius.heap import cells, lifetimes
from small import breaks, names, sides, values

FRESH = 10**6 + seed_of_the_code()
COUNT = 12 if "MOEBIUS_WHOLE" in os.environ else 6  # of the fixed programs
FEWER = COUNT // 2  # of fresh ones


@pytest.mark.parametrize("first", [0, FRESH], ids=["fixed", "fresh"])
def test_breaks(first: int) -> None:
    count = FEWER if first else COUNT
    graphs = broken = 0
    for seed in range(first, first + count):
        source = breaks.generate(SeededChoices(seed))
        differs, made, found = breaks.difference(source)
        assert not differs, f"seed {seed}: {differs}\n{source}"
        graphs, broken = graphs + made, broken + found
    assert graphs >= count  # each begins with an operator; fresh ones may all end before their first break
    assert broken >= (3 * count if first == 0 else 0)


@pytest.mark.parametrize("first", [0, FRESH], ids=["fixed", "fresh"])
def test_names(first: int) -> None:
    graphs = 0
    for seed in range(first, first + (FEWER if first else COUNT)):
        choices = SeededChoices(seed)
        source = names.generate(choices)
        differs, made = names.difference(source, choices)
        assert not differs, f"seed {seed}: {differs}\n{source}"
        graphs += made
    assert graphs >= (COUNT if first == 0 else 1)


# Of the fixed programs so many have a loop or branch in a graph; fresh ones may all ask what only native code can say.
DECIDED = {values: COUNT // 6, sides: COUNT // 3}


@pytest.mark.parametrize("first", [0, FRESH], ids=["fixed", "fresh"])
@pytest.mark.parametrize("programs", DECIDED, ids=["values", "sides"])
def test_what_values_decide(programs: types.ModuleType, first: int) -> None:
    decided = 0
    for seed in range(first, first + (FEWER if first else COUNT)):
        source = programs.generate(SeededChoices(seed))
        outcome = values.difference(source)
        assert not outcome.differs, f"seed {seed}: {outcome.differs}\n{source}"
        decided += outcome.decided
    assert decided >= (DECIDED[programs] if first == 0 else 0)


def unset_reads_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(continuation_code, "unset_reads", lambda code: {})


def names_held(patch: pytest.MonkeyPatch) -> None:
    for module in (lifetimes, cells):
        patch.setattr(module, "named", lambda value: False)


def values_unguarded(patch: pytest.MonkeyPatch) -> None:
    original = program.GuardProgram

    def build(n_positional: int, kwnames: tuple, slots: list, checks: list) -> Any:
        kept = [check if check[0] not in ("dict", "equal", "is") else ("answers", ()) for check in checks]
        return original(n_positional, kwnames, slots, kept)

    patch.setattr(program, "GuardProgram", build)


# with how many programs it may take to see them
FAULTS: dict[str, tuple[Any, Any, int]] = {
    "unset": (unset_reads_forgotten, breaks, 40),
    "held": (names_held, names, 8),
    "values": (values_unguarded, names, 4),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, module, count = FAULTS[fault]
    plant(monkeypatch)
    for seed in range(count):
        choices = SeededChoices(seed)
        source = module.generate(choices)
        if (breaks.difference(source) if module is breaks else names.difference(source, choices))[0]:
            return
    pytest.fail("no program shows it")

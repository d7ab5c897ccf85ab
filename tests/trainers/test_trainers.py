"""The gallery of training scripts (bench/trainers): plain and captured, equal to the bit. `make trainers` runs all.

CI runs a few of the quick ones for a few steps, others in each commit.
"""

from __future__ import annotations

import pytest
import seeds
import torch
import trainers
from trainers.measure import difference, measure
from trainers.page import page

STEPS = 5
SMALL = ("optimizers", "recommenders", "vision", "generative", "reinforcement learning")  # families
QUICK = sorted(name for name, (family, _) in trainers.SCRIPTS.items() if family in SMALL)
SHARE = [name for i, name in enumerate(QUICK) if (i + seeds.seed_of_the_code()) % 9 == 0]


@pytest.mark.share(5)
@pytest.mark.filterwarnings("ignore:moebius. .* was captured again")
@pytest.mark.parametrize("name", SHARE)
def test_each_script_trains_as_plain_python_does(name):
    row = measure(name, steps=STEPS)
    assert not row.difference and not row.native and row.graphs


def test_the_gallery_holds_scripts_of_many_families():
    assert len(trainers.SCRIPTS) >= 40 and len({family for family, _ in trainers.SCRIPTS.values()}) >= 8
    for _, build in trainers.SCRIPTS.values():
        assert build.__module__.startswith("trainers.")


def test_the_comparison_notices_a_bit():
    a, b = torch.ones(3), torch.ones(3)
    assert not difference([a, 1.0, {"x": float("nan")}], [b, 1.0, {"x": float("nan")}], "eager")
    b[1] = torch.nextafter(b[1], torch.tensor(2.0))
    assert difference(a, b, "eager") and not difference(a, b, "moebius") and difference(a, a + 1, "moebius")
    assert difference([1.0], [1], "eager") and difference([1.0], [1.0, 2.0], "eager")


def test_a_page_is_made_of_what_was_measured():
    row = measure("tasks_in_turns", steps=STEPS).as_dict()
    failed = {"eager": {"error": "x"}, "moebius": {"error": "y"}}
    text = page({"tasks_in_turns": {"eager": row, "moebius": row}, "other": failed})
    assert "| tasks_in_turns | habits | equal |" in text and "| other | | error: x | error: y |" in text


def test_a_page_keeps_the_rows_that_were_not_measured_again():
    row = measure("tasks_in_turns", steps=STEPS).as_dict()
    row["step"] = row["plain"]
    other = {**row, "step": 3 * row["plain"], "regions": 4, "lowered": 3, "breaks": ["a|b"]}
    before = page({"a": {"eager": row, "moebius": row}, "b": {"eager": row, "moebius": other}})
    after = page({"a": {"eager": row, "moebius": {**row, "breaks": ["c"]}}}, before=before)
    kept = [line for line in before.splitlines() if line.startswith(("| b", "  - break: a"))]
    assert len(kept) == 2 and all(line in after for line in kept) and "  - break: c" in after
    assert "2 scripts. Equal to the bit: 2." in after and "lowered: 3 of 4." in after and "at most 3.00." in after
    assert page({}, before=before) == before

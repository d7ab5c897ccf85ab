"""Models of transformers on ranks, each its own batch: 20 steps, as one process (``bench/ranks.py``)."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
import ranks  # noqa: E402

DOUBLE = ("mixtral", "gpt_oss", "granitemoe")  # their routers are of the model's dtype
SIZES = {"2": 2, "4": 4, "2x2": 4, "2x2-unequal": 4}


def train(family, name):
    return ranks.train(family, name)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("family", [*DOUBLE, "qwen3_moe", "deepseek_v3"])
def test_a_family_on_ranks(on_ranks, family, name):
    for found in on_ranks(SIZES[name], train, family, name):
        assert found["breaks"] == 0 and found["split"] == (8 if family == "gpt_oss" else 4)
        assert found["in parts"] <= ranks.ALLOWED
        if family in DOUBLE:
            assert max(found[kind] for kind in ranks.KINDS) <= ranks.ALLOWED

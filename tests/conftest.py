"""Shared by all tests: thread limits, seeds, markers. Small on purpose; what one folder needs lives in that folder."""

from __future__ import annotations

import os

# Before torch is imported anywhere: two threads at most, so that figures and timings mean the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "distributed: starts several processes")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


@pytest.fixture
def seed() -> int:
    """Seeds torch's generator; returns the seed."""
    import torch

    torch.manual_seed(0)
    return 0

"""Capture's tests: what moebius warns of (a capture that failed, one that gave up) is a failure here."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from moebius.trace import native_pieces

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "bench"))  # peaks.py


@pytest.fixture(autouse=True)
def goes_on_after_a_break(request, monkeypatch):
    """Small programs of tests often name nothing of torch: they are to go on after a break, as a step does."""
    if not request.module.__name__.endswith("test_native_pieces"):
        monkeypatch.setattr(native_pieces, "knows_no_torch", lambda *_: False)


@pytest.fixture(autouse=True)
def no_silent_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="moebius")
        yield

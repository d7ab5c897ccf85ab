"""Capture's tests: what moebius warns of (a capture that failed, one that gave up) is a failure here."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(autouse=True)
def no_silent_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="moebius")
        yield

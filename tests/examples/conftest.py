"""No example or demo prints a warning of ours: in each, and in the processes that it starts, one is an error."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def our_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error:moebius")  # (the beginning of the message)

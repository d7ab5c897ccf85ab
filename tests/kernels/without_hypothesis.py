"""Stands in for hypothesis where it is not installed: tests over generated cases are skipped, with that reason, and the
others of their modules run."""
from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest

REASON = "hypothesis is not installed"


def given(*strategies: object, **named: object) -> Callable:
    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def skipped(*args: object, **kwargs: object) -> None:  # also where a test calls it within
            pytest.skip(REASON)

        return pytest.mark.skip(reason=REASON)(skipped)

    return decorate


def settings(*args: object, **kwargs: object) -> Callable:
    return lambda test: test


def install() -> None:
    """Make ``import hypothesis`` find this."""
    module = types.ModuleType("hypothesis")
    module.__spec__ = ModuleSpec("hypothesis", None)  # torch asks for it
    module.__dict__.update(given=given, settings=settings, strategies=MagicMock())
    sys.modules["hypothesis"], sys.modules["hypothesis.strategies"] = module, module.strategies

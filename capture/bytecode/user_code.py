"""Whose code a file holds: the user's, or a library's (torch, numpy, the standard library) or ours. The one place that
answers it."""

from __future__ import annotations

import functools
import os
import sysconfig
import types
from importlib.util import find_spec

STDLIB = sysconfig.get_path("stdlib")
PACKAGES = ("moebius", "moebius.interpreter", "moebius.lowering", "moebius.kernels")


def folder_of(package: str) -> str:
    """Where a package's files stand; nothing is imported for it."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return os.path.join(spec.submodule_search_locations[0], "")


@functools.cache
def our_folders() -> tuple[str, ...]:
    return tuple(map(folder_of, PACKAGES))


@functools.lru_cache(maxsize=4096)
def is_ours(filename: str) -> bool:
    return filename.startswith(our_folders())


@functools.cache
def skipped() -> tuple[str, ...]:
    """How the names of files begin that are torch's, numpy's, ours, or made by generated code."""
    operators = [folder_of(package) for package in ("torch", "numpy") if find_spec(package) is not None]
    return *operators, *our_folders(), "<frozen", "<string>", "<moebius", "<eval_with_key>"


@functools.lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Whether a file is torch's, numpy's, the standard library's or ours: its code is never captured by itself, nor
    counted."""
    if filename.startswith(skipped()):
        return True
    return filename.startswith(STDLIB) and "site-packages" not in filename


SHOWS = "moebius_shows"


def shown_code(function: types.FunctionType) -> types.CodeType:
    """The code that reports name for a captured function: of a call of ours, what it calls."""
    return function.__dict__.get(SHOWS, function.__code__)

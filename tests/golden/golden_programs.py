"""The programs whose captures are kept as golden texts: expert layers, and training steps of transformers' families.

Each is a function that runs the program captured and gives what was captured.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[1]
for folder in ("expert_loops", "../bench"):
    if str(TESTS / folder) not in sys.path:
        sys.path.insert(0, str(TESTS / folder))

from table import MODULES, SPELLINGS, Runner  # noqa: E402

import moebius  # noqa: E402
from moebius import api  # noqa: E402

Program = Callable[[], Any]  # gives what its captures die with


def spelling(name: str) -> Any:
    runner = Runner(name)
    for seed in range(2):
        runner.call(seed)
    return runner


def family(name: str) -> Any:
    from zoo import tiny
    from zoo.measure import train_step

    torch.manual_seed(0)
    model, inputs = tiny.tiny_models()[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = moebius.capture(train_step)
    for _ in range(2):
        step(model, optimizer, inputs)
    return model, optimizer


def programs() -> dict[str, Program]:
    """By name; the families of the transformers that is installed come last."""
    found: dict[str, Program] = {}
    for name in (*SPELLINGS, *MODULES):
        found[f"spelling {name}"] = functools.partial(spelling, name)
    try:
        from zoo import tiny
    except ImportError:
        return found
    for name in tiny.tiny_models():
        found[f"family {name}"] = functools.partial(family, name)
    return found


def captured_by(program: Program) -> tuple[list[Any], Any]:
    """What was captured while it ran, in order, and what it dies with."""
    moebius.reset()
    kept, api.KEPT = api.KEPT, []
    try:
        quiet = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            held = program()
        return list(api.KEPT), held
    finally:
        api.KEPT = kept

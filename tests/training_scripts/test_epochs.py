"""Whole epochs under capture: loops over loaders, validation, trainers, beside plain Python, everything compared.

With backend "eager" to the bit. An epoch of those in SETTLED that was called three times is captured no more.
`MOEBIUS_EPOCHS=all` runs all programs; without it every sixth one.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import epochs_of_functions as functions
import epochs_of_objects as objects
import plain_python
import pytest
import torch

import moebius
from moebius import capture, stats

PROGRAMS = (*functions.PROGRAMS, *objects.PROGRAMS)
CHOSEN = PROGRAMS if os.environ.get("MOEBIUS_EPOCHS") == "all" else PROGRAMS[::6]
CALLS = 4
SETTLED = {
    functions.imagenet, functions.validate, functions.timm_style, functions.workers, functions.bar, functions.cycled,
    functions.two_loaders, functions.next_or_again, functions.out_of_memory,
    functions.cycle_of_itertools, functions.fabric_style, objects.wrapped,
    objects.exit_stack, objects.wandb_like, objects.stream, objects.balancing, objects.lightning_like, objects.warned,
    objects.queued, objects.adversaries, objects.trainer,
}  # fmt: skip


def epochs(step: Callable[..., Any], arguments: tuple, reached: list[Any]) -> list[dict[str, Any]]:
    """What each call did."""
    stream, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    found = []
    try:
        for _ in range(CALLS):
            logged = len(stream.getvalue())
            out, err = io.StringIO(), io.StringIO()
            result, error = None, None
            with (
                warnings.catch_warnings(record=True) as warned,
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                warnings.simplefilter("always")
                warnings.filterwarnings("ignore", message="Converting a tensor with")  # once a process
                try:
                    result = step(*arguments)
                except Exception as raised:
                    error = type(raised).__name__, str(raised)
            found.append(
                {
                    "result": plain_python.shown(result),
                    "error": error,
                    "printed": (re.sub(r"\d+\.\d+ms", "ms", out.getvalue()), err.getvalue()),
                    "logged": stream.getvalue()[logged:],
                    "warned": [(str(w.message), w.lineno) for w in warned if "moebius: " not in str(w.message)],
                    "reached": plain_python.shown(reached),
                    "gradients": [
                        None if t.grad is None else plain_python.values(t.grad) for t in plain_python.leaves(reached)
                    ],
                    "random": (torch.get_rng_state().tolist(), random.getstate()),
                    "misses": stats(step).misses if hasattr(step, "__wrapped__") else 0,
                }
            )
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return found


@pytest.mark.share(2)
@pytest.mark.filterwarnings("error:moebius could not capture")
@pytest.mark.parametrize("program", CHOSEN, ids=lambda p: p.__name__)
def test_epochs(program: Callable[[], Any]) -> None:
    want = epochs(*plain_python.seeded(program))
    moebius.reset()
    step, arguments, reached = plain_python.seeded(program)
    found = epochs(as_captured(step), arguments, reached)
    for number, (ours, plain) in enumerate(zip(found, want, strict=True)):
        assert plain["error"] is None
        for key in plain.keys() - {"misses"}:
            assert ours[key] == plain[key], f"epoch {number}: {key}"
    assert found[0]["misses"] > 0
    if program in SETTLED:
        assert found[-1]["misses"] == found[-2]["misses"]


def as_captured(step: Callable[..., Any]) -> Callable[..., Any]:
    return capture(step, backend="eager")


def test_the_comparison_notices_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any, *rest: Any) -> Any:
            with torch.no_grad():
                model.head.bias += 1e-7
            return step(model, *rest)

        return capture(run, backend="eager")

    monkeypatch.setitem(globals(), "as_captured", other)
    with pytest.raises(AssertionError, match="epoch 0"):
        test_epochs(functions.cycled)

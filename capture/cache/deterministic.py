"""``capture(..., deterministic=True)``: torch's deterministic algorithms for as long as a captured call runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..bytecode.hidden_frames import hidden


def deterministic(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` under ``torch.use_deterministic_algorithms(True)``; what was set before is set again afterwards."""
    call = functools.partial(run_settled, run)
    functools.update_wrapper(call, run)
    return call


@hidden
def run_settled(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return run(*args, **kwargs)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])

"""What ``torch.utils.checkpoint.checkpoint`` does where ``use_reentrant`` is not given: asked of torch once.

Torch has a default form, which it warns of, and releases to come are to raise instead.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Told:
    """A warning: its text and category, and the module's namespace, file and line that it is said to come from."""

    text: str
    category: type[Warning]
    namespace: dict[str, Any]
    file: str
    line: int


def default_form() -> tuple[bool, list[Told]] | None:
    """Whether it is the reentrant one, and what torch says to it; None where torch raises."""
    with warnings.catch_warnings(record=True) as told, torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("always")
        try:
            asked = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
            result: Any = checkpoint(torch.neg, asked)
        except (TypeError, ValueError):
            return None
    modules = {getattr(module, "__file__", None): module for module in [*sys.modules.values()]}
    if any(one.filename not in modules for one in told):
        return None
    said = [Told(str(t.message), t.category, vars(modules[t.filename]), t.filename, t.lineno) for t in told]
    return "Checkpoint" in result.grad_fn.name(), said


DEFAULT_FORM = default_form()

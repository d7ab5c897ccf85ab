"""Ranges for torch's profiler around the graphs of warm calls, named by the user's function and line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..bytecode.hidden_frames import hidden
from ..torch_facts import torch_private

CALL = "m_out = m_graph("


def profiled(source: str, graph: Callable[..., Any], label: str, namespace: dict[str, Any]) -> str:
    """Residual code whose graph runs in a range of this name while a profiler runs. Without one that costs a look at a
    flag, some 5 ns. namespace: of the residual code; it gets what that needs."""
    if not torch_private.can_ask_for_profiler:
        return source
    namespace["m_profiler"], namespace["m_ranged"] = torch_private.PROFILER, functools.partial(ranged, graph, label)
    return source.replace(CALL, f"m_out = (m_ranged if m_profiler.{torch_private.PROFILES} else m_graph)(", 1)


@hidden
def ranged(graph: Callable[..., Any], label: str, *inputs: Any) -> Any:
    with torch.profiler.record_function(label):
        return graph(*inputs)

"""The most bytes of tensors that a step holds, from what torch's profiler records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType


def peak_bytes(step: Callable[[], object]) -> int:
    """The highest sum, in bytes, of what one call allocates and has not freed.

    A release counts where the block was allocated in this call. The profiler also reports some of those from before, at
    addresses that an earlier session knew, with the size of then (c10/core/CPUAllocator.cpp).
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    results = profile.profiler and profile.profiler.kineto_results
    if results is None:
        raise RuntimeError("torch's profiler recorded nothing")
    held = peak = 0
    sizes: dict[int, int] = {}
    for event in sorted(allocations(results.experimental_event_tree()), key=lambda e: e.start_time_ns):
        block = event.extra_fields
        if block.alloc_size > 0:
            sizes[block.ptr] = block.alloc_size
            held += block.alloc_size
        else:
            held -= sizes.pop(block.ptr, 0)
        peak = max(peak, held)
    if not peak:
        raise RuntimeError("torch's profiler saw no allocation: nothing to report on memory")
    return peak


def allocations(events: Iterable[Any]) -> Iterator[Any]:
    """What was allocated and released, in each thread."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from allocations(event.children)

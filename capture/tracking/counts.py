"""Numbers of tokens an expert, as Python reads them: ``counts.tolist()`` of a vector of known length is a list of
symbolic ints, which ``split`` takes; ``bincount`` of a routing index has a known length."""

from __future__ import annotations

from typing import Any

import torch

from moebius.lowering.experts.routing import chosen_from, index_bounds
from moebius.lowering.operators import read_call

from .. import torch_fakes, torch_private

FEW = 1024  # experts; a longer list is data, which Python is going to compute with
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BINCOUNTS = frozenset({torch.bincount, torch.Tensor.bincount})


def known_few(fake: torch.Tensor) -> bool:
    """Whether ``tolist()`` gives a flat list of integers, few and known how many."""
    return fake.dtype in INTEGERS and fake.dim() == 1 and isinstance(fake.shape[0], int) and fake.shape[0] <= FEW


def unknown_numbers(world: torch_fakes.FakeWorld, fake: torch.Tensor) -> list[Any]:
    return [world.unknown_number() for _ in range(fake.shape[0])]


def bins(index: Any, weights: Any = None, minlength: Any = 0) -> int | None:
    """How many bins ``bincount`` gives, where the values are certain to lie in ``minlength`` bins."""
    if weights is not None or not isinstance(minlength, int):
        return None
    bounds = bounds_of(index.node)
    return minlength if bounds is not None and bounds[0] >= 0 and bounds[1] <= minlength else None


def bounds_of(node: Any) -> tuple[int, int] | None:
    """[low, high) of a routing index, or of ``top[:, :k]``, that nothing was written into."""
    return index_bounds(chosen_from(node)) if never_written(node) else None


def never_written(node: Any) -> bool:
    """Whether nothing was written in place into the tensor or into what it was copied of, since topk."""
    root = chosen_from(node)
    while True:
        value = node.meta["val"]
        if value.is_inference() or torch_private.version_of(value):  # in inference mode nobody counts
            return False
        if node is root:
            return True
        call = read_call(node)
        assert call is not None
        node = call["input"]

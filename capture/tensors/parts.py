"""Parts of tensors whose place the data say and whose length they do not: ``data[i : i + 8]``.

To torch's fakes its length is another unknown number for each. Here the two bounds are read as numbers of one thing and
a distance; the graph compares (``require_equal``), and where the part is shorter, at the end of the data say, plain
Python goes on from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.operators import read_call

from ..torch_facts import torch_private
from ..values.values import TensorProxy

PLACES = (slice, int, torch.SymInt)  # (a flag is none)


class Parts:
    """Of one trace. read: by the symbol of a number, the tensor that it was read of."""

    def __init__(self, world: Any) -> None:
        self.world, self.listener, self.read = world, world.shape_env.listener, dict[Any, TensorProxy]()

    def note(self, number: Any, tensor: TensorProxy) -> Any:
        """A number that was read of a tensor."""
        if torch_private.is_symbolic(number):
            self.read[torch_private.expression(number)] = tensor
        return number

    def at_the_start(self, proxy: TensorProxy, key: Any) -> Any:
        """The index with such parts of it at the start of their axes, whose shape and strides those have; the index
        itself where it has none."""
        keys = key if is_kind(key, tuple) else (key,)
        if not all(k is None or k is ... or type(k) in PLACES for k in keys):
            return key
        axes, moved, takes = axes_of(keys, proxy.fake.dim()), list(keys), self.listener.takes
        for place, axis in axes.items():
            part, size = keys[place], proxy.fake.shape[axis]
            length = self.length(part) if is_kind(part, slice) and is_kind(size, int) else None
            if length and length <= size and takes(size, part, length):
                moved[place] = slice(0, length)
        if all(one is other for one, other in zip(moved, keys, strict=True)):
            return key
        return tuple(moved) if is_kind(key, tuple) else moved[0]

    def length(self, part: slice) -> int | None:
        """How long it is where it does not reach over the end; None where that is another number in each step, or 0."""
        bounds = part.start, part.stop
        open_ = [torch_private.is_symbolic(one) and torch_private.depends_on_values(one) for one in bounds]
        plain = part.step is None or (type(part.step) is int and part.step == 1)
        if not plain or not all(open_):
            return None
        (one, first), (other, last) = map(self.as_distance, bounds)
        return last - first if one is not None and one == other and last > first else None

    def as_distance(self, number: Any) -> tuple[Any, int]:
        """A number as another one, or a tensor of one, and what is added to it."""
        distance, rest = torch_private.expression(number).as_coeff_Add()
        if not rest.is_Symbol or not distance.is_Integer:
            return None, 0
        node, distance = self.read[rest].node if rest in self.read else None, int(distance)
        while node is not None and (moved := moved_by(node)) and not self.world.writes_into(moved[0].meta["val"]):
            node, distance = moved[0], distance + moved[1]
        return (rest if node is None else node), distance


def moved_by(node: fx.Node) -> tuple[fx.Node, int] | None:
    """What was added to what, where the node adds a number of Python's."""
    call = read_call(node)
    if call is None or call.name not in ("add", "sub") or call.op.inplace or call["alpha"] != 1:
        return None
    of, added = call["input"], call["other"]
    if call.name == "add" and type(of) is int:
        of, added = added, of
    if not is_kind(of, fx.Node) or type(added) is not int:
        return None
    return of, added if call.name == "add" else -added


def axes_of(keys: tuple, dims: int) -> dict[int, int]:
    """For each place in an index of numbers, slices, None and one ``...``: of which axis it is."""
    used = sum(k is not None and k is not ... for k in keys)
    axes, axis = dict[int, int](), 0
    for place, key in enumerate(keys):
        if key is ...:
            axis += dims - used
        elif key is not None:
            axes[place] = axis
            axis += 1
    return axes if axis <= dims and sum(key is ... for key in keys) <= 1 else {}

"""Operators that run on fakes once more: over fakes of the same metadata an operator of torch's does the same.

A loop over parameters calls the same dozen operators for each of them. torch remembers what an operator gives
(FakeTensorMode's cache), but to come there and back takes ten times as long as to make the result. So what a whole
call did is remembered here, where torch itself found its one operator in that cache: which argument it gave back or
what new tensor it made, and what it wrote into. All that decides this is in the key: the function, the metadata of each
fake, which of them are the same or share memory, every other argument by its text, torch's switches. A call is left to
torch where something else may count: gradients, writes into shared memory, results that are views, sizes that vary,
modes of the program's, a transform of ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .torch_private import ON_FAKES, in_function_transform, owns_storage, storage_of, version_of

Key = tuple[Any, ...]
TEXTS = frozenset((int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.Size))
IN_C = frozenset(
    map(type, (torch.Tensor.mul_, torch.Tensor.__iadd__, torch.mul, [].append))
)  # what they do is not written in Python, which may read anything


@dataclass
class Known:
    """What a call did. argument: which of its fakes it gave back, None where it made ``result``, which is (sizes,
    strides, dtype, device). writes: each fake that it wrote into, and how often."""

    argument: int | None
    result: tuple[Any, ...]
    writes: list[tuple[int, int]]


class KnownResults:
    """Of one capture. make: a fake over a tensor on the meta device. note: told of each write."""

    def __init__(self, make: Callable[[torch.Tensor, Any], torch.Tensor], note: Callable[[torch.Tensor], None]):
        self.make, self.note = make, note
        self.known: dict[Key, Known] = {}

    def again(self, key: Key, fakes: list[FakeTensor]) -> torch.Tensor | None:
        """The result of a call that is known, after what it writes; else None."""
        known = self.known.get(key)
        if known is None:
            return None
        for place, times in known.writes:
            written = fakes[place]
            for _ in range(times):
                self.note(written)
                torch.autograd.graph.increment_version(written)
        if known.argument is not None:
            return fakes[known.argument]
        sizes, strides, dtype, device = known.result
        return self.make(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"), device)

    def learn(self, key: Key, fakes: list[FakeTensor], versions: list[Any], result: Any) -> None:
        """A call of this key has run, and torch knew its one operator. versions: of the fakes, before."""
        writes = [(i, version_of(f) - before) for i, (f, before) in enumerate(zip(fakes, versions, strict=True))]
        writes = [(i, times) for i, times in writes if times]
        if ON_FAKES.last() is not None or tuple(facts(fakes)) != key[-1]:
            return  # it warned, or changed what a tensor is
        memories = set(map(storage_of, fakes))
        if writes and (len(memories) < len(fakes) or any(fake._base is not None for fake in fakes)):
            return  # (a write into the one may be one into the other)
        place = next((i for i, fake in enumerate(fakes) if fake is result), None)
        if place is not None:
            self.known[key] = Known(place, (), writes)
        elif type(result) is FakeTensor and is_plain(result) and not result.requires_grad and owns_storage(result):
            if result._base is None and storage_of(result) not in memories:
                made = result.shape, result.stride(), result.dtype, result.fake_device
                self.known[key] = Known(None, made, writes)


def key_of(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Key, list[FakeTensor]] | None:
    """What decides what a call does, and its fakes, each once; None where that is not known."""
    if type(function) not in IN_C or modes() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    with_gradients = torch.is_grad_enabled()
    fakes: dict[FakeTensor, int] = {}  # (a tensor is hashed by what it is)
    try:
        given = tuple(described((*args, *kwargs.values()), fakes))
        if with_gradients and any(fake.requires_grad for fake in fakes):
            return None
        tensors = tuple(facts(fakes))
    except Unknown:
        return None
    switches = with_gradients, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    return (function, len(args), tuple(kwargs), given, switches, tensors), list(fakes)


class Unknown(Exception):
    """What a call does is not decided by what is looked at here."""


def described(values: Iterable[Any], fakes: dict[FakeTensor, int]) -> Iterator[Any]:
    """Arguments: a fake by its place among the fakes, anything else by its text."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            yield fakes.setdefault(value, len(fakes))
        elif kind in TEXTS:
            yield kind, repr(value)
        elif kind in (tuple, list):
            yield kind, tuple(described(value, fakes))
        else:
            raise Unknown


def facts(fakes: Iterable[FakeTensor]) -> Iterator[Any]:
    """What an operator may ask of each of these; Unknown for one of which it may ask more."""
    memories: dict[int, int] = {}
    for fake in fakes:
        if not is_plain(fake):
            raise Unknown
        whole = owns_storage(fake), fake.requires_grad, fake._base is None
        memory = memories.setdefault(storage_of(fake), len(memories))
        yield fake.shape, fake.stride(), fake.storage_offset(), fake.dtype, fake.fake_device, whole, memory


def is_plain(fake: FakeTensor) -> bool:
    """Strided, with known sizes, its memory's too, and without a value that is known."""
    odd = fake.layout is not torch.strided or fake._has_symbolic_sizes_strides
    odd = odd or type(fake.untyped_storage().nbytes()) is not int  # (a row of a tensor whose rows nobody counted)
    return not (odd or fake.constant is not None or fake.is_inference() or fake.is_conj() or fake.is_neg())


def modes() -> bool:
    """Whether something of the program's would hear of an operator, or do it otherwise."""
    active = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack() or in_function_transform()
    return bool(active) or torch.autograd.forward_ad._current_level >= 0

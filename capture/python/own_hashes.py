"""Keys that Python code of their class hashes, and that are told apart by identity (a ``Metric`` of torchmetrics)."""

from __future__ import annotations

from typing import Any

from ..heap.identities import refuse_own_hash
from ..heap.records import SIMPLE, python_method
from .enums import hashes_by_name
from .parts import Parts


def new_key(domain: Parts, key: Any, container: Any = None) -> Any:
    """The key as a dict or set has it that the step made (None: one that it makes now). ``__hash__`` is followed as any
    call is. Its number plays no part, as long as nothing that it looks at changes while the container is there."""
    kind, objects, heap = type(key), domain.objects, domain.objects.heap
    own = kind not in SIMPLE and python_method(kind, "__hash__") and not hashes_by_name(kind)
    in_new = container is None or objects.is_new(container)
    if not own or kind.__eq__ is not object.__eq__ or not domain.calls.known(key) or not in_new:
        return objects.made_key(key, in_new=in_new)
    begin, since = heap.mark(), heap.age(container)
    heap.listening += 1
    try:
        number = domain.call(kind.__hash__, [key], {})
    finally:
        heap.listening -= 1
    changed = container is not None and any(heap.was_written(event, since, begin) for event in heap.reads(begin))
    if type(number) is not int or heap.changes_older(begin) or changed or not has_hash(key):
        refuse_own_hash(key)
    return objects.made_key(key, is_hashed=True)


def has_hash(key: Any) -> bool:
    """Whether the object can be hashed as it is before the step: containers ask that while the step is captured."""
    try:
        hash(key)
    except Exception:
        return False
    return True

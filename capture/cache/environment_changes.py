"""What the process does beside capture: what somebody has replaced in Python and torch, what another thread changes."""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Iterable
from typing import Any

import torch

from ..guards.recorder import Fact
from ..tensors import tensor_class
from .logs import warn

MAX_CHANGES = 3  # of one callable's captures that another thread has spoiled; then it runs natively
# Not called by capture or torch. (IPython takes exit and quit away while a cell runs, and what it has added after it;
# ``_`` is what Python's shell has shown last, or gettext's.)
UNUSED = frozenset(
    "print input open breakpoint exit quit help copyright credits license __import__ __build_class__"
    " _ get_ipython display".split()
)
LIBRARIES: dict[Any, Iterable[str]] = {
    builtins: vars(builtins).keys() - UNUSED,
    collections: ("OrderedDict", "defaultdict", "deque", "Counter", "namedtuple", "ChainMap"),
    contextlib: ("contextmanager", "nullcontext", "suppress", "ExitStack"),
    functools: ("partial", "wraps", "update_wrapper", "reduce", "lru_cache"),
    inspect: ("signature", "getattr_static", "isclass", "isfunction"),
    itertools: ("chain", "count", "islice", "product", "repeat", "accumulate", "zip_longest"),
    torch: ("is_grad_enabled", "get_rng_state", "set_rng_state", "is_inference_mode_enabled", "is_autocast_enabled"),
}
ORIGINAL = [
    (vars(library), f"{library.__name__}.{name}", name, vars(library)[name])
    for library, names in LIBRARIES.items()
    for name in names
    if callable(vars(library).get(name))
]
TOLD: set[str] = set()
ITERATED = "during iteration"  # as C says of dicts, sets and deques


class ChangedWhileCapturing(Exception):
    """What a trace has read is something else at its end, and another thread runs."""


def changed(fact: Fact, found: str) -> Exception:
    """The error for a guard that does not hold at the end of the trace that made it."""
    record = fact.record
    if threading.active_count() == 1:
        return AssertionError(
            f"a guard does not hold for the call that it was made from: {record.source} {record.check} ({found})"
        )
    return ChangedWhileCapturing(f"{record.source} ({record.check}; now: {found}), {record.file}:{record.line}")


def is_a_race(error: BaseException) -> bool:
    """Whether another thread has spoiled a capture."""
    iterated = isinstance(error, RuntimeError) and ITERATED in str(error) and threading.active_count() > 1
    return isinstance(error, ChangedWhileCapturing) or iterated


def tell_of_a_race(name: str, error: BaseException, often: bool) -> None:
    warn(
        f"moebius: what {name} reads changed while it was captured, as other threads run: {error}. "
        + ("It runs natively from now on" if often else "This call runs natively, the next is captured anew")
        + "; change it between the calls, or hold a lock around both (if no thread does: please report this)"
    )


def replaced() -> str | None:
    """The name of a function of Python's or torch's that is not the original, of those that capture's and torch's own
    code call. While it is replaced nothing is captured: it would run in the midst of capture, where the program's would
    not, and capture would go by what it says."""
    for namespace, text, name, value in ORIGINAL:
        if namespace.get(name) is not value:
            return text
    return tensor_class.replaced()


def tell_of_a_replacement(name: str, replaced: str) -> None:
    """Once for each that is replaced."""
    if replaced not in TOLD:
        TOLD.add(replaced)
        warn(
            f"moebius: {replaced} was replaced, and capture relies on it: while it is, {name} and others that were not "
            "captured before run natively; replace it in your own modules instead"
        )

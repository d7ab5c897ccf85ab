"""What Python code still runs natively under `interpret`, by name, and counting it.

A Python function that C code calls while the machine runs that C code is interpreted (reentry.c), whatever the C code
is: sort keys, `__hash__` and `__eq__` of dict keys, `__set_name__`, replacement functions, … The program's own
`sys.setprofile` is refused with InterpreterError. NATIVE_CALLBACKS names the rest.
"""
from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from types import AsyncGeneratorType, CodeType, CoroutineType
from typing import Any

try:
    from .native import reentry
except ImportError as error:
    raise ImportError(
        "moebius.interpreter needs its C extension reentry, built for this Python: "
        "`pip install -e .` or `python setup.py build_ext --inplace` in the repository"
    ) from error

Native, call_inside, call_outside = reentry.Native, reentry.call_inside, reentry.call_outside
call_afresh = reentry.call_afresh
watch_finalizer, write_unraisable, fill_frame = reentry.watch_finalizer, reentry.write_unraisable, reentry.fill_frame
is_a, is_sequence_slot, merge_keywords = reentry.is_a, reentry.is_sequence_slot, reentry.merge_keywords
set_frame_names, link_frame = reentry.set_frame_names, reentry.link_frame

# Python code -> why it runs natively
NATIVE_CALLBACKS: dict[str, str] = {
    "generators and coroutines made outside of interpret": "their frame is a native one; what they call is interpreted",
    "finalizers (__del__)": "of an object that C code made, of a class that was defined outside of interpret and that "
    "interpreted code makes no object of, where the last reference goes in the machine's own code",
    "signal handlers, gc.callbacks, sys.excepthook, atexit functions": "CPython calls them",
    "ctypes callbacks": "where an object dies in the machine's own code",
    "importlib._bootstrap, importlib._bootstrap_external": "where C code imports; the modules' bodies are interpreted",
    "dict look-ups of names": "__eq__ of keys, put into a namespace, that are no strings but hash alike",
    "moebius, torch._dynamo": "functions of their modules, and all that they call",
}
DICT_GET = dict.get  # globals may be of a subclass, whose own methods do not count
OWN_FOLDER = os.path.dirname(__file__) + os.sep
OPAQUE_PREFIXES = ("moebius.", "torch._dynamo.")  # torch.compile's wrappers switch a frame hook of their own
IN_BETWEEN = "a native frame of the machine's"  # the module of frames that it puts between its own and C code
TRANSPARENT = frozenset({"importlib._bootstrap", "importlib._bootstrap_external", IN_BETWEEN})

async def never_awaited() -> AsyncGenerator[None, None]:
    yield


def finalized_by_c() -> list[type]:
    """Types of C whose finalizers call Python."""
    made = never_awaited()
    steps = made.asend(None), made.athrow(GeneratorExit), made.aclose()
    kinds: list[type] = [CoroutineType, AsyncGeneratorType, *{type(step) for step in steps}]
    with suppress(StopIteration):  # they are over: nothing warns
        steps[0].close()
    for step in steps[1:]:
        step.close()
    return kinds


for finalized in finalized_by_c():
    reentry.watch_native_finalizer(finalized)
reentry.set_modules(OPAQUE_PREFIXES, TRANSPARENT)


def is_opaque(globals_: dict[str, Any]) -> bool:
    """Whether functions of the module with these globals run natively, and all that they call."""
    name = DICT_GET(globals_, "__name__", None)
    return type(name) is str and name.startswith(OPAQUE_PREFIXES)


@contextmanager
def count_native_frames() -> Iterator[Counter[str]]:
    """Counts the Python frames that run natively while this thread interprets, by qualified name, file and line.

    The Counter that it gives is filled when the block ends. The machine's own frames and those of TRANSPARENT modules
    do not count. While it is on, Python runs slower and takes C stack for each call: 3.12 and 3.13 reach their limit of
    C recursion earlier.
    """
    counts: dict[CodeType, int] = {}
    shown: Counter[str] = Counter()
    before = reentry.set_counts(counts)
    try:
        yield shown
    finally:
        reentry.set_counts(before)
        for code, number in counts.items():
            if code.co_filename.startswith(OWN_FOLDER):  # ours, with the globals of the program's module
                continue
            shown[f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"] += number

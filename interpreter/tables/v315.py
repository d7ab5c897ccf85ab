"""Python 3.15: a second place on the stack beside an iterator; lazy imports; a list's slice without a slice object.

Private names of CPython's opcode module: those of v314.py, read on 3.15.0.
"""
from __future__ import annotations

from . import forms
from .forms import Entry
from .v314 import TABLE as TABLE_314

# CPython counts through some types with the second place (a tagged integer, Python/ceval.c);
# the machine always makes an iterator, above which it is NULL.
ITERATOR_PLACES = 2
COUNTED: tuple[type, ...] = (list, tuple, str, bytes)  # those with a _tp_iteritem
PLAIN = 0  # GET_ITER's argument in a `for`; others are kinds of `yield from`

TABLE: dict[str, Entry] = {
    **{name: entry for name, entry in TABLE_314.items() if name != "GET_YIELD_FROM_ITER"},
    "GET_ITER": Entry(
        "GET_ITER:WITH_PLACE", forms.none, forms.differs(PLAIN), "GET_YIELD_FROM_ITER:WITH_PLACE", "GET_YIELD_FROM_ITER"
    ),
    "FOR_ITER": Entry("FOR_ITER:WITH_PLACE", forms.jump),
    "POP_ITER": Entry("POP_ITER:WITH_PLACE", forms.none),
    "SEND": Entry("SEND:WITH_PLACE", forms.jump),
    **{name: Entry(f"{name}:WITH_PLACE", forms.none) for name in ("END_SEND", "CLEANUP_THROW")},
    "BINARY_SLICE": Entry("BINARY_SLICE:ENDS_APART", forms.none),
    "IMPORT_NAME": Entry("IMPORT_NAME:MAYBE_LAZY", forms.lazy_name, forms.bit(forms.EAGER), "IMPORT_NAME"),
    "IMPORT_FROM": Entry("IMPORT_FROM:MAYBE_LAZY", forms.name),
}

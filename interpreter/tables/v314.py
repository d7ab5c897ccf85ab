"""Python 3.14: borrowed locals, small integers, common constants, templates; LOAD_SPECIAL; what is no longer there."""
from __future__ import annotations

import opcode

from . import forms
from .common import same
from .forms import Entry
from .v313 import TABLE as TABLE_313

# Private names of CPython's opcode module, read on 3.14.8: what the arguments of these opcodes mean.
COMMON_CONSTANTS: list[object] = opcode._common_constants  # type: ignore[attr-defined]
# Of a call of tuple, all or any with a generator expression the compiler writes the loop too, for where the name means
# the builtin. No value is this constant: so the call is read, as on older versions, which capture and forms/ answer.
CALLED = object()
READ = [CALLED if callable(one) and Exception not in getattr(one, "__mro__", ()) else one for one in COMMON_CONSTANTS]
SPECIAL_METHODS: list[str] = opcode._special_method_names  # type: ignore[attr-defined]
SUBSCRIPT = len(forms.BINARY_OPERATORS)  # BINARY_OP's argument for `a[b]`

TABLE: dict[str, Entry] = {
    **{name: entry for name, entry in TABLE_313.items() if name in opcode.opmap},
    **same(forms.none, "BUILD_TEMPLATE"),
    "NOT_TAKEN": Entry("NOP", forms.none, older="NOP"),
    "POP_ITER": Entry("POP_TOP", forms.none, older="POP_TOP"),
    "LOAD_FAST_BORROW": Entry("LOAD_FAST", forms.arg, older="LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": Entry("LOAD_FAST_LOAD_FAST", forms.local_pair, older="LOAD_FAST_LOAD_FAST"),
    "LOAD_SMALL_INT": Entry("LOAD_CONST", forms.arg, older="LOAD_CONST"),
    "LOAD_COMMON_CONSTANT": Entry("LOAD_CONST", forms.chosen(READ), older="LOAD_CONST"),
    "LOAD_SPECIAL": Entry("LOAD_SPECIAL", forms.chosen(SPECIAL_METHODS)),
    "WITH_EXCEPT_START": Entry("WITH_EXCEPT_START:WITH_SELF", forms.none),
    "BINARY_OP": Entry(
        "BINARY_OP", forms.chosen([*forms.BINARY_OPERATORS, "[]"]), forms.equal(SUBSCRIPT), *("BINARY_SUBSCR",) * 2
    ),
    "STORE_SLICE": Entry("STORE_SLICE:TOPMOST", forms.none),
    "BUILD_INTERPOLATION": Entry("BUILD_INTERPOLATION", forms.interpolation),
    "CALL_FUNCTION_EX": Entry("CALL_FUNCTION_EX:KEYWORDS_OR_NULL", forms.none),
}

"""Python 3.11."""
from __future__ import annotations

from . import forms
from .common import COMMON, UP_TO_313, same
from .forms import Entry

TABLE: dict[str, Entry] = {
    **COMMON,
    **UP_TO_313,
    **same(
        forms.none,
        "UNARY_POSITIVE", "PRINT_EXPR", "LIST_TO_TUPLE", "IMPORT_STAR", "ASYNC_GEN_WRAP", "PREP_RERAISE_STAR",
    ),
    **same(forms.jump, "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP"),
    **{
        f"POP_JUMP_{way}_IF_{test}": Entry(f"POP_JUMP_IF_{test}", forms.jump)
        for way in ("FORWARD", "BACKWARD")
        for test in ("TRUE", "FALSE", "NONE", "NOT_NONE")
    },
    **same(forms.arg, "MAKE_FUNCTION", "LOAD_CLASSDEREF"),
    "FOR_ITER": Entry("FOR_ITER:POPS", forms.jump),
    "SEND": Entry("SEND:POPS", forms.jump),
    "LOAD_CLOSURE": Entry("LOAD_CLOSURE", forms.arg),
    "LOAD_ATTR": Entry("LOAD_ATTR", forms.name),
    "LOAD_METHOD": Entry("LOAD_METHOD:NULL_FIRST", forms.name),
    "LOAD_GLOBAL": Entry("LOAD_GLOBAL", forms.name_above_1, forms.bit(1), "LOAD_GLOBAL:NULL_FIRST"),
    "COMPARE_OP": Entry("COMPARE_OP", forms.comparison(0)),
    "FORMAT_VALUE": Entry("FORMAT_VALUE", forms.conversion),
    "PRECALL": Entry("NOP", forms.none),
    "KW_NAMES": Entry("KW_NAMES", forms.const),
    "CALL": Entry("CALL:NULL_FIRST", forms.arg),
    "CALL_FUNCTION_EX": Entry("CALL_FUNCTION_EX:NULL_FIRST", forms.flag),
}

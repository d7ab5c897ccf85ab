"""Python 3.12: inlined comprehensions, super and slice instructions, intrinsics, END_FOR and END_SEND."""
from __future__ import annotations

from . import forms
from .common import COMMON, UP_TO_313, same
from .forms import Entry

INTRINSICS_1 = {
    1: "print", 2: "import_star", 3: "stopiteration_error", 4: "async_gen_wrap", 5: "unary_positive",
    6: "list_to_tuple", 7: "typevar", 8: "paramspec", 9: "typevartuple", 10: "subscript_generic", 11: "typealias",
}  # fmt: skip
INTRINSICS_2 = {
    1: "prep_reraise_star", 2: "typevar_with_bound", 3: "typevar_with_constraints", 4: "set_function_type_params",
}  # fmt: skip

TABLE: dict[str, Entry] = {
    **COMMON,
    **UP_TO_313,
    **same(forms.none, "BINARY_SLICE", "STORE_SLICE", "END_FOR", "END_SEND", "CLEANUP_THROW", "LOAD_LOCALS"),
    **same(forms.jump, "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE"),
    **same(forms.arg, "MAKE_FUNCTION", "LOAD_FAST_AND_CLEAR", "LOAD_FROM_DICT_OR_DEREF"),
    "END_FOR": Entry("END_FOR:POPS_BOTH", forms.none),
    "LOAD_CLOSURE": Entry("LOAD_CLOSURE", forms.arg),
    "LOAD_FAST_CHECK": Entry("LOAD_FAST", forms.arg),
    "LOAD_FROM_DICT_OR_GLOBALS": Entry("LOAD_FROM_DICT_OR_GLOBALS", forms.name),
    "RETURN_CONST": Entry("RETURN_CONST", forms.const),
    "LOAD_ATTR": Entry("LOAD_ATTR", forms.name_above_1, forms.bit(1), "LOAD_METHOD:NULL_FIRST"),
    "LOAD_SUPER_ATTR": Entry("LOAD_SUPER_ATTR", forms.super_name, forms.bit(1), "LOAD_SUPER_METHOD:NULL_FIRST"),
    "LOAD_GLOBAL": Entry("LOAD_GLOBAL", forms.name_above_1, forms.bit(1), "LOAD_GLOBAL:NULL_FIRST"),
    "COMPARE_OP": Entry("COMPARE_OP", forms.comparison(4)),
    "FORMAT_VALUE": Entry("FORMAT_VALUE", forms.conversion),
    "KW_NAMES": Entry("KW_NAMES", forms.const),
    "CALL": Entry("CALL:NULL_FIRST", forms.arg),
    "CALL_FUNCTION_EX": Entry("CALL_FUNCTION_EX:NULL_FIRST", forms.flag),
    "CALL_INTRINSIC_1": Entry("CALL_INTRINSIC_1", forms.chosen(INTRINSICS_1)),
    "CALL_INTRINSIC_2": Entry("CALL_INTRINSIC_2", forms.chosen(INTRINSICS_2)),
}

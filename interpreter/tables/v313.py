"""Python 3.13: NULL stands above the callable, CALL_KW, SET_FUNCTION_ATTRIBUTE, paired local instructions, TO_BOOL."""
from __future__ import annotations

from . import forms
from .common import COMMON, UP_TO_313, same
from .forms import Entry
from .v312 import INTRINSICS_1, INTRINSICS_2

TABLE: dict[str, Entry] = {
    **COMMON,
    **UP_TO_313,
    **same(
        forms.none,
        "BINARY_SLICE", "STORE_SLICE", "END_FOR", "END_SEND", "CLEANUP_THROW", "LOAD_LOCALS", "TO_BOOL",
        "FORMAT_SIMPLE", "FORMAT_WITH_SPEC",
    ),
    **same(forms.jump, "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE"),
    **same(forms.arg, "LOAD_FAST_AND_CLEAR", "LOAD_FROM_DICT_OR_DEREF", "SET_FUNCTION_ATTRIBUTE"),
    **same(forms.local_pair, "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"),
    "MAKE_FUNCTION": Entry("MAKE_FUNCTION:BARE", forms.none),
    "CONVERT_VALUE": Entry("CONVERT_VALUE", forms.convert_letter),
    "LOAD_FAST_CHECK": Entry("LOAD_FAST", forms.arg),
    "LOAD_FROM_DICT_OR_GLOBALS": Entry("LOAD_FROM_DICT_OR_GLOBALS", forms.name),
    "RETURN_CONST": Entry("RETURN_CONST", forms.const),
    "LOAD_ATTR": Entry("LOAD_ATTR", forms.name_above_1, forms.bit(1), "LOAD_METHOD:NULL_AFTER"),
    "LOAD_SUPER_ATTR": Entry("LOAD_SUPER_ATTR", forms.super_name, forms.bit(1), "LOAD_SUPER_METHOD:NULL_AFTER"),
    "LOAD_GLOBAL": Entry("LOAD_GLOBAL", forms.name_above_1, forms.bit(1), "LOAD_GLOBAL:NULL_AFTER"),
    "COMPARE_OP": Entry("COMPARE_OP", forms.comparison(5), forms.bit(16), "COMPARE_OP:BOOL"),
    "CALL": Entry("CALL:NULL_AFTER", forms.arg),
    "CALL_KW": Entry("CALL_KW", forms.arg),
    "CALL_FUNCTION_EX": Entry("CALL_FUNCTION_EX:NULL_AFTER", forms.flag),
    "CALL_INTRINSIC_1": Entry("CALL_INTRINSIC_1", forms.chosen(INTRINSICS_1)),
    "CALL_INTRINSIC_2": Entry("CALL_INTRINSIC_2", forms.chosen({**INTRINSICS_2, 5: "set_typeparam_default"})),
}  # fmt: skip

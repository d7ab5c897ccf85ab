"""The opcodes that all versions share, with the same meaning; those that 3.11, 3.12 and 3.13 share."""
from __future__ import annotations

from . import forms
from .forms import Entry, Form


def same(form: Form, *names: str) -> dict[str, Entry]:
    """Entries whose handler has the opcode's own name."""
    return {name: Entry(name, form) for name in names}


COMMON: dict[str, Entry] = {
    **same(
        forms.none,
        "POP_TOP", "PUSH_NULL", "NOP", "RESUME", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_INVERT",
        "STORE_SUBSCR", "DELETE_SUBSCR", "GET_LEN", "GET_ITER", "GET_YIELD_FROM_ITER", "MATCH_MAPPING",
        "MATCH_SEQUENCE", "MATCH_KEYS", "PUSH_EXC_INFO", "POP_EXCEPT", "CHECK_EXC_MATCH", "CHECK_EG_MATCH",
        "GET_AITER", "GET_ANEXT", "END_ASYNC_FOR", "LOAD_BUILD_CLASS", "RETURN_GENERATOR", "RETURN_VALUE",
        "SETUP_ANNOTATIONS", "YIELD_VALUE",
    ),
    **same(
        forms.name,
        "LOAD_NAME", "STORE_NAME", "DELETE_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR",
        "IMPORT_NAME", "IMPORT_FROM",
    ),
    **same(
        forms.arg,
        "LOAD_FAST", "STORE_FAST", "DELETE_FAST", "MAKE_CELL", "COPY_FREE_VARS", "LOAD_DEREF", "STORE_DEREF",
        "DELETE_DEREF", "COPY", "SWAP", "BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_MAP",
        "BUILD_STRING", "BUILD_SLICE", "LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE", "MAP_ADD", "DICT_UPDATE",
        "DICT_MERGE", "UNPACK_SEQUENCE", "RAISE_VARARGS", "RERAISE", "MATCH_CLASS", "GET_AWAITABLE",
    ),
    **same(forms.jump, "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "FOR_ITER", "SEND"),
    **same(forms.flag, "IS_OP", "CONTAINS_OP"),
    "LOAD_CONST": Entry("LOAD_CONST", forms.const),
    "UNPACK_EX": Entry("UNPACK_EX", forms.unpack_counts),
    "BINARY_OP": Entry("BINARY_OP", forms.binary_operator),
}  # fmt: skip

UP_TO_313: dict[str, Entry] = {
    **same(forms.none, "BINARY_SUBSCR", "LOAD_ASSERTION_ERROR", "BEFORE_WITH", "BEFORE_ASYNC_WITH"),
    **same(forms.none, "WITH_EXCEPT_START"),
    **same(forms.arg, "BUILD_CONST_KEY_MAP"),
}

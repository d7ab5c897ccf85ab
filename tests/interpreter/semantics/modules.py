"""Which modules of Lib/test are run, and which are left out, with the reason."""
from __future__ import annotations

MODULES = tuple(
    """
    test_abc test_augassign test_binop test_bisect test_bool test_call test_class test_code test_compare test_complex
    test_contains test_context test_contextlib test_contextlib_async test_copy test_coroutines test_asyncgen
    test_dataclasses test_decorators test_descr test_descrtut test_dict test_dictcomps test_dictviews test_dynamic
    test_dynamicclassattribute test_enumerate test_except_star test_exception_group test_exception_variations
    test_exceptions test_extcall test_fstring test_funcattrs test_functools test_generator_stop test_generators
    test_genericalias test_genexps test_global test_grammar test_hash test_heapq test_index test_int test_int_literal
    test_isinstance test_iter test_itertools test_keywordonlyarg test_list test_listcomps test_long test_metaclass
    test_named_expressions test_numeric_tower test_opcodes test_operator test_ordered_dict test_patma
    test_pep646_syntax test_positional_only_arg test_property test_pow test_raise test_random test_range test_richcmp
    test_scope test_set test_setcomps test_slice test_string test_subclassinit test_super test_textwrap test_traceback
    test_tuple test_type_aliases test_type_params test_type_annotations test_types test_typechecks test_unary
    test_unpack test_unpack_ex test_userdict test_userlist test_userstring test_weakref test_weakset test_with
    test_yield_from test_enum test_collections test_typing test_builtin test_float test_bytes
    """.split()
)

EXCLUDED = {
    "test_sys_settrace": "jumps, opcode events and f_trace are not supported, see interpreter/tracing.py",
    "test_sys_setprofile": "the interpreter refuses sys.setprofile by name",
    "test_faulthandler": "tests native crashes of processes of their own",
    "test_dis": "tests the compiler and the disassembler; nothing of it depends on who runs the test",
    "test_gdb": "tests a debugger that looks at native frames",
}

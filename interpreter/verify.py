"""Whether a code object is sound: checked when it is decoded, so that no handler meets what no compiler emits.

CPython trusts its compiler; a code object made by hand can jump into the middle of an instruction, read below its stack
or name a constant that is not there, and crash the process. Here each instruction is reached with one stack depth that
suffices for it and keeps within co_stacksize, each argument has something to refer to, and each jump and each handler
begins at an instruction. What values stand on the stack is not checked: wrong ones are errors when they are met.
"""
from __future__ import annotations

import dis
from collections.abc import Callable
from types import FunctionType
from typing import NoReturn

from .errors import InterpreterError
from .program import Instruction, Program
from .reading import PAIRS
from .tables import ITERATOR_PLACES

GENERATOR_FLAGS = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS"})
# 3.15's generator expressions end with these, where their handler still counts on the iterator.
NEVER_RAISE = frozenset({"LOAD_CONST", "RETURN_VALUE"})
ALWAYS_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
PROLOGUE = frozenset({"COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR"})
if ITERATOR_PLACES > 1:  # from 3.15 on a generator expression makes its iterator first
    PROLOGUE |= {"RESUME", "LOAD_FAST", "GET_ITER", "GET_AITER"}
HAS_PRECALL = "PRECALL" in dis.opmap
HAS_ANNOTATE = "__annotate__" in FunctionType.__dict__  # PEP 649
KEYWORDS_BY_ARGUMENT = dis.stack_effect(dis.opmap["CALL_FUNCTION_EX"], 0) > -3  # 3.14 always has room for keywords
CALL_FLOOR = 3 if "CALL_KW" in dis.opmap else 2  # what stands below a call's dict of keywords: 3.13 has NULL above it

Need = int | Callable[[int], int]


def each(need: Need, *names: str) -> dict[str, Need]:
    return dict.fromkeys(names, need)


# How many values an instruction reads from the stack, popped or not; by its argument where that decides. Default: none.
NEEDS: dict[str, Need] = {
    **each(
        1,
        "POP_TOP", "STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "UNARY_NEGATIVE", "UNARY_POSITIVE",
        "UNARY_NOT", "UNARY_INVERT", "TO_BOOL", "GET_ITER", "GET_YIELD_FROM_ITER", "GET_LEN", "MATCH_MAPPING",
        "MATCH_SEQUENCE", "LOAD_ATTR", "LOAD_METHOD", "DELETE_ATTR", "IMPORT_FROM", "IMPORT_STAR", "RETURN_VALUE",
        "YIELD_VALUE", "GET_AWAITABLE", "GET_AITER", "GET_ANEXT", "BEFORE_WITH", "BEFORE_ASYNC_WITH", "PUSH_EXC_INFO",
        "POP_EXCEPT", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "LIST_TO_TUPLE", "FORMAT_SIMPLE",
        "CONVERT_VALUE", "PRINT_EXPR", "ASYNC_GEN_WRAP", "CALL_INTRINSIC_1", "LOAD_FROM_DICT_OR_GLOBALS",
        "LOAD_FROM_DICT_OR_DEREF", "STORE_FAST_LOAD_FAST", "UNPACK_SEQUENCE", "UNPACK_EX", "LOAD_SPECIAL",
    ),
    **{name: 1 for name in dis.opmap if name.startswith("POP_JUMP_")},
    **each(
        2,
        "BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "DELETE_SUBSCR", "STORE_ATTR",
        "IMPORT_NAME", "CHECK_EXC_MATCH", "CHECK_EG_MATCH", "MATCH_KEYS", "END_ASYNC_FOR",
        "FORMAT_WITH_SPEC", "CALL_INTRINSIC_2", "PREP_RERAISE_STAR", "STORE_FAST_STORE_FAST",
        "SET_FUNCTION_ATTRIBUTE", "BUILD_TEMPLATE",
    ),
    **each(3, "STORE_SUBSCR", "BINARY_SLICE", "MATCH_CLASS", "LOAD_SUPER_ATTR"),
    **each(4, "STORE_SLICE"),
    **each(ITERATOR_PLACES, "FOR_ITER", "POP_ITER"),
    **each(ITERATOR_PLACES + 1, "SEND", "END_SEND"),
    **each(ITERATOR_PLACES + 2, "CLEANUP_THROW"),
    "WITH_EXCEPT_START": 5 if "LOAD_SPECIAL" in dis.opmap else 4,  # an __exit__ may stand there in two parts
    **each(
        lambda n: n,
        "COPY", "SWAP", "BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_STRING", "BUILD_SLICE", "RAISE_VARARGS",
    ),
    **each(
        lambda n: n + 1,
        "LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE", "DICT_UPDATE", "BUILD_CONST_KEY_MAP", "RERAISE",
    ),
    **each(lambda n: n + 2, "MAP_ADD", "CALL", "PRECALL"),
    "BUILD_MAP": lambda n: 2 * n,
    "DICT_MERGE": lambda n: n + 1 + CALL_FLOOR,
    "CALL_KW": lambda n: n + 3,
    "CALL_FUNCTION_EX": (lambda n: 3 + (n & 1)) if KEYWORDS_BY_ARGUMENT else 4,
    "BUILD_INTERPOLATION": lambda n: 2 + (n & 1),
    "MAKE_FUNCTION": lambda n: 1 + (n & 15).bit_count(),
    "FORMAT_VALUE": lambda n: 1 + (n >> 2 & 1),
    "END_FOR": lambda n: -dis.stack_effect(dis.opmap["END_FOR"]),
}  # fmt: skip

# What an argument may be, where it refers to nothing by index: opname -> the least and the greatest.
RANGES = {
    **dict.fromkeys(("COPY", "SWAP", "LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE"), (1, None)),
    **dict.fromkeys(("MAP_ADD", "DICT_UPDATE", "DICT_MERGE"), (1, None)),
    "BUILD_SLICE": (2, 3),
    "RAISE_VARARGS": (0, 2),
    "MAKE_FUNCTION": (0, 15),
    "CONVERT_VALUE": (1, 3),
    "FORMAT_VALUE": (0, 7),
    "CALL_FUNCTION_EX": (0, 1),
    "BUILD_INTERPOLATION": (0, 15),
}
ONE_OF = {"SET_FUNCTION_ATTRIBUTE": (1, 2, 4, 8, *((16,) if HAS_ANNOTATE else ()))}
LOCALS = frozenset({
    "LOAD_FAST", "LOAD_FAST_CHECK", "STORE_FAST", "DELETE_FAST", "LOAD_FAST_AND_CLEAR",
    "LOAD_CLOSURE",
})  # fmt: skip
CELLS = frozenset({
    "MAKE_CELL", "LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF",
})  # fmt: skip


def verify(program: Program) -> None:
    """InterpreterError, with the instruction and its line, where the code object is not sound."""
    instructions = program.instructions
    if not instructions:
        refuse(program, None, "it has no instructions")
    for instruction in instructions:
        check_argument(program, instruction)
    check_generator(program)
    follow_depths(program)


def check_argument(program: Program, instruction: Instruction) -> None:
    name, arg = instruction.opname, instruction.arg or 0
    size = len(program.localsplus)
    if name in LOCALS:
        if arg >= size:
            refuse(program, instruction, f"there are {size} local variables")
    elif name in CELLS:
        if arg not in program.cell_indices:
            refuse(program, instruction, "that variable is no cell")
    elif name in PAIRS:
        if arg >> 4 >= size or arg & 15 >= size:
            refuse(program, instruction, f"there are {size} local variables")
    elif name in RANGES:
        least, greatest = RANGES[name]
        if arg < least or (greatest is not None and arg > greatest):
            refuse(program, instruction, "no compiler emits that argument")
    elif name in ONE_OF:
        if arg not in ONE_OF[name]:
            refuse(program, instruction, "no compiler emits that argument")
    elif name == "COPY_FREE_VARS":
        if arg != len(program.code.co_freevars):
            refuse(program, instruction, f"there are {len(program.code.co_freevars)} free variables")
    elif name == "KW_NAMES":
        check_keywords(program, instruction)


def check_keywords(program: Program, instruction: Instruction) -> None:
    names = instruction.operand
    if type(names) is not tuple or not all(type(name) is str for name in names):
        refuse(program, instruction, "the constant is no tuple of names")
    following = program.instructions[instruction.index + 1 : instruction.index + 3]
    call = next((ins for ins in following if ins.opname != "PRECALL"), None)
    if call is None or call.opname != "CALL" or (call.arg or 0) < len(names):
        refuse(program, instruction, "no call with that many arguments follows")


def check_generator(program: Program) -> None:
    """A generator begins by making itself; nothing but a generator yields."""
    makers = [ins for ins in program.instructions if ins.opname == "RETURN_GENERATOR"]
    is_generator = bool(program.code.co_flags & GENERATOR_FLAGS)
    if not is_generator:
        wrong = makers or [ins for ins in program.instructions if ins.opname == "YIELD_VALUE"]
        if wrong:
            refuse(program, wrong[0], "the code object is not flagged as a generator's")
        return
    if len(makers) != 1 or any(ins.opname not in PROLOGUE for ins in program.instructions[: makers[0].index]):
        refuse(program, makers[0] if makers else None, "a generator begins with one RETURN_GENERATOR")
    program.begins = makers[0].index


def follow_depths(program: Program) -> None:
    """Walk all paths, exception handlers included, with the depth of the stack."""
    instructions, handlers, limit = program.instructions, program.handlers, program.code.co_stacksize
    depths: list[int | None] = [None] * len(instructions)
    pending = [(0, 0)]
    while pending:
        index, depth = pending.pop()
        while True:
            if index >= len(instructions):
                refuse(program, instructions[-1], "execution runs past the end")
            instruction = instructions[index]
            known = depths[index]
            if known is not None:
                if known != depth:
                    refuse(program, instruction, f"it is reached with {known} and with {depth} values on the stack")
                break
            depths[index] = depth
            name, arg = instruction.opname, instruction.arg
            region = handlers[index]
            if region is not None and name not in NEVER_RAISE:
                target, kept, lasti = region
                if depth < kept:
                    refuse(program, instruction, f"its exception handler keeps {kept} values, the stack holds {depth}")
                if kept + lasti + 1 > limit:
                    refuse(program, instruction, f"its exception handler needs more than co_stacksize ({limit}) values")
                pending.append((target, kept + lasti + 1))
            need = NEEDS.get(name, 0)
            needed = need if isinstance(need, int) else need(arg or 0)
            if needed > depth:
                refuse(program, instruction, f"it reads {needed} values, the stack holds {depth}")
            if name in ENDS:
                break
            if instruction.target is not None:
                after = depth + effect(instruction, True)
                if after > limit:
                    refuse(program, instruction, f"the stack grows beyond the {limit} values of co_stacksize")
                if name in ALWAYS_JUMPS:
                    index, depth = instruction.target, after
                    continue
                pending.append((instruction.target, after))
            depth += effect(instruction, False)
            if depth > limit:
                refuse(program, instruction, f"the stack grows beyond the {limit} values of co_stacksize")
            index += 1


EFFECTS: dict[tuple[int, int | None, bool], int] = {}


def effect(instruction: Instruction, jump: bool) -> int:
    """By how much the stack has grown after the instruction, as the machine runs it."""
    key = instruction.opcode, instruction.arg, jump
    found = EFFECTS.get(key)
    if found is None:
        found = EFFECTS[key] = read_effect(instruction, jump)
    return found


def read_effect(instruction: Instruction, jump: bool) -> int:
    name, arg = instruction.opname, instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
    if name == "RETURN_GENERATOR":
        return 1  # what is sent first; compilers up to 3.12 do not count it
    if name == "PRECALL":
        return 0  # the machine takes the arguments at CALL
    found = dis.stack_effect(instruction.opcode, arg, jump=jump)
    if HAS_PRECALL and name == "CALL":
        found += dis.stack_effect(dis.opmap["PRECALL"], arg)
    return found


def refuse(program: Program, instruction: Instruction | None, reason: str) -> NoReturn:
    code = program.code
    shown = "" if instruction is None else f" ({instruction})"
    error = InterpreterError(f"broken code object {code.co_qualname}: {reason}{shown}")
    error.file, error.function = code.co_filename, code.co_qualname
    error.line = code.co_firstlineno if instruction is None or instruction.line is None else instruction.line
    error.instruction = None if instruction is None else str(instruction)
    raise error

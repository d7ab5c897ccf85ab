"""Local, global, class-level and cell variables; imports."""
from __future__ import annotations

from typing import Any

from ..registry import Frame, opcode
from ..sentinels import NULL, UNSET


@opcode("LOAD_FAST")
def load_fast(frame: Frame, stack: list[Any], index: int) -> None:
    value = frame.locals[index]
    if value is UNSET:
        frame.domain.unbound(frame, index)
    stack.append(value)


@opcode("STORE_FAST")
def store_fast(frame: Frame, stack: list[Any], index: int) -> None:
    frame.locals[index] = stack.pop()


@opcode("DELETE_FAST")
def delete_fast(frame: Frame, stack: list[Any], index: int) -> None:
    if frame.locals[index] is UNSET:
        frame.domain.unbound(frame, index)
    frame.locals[index] = UNSET


@opcode("LOAD_FAST_AND_CLEAR")
def load_fast_and_clear(frame: Frame, stack: list[Any], index: int) -> None:
    stack.append(frame.locals[index])  # UNSET travels over the stack and back, as NULL does in CPython
    frame.locals[index] = UNSET


@opcode("LOAD_FAST_LOAD_FAST")
def load_fast_load_fast(frame: Frame, stack: list[Any], pair: tuple[int, int]) -> None:
    load_fast(frame, stack, pair[0])
    load_fast(frame, stack, pair[1])


@opcode("STORE_FAST_LOAD_FAST")
def store_fast_load_fast(frame: Frame, stack: list[Any], pair: tuple[int, int]) -> None:
    frame.locals[pair[0]] = stack.pop()
    load_fast(frame, stack, pair[1])


@opcode("STORE_FAST_STORE_FAST")
def store_fast_store_fast(frame: Frame, stack: list[Any], pair: tuple[int, int]) -> None:
    frame.locals[pair[0]] = stack.pop()
    frame.locals[pair[1]] = stack.pop()


@opcode("LOAD_GLOBAL")
def load_global(frame: Frame, stack: list[Any], name: str) -> None:
    stack.append(frame.domain.load_global(frame, name))


@opcode("LOAD_GLOBAL:NULL_FIRST")
def load_global_null_first(frame: Frame, stack: list[Any], name: str) -> None:
    value = frame.domain.load_global(frame, name)
    stack.append(NULL)
    stack.append(value)


@opcode("LOAD_GLOBAL:NULL_AFTER")
def load_global_null_after(frame: Frame, stack: list[Any], name: str) -> None:
    stack.append(frame.domain.load_global(frame, name))
    stack.append(NULL)


@opcode("STORE_GLOBAL")
def store_global(frame: Frame, stack: list[Any], name: str) -> None:
    frame.domain.store_global(frame, name, stack.pop())


@opcode("DELETE_GLOBAL")
def delete_global(frame: Frame, stack: list[Any], name: str) -> None:
    frame.domain.delete_global(frame, name)


@opcode("LOAD_NAME")
def load_name(frame: Frame, stack: list[Any], name: str) -> None:
    stack.append(frame.domain.load_name(frame, name))


@opcode("STORE_NAME")
def store_name(frame: Frame, stack: list[Any], name: str) -> None:
    frame.domain.store_name(frame, name, stack.pop())


@opcode("DELETE_NAME")
def delete_name(frame: Frame, stack: list[Any], name: str) -> None:
    frame.domain.delete_name(frame, name)


@opcode("LOAD_LOCALS")
def load_locals(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.append(frame.domain.load_locals(frame))


@opcode("LOAD_FROM_DICT_OR_GLOBALS")
def load_from_dict_or_globals(frame: Frame, stack: list[Any], name: str) -> None:
    stack.append(frame.domain.load_from_mapping(frame, stack.pop(), name))


@opcode("LOAD_FROM_DICT_OR_DEREF")
def load_from_dict_or_deref(frame: Frame, stack: list[Any], index: int) -> None:
    mapping = stack.pop()
    value = frame.domain.look_up(mapping, frame.program.localsplus[index])
    load_deref(frame, stack, index) if value is UNSET else stack.append(value)


@opcode("LOAD_CLASSDEREF")
def load_classderef(frame: Frame, stack: list[Any], index: int) -> None:
    stack.append(frame.names)
    load_from_dict_or_deref(frame, stack, index)


@opcode("MAKE_CELL")
def make_cell(frame: Frame, stack: list[Any], index: int) -> None:
    frame.locals[index] = frame.domain.make_cell(frame.locals[index])


@opcode("COPY_FREE_VARS")
def copy_free_vars(frame: Frame, stack: list[Any], count: int) -> None:
    frame.locals[len(frame.locals) - count :] = frame.closure


@opcode("LOAD_CLOSURE")
def load_closure(frame: Frame, stack: list[Any], index: int) -> None:
    stack.append(frame.locals[index])


@opcode("LOAD_DEREF")
def load_deref(frame: Frame, stack: list[Any], index: int) -> None:
    value = frame.domain.load_cell(frame.locals[index])
    if value is UNSET:
        frame.domain.unbound(frame, index)
    stack.append(value)


@opcode("STORE_DEREF")
def store_deref(frame: Frame, stack: list[Any], index: int) -> None:
    frame.domain.store_cell(frame.locals[index], stack.pop())


@opcode("DELETE_DEREF")
def delete_deref(frame: Frame, stack: list[Any], index: int) -> None:
    if frame.domain.load_cell(frame.locals[index]) is UNSET:
        frame.domain.unbound(frame, index)
    frame.domain.delete_cell(frame.locals[index])


@opcode("IMPORT_NAME")
def import_name(frame: Frame, stack: list[Any], name: str) -> None:
    fromlist = stack.pop()
    stack[-1] = frame.domain.import_name(frame, name, fromlist, stack[-1])


@opcode("IMPORT_NAME:MAYBE_LAZY")
def import_name_maybe_lazy(frame: Frame, stack: list[Any], operand: tuple[str, bool]) -> None:
    fromlist = stack.pop()
    stack[-1] = frame.domain.import_lazily(frame, operand[0], fromlist, stack[-1], operand[1])


@opcode("IMPORT_FROM:MAYBE_LAZY")
def import_from_maybe_lazy(frame: Frame, stack: list[Any], name: str) -> None:
    stack.append(frame.domain.import_from_lazy(frame, stack[-1], name))


@opcode("IMPORT_FROM")
def import_from(frame: Frame, stack: list[Any], name: str) -> None:
    stack.append(frame.domain.import_from(stack[-1], name))


@opcode("IMPORT_STAR")
def import_star(frame: Frame, stack: list[Any], operand: Any) -> None:
    frame.domain.import_star(frame, stack.pop())

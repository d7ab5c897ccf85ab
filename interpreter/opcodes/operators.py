"""Unary, binary and comparison operators, attributes and items."""
from __future__ import annotations

from typing import Any

from ..frame import Frame
from ..registry import opcode
from ..sentinels import NULL


@opcode("UNARY_NEGATIVE")
def unary_negative(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.unary("-", stack[-1])


@opcode("UNARY_POSITIVE")
def unary_positive(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.unary("+", stack[-1])


@opcode("UNARY_INVERT")
def unary_invert(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.unary("~", stack[-1])


@opcode("UNARY_NOT")
def unary_not(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.unary("not", stack[-1])


@opcode("TO_BOOL")
def to_bool(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.truth(stack[-1])


@opcode("BINARY_OP")
def binary_op(frame: Frame, stack: list[Any], op: str) -> None:
    right = stack.pop()
    stack[-1] = frame.domain.binary(op, stack[-1], right)


@opcode("COMPARE_OP")
def compare_op(frame: Frame, stack: list[Any], op: str) -> None:
    right = stack.pop()
    stack[-1] = frame.domain.compare(op, stack[-1], right)


@opcode("COMPARE_OP:BOOL")
def compare_op_bool(frame: Frame, stack: list[Any], op: str) -> None:
    right = stack.pop()
    stack[-1] = frame.domain.truth(frame.domain.compare(op, stack[-1], right))


@opcode("IS_OP")
def is_op(frame: Frame, stack: list[Any], negate: bool) -> None:
    right = stack.pop()
    stack[-1] = frame.domain.is_same(stack[-1], right) is not negate


@opcode("CONTAINS_OP")
def contains_op(frame: Frame, stack: list[Any], negate: bool) -> None:
    container = stack.pop()
    found = frame.domain.contains(stack[-1], container)
    stack[-1] = frame.domain.unary("not", found) if negate else found


@opcode("BINARY_SUBSCR")
def binary_subscr(frame: Frame, stack: list[Any], operand: Any) -> None:
    key = stack.pop()
    stack[-1] = frame.domain.get_item(stack[-1], key)


@opcode("STORE_SUBSCR")
def store_subscr(frame: Frame, stack: list[Any], operand: Any) -> None:
    key = stack.pop()
    container = stack.pop()
    frame.domain.set_item(container, key, stack.pop())


@opcode("DELETE_SUBSCR")
def delete_subscr(frame: Frame, stack: list[Any], operand: Any) -> None:
    key = stack.pop()
    frame.domain.del_item(stack.pop(), key)


@opcode("BINARY_SLICE")
def binary_slice(frame: Frame, stack: list[Any], operand: Any) -> None:
    stop = stack.pop()
    start = stack.pop()
    stack[-1] = frame.domain.get_item(stack[-1], frame.domain.make_slice(start, stop))


@opcode("STORE_SLICE")
def store_slice(frame: Frame, stack: list[Any], operand: Any) -> None:
    stop = stack.pop()
    start = stack.pop()
    container = stack.pop()
    frame.domain.set_item(container, frame.domain.make_slice(start, stop), stack.pop())


@opcode("LOAD_ATTR")
def load_attr(frame: Frame, stack: list[Any], name: str) -> None:
    stack[-1] = frame.domain.get_attr(stack[-1], name)


@opcode("STORE_ATTR")
def store_attr(frame: Frame, stack: list[Any], name: str) -> None:
    owner = stack.pop()
    frame.domain.set_attr(owner, name, stack.pop())


@opcode("DELETE_ATTR")
def delete_attr(frame: Frame, stack: list[Any], name: str) -> None:
    frame.domain.del_attr(stack.pop(), name)


@opcode("LOAD_METHOD:NULL_FIRST")
def load_method_null_first(frame: Frame, stack: list[Any], name: str) -> None:
    method, owner = frame.domain.load_method(stack[-1], name)
    if owner is NULL:
        stack[-1] = NULL
        stack.append(method)
    else:
        stack[-1] = method
        stack.append(owner)


@opcode("LOAD_METHOD:NULL_AFTER")
def load_method_null_after(frame: Frame, stack: list[Any], name: str) -> None:
    stack[-1], owner = frame.domain.load_method(stack[-1], name)
    stack.append(owner)


@opcode("LOAD_SUPER_ATTR")
def load_super_attr(frame: Frame, stack: list[Any], operand: tuple[str, bool]) -> None:
    owner = stack.pop()
    cls = stack.pop()
    stack[-1] = frame.domain.load_super_attr(frame, stack[-1], cls, owner, operand[0], operand[1])


@opcode("LOAD_SUPER_METHOD:NULL_FIRST")
def load_super_method_null_first(frame: Frame, stack: list[Any], operand: tuple[str, bool]) -> None:
    load_super_attr(frame, stack, operand)
    stack.append(stack[-1])
    stack[-2] = NULL


@opcode("LOAD_SUPER_METHOD:NULL_AFTER")
def load_super_method_null_after(frame: Frame, stack: list[Any], operand: tuple[str, bool]) -> None:
    load_super_attr(frame, stack, operand)
    stack.append(NULL)

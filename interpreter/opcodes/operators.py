"""Unary, binary and comparison operators, attributes and items."""
from __future__ import annotations

from typing import Any

from ..order import discard, replace
from ..registry import Frame, Handler, opcode
from ..sentinels import NULL


def unary(op: str) -> Handler:
    def run(frame: Frame, stack: list[Any], operand: Any) -> None:
        stack[-1] = frame.domain.unary(op, stack[-1])

    return run


for _name, _op in (("NEGATIVE", "-"), ("POSITIVE", "+"), ("INVERT", "~"), ("NOT", "not")):
    opcode(f"UNARY_{_name}")(unary(_op))


@opcode("TO_BOOL")
def to_bool(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.truth(stack[-1])


@opcode("BINARY_OP", operands=2)
def binary_op(frame: Frame, stack: list[Any], op: str) -> None:
    replace(stack, 2, frame.domain.binary(op, stack[-2], stack[-1]))


@opcode("COMPARE_OP", operands=2)
def compare_op(frame: Frame, stack: list[Any], op: str) -> None:
    replace(stack, 2, frame.domain.compare(op, stack[-2], stack[-1]))


@opcode("COMPARE_OP:BOOL", operands=2)
def compare_op_bool(frame: Frame, stack: list[Any], op: str) -> None:
    compare_op(frame, stack, op)
    stack[-1] = frame.domain.truth(stack[-1])


@opcode("IS_OP", operands=2)
def is_op(frame: Frame, stack: list[Any], negate: bool) -> None:
    replace(stack, 2, frame.domain.is_same(stack[-2], stack[-1]) is not negate)


@opcode("CONTAINS_OP", operands=2)
def contains_op(frame: Frame, stack: list[Any], negate: bool) -> None:
    found = frame.domain.contains(stack[-2], stack[-1])
    replace(stack, 2, frame.domain.unary("not", found) if negate else found)


@opcode("BINARY_SUBSCR", operands=2)
def binary_subscr(frame: Frame, stack: list[Any], operand: Any) -> None:
    replace(stack, 2, frame.domain.get_item(stack[-2], stack[-1]))


@opcode("STORE_SUBSCR", operands=3)
def store_subscr(frame: Frame, stack: list[Any], operand: Any) -> None:
    frame.domain.set_item(stack[-2], stack[-1], stack[-3])
    discard(stack, 3)


@opcode("DELETE_SUBSCR", operands=2)
def delete_subscr(frame: Frame, stack: list[Any], operand: Any) -> None:
    frame.domain.del_item(stack[-2], stack[-1])
    discard(stack, 2)


@opcode("BINARY_SLICE")
def binary_slice(frame: Frame, stack: list[Any], operand: Any) -> None:
    stop = stack.pop()
    stack[-1] = frame.domain.make_slice(stack[-1], stop)
    del stop  # the slice alone has it
    value = frame.domain.get_item(stack[-2], stack[-1])
    del stack[-1]
    stack[-1] = value


@opcode("BINARY_SLICE:ENDS_APART")
def binary_slice_ends_apart(frame: Frame, stack: list[Any], operand: Any) -> None:
    if type(stack[-3]) not in (list, tuple, str):
        binary_slice(frame, stack, operand)
    else:
        replace(stack, 3, frame.domain.get_item(stack[-3], frame.domain.make_slice(stack[-2], stack[-1])))


@opcode("STORE_SLICE", operands=3)
def store_slice(frame: Frame, stack: list[Any], operand: Any) -> None:
    stop = stack.pop()
    stack.insert(-2, frame.domain.make_slice(stack.pop(), stop))  # it dies first, then the value
    del stop
    frame.domain.set_item(stack[-1], stack[-3], stack[-2])
    discard(stack, 3)


@opcode("STORE_SLICE:TOPMOST", operands=3)
def store_slice_topmost(frame: Frame, stack: list[Any], operand: Any) -> None:
    stop = stack.pop()
    stack[-1] = frame.domain.make_slice(stack[-1], stop)
    del stop
    store_subscr(frame, stack, operand)


@opcode("LOAD_ATTR")
def load_attr(frame: Frame, stack: list[Any], name: str) -> None:
    stack[-1] = frame.domain.get_attr(stack[-1], name)


@opcode("STORE_ATTR", operands=2)
def store_attr(frame: Frame, stack: list[Any], name: str) -> None:
    frame.domain.set_attr(stack[-1], name, stack[-2])
    discard(stack, 2)


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


@opcode("LOAD_SUPER_ATTR", operands=3)
def load_super_attr(frame: Frame, stack: list[Any], operand: tuple[str, bool]) -> None:
    name, with_arguments = operand
    replace(stack, 3, frame.domain.load_super_attr(frame, stack[-3], stack[-2], stack[-1], name, with_arguments))


@opcode("LOAD_SUPER_METHOD:NULL_FIRST")
def load_super_method_null_first(frame: Frame, stack: list[Any], operand: tuple[str, bool]) -> None:
    load_super_attr(frame, stack, operand)
    stack.append(stack[-1])
    stack[-2] = NULL


@opcode("LOAD_SUPER_METHOD:NULL_AFTER")
def load_super_method_null_after(frame: Frame, stack: list[Any], operand: tuple[str, bool]) -> None:
    load_super_attr(frame, stack, operand)
    stack.append(NULL)

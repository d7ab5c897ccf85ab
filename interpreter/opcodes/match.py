"""Structural pattern matching (PEP 634)."""
from __future__ import annotations

from typing import Any

from ..registry import Frame, opcode


@opcode("MATCH_MAPPING")
def match_mapping(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.append(frame.domain.match_mapping(stack[-1]))


@opcode("MATCH_SEQUENCE")
def match_sequence(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.append(frame.domain.match_sequence(stack[-1]))


@opcode("MATCH_KEYS")
def match_keys(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.append(frame.domain.match_keys(stack[-2], stack[-1]))


@opcode("MATCH_CLASS")
def match_class(frame: Frame, stack: list[Any], count: int) -> None:
    names = stack.pop()
    cls = stack.pop()
    stack[-1] = frame.domain.match_class(stack[-1], cls, count, names)

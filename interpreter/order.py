"""In which order the operands of an instruction, the arguments of C code and the variables of a frame die.

Up to 3.13 the deepest operand and the first variable go first. From 3.14 the topmost and the last do (the C code that
Tools/cases_generator writes, and _PyFrame_ClearLocals), which is also how a list drops its items.
"""
from __future__ import annotations

import sys
from typing import Any

LAST_FIRST = sys.version_info >= (3, 14)

if LAST_FIRST:

    def replace(stack: list[Any], count: int, value: Any) -> None:
        """The topmost `count` operands die; the value that the instruction makes stands in their place."""
        del stack[1 - count :]
        stack[-1] = value

    def discard(stack: list[Any], count: int) -> None:
        """The topmost `count` operands die."""
        del stack[-count:]

    def clear(values: list[Any]) -> None:
        """What the list holds dies."""
        values.clear()

    def end_call(stack: list[Any], args: list[Any], result: Any) -> None:
        """What C code was given dies, and the callable on the stack; of a function's, the frame took the arguments."""
        if args:
            args.clear()
        stack[-1] = result

else:

    def replace(stack: list[Any], count: int, value: Any) -> None:
        stack[-count] = value
        for index in range(1 - count, -1):
            stack[index] = None
        del stack[1 - count :]

    def discard(stack: list[Any], count: int) -> None:
        for index in range(-count, -1):
            stack[index] = None
        del stack[-count:]

    def clear(values: list[Any]) -> None:
        values.reverse()
        values.clear()

    def end_call(stack: list[Any], args: list[Any], result: Any) -> None:
        stack[-1] = result
        if args:
            args.reverse()
            args.clear()

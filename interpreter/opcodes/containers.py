"""Building, filling and unpacking containers and strings."""
from __future__ import annotations

from typing import Any

from ..order import clear, discard, replace
from ..registry import Frame, Handler, opcode
from ..sentinels import NULL


def take(stack: list[Any], count: int) -> list[Any]:
    """Pop the topmost `count` values, in stack order."""
    if not count:
        return []
    items = stack[-count:]
    del stack[-count:]
    return items


def build(name: str) -> Handler:
    def run(frame: Frame, stack: list[Any], count: int) -> None:
        items = take(stack, count)
        stack.append(getattr(frame.domain, name)(items))

    return run


for _name in ("build_tuple", "build_list", "build_set", "build_string"):
    opcode(_name.upper())(build(_name))


@opcode("BUILD_MAP", operands=lambda count: 2 * count)
def build_map(frame: Frame, stack: list[Any], count: int) -> None:
    items = stack[len(stack) - 2 * count :]
    made = frame.domain.build_map(list(zip(items[::2], items[1::2], strict=True)))
    del stack[len(stack) - 2 * count :]
    clear(items)  # of equal keys the later ones die here
    stack.append(made)


@opcode("BUILD_CONST_KEY_MAP")
def build_const_key_map(frame: Frame, stack: list[Any], count: int) -> None:
    keys = stack.pop()
    items = take(stack, count)
    stack.append(frame.domain.build_map(list(zip(keys, items, strict=True))))


@opcode("BUILD_SLICE")
def build_slice(frame: Frame, stack: list[Any], count: int) -> None:
    parts = take(stack, count)
    stack.append(frame.domain.make_slice(*parts))


@opcode("FORMAT_VALUE", operands=lambda operand: 1 + operand[1])
def format_value(frame: Frame, stack: list[Any], operand: tuple[str, bool]) -> None:
    conversion, has_spec = operand
    if not has_spec:
        stack[-1] = frame.domain.format_value(stack[-1], conversion, "")
    else:
        replace(stack, 2, frame.domain.format_value(stack[-2], conversion, stack[-1]))


@opcode("FORMAT_SIMPLE")
def format_simple(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.format_value(stack[-1], "", "")


@opcode("FORMAT_WITH_SPEC", operands=2)
def format_with_spec(frame: Frame, stack: list[Any], operand: Any) -> None:
    replace(stack, 2, frame.domain.format_value(stack[-2], "", stack[-1]))


@opcode("BUILD_INTERPOLATION", operands=lambda operand: 2 + operand[1])
def build_interpolation(frame: Frame, stack: list[Any], operand: tuple[str | None, bool]) -> None:
    conversion, has_spec = operand
    parts = take(stack, 2 + has_spec)
    stack.append(frame.domain.build_interpolation(parts[0], parts[1], conversion, parts[2] if has_spec else ""))


@opcode("BUILD_TEMPLATE")
def build_template(frame: Frame, stack: list[Any], operand: Any) -> None:
    interpolations = stack.pop()
    stack[-1] = frame.domain.build_template(stack[-1], interpolations)


@opcode("CONVERT_VALUE")
def convert_value(frame: Frame, stack: list[Any], conversion: str) -> None:
    stack[-1] = frame.domain.convert_value(stack[-1], conversion)


@opcode("LIST_TO_TUPLE")
def list_to_tuple(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.list_to_tuple(stack[-1])


def fill(name: str) -> Handler:
    """Of a container that stands deeper on the stack: the topmost value, or what it holds, comes into it."""

    def run(frame: Frame, stack: list[Any], depth: int) -> None:
        value = stack.pop()
        getattr(frame.domain, name)(stack[-depth], value)

    return run


for _name in ("list_append", "list_extend", "set_add", "set_update", "dict_update"):
    opcode(_name.upper())(fill(_name))


@opcode("MAP_ADD", operands=2)
def map_add(frame: Frame, stack: list[Any], depth: int) -> None:
    frame.domain.map_add(stack[-depth - 2], stack[-2], stack[-1])
    discard(stack, 2)


@opcode("DICT_MERGE")
def dict_merge(frame: Frame, stack: list[Any], depth: int) -> None:
    other = stack.pop()
    # below the dict stand the positional arguments and the callable (3.13: with a NULL between the two)
    function = stack[-depth - 2]
    if function is NULL:
        function = stack[-depth - 3]
    frame.domain.dict_merge(stack[-depth], other, function)


@opcode("UNPACK_SEQUENCE")
def unpack_sequence(frame: Frame, stack: list[Any], count: int) -> None:
    items = frame.domain.unpack(stack[-1], count)
    stack[-1:] = reversed(items)


@opcode("UNPACK_EX")
def unpack_ex(frame: Frame, stack: list[Any], counts: tuple[int, int]) -> None:
    items = frame.domain.unpack_ex(stack[-1], counts[0], counts[1])
    stack[-1:] = reversed(items)


@opcode("GET_LEN")
def get_len(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.append(frame.domain.length(stack[-1]))

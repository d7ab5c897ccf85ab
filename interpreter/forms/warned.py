"""warnings.warn: a warning is of the interpreted frame's file and line, and its registry is in that frame's globals.

What C code itself warns of names the machine's file: there is no native frame of the program's for it to find.
"""
from __future__ import annotations

import _warnings
import sys
from collections.abc import Iterator
from typing import Any

from ..domain.core import is_a, is_class, is_subtype
from ..frame import opened
from .registry import form


def given(
    message: Any, category: Any = None, stacklevel: Any = 1, source: Any = None, *, skip_file_prefixes: Any = ()
) -> tuple[Any, Any, Any, Any, Any]:
    """_warnings.warn's parameters; those after `*` from 3.12."""
    return message, category, stacklevel, source, skip_file_prefixes


def places(machine: Any) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(file, line, globals) of the frames on the stack, the innermost first."""
    for frame in opened(machine.frame):
        yield frame.code.co_filename, frame.line or 0, frame.globals
    for native in machine.callers():
        yield native.f_code.co_filename, native.f_lineno, native.f_globals


def is_internal(file: str, skipped: tuple[str, ...] = ()) -> bool:
    return "importlib" in file and "_bootstrap" in file or file.startswith(skipped)


@form(_warnings.warn)
def warn(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Python/_warnings.c setup_context and do_warn; C itself refuses arguments and writes of a stack that ends."""
    if sys.version_info < (3, 12) and "skip_file_prefixes" in kwargs:
        return domain.native(_warnings.warn, *args, **kwargs)
    try:
        message, category, level, source, skipped = given(*args, **kwargs)
    except TypeError:
        return domain.native(_warnings.warn, *args, **kwargs)
    kind = type(message) if is_a(message, Warning) else UserWarning if category is None else category
    if not (is_class(kind) and is_subtype(kind, Warning)) or type(level) is not int:
        return domain.native(_warnings.warn, *args, **kwargs)
    if type(skipped) is not tuple or not all(type(prefix) is str for prefix in skipped):
        return domain.native(_warnings.warn, *args, **kwargs)
    if skipped:
        level = max(2, level)
    stack = list(places(domain.machine))
    if stack and level > 1 and not is_internal(stack[0][0]):
        stack[1:] = [place for place in stack[1:] if not is_internal(place[0], skipped)]
    if len(stack) < level:
        return domain.native(_warnings.warn, *args, **kwargs)
    file, line, names = stack[max(level, 1) - 1]
    registry = dict.setdefault(names, "__warningregistry__", {})
    module = dict.get(names, "__name__", None)
    if not is_a(module, str):
        module = "<string>"
    return domain.native(_warnings.warn_explicit, message, kind, file, line, module, registry, None, source)

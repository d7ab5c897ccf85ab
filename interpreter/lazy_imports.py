"""Lazy imports (PEP 810, from 3.15): which import is one, and what stands for the module until it is asked for."""
from __future__ import annotations

import dis
import sys
import types
from collections.abc import Sequence
from typing import Any

from .tables.caches import CACHES

LAZY_FLAG = 1  # of IMPORT_NAME's argument
LAZY: Any = getattr(types, "LazyImportType", None)  # None is no value's type
DICT_GET, DICT_SET = dict.get, dict.__setitem__


def is_lazy(globals_: Any, name: str, level: int, asked: bool) -> bool:
    """Whether an import statement that may be lazy is (`asked`: it says so): _PyEval_LazyImportName, ceval.c."""
    mode = sys.get_lazy_imports()  # type: ignore[attr-defined]
    if mode == "none":
        return False
    if asked or mode == "all":
        return True
    modules = globals_.get("__lazy_modules__")
    if modules is None:
        return False
    if level:
        from importlib.util import resolve_name

        name = resolve_name("." * level + name, globals_.get("__package__"))
    return name in modules


def resolve_binding(namespace: Any, name: str, value: Any) -> Any:
    """The module or attribute that `value` stands for; where `name` is bound to `value` still, it is bound to that."""
    found = value.resolve()
    if isinstance(namespace, dict) and DICT_GET(namespace, name) is value:
        DICT_SET(namespace, name, found)
    return found


def import_name_lazily(name: str, globals_: Any, names: Any, fromlist: Any, level: int) -> Any:
    """The placeholder of a lazy import. `__lazy_import__` asks which frame calls it, so the instruction itself runs."""
    steps = ("RESUME", 0), ("LOAD_CONST", 0), ("LOAD_CONST", 1), ("IMPORT_NAME", LAZY_FLAG), ("RETURN_VALUE", 0)
    return eval(module_code(steps, (level, fromlist), name), globals_, names)


def import_from_lazy(placeholder: Any, name: str, globals_: Any) -> Any:
    """What `lazy from module import name` binds: Python can make no other placeholder, so its own instruction runs."""
    steps = ("RESUME", 0), ("LOAD_CONST", 0), ("IMPORT_FROM", 0), ("SWAP", 2), ("POP_TOP", 0), ("RETURN_VALUE", 0)
    return eval(module_code(steps, (placeholder,), name), globals_)


def module_code(steps: Sequence[tuple[str, int]], constants: tuple[Any, ...], name: str) -> types.CodeType:
    code = b""
    for opname, arg in steps:
        op = dis.opmap[opname]
        code += bytes((op, arg)) + bytes(2 * CACHES[op])
    template = compile("", "<lazy import>", "exec")
    return template.replace(co_code=code, co_consts=constants, co_names=(name,), co_stacksize=2)

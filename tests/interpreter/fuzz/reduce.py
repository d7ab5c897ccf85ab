"""Makes a differing program small: statements and expressions are taken out as long as it still differs.

Hypothesis shrinks the choices that a program is made of; this works on the program's syntax tree, where no choice
shifts another, and so also on programs made from a seed.
"""

from __future__ import annotations

import ast
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

Place = tuple[ast.AST, str, int]  # a node, its field that holds a list, an index there (-1: the field itself)


def reduced(source: str, differs: Callable[[str], bool], most_tries: int = 3000) -> str:
    """A smaller program for which `differs` is true as well; `source` itself where nothing can be left out."""
    tries = [most_tries]

    def keeps(tree: ast.AST) -> bool:
        try:
            text = ast.unparse(ast.fix_missing_locations(tree))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(text, "<program>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError):
            return False
        tries[0] -= 1
        return differs(text)

    tree: Any = ast.parse(source)
    if not keeps(tree):
        return source
    while tries[0] > 0:
        before = ast.dump(tree)
        tree = without_statements(tree, keeps, tries)
        tree = simplified(tree, keeps, tries)
        if ast.dump(tree) == before:
            break
    return ast.unparse(tree)


def without_statements(tree: Any, keeps: Callable[[Any], bool], tries: list[int]) -> Any:
    """Leave out runs of statements, long ones first, and put the bodies of compound statements in their place."""
    number = 0
    while tries[0] > 0:
        places = list(statement_lists(tree))
        if number >= len(places):
            return tree
        node, field = places[number]
        size = max(1, len(getattr(node, field)))
        while size and tries[0] > 0:
            start = 0
            while start < len(getattr(node, field)) and tries[0] > 0:
                body = getattr(node, field)
                for instead in replacements(body[start : start + size]):
                    setattr(node, field, [*body[:start], *instead, *body[start + size :]] or empty(node, field))
                    if keeps(tree):
                        break
                    setattr(node, field, body)
                else:
                    start += size
                    continue
                if not instead and getattr(node, field) and isinstance(getattr(node, field)[0], ast.Pass):
                    start += size
            size //= 2
        number += 1
    return tree


def empty(node: ast.AST, field: str) -> list[ast.stmt]:
    return [ast.Pass()] if field == "body" and not isinstance(node, ast.Module) else []


def replacements(run: list[Any]) -> Iterator[list[Any]]:
    """Nothing; and for one compound statement what it holds."""
    if not (len(run) == 1 and isinstance(run[0], ast.Pass)):
        yield []
    if len(run) == 1:
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(run[0], field, None)
            if inner and not isinstance(run[0], ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield inner
        for handler in getattr(run[0], "handlers", ()):
            yield handler.body


def statement_lists(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody", "handlers", "decorator_list", "cases"):
            if isinstance(getattr(node, field, None), list):
                yield node, field


def simplified(tree: Any, keeps: Callable[[Any], bool], tries: list[int]) -> Any:
    """Put parts of expressions, or constants, in the place of expressions."""
    number = 0
    while tries[0] > 0:
        places = list(expressions(tree))
        if number >= len(places):
            return tree
        node, field, index = places[number]
        old = getattr(node, field) if index < 0 else getattr(node, field)[index]
        for new in simpler(old):
            put(node, field, index, new)
            if keeps(tree):
                break
            put(node, field, index, old)
        number += 1
    return tree


def put(node: ast.AST, field: str, index: int, value: Any) -> None:
    if index < 0:
        setattr(node, field, value)
    else:
        getattr(node, field)[index] = value


def expressions(tree: ast.AST) -> Iterator[Place]:
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                yield node, field, -1
            elif isinstance(value, list):
                yield from ((node, field, index) for index, inner in enumerate(value) if isinstance(inner, ast.expr))


def simpler(old: ast.expr) -> Iterator[ast.expr]:
    if isinstance(old, ast.Constant | ast.Name):
        return
    yield ast.Constant(0)
    for child in ast.iter_child_nodes(old):
        if isinstance(child, ast.expr) and not isinstance(child, ast.Starred):
            yield copy.deepcopy(child)

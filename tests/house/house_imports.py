"""Who imports whom in the four packages, read from their source: imports in functions and for type checkers too."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"capture": "moebius", "interpreter": "moebius.interpreter", "lowering": "moebius.lowering",
           "kernels": "moebius.kernels"}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def imported(name: str) -> Iterator[str]:
    """The modules of ours that a module imports, wherever in it. A name that a package's __init__ resolves by itself is
    not looked through."""
    package = name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            while target and target not in modules():
                target = target.rpartition(".")[0]
            if target and target != name:
                yield target


@cache
def graph() -> networkx.DiGraph:
    made = networkx.DiGraph()
    made.add_nodes_from(modules())
    made.add_edges_from((name, other) for name in modules() for other in imported(name))
    return made


def circles() -> list[set[str]]:
    """Sets of modules of which each imports each other, by way of others."""
    return [found for found in networkx.strongly_connected_components(graph()) if len(found) > 1]


def questions(rooms: Iterable[str]) -> int:
    """How often code of these rooms of capture/ asks a value itself of what kind it is, with ``isinstance``."""
    count = 0
    for name in modules():
        parts = name.split(".")
        if len(parts) > 1 and parts[0] == "moebius" and parts[1] in rooms:
            calls = (node.func for node in ast.walk(tree(name)) if isinstance(node, ast.Call))
            count += sum(isinstance(function, ast.Name) and function.id == "isinstance" for function in calls)
    return count


def chains() -> int:
    """How often code reaches through three objects: ``self.a.b.c``."""
    count = 0
    for name in modules():
        for node in ast.walk(tree(name)):
            depth, inner = 0, node
            while isinstance(inner, ast.Attribute):
                inner, depth = inner.value, depth + 1
            count += depth >= 3 and isinstance(inner, ast.Name) and inner.id == "self"
    return count


def factories() -> Iterator[str]:
    """Where a tensor is made whose dtype or device torch's defaults decide, which are the program's."""
    for name in modules():
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES:
                named = {keyword.arg for keyword in node.keywords}
                if None not in named and not {"dtype", "device"} <= named:
                    yield f"{name}:{node.lineno}: {ast.unparse(node)}"


FACTORIES = {f"torch.{name}" for name in (
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
)}  # fmt: skip

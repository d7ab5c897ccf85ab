"""The machine's own builtins: a program may replace `builtins.len`, and the machine must not notice.

A function looks builtins up in its module's `__builtins__`. While the package loads, each of its modules gets a copy
of the builtins there before its body runs. A library module that the machine runs in Python has a copy of its own.
"""
from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any

PRIVATE = dict(vars(builtins))
ORIGINAL: Any = SimpleNamespace(**PRIVATE)  # the same as attributes: the module's own may be replaced as well


def private_copy(name: str) -> Any:
    """A second copy of a library module, with private builtins."""
    spec = find_spec(name)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    module.__dict__["__builtins__"] = PRIVATE
    spec.loader.exec_module(module)
    return module


class PrivateLoader:
    """A module's own loader, but for the builtins that the module's code finds."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self.loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = PRIVATE
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)


class Finder:
    """Finds the modules below `package`, with private builtins."""

    def __init__(self, package: str) -> None:
        self.prefix = package + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self.prefix):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = PrivateLoader(spec.loader)  # type: ignore[assignment]
        return spec


@contextmanager
def private_builtins(package: str) -> Iterator[None]:
    """Modules of `package` that are imported in the block get private builtins."""
    finder: Any = Finder(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)

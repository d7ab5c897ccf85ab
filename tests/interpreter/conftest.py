"""Makes `moebius.interpreter` importable from the checkout where moebius is not installed (it needs no build and no torch)."""
from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path


def provide_interpreter() -> None:
    if importlib.util.find_spec("moebius") is not None and importlib.util.find_spec("torch") is not None:
        return
    for name in ("moebius", "moebius.interpreter"):
        sys.modules.pop(name, None)
    package = types.ModuleType("moebius")
    package.__path__ = []
    sys.modules["moebius"] = package
    folder = Path(__file__).resolve().parents[2] / "interpreter"
    spec = importlib.util.spec_from_file_location(
        "moebius.interpreter", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["moebius.interpreter"] = module
    spec.loader.exec_module(module)
    package.interpreter = module


provide_interpreter()

"""Makes `moebius.interpreter` importable from the checkout where moebius is not installed (no build, no torch)."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

INTERPRETER = Path(__file__).resolve().parents[3] / "interpreter"


def provide_interpreter() -> None:
    if "moebius.interpreter" in sys.modules:  # a process runs several batches
        return
    alone = os.environ.get("MOEBIUS_INTERPRETER_ALONE")
    if not alone and importlib.util.find_spec("moebius") is not None and importlib.util.find_spec("torch") is not None:
        return
    for name in ("moebius", "moebius.interpreter"):
        sys.modules.pop(name, None)
    package = types.ModuleType("moebius")
    package.__path__ = []
    sys.modules["moebius"] = package
    spec = importlib.util.spec_from_file_location(
        "moebius.interpreter", INTERPRETER / "__init__.py", submodule_search_locations=[str(INTERPRETER)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["moebius.interpreter"] = module
    spec.loader.exec_module(module)
    package.interpreter = module  # type: ignore[attr-defined]

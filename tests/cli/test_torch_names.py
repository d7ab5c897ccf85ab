"""The private names of torch's: each is there, in the table, and used in the files that exist for them alone."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest
import torch

from moebius.torch_facts.torch_names import EXISTS_IN, NAMES, ONLY_SOME, missing, resolve
from moebius.versions import TORCHES, numbers

ROOT = Path(__file__).resolve().parents[2]
ABOUT = ("private", "fakes", "pointwise", "sizes", "warnings", "scripts", "memory", "known", "relations", "flags")
ALLOWED = [ROOT / "capture" / "torch_facts" / f"torch_{name}.py" for name in ABOUT]
ALLOWED += [ROOT / "lowering" / "torch_private.py", ROOT / "lowering" / "distribution" / "torch_private.py"]
ROOMS = ("capture", "lowering", "kernels", "interpreter")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if path not in ALLOWED]
DOCUMENTED = {"torch._check", "torch.fx.passes", "torch.fx.experimental"}  # public, or a package of public modules
WRITTEN = {"_is_param", "_stack_trace"}  # attributes that fakes and their mode are given
OURS = {"_print_Symbol", "_print_ToFloat", "_print_Identity", "_helper_sqrt"}


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` of an expression that is one, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each dotted name of torch's with a private part, and each private attribute of anything else."""
    called = {}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                name = called[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if any(map(is_private, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and any(map(is_private, alias.name.split("."))):
                    yield node.lineno, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and (name := dotted(node)):
            first, _, rest = name.partition(".")
            whole = f"{called[first]}.{rest}" if first in called else name
            first, second, *_ = f"{whole}.".split(".")
            if first == "torch" and second != "ops" and any(map(is_private, whole.split("."))):
                yield node.lineno, whole


def attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each private attribute, of whatever object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr


def is_in_table(name: str) -> bool:
    """Whether a name, or what it is a part or a public attribute of, is a row."""
    parts = name.split(".")
    last = max(i for i, part in enumerate(parts) if is_private(part))
    return any(".".join(parts[:end]) in NAMES for end in range(last + 1, len(parts) + 1)) or any(
        row.startswith(f"{name}.") for row in NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there(name: str) -> None:
    oldest, newest = EXISTS_IN.get(name, (min(TORCHES), max(TORCHES)))
    expected = oldest <= numbers(torch.__version__) <= newest
    try:
        found = resolve(name) is not None or True
    except (AttributeError, ImportError):
        found = False
    assert found == expected or (name in ONLY_SOME and not found)


def test_nothing_is_missing_on_a_tested_torch() -> None:
    assert missing() == []


@pytest.mark.parametrize("path", ALLOWED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_use_is_in_the_table(path: Path) -> None:
    tree = ast.parse(path.read_text())
    found = [(line, name) for line, name in uses(tree) if name not in DOCUMENTED]
    few = ("pointwise", "sizes", "warnings", "memory", "relations", "flags")
    assert len(found) > 3 or path.stem.removeprefix("torch_") in few
    assert [(line, name) for line, name in found if not is_in_table(name)] == []
    known = {part for name in NAMES for part in name.split(".")} | WRITTEN | OURS | {"_check"}
    assert [(line, name) for line, name in attributes(tree) if name not in known] == []


def test_each_row_is_used() -> None:
    text = "\n".join(path.read_text() for path in ALLOWED)
    for name in NAMES:
        last = name.rpartition(".")[2]
        by_parts = "sdp" in last or last == "_ParameterMeta"  # names that are put together, or asked for by torch
        assert by_parts or last in text, f"{name} is not used any more"


def test_no_other_file_reaches_into_torchs_private_names() -> None:
    of_objects = {name.rpartition(".")[2] for name in NAMES} - {"_print", "_base"}
    found = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        found += [(path, line, name) for line, name in uses(tree) if name not in DOCUMENTED]
        found += [(path, line, name) for line, name in attributes(tree) if name in of_objects]
    assert found == [] and len(FILES) > 300


@pytest.fixture(scope="module")
def torch_without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """What is seen where torch lacks a name."""
    environment = {**os.environ, "MOEBIUS_CACHE": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "tests" / "support" / "torch_without.py"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=environment) as process:
        given, said = process.stdin, process.stdout
        assert given is not None and said is not None

        def ask(name: str) -> dict[str, Any]:
            print(name, file=given, flush=True)
            found: dict[str, Any] = json.loads(said.readline())
            assert "failed" not in found, found
            return found

        yield ask


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONLY_SOME | EXISTS_IN.keys()])
def test_what_was_taken_away_is_named(name: str, torch_without: Callable[[str], dict[str, Any]]) -> None:
    """By the doctor, and by the import, or else by one warning at the first capture on a torch that was not tested."""
    found = torch_without(name)
    printed = " ".join(found["printed"].split())
    assert found["doctor"] == 1 and f"has no {name}" in printed and "pip install" in printed
    assert "moebius cannot run here: mend torch's parts" in printed
    if found["import"] is not None:
        assert found["import"].startswith("UnsupportedVersionError: torch ")
        assert f"has no {name}" in found["import"] and "pip install" in found["import"]
    else:
        (warning,) = found["warnings"]
        assert f"it has no {name}" in warning and "pip install" in warning
        assert found["right"] and found["graphs"] == 0


@pytest.mark.share(1)
@pytest.mark.parametrize("name", sorted(ONLY_SOME))
def test_what_only_some_builds_have_is_not_needed(name: str, torch_without: Callable[[str], dict[str, Any]]) -> None:
    found = torch_without(name)
    assert (found["doctor"], found["import"], found["warnings"], found["graphs"]) == (0, None, [], 2)


def test_what_has_become_something_else_is_told() -> None:
    """An import statement would say of an AttributeError that there is no ``capture``."""
    program = "import torch; torch.nn.Module._call_impl = 'of another kind'; from moebius import capture"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = run.stderr.strip().splitlines()[-1]
    assert said.startswith("moebius.errors.UnsupportedVersionError: moebius cannot be imported: AttributeError: 'str'")
    assert "has no attribute '__code__'" in said and "pip install" in said


def test_another_failure_of_the_import_is_left_as_it_is() -> None:
    program = "import sys; sys.modules['bytecode'] = None; from moebius import capture"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stderr.strip().splitlines()[-1].startswith("ModuleNotFoundError: import of bytecode halted")

"""The private names of torch's: each is there, in the table, and used in the files that exist for them alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moebius.torch_facts.torch_names import EXISTS_IN, NAMES, ONLY_SOME, missing, resolve
from moebius.versions import TORCHES, numbers

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = [ROOT / "capture" / "torch_facts" / f"torch_{name}.py" for name in ("private", "fakes", "sizes")]
ALLOWED += [ROOT / "lowering" / "torch_private.py", ROOT / "lowering" / "distribution" / "torch_private.py"]
ROOMS = ("capture", "lowering", "kernels", "interpreter")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if path not in ALLOWED]
DOCUMENTED = {"torch._check", "torch.fx.passes", "torch.fx.experimental"}  # public, or a package of public modules
WRITTEN = {"_is_param"}  # attributes that fakes are given
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
    assert len(found) > 3 or path.name == "torch_sizes.py"
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


# What is taken away -> whether moebius can be imported without it.
TAKEN = {
    "torch._C._has_torch_function": False,
    "torch._C._get_dispatch_stack_at": True,
    "torch.utils._sympy.interp.sympy_interp": False,
}
WITHOUT = """
import sys, torch, torch._dynamo, torch.fx.experimental.symbolic_shapes, torch.utils._sympy.interp
owner, _, last = {name!r}.rpartition(".")

from importlib import import_module
try:
    holder = import_module(owner)
except ImportError:
    place, _, part = owner.rpartition(".")
    holder = getattr(import_module(place), part)
delattr(holder, last)
{then}
"""


def without(name: str, then: str) -> subprocess.CompletedProcess[str]:
    """Python code that runs where torch lacks a name, in a process of its own."""
    command = [sys.executable, "-c", WITHOUT.format(name=name, then=then)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", TAKEN)
def test_doctor_names_what_was_taken_away(name: str) -> None:
    run = without(name, "from moebius.cli import main; sys.exit(main(['doctor']))")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert f"has no {name}" in " ".join(run.stdout.split()) and "pip install" in run.stdout
    assert "moebius cannot run here: mend torch's parts" in run.stdout


@pytest.mark.parametrize("name", [name for name, imports in TAKEN.items() if not imports])
def test_the_import_names_what_was_taken_away(name: str) -> None:
    run = without(name, "from moebius import capture")
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("moebius.errors.UnsupportedVersionError: torch ") and f"has no {name}, which" in last
    assert "pip install" in last


def test_another_failure_of_the_import_is_left_as_it_is() -> None:
    run = without("torch._C._has_torch_function", "torch._C._has_torch_function = 1\nimport moebius\nmoebius.no_name")
    assert run.stderr.strip().splitlines()[-1] == "AttributeError: module 'moebius' has no attribute 'no_name'"

"""What the pages of docs/ say exists: their code runs, commands, options, variables and pages are real."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moebius.cli import make_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# their code blocks, one after another, are a program
PROGRAMS = ("hugging-face", "debugging", "from-torch-compile")
# blocks that stand for a part of a program, with names that they do not define
PARTS = {"break-codes": 3, "distributed": 6, "export": 2, "kernels": 1, "precision": 1, "reading-a-report": 1}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_every_block_of_code_is_run_or_known_as_a_part() -> None:
    found = {page.stem: len(blocks(page)) for page in PAGES if blocks(page)}
    assert found.keys() == {*PROGRAMS, *PARTS}
    assert {name: count for name, count in found.items() if name in PARTS} == PARTS


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join(blocks(ROOT / f"docs/{name}.md")))
    words = [sys.executable, "-W", "error:::moebius", "page.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout and "moebius" not in done.stderr, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_python(page: Path) -> None:
    for block in blocks(page):
        compile(block, page.name, "exec")


def test_the_site_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"^\s+- (?:[^:\n]+: )?([\w-]+\.md)$", text, re.M)
    assert sorted(named) == [page.name for page in PAGES]


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index] == []


def test_the_variables_of_the_environment_are_those_that_the_code_reads() -> None:
    table = re.findall(r"^\| `(MOEBIUS_\w+)=", (ROOT / "docs/debugging.md").read_text(), re.M)
    folders = ("capture", "lowering", "kernels", "interpreter")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r"environ[^\n]*?\b(MOEBIUS_\w+)", path.read_text())}
    assert set(table) == read


def commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = (a.choices for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(choices)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    known, targets = commands(), re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    text = page.read_text()
    for command in re.findall(r"`moebius (\w+)", text):
        assert command in {*known, "COMMAND"}, command
    for target in re.findall(r"`make (\w+)", text):
        assert target in targets, target


def test_each_command_and_option_has_a_help_text() -> None:
    for name, parser in commands().items():
        assert all(action.help for action in parser._actions), name

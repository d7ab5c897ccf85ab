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
# what stands before the blocks of a page that are parts of a program, and gives the names that they do not define
MODEL = """
import os
import torch, torch.nn.functional as F
import moebius
from moebius import capture

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Parameter(torch.randn(4, 32))
        self.up, self.down = (torch.nn.Parameter(torch.randn(shape) / 8) for shape in ((4, 32, 64), (4, 64, 32)))

    def forward(self, x):
        weight, chosen = (x @ self.router.T).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(4):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, F.silu(x[token] @ self.up[e]) @ self.down[e] * weight[token, slot, None])
        return out

def step(model, optimizer, batch):
    loss = F.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

model = Experts()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(16, 32)
"""
BEFORE = {
    "break-codes": "import torch\nloss, limit, total = torch.ones(()), torch.zeros(()), 0.0\n"
    "counts, expert, token = [], 0, torch.ones(3)\n",
    "export": MODEL + """
def train_step(model, optimizer, scheduler, tokens, labels):
    loss = F.mse_loss(model(tokens), labels)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.detach()

scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
tokens, labels = batch, torch.randn(16, 32)
first_batches = [{"tokens": torch.randn(16, 32), "labels": torch.randn(16, 32)} for _ in range(4)]
""",
    "kernels": """
import torch
x_TD, gate_up_E2ND = torch.randn(8, 16), torch.randn(4, 2 * 24, 16, requires_grad=True)
down_EDN, index_TK = torch.randn(4, 16, 24), torch.randint(4, (8, 2))
weight_TK = torch.rand(8, 2)
""",
    "precision": MODEL,
    "reading-a-report": MODEL + "other = moebius.explain(step)(model, optimizer, batch)\n",
}
PARTS = {"distributed": 7}  # blocks of code for several ranks, which tests/lowering/distribution runs programs like


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_every_block_of_code_is_run_or_known_as_a_part() -> None:
    found = {page.stem: len(blocks(page)) for page in PAGES if blocks(page)}
    assert found.keys() == {*PROGRAMS, *BEFORE, *PARTS}
    assert {name: count for name, count in found.items() if name in PARTS} == PARTS


@pytest.mark.parametrize("name", [*PROGRAMS, *BEFORE])
def test_the_code_of_a_page_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join([BEFORE.get(name, ""), *blocks(ROOT / f"docs/{name}.md")]))
    words = [sys.executable, "-W", "error:::moebius", "page.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert (done.stdout or name in BEFORE) and "moebius" not in done.stderr, done.stderr


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

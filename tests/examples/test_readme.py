"""The README's example is real: its code runs, and prints what the README says it prints, times aside."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIME = re.compile(r"\d+(\.\d+)? ?(ns|µs|ms|s)\b")
# the README has those of 3.11
COUNT = re.compile(r"\d+ (instructions|guards)" if sys.version_info >= (3, 12) else "(?!)")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)


def words(text: str) -> list[str]:
    """The text without times, rules and spacing: these vary from run to run, or with them."""
    return TIME.sub("TIME", COUNT.sub(lambda found: f"N {found[1]}", re.sub("─+", "", text))).split()


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(blocks("python")[0])
    done = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    shown = blocks("text")[0]
    assert len(shown.splitlines()) > 5
    printed, said = words(done.stdout), words(shown)
    # the README may end early, and says so with an ellipsis
    if said[-1] == "…":
        said = said[:-1]
        printed = printed[: len(said)]
    assert printed == said


def test_the_readme_names_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in (ROOT / "README.md").read_text()
        assert re.search(rf"^{target}:", makefile, re.M)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", re.sub(r"`[^`]*`", "", page.read_text())):
            assert (page.parent / link).exists(), f"{page.name}: {link}"

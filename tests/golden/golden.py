"""The golden texts: what became of some 180 captured programs, to show that a change of the code changed nothing there.

Kept is one line a program, with a digest of each of its texts. A difference names the program and which texts:
``--out FOLDER`` at two commits writes them whole, for diff. ``--keep`` writes the lines of what is now.

    python tests/golden/golden.py --keep
    python tests/golden/golden.py --out build/golden --only spelling
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from golden_programs import captured_by, programs
from golden_texts import SECTIONS, sections

KEPT = Path(__file__).parent / "kept.txt"


def versions() -> str:
    """What the texts are of: others have other operators, lines and bytecode."""
    found = [f"Python {sys.version_info[0]}.{sys.version_info[1]}"]
    return ", ".join([*found, *(f"{name} {version(name).split('+')[0]}" for name in ("torch", "transformers"))])


def texts(program: Callable[[], Any]) -> dict[str, str]:
    """One text for each of SECTIONS."""
    found: dict[str, list[str]] = {name: [] for name in SECTIONS}
    captures, held = captured_by(program)
    for captured in captures:
        for where, section, text in sections(captured):
            found[section].append(f"== {where}\n{text}\n")
    del held
    return {name: "".join(parts) for name, parts in found.items()}


def line_of(name: str, found: dict[str, str]) -> str:
    digests = (f"{section}={hashlib.sha256(text.encode()).hexdigest()[:12]}" for section, text in found.items())
    return f"{name}: {' '.join(digests)}"


def kept() -> tuple[str, dict[str, str]]:
    """The versions, and the line of each program by its name."""
    first, *lines = KEPT.read_text().splitlines()
    return first, {line.partition(":")[0]: line for line in lines}


def differing(kept_line: str, line: str) -> list[str]:
    """Which texts differ."""
    before, now = (dict(part.split("=") for part in each.partition(": ")[2].split()) for each in (kept_line, line))
    return [section for section in now if before.get(section) != now[section]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose names begin so")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the texts")
    parser.add_argument("--keep", action="store_true", help="write the lines that the test holds the code to")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="in another order")
    args = parser.parse_args()
    chosen = {name: program for name, program in programs().items() if name.startswith(args.only)}
    names = list(chosen)
    if args.shuffle is not None:
        random.Random(args.shuffle).shuffle(names)
    lines, (_, before) = {}, kept() if KEPT.exists() else ("", {})
    for name in names:
        found = texts(chosen[name])
        lines[name] = line_of(name, found)
        if args.out:
            path = args.out / f"{name.replace(' ', '/')}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"#### {section}\n{text}" for section, text in found.items()))
        if differs := differing(before.get(name, ""), lines[name]):
            print(f"{name}: {', '.join(differs)}", flush=True)
    if args.keep:
        merged = {**before, **lines} if args.only else lines
        KEPT.write_text("\n".join([versions(), *(merged[name] for name in programs() if name in merged)]) + "\n")


if __name__ == "__main__":
    main()

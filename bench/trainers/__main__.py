"""Runs the gallery and writes docs/trainers.md: ``make trainers``."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from . import SCRIPTS
from .measure import measure
from .page import page

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 300  # seconds that a script may take


def main() -> None:
    parser = argparse.ArgumentParser(prog="make trainers", description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts; without, all of them")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--backend", choices=["eager", "moebius"], help="one alone; without, both")
    parser.add_argument("--json", action="store_true", help="print what was measured, write no page")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/trainers.md")
    parser.add_argument("--kept", type=Path, default=ROOT / "build/trainers.json", help="of scripts measured before")
    parser.add_argument("--page", action="store_true", help="write the page of what is kept, measure nothing")
    given = parser.parse_args()
    if unknown := set(given.names) - SCRIPTS.keys():
        parser.error(f"no scripts {sorted(unknown)}; there are {', '.join(SCRIPTS)}")
    backends = [given.backend] if given.backend else ["eager", "moebius"]
    if given.json:
        for name in given.names or SCRIPTS:
            for backend in backends:
                print(json.dumps(measure(name, backend, given.steps).as_dict()))
        return
    rows = json.loads(given.kept.read_text()) if given.kept.exists() else {}
    for name in () if given.page else given.names or SCRIPTS:
        print(name, flush=True)
        rows[name] = rows.get(name, {}) | in_its_own_process(name, given.steps, backends)
        given.kept.parent.mkdir(exist_ok=True)
        given.kept.write_text(json.dumps(rows))
    before = given.out.read_text() if given.out.exists() else ""
    given.out.write_text(page({name: rows[name] for name in SCRIPTS if name in rows}, made(rows), before))
    print(f"written: {given.out}")


def commit() -> str:
    """Of the checkout, as git names it."""
    command = ["git", "describe", "--always", "--dirty=, changed"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def made(rows: dict) -> str:
    """When the page is made, of which commits, on how many cores."""
    commits = Counter(found.get("commit", "unknown") for row in rows.values() for found in row.values())
    counted = "; ".join(f"{count} of {name}" for name, count in commits.most_common())
    day, cores = datetime.date.today(), len(os.sched_getaffinity(0))
    return f"Made on {day}, on {cores} cores. Newer runs of each commit: {counted}; other rows are of an older page."


def in_its_own_process(name: str, steps: int, backends: list[str]) -> dict:
    """Each script begins with nothing captured, and one that dies is a row."""
    found = {}
    for backend in backends:
        command = [sys.executable, "-m", "trainers", name, "--json", "--backend", backend, "--steps", str(steps)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            found[backend] = {"error": f"not done after {LONGEST} seconds", "commit": commit()}
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        found[backend] = json.loads(lines[-1]) if lines else {"error": last[:200]}
        found[backend]["commit"] = commit()
    return found


if __name__ == "__main__":
    main()

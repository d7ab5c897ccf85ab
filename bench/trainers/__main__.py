"""Runs the gallery and writes docs/trainers.md: ``make trainers``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from . import SCRIPTS
from .measure import measure
from .page import page

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make trainers", description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts; without, all of them")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--backend", choices=["eager", "moebius"], help="one alone; without, both")
    parser.add_argument("--json", action="store_true", help="print what was measured, write no page")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/trainers.md")
    parser.add_argument("--kept", type=Path, default=ROOT / "build/trainers.json", help="of scripts measured before")
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
    for name in given.names or SCRIPTS:
        print(name, flush=True)
        rows[name] = in_its_own_process(name, given.steps, backends)
        given.kept.parent.mkdir(exist_ok=True)
        given.kept.write_text(json.dumps(rows))
    given.out.write_text(page({name: rows[name] for name in SCRIPTS if name in rows}))
    print(f"written: {given.out}")


def in_its_own_process(name: str, steps: int, backends: list[str]) -> dict:
    """Each script begins with nothing captured, and one that dies is a row."""
    found = {}
    for backend in backends:
        command = [sys.executable, "-m", "trainers", name, "--json", "--backend", backend, "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        found[backend] = json.loads(lines[-1]) if lines else {"error": last[:200]}
    return found


if __name__ == "__main__":
    main()

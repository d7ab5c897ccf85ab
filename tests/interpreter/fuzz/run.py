"""`make fuzz`: thousands of programs, compared, with what they reached; failures are shrunk and written down.

python tests/interpreter/fuzz/run.py --count 20000 --seed 7 --jobs 2
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.provide import provide_interpreter

BATCH = 250  # programs from one seed: a search stops at its first difference, so batches are short


def run_batch(task: tuple[int, int, bool]) -> tuple[int, int, list[tuple[str, str]], Any]:
    """One search. Its seed, programs run, what differs, what was reached."""
    number, count, shrink = task
    provide_interpreter()
    from fuzz.reach import Reach, recording
    from fuzz.search import search

    reach = Reach()
    with recording(reach):
        found = search(number, count, shrink)
    return number, found.ran, found.differing, reach


def write_failure(folder: Path, source: str, text: str) -> Path:
    from fuzz.compare import PROGRAM

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:10]}.py.txt"
    shown = "\n".join(f"# {line}" for line in text.splitlines())
    path.write_text(f"# {PROGRAM}: differs on Python {sys.version_info[0]}.{sys.version_info[1]}\n{shown}\n{source}")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="programs to run")
    parser.add_argument("--seed", type=int, default=None, help="of the first batch (default: a fresh one, printed)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--no-shrink", action="store_true", help="failures as they were generated")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="folder for failures and the table of reach")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    print(f"Python {sys.version.split()[0]}, {options.count} programs, seed {first}")
    tasks = [
        (first + number, min(BATCH, options.count - number * BATCH), not options.no_shrink)
        for number in range((options.count + BATCH - 1) // BATCH)
    ]
    return report(options, tasks)


def report(options: argparse.Namespace, tasks: list[tuple[int, int, bool]]) -> int:
    from tqdm import tqdm

    provide_interpreter()
    from fuzz.reach import Reach

    total, ran, failures = Reach(), 0, 0
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        with tqdm(total=options.count, unit="program") as bar:
            for number, count, differing, reach in pool.imap_unordered(run_batch, tasks):
                ran += count
                bar.update(count)
                total.add(reach)
                for source, text in differing:
                    failures += 1
                    path = write_failure(options.out, source, text)
                    bar.write(f"seed {number} differs: {path}\n{text}")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    table = total.table(f"{ran} programs on Python {version}")
    print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"reach-{version}.txt").write_text(table + "\n")
    print(f"{ran} programs, {failures} differing ones" + (f" in {options.out}" if failures else ""))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

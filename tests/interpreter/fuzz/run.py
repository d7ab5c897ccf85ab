"""`make fuzz`: thousands of programs, compared, with what they reached; failures are shrunk and written down.

    python tests/interpreter/fuzz/run.py --count 20000 --seed 7 --jobs 2

A run with a seed and a count goes on where an earlier one of the same was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import multiprocessing
import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.provide import provide_interpreter

BATCH = 250  # programs from one seed: a search stops at its first difference, so batches are short


def run_batch(task: tuple[int, int, bool, bool]) -> tuple[int, int, list[tuple[str, str]], Any]:
    """One batch. Its number, programs run, what differs, what was reached.

    Odd batches are hypothesis searches; even ones take their choices from seeds, which reach more in the same time.
    """
    number, count, shrink, captured = task
    provide_interpreter()
    from fuzz.choices import SeededChoices
    from fuzz.compare import checked, difference
    from fuzz.grammar import generate
    from fuzz.grammar.program import CAPTURED_FAMILIES, FAMILIES
    from fuzz.reach import Reach, recording
    from fuzz.reduce import reduced
    from fuzz.search import programs, search

    families = CAPTURED_FAMILIES if captured else FAMILIES
    reach = Reach()
    if captured:
        from fuzz.captured import difference_captured as check  # needs torch
    else:

        def check(source: str, native: Any = None) -> str | None:
            with recording(reach) if checked(source) else contextlib.nullcontext():
                return difference(source, native)

    def smaller(source: str) -> str:
        return reduced(source, lambda one: bool(check(one)), 500) if shrink else source

    if number % 2:
        found = search(number, count, shrink, check, strategy=programs(families=families))
        differing = [(source, f"hypothesis seed {number}") for source, _ in found.differing]
        count = found.ran
    else:
        differing = []
        for seed in range(number * BATCH, number * BATCH + count):
            source = generate(SeededChoices(seed), tensors=captured and seed % 2 == 1, families=families)
            if check(source):
                differing.append((source, f"seed {seed}"))
    reached = copy.deepcopy(reach)  # without what making it small runs
    small = [(smaller(source), where) for source, where in differing]
    return number, count, [(source, f"{where}: {check(source)}") for source, where in small], reached


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
    parser.add_argument("--captured", action="store_true", help="through @capture instead of the interpreter")
    parser.add_argument("--faults", action="store_true", help="plant each fault of faults.py and look for it")
    options = parser.parse_args()
    if options.faults:
        return plant_faults()
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    print(f"Python {sys.version.split()[0]}, {options.count} programs, seed {first}")
    tasks = [
        (first + number, min(BATCH, options.count - number * BATCH), not options.no_shrink, options.captured)
        for number in range((options.count + BATCH - 1) // BATCH)
    ]
    return report(options, tasks)


def plant_faults() -> int:
    """Plant every fault, one at a time, and say after how many programs it is noticed."""
    from tqdm import tqdm

    provide_interpreter()
    from fuzz.faults import FAULTS, corpus, programs_until_found

    programs = corpus(600)
    missed = 0
    for fault in (bar := tqdm(FAULTS, unit="fault")):
        number = programs_until_found(fault, programs)
        missed += number is None
        bar.write(f"{'not found' if number is None else f'program {number}':>12}  {fault}")
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults found in {len(programs)} programs")
    return 1 if missed > len(FAULTS) // 25 + 1 else 0


def report(options: argparse.Namespace, tasks: list[tuple[int, int, bool, bool]]) -> int:
    from tqdm import tqdm

    provide_interpreter()
    from fuzz.reach import Reach

    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    kind = "captured" if options.captured else "interpreted"
    options.out.mkdir(parents=True, exist_ok=True)
    state = options.out / f"state-{kind}-{version}-{tasks[0][0]}-{options.count}.pickle"  # what an earlier run finished
    total, ran, failures, finished = Reach(), 0, 0, set()
    if state.exists():
        total, ran, failures, finished = pickle.loads(state.read_bytes())
        tasks = [task for task in tasks if task[0] not in finished]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        with tqdm(total=options.count, initial=ran, unit="program") as bar:
            for number, count, differing, reach in pool.imap_unordered(run_batch, tasks):
                ran += count
                bar.update(count)
                total.add(reach)
                for source, text in differing:
                    failures += 1
                    path = write_failure(options.out, source, text)
                    bar.write(f"batch {number} differs: {path}\n{text}")
                finished.add(number)
                state.write_bytes(pickle.dumps((total, ran, failures, finished)))
    if not options.captured:
        table = total.table(f"{ran} programs on Python {version}; counted in those of them that run with checks, about half")
        print(table)
        (options.out / f"reach-{version}.txt").write_text(table + "\n")
    print(f"{ran} programs, {failures} differing ones" + (f" in {options.out}" if failures else ""))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

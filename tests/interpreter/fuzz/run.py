"""`make fuzz`: thousands of programs, compared, with what they reached; failures are shrunk and written down.

    python tests/interpreter/fuzz/run.py --count 20000 --seed 7 --jobs 2

A run with a seed and a count goes on where an earlier one of the same was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import os
import pickle
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.provide import provide_interpreter
from fuzz.workers import Ended, Limits, batches, run_tasks

BATCH = 250  # programs from one seed: a search stops at its first difference, so batches are short
LIMITS = {False: Limits(1200.0, 4 << 30), True: Limits(3600.0, 8 << 30)}  # of a batch; through @capture


@dataclass
class Batch:
    number: int
    count: int
    shrink: bool
    captured: bool
    running: Path  # where the source of the program that runs is written


def run_batch(batch: Batch) -> tuple[int, list[tuple[str, str]], Any]:
    """One batch. Programs run, what differs, what was reached.

    Odd batches are hypothesis searches; even ones take their choices from seeds, which reach more in the same time.
    """
    number, count, captured = batch.number, batch.count, batch.captured
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
        from fuzz.captured import difference_captured  # needs torch

    def check(source: str) -> str | None:
        batch.running.write_text(source)
        try:
            if captured:
                return difference_captured(source)
            with recording(reach) if checked(source) else contextlib.nullcontext():
                return difference(source)
        except SyntaxError as error:
            return f"the grammar made what is no program: {error}"

    def smaller(source: str) -> str:
        return reduced(source, lambda one: bool(check(one)), 500) if batch.shrink else source

    if number % 2:
        found = search(number, count, False, check, strategy=programs(families=families))
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
    texts = [(source, f"{where}: {check(source)}") for source, where in small]
    batch.running.unlink(missing_ok=True)
    return count, texts, reached


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
    parser.add_argument("--docs", type=Path, help="run nothing; write what runs into --out found into this page")
    options = parser.parse_args()
    if options.docs:
        from fuzz.figures import document

        document(options.docs, options.out)
        return 0
    if options.faults:
        return plant_faults(options.out)
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    print(f"Python {sys.version.split()[0]}, {options.count} programs, seed {first}")
    tasks = [
        Batch(
            first + number,
            many,
            not options.no_shrink,
            options.captured,
            options.out / f"running-{first + number}.py.txt",
        )
        for number, many in batches(options.count, BATCH)
    ]
    return report(options, tasks)


def failed(ended: Ended) -> tuple[int, list[tuple[str, str]], Any]:
    """What a batch came to whose process was ended: one failure, the program that ran."""
    from fuzz.reach import Reach

    running = ended.task.running
    source = running.read_text() if running.exists() else ""
    running.unlink(missing_ok=True)
    return 0, [(source, f"batch {ended.task.number} {ended.reason}, in this program")], Reach()


def plant_faults(out: Path) -> int:
    """Plant every fault, one at a time, and say after how many programs it is noticed."""
    from tqdm import tqdm

    provide_interpreter()
    from semantics.checkout import commit

    from fuzz.faults import FAULTS, corpus, programs_until_found
    from fuzz.figures import keep

    at, programs = commit(), corpus(600)
    numbers: dict[str, int | None] = {}
    for fault in (bar := tqdm(FAULTS, unit="fault")):
        number = numbers[fault] = programs_until_found(fault, programs)
        bar.write(f"{'not found' if number is None else f'program {number}':>12}  {fault}")
    found = sorted(number for number in numbers.values() if number is not None)
    missed = [fault for fault, number in numbers.items() if number is None]
    counts = {"found": len(found), "faults": len(FAULTS), "median": found[len(found) // 2], "slowest": found[-1]}
    keep(out, "faults", {"kind": "faults", "commit": at, "programs": len(programs), "missed": missed, **counts})
    print(f"{len(found)} of {len(FAULTS)} faults found in {len(programs)} programs")
    return 1 if len(missed) > len(FAULTS) // 25 + 1 else 0


def report(options: argparse.Namespace, tasks: list[Batch]) -> int:
    from tqdm import tqdm

    provide_interpreter()
    from semantics.checkout import commit

    from fuzz.figures import keep
    from fuzz.reach import Reach

    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    kind, seed, at = "captured" if options.captured else "interpreted", tasks[0].number, commit()
    options.out.mkdir(parents=True, exist_ok=True)
    state = options.out / f"state-{kind}-{version}-{seed}-{options.count}.pickle"  # what an earlier run finished
    total, ran, failures, finished, before = Reach(), 0, 0, set(), 0.0
    if state.exists():
        total, ran, failures, finished, before = pickle.loads(state.read_bytes())
        tasks = [task for task in tasks if task.number not in finished]
    start = time.monotonic()
    with tqdm(total=options.count, initial=ran, unit="program") as bar:
        for ended in run_tasks(run_batch, tasks, options.jobs, LIMITS[options.captured]):
            count, differing, reach = failed(ended) if ended.reason else ended.result
            ran += count
            bar.update(count)
            total.add(reach)
            for source, text in differing:
                failures += 1
                path = write_failure(options.out, source, text)
                bar.write(f"batch {ended.task.number} differs: {path}\n{text}")
            finished.add(ended.task.number)
            seconds = before + time.monotonic() - start
            state.write_bytes(pickle.dumps((total, ran, failures, finished, seconds)))
            figures = {"kind": kind, "commit": at, "seed": seed, "programs": ran, "differing": failures}
            reached = None if options.captured else total
            keep(options.out, f"{kind}-{version}", {**figures, "seconds": seconds}, reached)
    if not options.captured:
        table = total.table(f"{ran} programs on Python {version}; counted in the half of them that run with checks")
        print(table)
        (options.out / f"reach-{version}.txt").write_text(table + "\n")
    took = before + time.monotonic() - start
    print(f"{ran} programs, {failures} differing ones" + (f" in {options.out}" if failures else "") + f", {took:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

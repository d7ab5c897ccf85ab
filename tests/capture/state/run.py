"""`make state`: every kind of state with every question about it, plain and captured; what differs is printed.

Each kind runs in a process of its own, which is why one that dies is told.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def run_kind(kind: str, questions: list[str], file: Path, show: bool) -> None:
    from state.matrix import KINDS, QUESTIONS, outcome, source_of

    with file.open("w") as out:
        for question in questions:
            began = time.monotonic()
            try:
                found = outcome(kind, question)
                row = [kind, question, found.how, found.differs, time.monotonic() - began]
            except Exception as error:
                row = [kind, question, "fails", f"{type(error).__name__}: {error}", time.monotonic() - began]
            if show:
                print(source_of(KINDS[kind], QUESTIONS[question]), row)
            out.write(json.dumps(row) + "\n")
            out.flush()


def mutate(most: int) -> int:
    """For each kind of read and write: cells that differ where the log is not told of it."""
    from state.mutation import NOTICED, UNSEEN, is_noticed, those_that_notice

    lost = [mutant for mutant, cell in NOTICED.items() if not is_noticed(mutant, *cell)]
    for mutant in [*NOTICED, *UNSEEN]:
        found = list(those_that_notice(mutant, most))
        print(f"{mutant}: {'; '.join(' × '.join(cell) for cell in found) or 'no cell'}", flush=True)
    print(f"{len(NOTICED)} kinds are noticed, {len(lost)} no longer by the cell that is named: {', '.join(lost)}")
    return 1 if lost else 0


def main() -> int:
    import torch

    from state.matrix import KINDS, OPEN, QUESTIONS, share

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", help="part of a kind's name; default: all")
    parser.add_argument("--question", action="append", help="part of a question's name; default: all")
    parser.add_argument("--count", type=int, help="that many cells, chosen by --seed; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--show", action="store_true", help="print each program")
    parser.add_argument("--mutate", action="store_true", help="leave kinds of reads and writes out of the log")
    parser.add_argument("--most", type=int, default=1, help="with --mutate: how many cells to find for each")
    parser.add_argument("--json", help="write each cell's outcome to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.mutate:
        return mutate(options.most)
    kinds = [k for k in KINDS if not options.kind or any(part in k for part in options.kind)]
    questions = [q for q in QUESTIONS if not options.question or any(part in q for part in options.question)]
    chosen = None if options.count is None else set(share(options.seed, options.count))
    asked = {k: [q for q in questions if chosen is None or (k, q) in chosen] for k in kinds}
    began, running, rows = time.monotonic(), dict[int, tuple[str, Path]](), list[list]()
    with tempfile.TemporaryDirectory() as folder:
        waiting = [(number, kind) for number, kind in enumerate(kinds) if asked[kind]]
        while waiting or running:
            while waiting and len(running) < options.jobs:
                number, kind = waiting.pop(0)
                file = Path(folder) / f"{number}.json"
                sys.stdout.flush()
                child = os.fork()
                if child == 0:
                    run_kind(kind, asked[kind], file, options.show)
                    sys.stdout.flush()
                    os._exit(0)
                running[child] = kind, file
            child, status = os.wait()
            kind, file = running.pop(child)
            found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            if status:
                lost = asked[kind][len(found)]
                found.append([kind, lost, "dies", f"status {status}", 0.0])
            rows += found
            for row in found:
                if row[3]:
                    note = " (known)" if (row[0], row[1]) in OPEN else ""
                    print(f"{row[0]} × {row[1]} ({row[2]}){note}: {row[3]}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows))
    counts = collections.Counter(row[2] for row in rows)
    known = sum(bool(row[3]) and (row[0], row[1]) in OPEN for row in rows)
    differ = sum(bool(row[3]) for row in rows) - known
    text = ", ".join(f"{number} {how}" for how, number in counts.most_common())
    print(f"{len(rows)} programs, {differ} differ, {known} as is known; {text}; {time.monotonic() - began:.0f} s")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())

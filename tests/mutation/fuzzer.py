"""The mutation fuzzer: change one reachable thing, call again, and compare with plain Python.

For each change two worlds are made from one program file. Both are called until the captured one is warm, both
get the same change, and both are called twice again. Result or exception, everything reachable, gradients and random
state have to be equal after each call, aliases included.

    python tests/mutation/fuzzer.py                     all changes of all programs, of models one in 4
    python tests/mutation/fuzzer.py --program tensors   one program
    python tests/mutation/fuzzer.py --each 40           every 40th change
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import functools
import gc
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from changes import Change, all_changes
from world import PROGRAMS, Differ, World, make_world

import moebius
from moebius.api import captured_of
from moebius.guards import program
from moebius.torch_facts.torch_private import switches, throw_switches

NAMES = sorted(p.stem for p in PROGRAMS.glob("*.py"))
# Thousands of attributes of one model and its configuration: one in so many is changed.
SPARSE = {"mixtral": 4, "qwen3_moe": 4, "deepseek": 4}
WARM_UP = 9  # calls at most before the change; numbers that differ from call to call are learnt one by one
PATIENCE = 120  # seconds of CPU that one change may take
ENDED = "the process ended with status"
OUTCOMES = ("hit", "recompiled", "break", "native", "both raise", "WRONG")


@dataclasses.dataclass
class Outcome:
    """What came of one change. ``what``: one of OUTCOMES; ``detail``: the difference, if there is one."""

    program: str
    change: Change
    what: str
    detail: str = ""


def nothing(world: World) -> Any:
    return contextlib.nullcontext()


def call(world: World) -> tuple[Any, str]:
    """One call and, if its result can, its backward: (result, exception in words)."""
    torch.manual_seed(1)
    try:
        result = world.call(*world.args, **world.kwargs)
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None and not leaf.is_meta:
                leaf.sum().backward()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"
    return result, ""


def difference(
    plain: World, captured: World, words: str, surroundings: Callable[[World], Any] = nothing
) -> tuple[str | None, bool]:
    """Call both, each within its surroundings; (the first difference or None, whether both raised)."""
    with surroundings(plain):
        want, want_error = call(plain)
        want_switches = switches()
    want_random = torch.get_rng_state()
    with surroundings(captured):
        got, got_error = call(captured)
        got_switches, _ = switches(), throw_switches(want_switches)
    if bool(want_error) != bool(got_error) or want_error.split(":")[0] != got_error.split(":")[0]:
        return f"{words}: plain {want_error or 'returns'}, captured {got_error or 'returns'}", False
    if want_switches != got_switches:
        return f"{words}: leaves {want_switches}, captured {got_switches}", False
    if not want_error and not torch.equal(want_random, torch.get_rng_state()):
        return f"{words}: other random state", False
    differ = Differ(plain, captured)
    found = differ.compare(want, got, "result") or differ.compare(plain.args, captured.args, "args")
    found = found or differ.compare(plain.kwargs, captured.kwargs, "kwargs")
    found = found or differ.compare(plain.function, captured.function, "function")
    return (f"{words}: {found}" if found else None), bool(want_error)


def applied(change: Change, *worlds: World) -> Callable[[World], Any]:
    """Make the change; what its calls have to be surrounded by (a switch is on during the calls alone)."""
    if change.kind.startswith(("switch", "library")):
        return change.apply
    for world in worlds:
        change.apply(world)
    return nothing


def undefined(name: str, change: Change) -> bool:
    """Whether plain Python itself answers differently each time (memory that nobody wrote to)."""
    return any(differs_from_itself(name, change, number) for number in range(8))


def differs_from_itself(name: str, change: Change, number: int) -> bool:
    first, second = make_world(name), make_world(name)
    for _ in range(2):
        difference(first, second, "")
    surroundings = applied(change, first, second)
    for _ in range(2):
        litter(number)  # else what was there may be the same each time
        if difference(first, second, "", surroundings)[0]:
            return True
    return False


def litter(number: int) -> None:
    """Leave numbers in the memory that the next tensors get."""
    for size in (16, 64, 256, 1024, 2048, 4096, 16384):
        for _ in range(4):
            torch.full((size,), float(number))


def capture_world(name: str) -> World:
    world = make_world(name)
    world.call = moebius.capture(world.function, backend="eager")
    return world


def warmed(name: str) -> tuple[World, World, str]:
    """A plain and a captured world, called until the captured one is warm; what differed before any change."""
    plain, captured = make_world(name), capture_world(name)
    owner = captured_of(captured.call)
    assert owner is not None
    for number in range(WARM_UP):
        misses = owner.stats().misses
        found, _ = difference(plain, captured, f"call {number} before the change")
        if found:
            return plain, captured, found
        if owner.stats().misses == misses:
            break
    return plain, captured, ""


def tried(change: Change, plain: World, captured: World) -> tuple[str, str]:
    """The change in two warm worlds, and what came of it: (one of OUTCOMES or "impossible", the difference)."""
    owner = captured_of(captured.call)
    assert owner is not None
    try:
        surroundings = applied(change, plain, captured)
    except Exception as error:  # not a change that Python allows here
        return "impossible", f"{type(error).__name__}: {error}"
    before = after = owner.stats()
    for number in ("first", "second"):
        found, raised = difference(plain, captured, f"{number} call after the change", surroundings)
        if found:
            return ("impossible" if undefined(plain.name, change) else "WRONG"), found
        if number == "first":
            after = owner.stats()
    if raised:
        return "both raise", ""
    if owner.given_up:
        return "native", ""
    if after.misses == before.misses:
        return "hit", ""
    return ("break" if after.breaks > before.breaks else "recompiled"), ""


def tried_alone(change: Change, plain: World) -> tuple[str, str]:
    """The change in plain Python's world alone."""
    surroundings = applied(change, plain)
    for _ in range(2):
        with surroundings(plain):
            call(plain)
    return "hit", ""


def run(names: list[str], each: int = 1, start: int = 0, kinds: str = "", forks: bool = False) -> Iterator[Outcome]:
    """Every ``each``-th change of the programs, beginning with number ``start``, each in worlds of its own: made
    anew, or (forks) those of a child process, so that the two worlds are made and warmed once for a program."""
    count = start
    for name in names:
        changes = []
        for change in all_changes(make_world(name)):
            if change.kind.startswith(kinds):
                count += 1
                if count % each == 0:
                    changes.append(change)
        moebius.reset()
        if not forks:
            for change in changes:
                plain, captured, found = warmed(name)
                yield Outcome(name, change, *(("WRONG", found) if found else tried(change, plain, captured)))
                moebius.reset()
        elif changes:
            torch.set_num_threads(1)  # the threads of OpenMP are not copied
            plain, captured, found = warmed(name)
            gc.collect()
            gc.freeze()  # a collection in a child would copy every page
            for change in changes:
                answer = ("WRONG", found) if found else in_child(functools.partial(tried, change, plain, captured))
                if answer[1].startswith(ENDED):  # an operator of torch's may end the process: of plain Python's too?
                    alone = in_child(functools.partial(tried_alone, change, plain))
                    answer = ("impossible", answer[1]) if alone[1] == answer[1] else answer
                yield Outcome(name, change, *answer)
            gc.unfreeze()


def in_child(work: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """What ``work`` gives in a copy of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, PATIENCE)  # of CPU: other processes may keep it waiting
            what, detail = work()
            os.write(writing, json.dumps((what, detail[:1000])).encode())
        except BaseException as error:
            os.write(writing, json.dumps(("WRONG", f"the fuzzer itself: {type(error).__name__}: {error}")).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        return "WRONG", f"{ENDED} {status}"
    what, detail = json.loads(answer)
    return what, detail


@contextlib.contextmanager
def switched_off(kind: str) -> Iterator[None]:
    """Guard programs without checks of one kind (each is replaced by a check that asks nothing)."""
    original = program.GuardProgram

    def build(n_positional: int, kwnames: tuple, slots: list, checks: list) -> Any:
        return original(n_positional, kwnames, slots, [c if c[0] != kind else ("answers", ()) for c in checks])

    program.GuardProgram = build  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        program.GuardProgram = original  # type: ignore[misc]


def noticed_without(kind: str, names: list[str], each: int = 1, kinds: str = "") -> Outcome | None:
    """The first wrong answer that the fuzzer finds with one kind of guard switched off."""
    with switched_off(kind):
        return next((o for o in run(names, each, 0, kinds) if o.what == "WRONG"), None)


def table(outcomes: list[Outcome], seconds: float, each: int = 1) -> str:
    """docs/guards.md: kinds of change × outcomes."""
    rows: dict[str, collections.Counter[str]] = {}
    total: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        if outcome.what != "impossible":
            rows.setdefault(outcome.change.kind, collections.Counter())[outcome.what] += 1
            total[outcome.what] += 1
    lines = ["| change | " + " | ".join(OUTCOMES) + " |", "|---|" + "---:|" * len(OUTCOMES)]
    for kind in sorted(rows):
        lines.append(f"| {kind} | " + " | ".join(str(rows[kind][o] or "") for o in OUTCOMES) + " |")
    lines.append("| **all** | " + " | ".join(f"**{total[o]}**" for o in OUTCOMES) + " |")
    head = INTRODUCTION.format(
        changes=sum(total.values()),
        programs=len({o.program for o in outcomes}),
        minutes=f"{seconds / 60:.0f}",
        python=sys.version.split()[0],
        torch=torch.__version__,
        wrong=total["WRONG"],
        of_all="all" if each == 1 else f"one in {each}",
        of_models=each * SPARSE["mixtral"],
        date=datetime.date.today(),
        commit=commit(),
    )
    wrong = [o for o in outcomes if o.what == "WRONG"]
    if wrong:
        lines += ["", "## The differences", ""]
        lines += [f"- {o.program}, {o.change.kind}, `{o.change.where}`: {o.detail}" for o in wrong]
    return head + "\n".join(lines) + "\n"


INTRODUCTION = """# One thing changed between two calls

Written by `make mutate` on {date}, at commit {commit} (Python {python}, torch {torch}; {minutes} minutes of CPU); not
edited by hand. For {programs} programs (`tests/mutation/programs/`), one reachable thing at a time was changed after a
captured call, {changes} changes ({of_all} of those that there are; of transformers' models, one in {of_models}), and
the call was made again, twice, next to plain Python with the same change. Compared bit for bit: the result or the
exception, everything reachable from the arguments, the function and its globals, which objects are one object,
gradients, random state and torch's switches. Only programs that say why (transformers' models: the order in which
autograd adds) may round differently. Differences: {wrong}. With any one kind of guard switched off, there are.

- *hit*: the captured call still held, and was right: the change was of something that the program does not depend on,
  or that the graph reads each time.
- *recompiled*: a guard failed, and the call was captured again. *break*: the same, with a graph break in it.
- *native*: capture gave up. *both raise*: plain Python raises after this change, and so does the captured call, the
  same type.

"""


def commit() -> str:
    """The commit that the sources are at."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=PROGRAMS)
    return asked.stdout.strip() or "unknown"


def cpu_seconds() -> float:
    """Of this process and its children."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", action="append", choices=NAMES)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--kinds", default="", help="only kinds of change that begin so")
    parser.add_argument("--outcomes", action="store_true", help="a line for each change")
    parser.add_argument("--docs", type=Path, help="write the table there")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    started, outcomes = cpu_seconds(), []
    forks = hasattr(os, "fork")
    sampled = (run([n], args.each * SPARSE.get(n, 1), args.start, args.kinds, forks) for n in args.program or NAMES)
    for outcome in itertools.chain.from_iterable(sampled):
        outcomes.append(outcome)
        if args.outcomes:
            print(f"{outcome.what}: {outcome.change.kind}, {outcome.change.where}")
        if outcome.what == "WRONG":
            print(f"WRONG {outcome.program}: {outcome.change.kind}: {outcome.change.where}: {outcome.detail}")
            sys.stdout.flush()
    seconds = cpu_seconds() - started
    text = table(outcomes, seconds, args.each)
    if args.docs:
        args.docs.write_text(text)
    else:
        print(text[text.index("| change") :])
    wrong = sum(o.what == "WRONG" for o in outcomes)
    print(f"{len(outcomes)} changes, {wrong} wrong, {seconds:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

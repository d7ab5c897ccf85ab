"""Test suites of other projects (PyTorch's own), each test twice: plain, and with capture. What differs is shown.

    python tests/suites/run.py FILE… [--how compiled|whole] [--only TEXT] [--every N] [--seconds 90]

``compiled`` (test/dynamo): what a test gives to torch.compile is captured. ``whole`` (test/test_autograd.py, …):
each test method is captured itself, and its assertions say what they are asked, to the bit. A difference is to be read:
tests ask for object identity, memory and internals, too. A file needs what its project's tests need (PyTorch's:
expecttest).
"""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import once
import torch
from tqdm import tqdm

from moebius import capture
from moebius.errors import NotCapturableError


def captured(function: Any) -> Any:
    try:
        return capture(function, backend="eager")
    except NotCapturableError:  # functions written in C
        return function


def in_a_child(work: Callable[[], once.Record], seconds: int) -> once.Record:
    """A test of its own process: it may crash, hang, and leave torch as it likes."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.alarm(seconds)
        try:
            found = work()
        except BaseException as error:
            found = {"state": "broken", "error": repr(error)[:300], "record": [], "printed": "", "internal": []}
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(found, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    lost = {"state": f"ended by signal {status & 127}", "error": "", "record": [], "printed": "", "internal": []}
    return pickle.loads(data) if data else lost  # of our own child


def records_of(path: Path, ours: bool, options: argparse.Namespace) -> dict[str, once.Record]:
    """All tests of a file, in a process that imports it for this alone."""
    record: list[str] = []
    kept: list[tuple[str, tuple]] = []
    module = once.load(path)
    if ours:
        once.note_internal_errors()
    wrapped = None
    if options.how == "compiled":
        once.replace_compiler(captured if ours else lambda function: function, record)
    elif ours:
        wrapped = captured
    for cls in {c for _, test, _ in once.tests_of(module, options.only) for c in test.__mro__ if c is not object}:
        if options.how == "compiled":
            once.soften(cls, record)
        else:
            once.keep_what_is_asserted(cls, kept)
    tests = [*once.tests_of(module, options.only)][:: options.every]
    label = f"{path.stem} {'captured' if ours else 'plain'}"
    return {
        name: in_a_child(lambda c=cls, m=method: once.run(c, m, record, kept, wrapped), options.seconds)
        for name, cls, method in tqdm(tests, label, disable=None)
    }


def difference(plain: once.Record | None, ours: once.Record | None) -> list[str]:
    if plain is None or ours is None:  # what tests there are depends on what is imported, or on chance
        return ["is a test of one side alone: " + ("captured" if plain is None else "plain")]
    found = [f"capture failed: {error}" for error in ours["internal"]]
    if (plain["state"], plain["error"]) != (ours["state"], ours["error"]):
        found.append(f"{plain['state']} {plain['error']} -> {ours['state']} {ours['error']}")
    for mine, other in zip([*ours["record"], ""], [*plain["record"], ""], strict=False):
        if mine != other:
            found.append(f"{other[:300] or 'nothing'} -> {mine[:300] or 'nothing'}")
            break
    if plain["printed"] != ours["printed"]:
        found.append(f"printed {plain['printed'][:150]!r} -> {ours['printed'][:150]!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="files of unittest tests, in a checkout of their project")
    parser.add_argument("--how", choices=("compiled", "whole"), default="compiled")
    parser.add_argument("--only", default="", help="tests whose Class.name holds this text")
    parser.add_argument("--every", type=int, default=1, help="each so many of these tests: a sample of a large file")
    parser.add_argument("--seconds", type=int, default=90, help="for one test")
    options = parser.parse_args()
    if missing := [str(path) for path in options.files if not path.is_file()]:
        parser.error(
            f"no such file: {', '.join(missing)}; give files of a checkout, as pytorch/test/dynamo/test_misc.py"
        )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    differing = 0
    for path in options.files:
        sides = [in_a_child(lambda p=path, o=ours: records_of(p, o, options), 0) for ours in (False, True)]
        if broken := [side["error"] for side in sides if isinstance(side.get("state"), str)]:
            print(f"{path.stem}: cannot be run: {broken[0]}")
            differing += 1
            continue
        plain, ours = sides
        names = [*plain, *(name for name in ours if name not in plain)]
        differences = {name: found for name in names if (found := difference(plain.get(name), ours.get(name)))}
        for name, found in differences.items():
            print(f"{path.stem}.{name}", *found, sep="\n    ")
        states = collections.Counter(record["state"] for record in ours.values())
        print(f"{path.stem}: {len(names)} tests ({dict(states)}), {len(differences)} differ", flush=True)
        differing += len(differences)
    return min(differing, 1)


if __name__ == "__main__":
    sys.exit(main())

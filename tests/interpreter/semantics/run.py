"""`make semantics`: CPython's own tests natively and interpreted, compared test by test.

    python run.py [--modules test_with test_raise] [--resume] [--results FILE]   this Python's figures, into FILE
    python run.py --docs docs/semantics.md FILE...                               the table of all of them

Exit status 1: below GOAL, a difference without a reason in reasons.toml, or a reason there for a test that passes.
"""
from __future__ import annotations

import argparse
import ast
import fnmatch
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from checkout import commit
from modules import EXCLUDED, MODULES

HERE = Path(__file__).resolve().parent
GOAL = 0.995  # of the tests that pass natively
VERSION = "{}.{}".format(*sys.version_info)
STACK = 256 << 20  # bytes of C stack of the processes, native and interpreted ones
OTHERWISE = """\
Also known to differ: what C code itself warns of (`bool(NotImplemented)`, an unclosed file) has the machine's file and
line, while `warnings.warn` has the program's; a signal handler's second argument is one of the machine's frames."""
MODULE_SECONDS = 1800  # wall clock of one process; a test that is not reached counts as different


def widen_stack() -> None:
    """In the child: an interpreted call takes more C stack than a native one."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK if limit == resource.RLIM_INFINITY else min(STACK, limit), limit))


def run_module(name: str, mode: str, tests: list[str] | None, seconds: float) -> tuple[dict[str, list[str]], str]:
    """Outcomes by test, and what went wrong outside of tests. A test that kills its process fails; the rest go on."""
    outcomes: dict[str, list[str]] = {}
    trouble = ""
    end = time.monotonic() + seconds
    while tests is None or tests:
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "record")
            command = [sys.executable, str(HERE / "worker.py"), name, mode, str(record)]
            if tests is not None:
                Path(folder, "only").write_text("\n".join(tests))
                command.append(str(Path(folder, "only")))
            Path(folder, "cwd").mkdir()
            try:
                done = subprocess.run(
                    command, cwd=Path(folder, "cwd"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                    errors="replace", timeout=max(end - time.monotonic(), 1), preexec_fn=widen_stack,
                )  # fmt: skip
                status, said = done.returncode, done.stderr[-3000:]
            except subprocess.TimeoutExpired:
                status, said = 124, "the module's time was up"
            lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        started = None
        for line in lines:
            test, outcome, *text = json.loads(line)
            if outcome == "start":
                started = test
            elif outcome == "fixture":
                trouble += test + "\n" + text[0]
            else:
                outcomes[test], started = [outcome, *text], None
        if started is not None:
            outcomes[started] = ["crashed", f"status {status}\n{said}"]
        if tests is None or status in (0, 124) or not lines:
            trouble += said if status else ""
            break
        tests = [test for test in tests if test not in outcomes]
    return outcomes, trouble


def measure(name: str, seconds: float = MODULE_SECONDS) -> dict[str, Any]:
    """{"native": number passed, "different": {test: [outcome, text]}} of a module."""
    native, trouble = run_module(name, "native", None, seconds)
    passed = [test for test, outcome in native.items() if outcome[0] == "passed"]
    interpreted, said = run_module(name, "interpreted", passed, seconds) if passed else ({}, trouble)
    missed = ["not run", said]
    different = {test: found for test in passed if (found := interpreted.get(test, missed))[0] != "passed"}
    when = time.strftime("%Y-%m-%d", time.gmtime())
    return {"native": len(passed), "different": different, "date": when, "commit": commit()}


def known_reasons() -> list[dict[str, Any]]:
    return tomllib.loads((HERE / "reasons.toml").read_text(encoding="utf-8"))["reason"]


def reason_for(name: str, test: str, version: str, reasons: list[dict[str, Any]]) -> str | None:
    for entry in reasons:
        if version in entry.get("pythons", [version]):
            if any(fnmatch.fnmatchcase(f"{name}.{test}", pattern) for pattern in entry["tests"]):
                return entry["why"]
    return None


def stale(result: dict[str, Any], reasons: list[dict[str, Any]]) -> list[str]:
    """Patterns of reasons.toml, of modules that ran, that fit no difference. A `sometimes` entry need not fit any."""
    found = [f"{name}.{test}" for name, test, _ in differences(result)]
    return [
        pattern
        for entry in reasons
        if not entry.get("sometimes") and result["version"] in entry.get("pythons", [result["version"]])
        for pattern in entry["tests"]
        if pattern.partition(".")[0] in result["modules"]
        and not any(fnmatch.fnmatchcase(test, pattern) for test in found)
    ]


def native_callbacks() -> dict[str, str]:
    """NATIVE_CALLBACKS of interpreter/natives.py, read without importing it."""
    tree = ast.parse((HERE.parents[2] / "interpreter" / "natives.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "NATIVE_CALLBACKS":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError("interpreter/natives.py has no NATIVE_CALLBACKS")


def share_of(native: int, wrong: int) -> str:
    return f"{(native - wrong) / max(native, 1):.2%}"


def differences(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (name, test, found[0]) for name, part in result["modules"].items() for test, found in part["different"].items()
    ]


def document(results: list[dict[str, Any]]) -> str:
    reasons = known_reasons()
    lines = [
        "# CPython's own tests through the interpreter", "",
        "Written by `make semantics`; do not edit. The test methods of modules of the running Python's `Lib/test`,",
        "with setUp, tearDown and cleanups, run natively and with `moebius.interpreter.interpret`, a process a module,",
        f"with {STACK >> 20} MiB of C stack. What passes natively must pass interpreted, and no Python code may run",
        "natively meanwhile. Class and module fixtures run natively; tests that ask for resources (network, minutes",
        f"of CPU) are skipped in both. The goal is {GOAL:.1%} on each Python.", "",
        "| Python | measured | commit | modules | pass natively | pass interpreted | share |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for result in results:
        parts = [part for part in result["modules"].values() if part["native"]]
        total, wrong = sum(part["native"] for part in parts), len(differences(result))
        days = sorted({part.get("date", "?") for part in parts})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        commits = " and ".join(sorted({part.get("commit", "?") for part in parts}))
        passing = f"{total:,} | {total - wrong:,} | {share_of(total, wrong)}"
        lines.append(f"| {result['python']} | {when} | {commits} | {len(parts)} | {passing} |")
    lines += ["", "Left out:", "", *(f"- {name}: {why}" for name, why in EXCLUDED.items())]
    lines += ["", "Python code that runs natively, and is not counted as a difference:", ""]
    lines += [f"- {what}: {why}" for what, why in native_callbacks().items()]
    lines += ["", OTHERWISE]
    lines += ["", "## Modules", "", "Tests that pass interpreted, of those that pass natively.", ""]
    lines.append("| module | " + " | ".join(result["version"] for result in results) + " |")
    lines.append("|---" * (len(results) + 1) + "|")
    for name in sorted(set().union(*(result["modules"] for result in results))):
        cells = []
        for result in results:
            part = result["modules"].get(name, {"native": 0, "different": {}})
            native, wrong = part["native"], len(part["different"])
            cells.append(f"{native - wrong} of {native}, {share_of(native, wrong)}" if native else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "## Differences", ""]
    lines.append('"native": the test passes, but Python code ran natively in it.')
    lines += ['"crashed": its process died, or its time was up.', ""]
    rows: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for result in results:
        for name, test, outcome in differences(result):
            why = reason_for(name, test, result["version"], reasons) or "**not explained yet**"
            rows.setdefault(why, {}).setdefault((name, test, outcome), []).append(result["version"])
    for why, tests in sorted(rows.items(), key=lambda row: (-len(row[1]), row[0])):
        lines += [f"{why}:", ""]
        lines += [
            f"- {name}.{test} ({outcome}; {', '.join(versions)})"
            for (name, test, outcome), versions in sorted(tests.items())
        ]
        lines.append("")
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> int:
    wrong = differences(result)
    total = sum(part["native"] for part in result["modules"].values())
    reasons = known_reasons()
    bare = [(name, test) for name, test, _ in wrong if reason_for(name, test, result["version"], reasons) is None]
    for name, test in bare:
        print(f"no reason given: {name}.{test}")
    old = stale(result, reasons)
    for pattern in old:
        print(f"a reason is given, but it passes: {pattern} on {result['version']}")
    share = (total - len(wrong)) / max(total, 1)
    print(f"Python {result['python']}: {total - len(wrong)} of {total} tests pass interpreted, {share:.2%}")
    return int(share < GOAL or bool(bare or old))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", nargs="*", default=MODULES)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seconds", type=float, default=MODULE_SECONDS, help="of one module, wall clock")
    parser.add_argument("--docs", type=Path)
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args()
    if given.docs:
        results = [json.loads(path.read_text()) for path in given.files]
        given.docs.write_text(document(results), encoding="utf-8")
        return max([verdict(result) for result in results], default=1)
    result: dict[str, Any] = {"python": sys.version.split()[0], "version": VERSION, "modules": {}}
    if given.resume and given.results and given.results.exists():
        result = json.loads(given.results.read_text())
    for name in given.modules:
        if name in result["modules"] or importlib.util.find_spec(f"test.{name}") is None:
            continue
        start = time.monotonic()
        part = result["modules"][name] = measure(name, given.seconds)
        took = time.monotonic() - start
        print(f"{name}: {part['native'] - len(part['different'])} of {part['native']}, {took:.0f} s", flush=True)
        if given.results:
            given.results.parent.mkdir(parents=True, exist_ok=True)
            given.results.write_text(json.dumps(result, indent=1))
    return verdict(result)


if __name__ == "__main__":
    sys.exit(main())

"""One torch after another, each in an environment of its own: install, doctor, README example, demo, tests, families.

    make torches TORCHES="2.14 2.15" PYTHON=python3.13 ARGS="--every 3 --families mixtral olmoe"

Writes the table docs/versions.md; rows of other versions stay. An environment is removed before the next is made, but
with --keep: a torch for CUDA takes 5 GB. What is tried is what is committed, in a copy.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from capture.versions import BESIDE_TRITON, TORCHES, dotted, numbers  # noqa: E402  (needs no torch)

PAGE = ROOT / "docs" / "versions.md"
REPORT = r"(\d+ graphs?) · (\d+ graph breaks?).*?(\d+ of \d+) expert regions?"  # its second line
COLUMNS = ("torch", "Python", "Triton", "doctor", "README example", "demo", "tests", "families", "commit", "date")
HEAD = """# Versions of torch

Written by `make torches`, which makes an environment for each torch, with the Triton that goes with it, and tries
moebius there: what `moebius doctor` says, the README's example, the first steps of the demo, a share of the tests (one
file in so many), families of the zoo. A cell says what was seen; – is what was not run. `constraints.txt` holds the one
version that the whole suite runs on at each commit.

"""


def wanted(torch: str) -> list[str]:
    """What pip is to install for a torch: itself, the Triton that goes with it, and what that one needs beside it."""
    triton = TORCHES[numbers(torch)]
    beside = [BESIDE_TRITON[triton]] if triton in BESIDE_TRITON else []
    return [f"torch=={dotted(numbers(torch))}.*", f"triton=={dotted(triton)}.*", *beside]


def said(command: Sequence[str | Path], folder: Path, seconds: float) -> tuple[int, str]:
    """Exit status and output of a command; -1 where it took too long."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "COLUMNS": "120"}
    run = [str(word) for word in command]
    try:
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(run, cwd=folder, env=environment, timeout=seconds, text=True, **out)  # type: ignore
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        return -1, output.decode(errors="replace") if isinstance(output, bytes) else output
    return done.returncode, done.stdout


def committed(folder: Path) -> str:
    """A copy of what is committed; gives the commit."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


@contextlib.contextmanager
def environment(folder: Path, python: str, torch: str, source: Path, keep: bool) -> Iterator[Path]:
    """Its folder of programs, with moebius installed as its users install it, and torch first: so no other is tried."""
    made = folder / f"torch-{torch}"
    pip = [made / "bin" / "pip", "--disable-pip-version-check", "install", "-q", "--no-cache-dir"]
    try:
        if made.exists():  # --keep has left it
            subprocess.run([*pip, "--no-deps", "--force-reinstall", source], check=True)
        else:
            subprocess.run([python, "-m", "venv", made], check=True)
            subprocess.run([*pip, *wanted(torch), "setuptools"], check=True)
            subprocess.run([*pip, *wanted(torch), f"{source}[examples,dev,triton]"], check=True)
        yield made / "bin"
    finally:
        if not keep:
            shutil.rmtree(made, ignore_errors=True)


def share(source: Path, every: int) -> list[str]:
    """One file of tests in so many, of each folder, and always those of versions. A fixed choice: the middle ones."""
    found = ["tests/cli/test_selftest.py", "tests/cli/test_torch_names.py", "tests/capture/test_c_callables.py"]
    for folder in ("capture", "lowering", "kernels", "expert_loops", "cli", "report", "training_scripts"):
        files = sorted(path for path in (source / "tests" / folder).glob("**/test_*.py"))
        found += [str(path.relative_to(source)) for path in files[every // 2 :: every]]
    return list(dict.fromkeys(found))


def counts(output: str) -> str:
    """``12 passed, 1 failed`` of pytest's last line. (Libraries may write more as the process ends.)"""
    ends = re.findall(r"^.*\b\d+ (?:passed|failed|errors?)\b.* in [\d.]+s\b.*$", output, re.M)
    found = re.findall(r"(\d+) (passed|failed|error)", ends[-1]) if ends else []
    return ", ".join(f"{number} {what}" for number, what in found) or "did not end"


def example(bin: Path, source: Path, folder: Path) -> str:
    """The README's example: the line of its report that counts."""
    code = re.findall(r"^```python\n(.*?)^```$", (source / "README.md").read_text(), re.M | re.S)[0]
    (folder / "first.py").write_text(code)
    status, output = said([bin / "python", "first.py"], folder, 300)
    return line(output, REPORT) if status == 0 else "fails"


def demo(bin: Path, source: Path, folder: Path, steps: int) -> str:
    script = source / "examples" / "train_mixtral.py"
    status, output = said([bin / "python", script, "--steps", str(steps)], folder, 900)
    if status:
        return "fails"
    graphs = line(output, REPORT)
    memory = line(output, r"saved for backward.*?(\d\.\d+×)")
    return f"{graphs}, memory {memory}" + ("" if "losses agree" in output else ", losses differ")


def line(output: str, pattern: str) -> str:
    found = re.search(pattern, output)
    return ", ".join(found.groups()) if found else "?"


def tried(bin: Path, source: Path, folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """The cells of one row."""
    ask = "import torch, platform; print(torch.__version__, platform.python_version())"
    torch, python = said([bin / "python", "-c", ask], folder, 120)[1].split()[-2:]
    ask = "from importlib.metadata import version; print(version('triton'))"
    row = {"torch": torch, "Python": python, "Triton": said([bin / "python", "-c", ask], folder, 60)[1].strip()}
    status, output = said([bin / "moebius", "doctor"], folder, 300)
    print(output, flush=True)
    row["doctor"] = "all works" if status == 0 else output.strip().rpartition("\n")[2]
    row["README example"] = example(bin, source, folder)
    row["demo"] = demo(bin, source, folder, args.steps) if args.steps else "–"
    row["tests"] = row["families"] = "–"
    if args.every:
        files = share(source, args.every)
        status, output = said([bin / "python", "-m", "pytest", "-q", *files], source, args.seconds)
        print("\n".join(output.splitlines()[-30:]), flush=True)
        row["tests"] = f"{counts(output)} (1 file in {args.every})" + (", cut short" if status == -1 else "")
    if args.families:
        os.environ["PYTHONPATH"] = str(source / "bench")
        status, output = said([bin / "python", "-m", "zoo", *args.families], source, args.seconds)
        del os.environ["PYTHONPATH"]
        print("\n".join(output.splitlines()[-len(args.families) - 1 :]), flush=True)
        equal = len(re.findall(r"^\w+ +equal .*graphs 1  breaks 0 ", output, re.M))
        row["families"] = f"{equal} of {len(args.families)} equal, 1 graph, 0 breaks"
    return row


def table(rows: dict[str, dict[str, str]]) -> str:
    """Markdown, newest torch first."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name in sorted(rows, key=numbers, reverse=True):
        lines.append("| " + " | ".join(rows[name].get(column, "–") for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[str, dict[str, str]]:
    """The rows of a page that was written before."""
    rows = [[cell.strip() for cell in one.strip("|").split("|")] for one in text.splitlines() if one.startswith("|")]
    return {dotted(numbers(row[0])): dict(zip(COLUMNS, row, strict=True)) for row in rows[2:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--torches", nargs="*", default=[dotted(pair) for pair in TORCHES])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    parser.add_argument("--steps", type=int, default=6, help="of the demo; 0 for none")
    parser.add_argument("--every", type=int, default=10, help="one file of tests in so many; 0 for none, 1 for all")
    parser.add_argument("--families", nargs="*", default=[], help="of the zoo, by name")
    parser.add_argument("--seconds", type=float, default=3600, help="the tests may take, and the families")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are, for another run")
    parser.add_argument("--folder", type=Path, help="where the environments are made")
    args = parser.parse_args()
    for torch in args.torches:
        if numbers(torch) not in TORCHES:
            parser.error(f"torch {torch} has no row in capture/versions.py, which says which Triton goes with it")
    failed = False
    with tempfile.TemporaryDirectory(dir=args.folder) as held:
        source = Path(held) / "source"
        source.mkdir()
        commit = committed(source)
        for torch in args.torches:
            began = time.monotonic()
            folder = Path(tempfile.mkdtemp(dir=held))
            try:
                with environment(args.folder or Path(held), args.python, torch, source, args.keep) as bin:
                    row = tried(bin, source, folder, args)
            except subprocess.CalledProcessError as error:
                row = {"torch": torch, "doctor": f"install fails: {error.returncode}"}
            row |= {"commit": commit, "date": datetime.date.today().isoformat()}
            print(f"torch {torch}: {row} in {time.monotonic() - began:.0f} s", flush=True)
            failed |= row["doctor"] != "all works" or "failed" in row.get("tests", "")
            known, _, below = PAGE.read_text().partition("\n## ") if PAGE.exists() else ("", "", "")
            after = f"\n## {below}" if below else ""  # what people have written below the table stays
            PAGE.write_text(HEAD + table(read(known) | {dotted(numbers(torch)): row}) + after)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""``moebius debug``: its options, and the job that it starts."""
from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from moebius.lowering.debugger.terminal import HELP, Terminal
from moebius.lowering.debugger.wire import VARIABLE, DebuggerError, parse_place, private_folder, ranks_in, write_job
from moebius.lowering.distribution.alive import this_process

__all__ = ["DebuggerError", "run"]

ENDING = 10.0  # seconds that a job has to end in, when it is told to
EXAMPLES = """\
examples:
  moebius debug --at train.py:41 torchrun --nproc-per-node 4 train.py --steps 20
  moebius debug --at 'train.py:41, loss.item() > 9' --rank 3 torchrun --nproc-per-node 4 train.py
  moebius debug train.py                    a script, which stops at its breakpoint()
  moebius debug --attach FOLDER             a job that was left with `detach`, or started with MOEBIUS_DEBUGGER=FOLDER

at the prompt:
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moebius debug", formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="moebius debug [--at PLACE] [--rank N] [--] COMMAND | SCRIPT.py [ARGS ...]\n"
              "       moebius debug --attach FOLDER [--at PLACE] [--rank N]",
        description="Runs a job whose ranks stop at a line, at breakpoint(), or at Ctrl-C, all of them; one terminal\n"
                    "looks at any rank, steps, and lets all go on. What is captured runs as Python meanwhile.",
        epilog=EXAMPLES + HELP + "\n\ndocs/debugging.md says more.",
    )
    parser.add_argument("--at", action="append", default=[], metavar="PLACE", help="FILE:LINE, or 'FILE:LINE, "
                        "CONDITION': stop all ranks there; may be given several times")
    parser.add_argument("--rank", type=int, metavar="N",
                        help="look at this rank first (default: the first that stands)")
    parser.add_argument("--attach", metavar="FOLDER", help="a job that runs already, instead of a command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="torchrun ..., any other command, or a script")
    return parser


def run(words: Sequence[str]) -> int:
    """Run the command. Returns the job's status. Raises DebuggerError for what cannot be done."""
    args = make_parser().parse_args(words)
    command = args.command[args.command[:1] == ["--"]:]
    if bool(command) == bool(args.attach):
        raise DebuggerError("debug needs a command, or --attach FOLDER: moebius debug --at train.py:41 torchrun "
                            "--nproc-per-node 4 train.py")
    at = [checked(place, command) for place in args.at]
    if args.attach:
        return attach(args.attach, at, args.rank)
    folder = private_folder(tempfile.mkdtemp(prefix="moebius-debug-"))
    write_job(folder, at, this_process())
    job = begin(runnable(command), folder)
    terminal = Terminal(folder, job, at, args.rank)
    try:
        return terminal.run()
    finally:
        if not terminal.detached:
            end(job)
            shutil.rmtree(folder, ignore_errors=True)


def attach(name: str, at: list[str], rank: int | None) -> int:
    if not Path(name).is_dir() or not ranks_in(folder := private_folder(name)):
        raise DebuggerError(f"there is no rank of a job in {name}: a job that is started with {VARIABLE}={name}, and "
                            f"whose script imports moebius, has them there")
    return Terminal(folder, None, at, rank).run()


def runnable(command: list[str]) -> list[str]:
    """With this Python, where the command is torchrun or a script."""
    if command[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    if command[0].endswith(".py"):
        if not Path(command[0]).is_file():
            raise DebuggerError(f"there is no file {command[0]}")
        return [sys.executable, *command]
    return command


def begin(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """The job, in a session of its own: Ctrl-C is the terminal's."""
    environment = {**os.environ, VARIABLE: str(folder)}
    try:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise DebuggerError(f"{command[0]} cannot be run: {error}") from error


def end(job: subprocess.Popen[bytes]) -> None:
    """Its ranks have been told to; a launcher waits for them."""
    for stop in (lambda: None, job.terminate, job.kill):
        stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(ENDING)
            return


def checked(place: str, command: list[str]) -> str:
    """The place with its file's whole path. Raises DebuggerError where there is no code on the line."""
    file, line, condition = parse_place(place)
    named = [word for word in command if word == file or word.endswith(os.sep + file)]
    path = next((Path(each) for each in (file, *named) if Path(each).is_file()), None)
    if path is None:
        raise DebuggerError(f"there is no file {file}")
    try:
        lines = sorted(set(lines_of(compile(path.read_bytes(), str(path), "exec"))))
    except SyntaxError as error:
        raise DebuggerError(f"{file} is no Python: {error}") from None
    if line not in lines:
        near = [str(each) for each in (*[x for x in lines if x < line][-1:], *[x for x in lines if x > line][:1])]
        raise DebuggerError(f"{file}:{line} has no code; {' and '.join(near) or 'no line'} has")
    return f"{os.path.abspath(path)}:{line}" + (f", {condition}" if condition else "")


def lines_of(code: types.CodeType) -> Iterator[int]:
    """The lines that code runs, that of its functions and classes too."""
    yield from (line for _, _, line in code.co_lines() if line)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from lines_of(each)

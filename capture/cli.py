"""The ``moebius`` command: explain a script, check a machine, run the benchmarks."""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .versions import __version__

USAGE_ERROR = 2


class UsageError(Exception):
    """The command line asks for something that cannot be done; the text says what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (2: the command line was wrong)."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    try:
        if words[:2] == ["explain", "--kernels"]:
            return explain_kernels(words[2:])
        if words[:1] == ["explain"] and not {"-h", "--help"} & set(words[1:2]):
            return explain_script(split_explain(words[1:]))
        if words[:1] == ["plan"]:
            return plan(words[1:])
        if words[:1] == ["debug"]:
            return debug(words[1:])
        args, rest = parser.parse_known_args(words)
        if rest and args.command != "bench":
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.rest = rest
        if args.command is None:
            parser.print_help()
            return USAGE_ERROR
        return args.run(args)
    except UsageError as error:
        print(f"moebius: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # | head
        sys.stdout = open(os.devnull, "w")
        return 0


def make_parser(files: Any = None) -> argparse.ArgumentParser:
    """The commands. files: what completes the name of a file, for shtab."""
    parser = argparse.ArgumentParser(prog="moebius", description="Captures whole MoE training steps from plain Python.")
    parser.add_argument("--version", action="version", version=f"moebius {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    explain = commands.add_parser(
        "explain",
        help="run a script and print the report of every captured function at its end",
        description="Runs SCRIPT as Python would, then prints the report of every function that it captured.",
        epilog="What stands after -- goes to the script unread, should it have its own --html or --json.",
        usage="moebius explain SCRIPT.py [ARGS ...] [--html FILE] [--json FILE]\n"
        "       moebius explain --step SCRIPT.py [ARGS ...]\n"
        "       moebius explain --roofline [--on DEVICE] SCRIPT.py [ARGS ...]\n"
        "       moebius explain --routing FILE SCRIPT.py [ARGS ...]\n"
        "       moebius explain --kernels [-h] ...",
    )
    explain.add_argument("--kernels", action="store_true", help="instead of a script: what the compiler makes of the "
                         "GPU kernels, and what bounds them; its own options stand after it")
    script = explain.add_argument("script", help="the script to run, with its own arguments after it")
    explain.add_argument("--step", action="store_true", help="then walk through what was captured, line by line, "
                         "forwards and backwards: stack, variables, guards and graph so far")
    explain.add_argument("--roofline", action="store_true", help="instead of the reports: what the operators of each "
                         "graph that ran need on a device, what bounds them, and what another saving, precision or "
                         "top-k would change")
    explain.add_argument("--on", metavar="DEVICE", default="here", help="for --roofline: here (this CPU, measured on "
                         "one thread), h100, h200, b200, mi300x, or a file of moebius plan --calibrate (default: here)")
    routing = explain.add_argument("--routing", metavar="FILE", help="instead of the reports: slots of each expert and "
                                   "layer in all calls, how uneven they are, and FILE with them for moebius plan "
                                   "--routing")
    html = explain.add_argument("--html", metavar="FILE", help="also write the reports as one self-contained HTML page")
    json_file = explain.add_argument("--json", metavar="FILE", help="also write the reports as a JSON list")

    doctor = commands.add_parser("doctor", help="say what works on this machine, and what is used instead",
                                 description="Says which versions, compilers, devices and kernels this machine has, "
                                 "and tries a small captured step.")
    doctor.set_defaults(run=run_doctor)

    bench = commands.add_parser("bench", help="run a benchmark of bench/; without a name, list them",
                                description="Runs a benchmark of the checkout; without a name, lists them.",
                                epilog="Other options go to the benchmark: moebius bench warm --help lists them.")
    bench.add_argument("name", nargs="?", help="the benchmark, for example warm")
    plot = bench.add_argument("--plot", nargs="?", const="", metavar="FILE",
                              help="also draw the result as a PNG (NAME.png)")
    bench.set_defaults(run=run_bench)

    help_ = commands.add_parser("help", help="what a graph break's code means, and the smallest change that avoids it",
                                description="Says what a graph break's code means, and the smallest change of your "
                                "program that avoids it.")
    help_.add_argument("code", nargs="?", help="the code, for example MB002; without one, all are listed")
    help_.add_argument("--page", action="store_true", help="print docs/break-codes.md")
    help_.set_defaults(run=run_help)

    completion = commands.add_parser("completion", help="print a script that completes these commands in a shell",
                                     description="Prints a script with which a shell completes these commands, their "
                                     "options and files. It needs the package shtab.",
                                     epilog="For bash: moebius completion bash > ~/.bash_completion.d/moebius")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="for which shell")
    completion.set_defaults(run=run_completion)

    for action in (script, html, json_file, routing, plot):
        vars(action)["complete"] = files
    others = {
        "plan": "how a training step would best be run on a cluster, without running it",
        "debug": "one terminal for the ranks of a running job: all stop at a line, look at any",
    }
    for name, said in others.items():  # (they parse their words themselves)
        parents = [] if files is None else [parser_of(name)]
        commands.add_parser(name, help=said, parents=parents, conflict_handler="resolve")
    return parser


def parser_of(name: str) -> argparse.ArgumentParser:
    """Of a command that has its own."""
    if name == "plan":
        from moebius.lowering.planner.command import make_parser
    else:
        from moebius.lowering.debugger.command import make_parser
    return make_parser()


@dataclass
class Explained:
    """What ``moebius explain`` is asked for: a script with its arguments, files to write, whether to walk through the
    captures, the device of a roofline, a file for slots of experts."""

    script: str
    args: list[str]
    html: str | None = None
    json: str | None = None
    walks: bool = False
    device: str | None = None
    routing: str | None = None


def split_explain(words: list[str]) -> Explained:
    """Our options that name a file may stand before or after the script, the others before it: scripts have words of
    such names."""
    values: dict[str, str | None] = {"--html": None, "--json": None}
    early: dict[str, str | None] = {"--on": None, "--routing": None}
    rest: list[str] = []
    flags = {"--step": False, "--roofline": False}
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            rest += words
            break
        if name in values or (name in early and not rest):
            if not equals and not words:
                raise UsageError(f"{name} needs {'a device' if name == '--on' else 'the name of a file to write'}")
            (values if name in values else early)[name] = value if equals else words.pop(0)
        elif not rest and word in flags:
            flags[word] = True
        elif not rest and word.startswith("-"):
            raise UsageError(f"explain knows no option {word}; a script's own options stand after the script")
        else:
            rest.append(word)
    if not rest:
        raise UsageError("explain needs a script: moebius explain SCRIPT.py [ARGS]")
    if early["--on"] is not None and not flags["--roofline"]:
        raise UsageError("--on names the device of --roofline: moebius explain --roofline --on h200 SCRIPT.py [ARGS]")
    device = (early["--on"] or "here") if flags["--roofline"] else None
    return Explained(rest[0], rest[1:], values["--html"], values["--json"], flags["--step"], device, early["--routing"])


def explain_kernels(options: list[str]) -> int:
    """The experts' GPU kernels, compiled without a GPU: roofline.py's table."""
    try:
        from moebius.kernels.triton_form import roofline
    except ImportError as error:
        raise UsageError(f"explain --kernels needs the triton package: {error}") from error
    return roofline.main(options)


def explain_script(asked: Explained) -> int:
    """Run the script, then print the reports: also when it failed or exited. Returns the script's own exit status."""
    script, html, json_file, walks = asked.script, asked.html, asked.json, asked.walks
    path = Path(script)
    if not path.is_file():
        raise UsageError(f"there is no file {script}")
    for file in (html, json_file, asked.routing):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise UsageError(f"there is no folder {Path(file).absolute().parent} to write {file} to")
    from .api import captured_functions, keep_captured
    from .trace.recorder import Recordings

    keep_captured()
    Recordings.is_on |= walks
    answer = roofline(asked.device) if asked.device is not None else None
    if asked.routing is not None:
        from moebius.lowering.roofline import RECORDER

        RECORDER.on = True
    status, captured = run_script(path, asked.args, captured_functions)
    reports = [item.report() for item in captured]
    for report in [] if walks or answer is not None or asked.routing is not None else reports:
        print(f"\n{report}")
    if not reports:
        print(f"\nmoebius: {script} captured nothing: put @moebius.capture on the function to capture", file=sys.stderr)
    if html is not None and reports:
        from .report.page import write

        print(f"\nmoebius: {write(reports, html)}", file=sys.stderr)
    if json_file is not None:
        import json

        Path(json_file).write_text(json.dumps([report.to_dict() for report in reports], indent=1), encoding="utf-8")
    if answer is not None:
        print(f"\n{answer()}")
    if asked.routing is not None:
        print(f"\n{write_slots(asked.routing)}")
    if walks:
        walk()
    return status


def write_slots(file: str) -> str:
    """The slots that were counted, to a file. Returns what to print of them."""
    import json

    from moebius.lowering.roofline import RECORDER
    from moebius.lowering.roofline.slots import render

    if not (rows := RECORDER.rows()):
        return ("moebius: no experts operator ran (with mesh= none is counted: run it on one process), so there are no "
                f"slots for {file}")
    Path(file).write_text(json.dumps(rows), encoding="utf-8")
    return f"{render(rows)}\nWritten: moebius plan --routing {file}"


def roofline(name: str) -> Callable[[], str]:
    """Begin to count what graphs run. Returns what writes the answer for a device."""
    from moebius.lowering.planner import PlannerError, calibrate, hardware
    from moebius.lowering.roofline import METER, render

    try:
        device = calibrate.measure(link=(0.0, 1e9)) if name == "here" else hardware.device(name)
    except PlannerError as error:
        raise UsageError(str(error)) from None
    METER.on = True
    return lambda: render(METER.counts, device, name == "here")


def walk() -> None:
    """Commands about what was recorded, from the terminal or a pipe."""
    from .report.walk import Walk
    from .trace.recorder import Recordings

    if not Recordings.kept:
        return
    walking = Walk(Recordings.kept, None if sys.stdin.isatty() else sys.stdin)
    while True:
        try:
            walking.cmdloop()
            return
        except KeyboardInterrupt:  # (as in pdb: the line is given up)
            print()


def run_script(path: Path, args: list[str], captured_functions: Callable[[], Iterable[Any]]) -> tuple[int, list[Any]]:
    """Run a file as ``__main__``. Returns (exit status, the captured functions); a failure's traceback is printed."""
    before = (sys.argv, sys.path[:])
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.resolve().parent))
    captured: list[Any] = []
    try:
        try:
            namespace = runpy.run_path(str(path), run_name="__main__")
        finally:
            # here, while the script's variables, or the frames of its exception, still hold what it captured
            captured += captured_functions()
        del namespace
        return 0, captured
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None), captured
    except BaseException as error:
        # the script's own frames are what its author wants to see, without ours and runpy's above them
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename != str(path):
            tb = tb.tb_next
        traceback.print_exception(type(error), error, tb or error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1, captured
    finally:
        sys.argv, sys.path[:] = before


def plan(options: list[str]) -> int:
    """The planner's table; its own options stand in its module."""
    from moebius.lowering.planner import PlannerError, command

    try:
        return command.run(options)
    except PlannerError as error:
        raise UsageError(str(error)) from None


def debug(options: list[str]) -> int:
    """The terminal of a job's ranks; its own options stand in its module."""
    from moebius.lowering.debugger import command

    try:
        return command.run(options)
    except command.DebuggerError as error:
        raise UsageError(str(error)) from None


def run_doctor(args: argparse.Namespace) -> int:
    from .doctor import examine, render

    findings = examine()
    print(render(findings))
    return int(any(finding.status == "missing" for finding in findings))


def run_help(args: argparse.Namespace) -> int:
    from .report.codes import CODES, by_name, help_text, page

    if args.page:
        print(page(), end="")
    elif args.code is None:
        print("\n".join(f"{code.name}  {code.title}" for code in CODES))
    elif (code := by_name(args.code)) is not None:
        print(help_text(code))
    else:
        raise UsageError(f"there is no code {args.code}; there are {CODES[0].name} to {CODES[-1].name}")
    return 0


def run_completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs the package shtab: pip install shtab") from None
    print(shtab.complete(make_parser(shtab.FILE), args.shell))
    return 0


def bench_folder() -> Path:
    """The repository's bench/ folder; benchmarks are not part of the installed package."""
    for folder in (Path(__file__).resolve().parent.parent / "bench", Path("bench")):
        if (folder / "warm.py").is_file():
            return folder
    raise UsageError("the benchmarks are part of the repository: run this in a checkout")


def run_bench(args: argparse.Namespace) -> int:
    folder = bench_folder()
    names = sorted(
        path.stem
        for path in folder.glob("*.py")
        if not path.stem.startswith("_") and path.stem not in ("common", "models")
    )
    if args.name is None:
        if args.rest:
            raise UsageError(f"bench needs a name before {args.rest[0]}; there are: {', '.join(names)}")
        print("\n".join(names))
        return 0
    if args.name not in names:
        raise UsageError(f"there is no benchmark {args.name!r}; there are: {', '.join(names)}")
    command = [sys.executable, str(folder / f"{args.name}.py")]
    plot = [] if args.plot is None else ["--plot", args.plot or f"{args.name}.png"]
    return subprocess.run(command + plot + args.rest).returncode

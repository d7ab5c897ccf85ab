"""Steps exported by one torch and gone on with by another: this environment's Python and each other one, both ways.

    python tests/capture/export/across.py OTHER_PYTHON … [--families mixtral qwen3_moe …]

An OTHER_PYTHON is the interpreter of an environment that has moebius, safetensors and another version of torch. Each
step is captured, called three times, exported, called three times more; whoever loads the file makes the same three
calls and compares losses and the whole state after them. Exit status 1 where more than rounding differs, or a file
could not be loaded.
--families: of `make zoo`, where transformers is installed; in an OTHER_PYTHON that lacks it they are only loaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import moebius

HERE = Path(__file__).resolve()
ROOT = HERE.parents[3]
SIZES = (30, 33, 36)  # of the calls before the export
LATER = (31, 40, 12)  # of the calls after it
# Relative, in float32 after three steps. Kernels of two torch builds round apart: plain Python's SGD momentum after six
# of these steps differs by 6e-10 between 2.12.1 and 2.13.0. A state not gone on with or a lost term shows from 1e-4 on.
ROUNDING = 1e-6
NUMBERS = (bool, int, float, type(None))
Call = Callable[[int, int], tuple[tuple, dict[str, Any]]]  # size, seed → the arguments that stand for state; the batch


# ----------------------------------------------------------------------------------------------------------------------
# what is exported
# ----------------------------------------------------------------------------------------------------------------------
def small(kind: type[torch.optim.Optimizer], **options) -> tuple[Callable, Call]:
    from tests.capture.export.conftest import batch, make_training

    model, optimizer, scheduler, step = make_training(lambda p, lr: kind(p, lr=lr, **options))
    return step, lambda size, seed: (
        (model, optimizer, scheduler),
        dict(zip(("tokens", "labels"), batch(size, seed), strict=True)),
    )


def family(name: str) -> tuple[Callable, Call]:
    from zoo.measure import train_step
    from zoo.tiny import tiny_models

    model, inputs = tiny_models()[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batch(size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        ids = {"input_ids", "labels", "decoder_input_ids"}
        drawn = {
            key: torch.randint(3, 128, value.shape, generator=generator) if key in ids else value
            for key, value in inputs.items()
        }
        return (model, optimizer), {"inputs": drawn}

    def step(model, optimizer, inputs):
        return train_step(model, optimizer, inputs)

    return step, batch


def cases(families: list[str]) -> Iterator[tuple[str, Callable[[], tuple[Callable, Call]]]]:
    yield "AdamW", lambda: small(torch.optim.AdamW)
    yield "AdamW, foreach", lambda: small(torch.optim.AdamW, foreach=True)
    yield "AdamW, fused", lambda: small(torch.optim.AdamW, fused=True)
    yield "Adam, amsgrad", lambda: small(torch.optim.Adam, amsgrad=True)
    yield "SGD, momentum", lambda: small(torch.optim.SGD, momentum=0.9, nesterov=True)
    for name in families:
        yield name, lambda name=name: family(name)


# ----------------------------------------------------------------------------------------------------------------------
# the two ends
# ----------------------------------------------------------------------------------------------------------------------
def values(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors and numbers of a state, the tensors copied; what else it holds as text."""
    return {
        name: value.detach().clone() if torch.is_tensor(value) else value if isinstance(value, NUMBERS) else repr(value)
        for name, value in state.items()
    }


def write(folder: Path, families: list[str]) -> None:
    """For each case a folder with the file, the later batches, and what a copy of the step made of them here."""
    for number, (name, make) in enumerate(cases(families)):
        at = folder / str(number)
        at.mkdir(parents=True)
        (at / "name").write_text(name)
        torch.manual_seed(0)
        try:
            step, call = make()
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            (at / "left_out").write_text(str(error))
            continue
        captured = moebius.capture(step)
        for seed, size in enumerate(SIZES):
            given, batch = call(size, seed)
            captured(*given, **batch)
        try:
            captured.export(at / "step.moebius")
        except moebius.ExportError as error:
            (at / "left_out").write_text(str(error))
            continue
        batches = [call(size, 10 + seed) for seed, size in enumerate(LATER)]
        losses = [captured(*given, **batch).detach().clone() for given, batch in batches]
        captured.export(at / "after.moebius")
        state = values(moebius.load(at / "after.moebius").state_dict())
        torch.save({"batches": [batch for _, batch in batches], "losses": losses, "state": state}, at / "expected")


def read(folder: Path) -> None:
    """A line of JSON for each case: its name, and the largest relative difference or what went wrong."""
    for at in sorted(folder.iterdir(), key=lambda path: int(path.name)):
        found: dict[str, Any] = {"name": (at / "name").read_text()}
        if (at / "left_out").exists():
            found["left_out"] = (at / "left_out").read_text().strip().splitlines()[-1]
        else:
            try:
                found["difference"] = compared(at)
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps(found), flush=True)


def compared(at: Path) -> float:
    expected = torch.load(at / "expected", weights_only=True)
    step = moebius.load(at / "step.moebius")
    losses = [step(**batch) for batch in expected["batches"]]
    state = values(step.state_dict())
    if state.keys() != expected["state"].keys():
        raise KeyError(f"states differ in {sorted(state.keys() ^ expected['state'].keys())[:3]}")
    pairs = [*zip(losses, expected["losses"], strict=True), *((state[k], v) for k, v in expected["state"].items())]
    return max(distance(a, b) for a, b in pairs)


def distance(a: Any, b: Any) -> float:
    """Of two tensors, the norm of the difference over the norm; other values are the same or infinitely far apart."""
    if type(a) is type(b) and torch.is_tensor(a):
        if (a.dtype, a.shape) == (b.dtype, b.shape):
            return 0.0 if torch.equal(a, b) else float((a.double() - b.double()).norm() / b.double().norm())
    elif type(a) is type(b) and a == b:
        return 0.0
    return float("inf")


# ----------------------------------------------------------------------------------------------------------------------
# both ways
# ----------------------------------------------------------------------------------------------------------------------
def run(python: str, *arguments: str) -> str:
    # moebius is the one that is installed there; the programs are this checkout's
    paths = [str(ROOT), str(ROOT / "bench"), str(HERE.parent)]
    program = f"import sys; sys.path[:0] = {paths!r}; import across; across.main()"
    done = subprocess.run(
        [python, "-c", program, *arguments], capture_output=True, text=True, cwd=tempfile.gettempdir()
    )
    if done.returncode:
        raise SystemExit(f"{python} {' '.join(arguments)}\n{done.stderr[-3000:]}")
    return done.stdout


def version(python: str) -> str:
    return subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"], text=True).strip()


def table(others: list[str], families: list[str]) -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, other in enumerate(others):
            for back, (writer, reader) in enumerate(((sys.executable, other), (other, sys.executable))):
                folder = str(Path(scratch, f"{number}-{back}"))
                run(writer, "--write", folder, "--families", *families)
                print(f"written with torch {version(writer)}, loaded with {version(reader)}")
                for line in run(reader, "--read", folder).splitlines():
                    found = json.loads(line)
                    if "left_out" in found:
                        outcome = f"not exported: {found['left_out']}"
                    elif "error" in found:
                        outcome, bad = found["error"], bad + 1
                    elif found["difference"] > ROUNDING:
                        outcome, bad = f"differs by {found['difference']:.1e}", bad + 1
                    else:
                        outcome = f"differs by {found['difference']:.1e}" if found["difference"] else "the same bits"
                    print(f"  {found['name']:20} {outcome}", flush=True)
    return int(bad > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="*", metavar="OTHER_PYTHON")
    parser.add_argument("--families", nargs="*", default=[])
    parser.add_argument("--write", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write, arguments.families)
    elif arguments.read:
        read(arguments.read)
    elif arguments.others:
        raise SystemExit(table(arguments.others, arguments.families))
    else:
        parser.error("name the Python of an environment with another torch")


if __name__ == "__main__":
    main()

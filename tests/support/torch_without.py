"""What becomes of moebius where torch lacks a name: a process that has loaded torch forks for each name it is told.

A line of its input is a name, a line of its output what was seen, as JSON. Loading torch is what takes long.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch._dynamo
import torch.distributed._local_tensor
import torch.fx.experimental.symbolic_shapes
import torch.utils._sympy.interp
import torch.utils.checkpoint

from moebius.torch_facts.torch_names import resolve  # (of moebius nothing else before the fork)


class Gone:
    """In an attribute's place: whoever asks for it, of the class or of an object, is told that there is none."""

    def __get__(self, held: Any, owner: Any = None) -> Any:
        raise AttributeError("taken away")

    def __set__(self, held: Any, value: Any) -> None:
        pass


def take_away(name: str) -> None:
    owner, _, last = name.rpartition(".")
    holder = resolve(owner)
    if name in sys.modules:
        sys.modules[name] = None  # type: ignore[assignment]  # (who imports it is told that there is none)
    if isinstance(holder, type):
        setattr(holder, last, Gone())  # (a base in C may have it, or each object for itself)
    elif hasattr(type(holder), "__getattr__"):
        vars(holder).pop(last, None)  # (torch.ops keeps what it was asked for, and makes what it does not keep)
        elsewhere = type(holder).__getattr__

        def looked_up(owner: Any, asked: str) -> Any:
            if asked == last:
                raise AttributeError("taken away")
            return elsewhere(owner, asked)

        type(holder).__getattr__ = looked_up
    elif hasattr(holder, last):  # (a build for a CPU alone lacks some)
        delattr(holder, last)


def seen() -> dict[str, Any]:
    """What the doctor says, what the import does, and what a first capture does as if no test had run on this torch."""
    from moebius.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found: dict[str, Any] = {"doctor": main(["doctor"])}
    found["printed"] = printed.getvalue()
    try:
        from moebius import capture
    except Exception as error:
        return found | {"import": f"{type(error).__name__}: {error}"}
    from moebius import selftest, stats

    selftest.WORKS = None
    double, triple = capture(lambda x: x.clone() * 2), capture(lambda x: x.clone() * 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right = [function(torch.ones(2)).tolist() for function in (double, double, triple)] == [[2, 2], [2, 2], [3, 3]]
    found |= {"import": None, "right": right, "warnings": [str(warning.message) for warning in caught]}
    return found | {"graphs": stats(double).graphs + stats(triple).graphs}


def answer(name: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            os.environ["MOEBIUS_CACHE"] = tempfile.mkdtemp(dir=os.environ["MOEBIUS_CACHE"])  # nothing is remembered
            take_away(name)
            line = json.dumps(seen())
        except BaseException as error:
            line = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        os.write(1, f"{line}\n".encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        os.write(1, f"{json.dumps({'failed': f'it ended with status {status}'})}\n".encode())


if __name__ == "__main__":
    for given in sys.stdin:
        answer(given.strip())

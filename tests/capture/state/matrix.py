"""Programs of a kind of state and a question about it, run plain and captured on fresh copies, and compared."""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import math
import random
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

import moebius

from . import further, further_questions, kinds, of_process, of_torch, questions
from .kinds import Kind
from .questions import Question

HEAD = (
    "import array, builtins, collections, contextlib, contextvars, ctypes, dataclasses, decimal, functools, gc, io\n"
    "import itertools, logging, numpy, os, queue, random, sys, threading, types, warnings, weakref\nimport torch\n"
)
KINDS = kinds.KINDS | further.KINDS | of_torch.KINDS | of_process.KINDS
QUESTIONS = questions.QUESTIONS | further_questions.QUESTIONS
CELLS = list(itertools.product(KINDS, QUESTIONS))
# Shadow mode runs the step once more, on copies; of what belongs to the process or to a class there is none
# (docs/soundness.md): kinds that a step cannot write to twice as if it were once.
UNCOPIED = (
    "class attribute", "class of an object", "cell_contents", "function attribute", "builtins", "sys attribute",
    "recursion limit", "logging level", "logger enabled", "decimal", "directory", "numpy.random",
    "annotations of a class", "thread's attribute", "expression compiled", "code that is no function's",
)  # fmt: skip
# Forward is captured and backward runs outside, after the state is another. These no guard of the call names as a place
# of its own, or the graph has them for inputs, or they come and go (docs/soundness.md); all else is an error when
# backward runs, or native.
LATER = {
    "backward outside": ("stdout swapped", "autocast dtype", "autocast cache"),
    "backward outside, of a checkpoint": (
        "thread local", "stdout swapped", "param_groups", "scheduler's epoch", "class of a class",
        ".grad", ".grad's value", "grad of another dtype",
    ),
}  # fmt: skip
# Known to differ: `make state` reports them as such, the share that runs with the tests leaves them out.
OPEN = {(kind, "shadow mode") for kind in KINDS if kind in UNCOPIED or kind.endswith(" of a metaclass")}
OPEN |= {(kind, question) for question, kinds in LATER.items() for kind in kinds}
# torch.utils.swap_tensors refuses, with its own error, a tensor that guards hold weakly: loud, and not mended yet
OPEN |= {("swap_tensors", question) for question in QUESTIONS}
# guards hold what a place had until the next call, where the step itself empties the place (docs/soundness.md)
OPEN |= {
    ("weakref's death", question)
    for question in (
        "checkpoint, written before", "native code reads", "finally", "nested capture", "loop that counts",
        "raises in one call", "cached by a cached one", "cached_property of the model",
        "returned on data from a with", "nested captures that fail",
    )
}  # fmt: skip
NUMBERS = itertools.count()


def share(seed: int, count: int) -> list[tuple[str, str]]:
    """Some of all cells, others for each seed."""
    return random.Random(seed).sample([cell for cell in CELLS if cell not in OPEN], count)


@dataclass
class Outcome:
    """differs: how, "" if it does not. how: "whole", "breaks" or "native", of the captured run."""

    differs: str
    how: str


@dataclass
class Seen:
    """One run: what was seen of each call, and how it was captured."""

    calls: list[Any]
    how: str = ""


def source_of(kind: Kind, question: Question) -> str:
    body = "\n".join(itertools.chain.from_iterable(expand(line, kind) for line in question.text.splitlines()))
    look = f"def look_at(s):\n    return {kind.read.replace('@', 's')}\n"
    return HEAD + kind.before + body + "\n" + look + "def put_back():\n    " + (kind.after or "pass") + "\n"


def expand(line: str, kind: Kind) -> Iterator[str]:
    """A line of a question with the kind's expressions in it."""
    line = re.sub(r"NEW\((\d)\)", lambda m: "(" + kind.make.replace("$", m[1]) + ")", line)
    line = re.sub(r"READ\(([\w.\[\]]+)\)", lambda m: "(" + kind.read.replace("@", m[1]) + ")", line)
    write = re.search(r"WRITE\(([\w.\[\]]+), (\d)\)", line)
    if write is None:
        yield line
        return
    head = line[: write.start()]
    indent = head[: len(head) - len(head.lstrip())]
    if head.strip():
        yield head.rstrip()
        indent += "    "
    for statement in kind.write.replace("@", write[1]).replace("$", write[2]).splitlines():
        yield indent + statement


def outcome(kind: str, question: str) -> Outcome:
    source, asked = source_of(KINDS[kind], QUESTIONS[question]), QUESTIONS[question]
    plain, captured = run(source, asked, False), run(source, asked, True)
    return Outcome(difference(plain.calls, captured.calls), captured.how)


def run(source: str, question: Question, captured: bool) -> Seen:
    name = f"<state {next(NUMBERS)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    sys.modules["state_program"] = module = types.ModuleType("state_program")  # (dataclasses look for it)
    space = vars(module)
    space["CAPTURED"] = captured
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    seen = Seen([])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec(compile(source, name, "exec"), space)
        try:
            calls(space, question, captured, seen)
        finally:
            space["put_back"]()
            torch.set_grad_enabled(True)
    ours = [str(w.message) for w in told if str(w.message).startswith("moebius could not capture")]
    if ours:
        seen.calls.append(f"warns: {ours[0][:300]}")
    linecache.cache.pop(name, None)
    del sys.modules["state_program"]
    moebius.reset()
    return seen


def calls(space: dict[str, Any], question: Question, captured: bool, seen: Seen) -> None:
    model = space["prepare"]()
    step = given = space["step"]
    if captured:
        step = given = moebius.capture(step, **({"verify": 1} if question.how == "verify" else {}))
    for i in range(question.calls):
        between = ""
        if "between" in space:
            try:
                space["between"](i, model)
            except moebius.StateChangedError:
                if question.how != "outside":
                    raise
                seen.calls.append(None)
                break
            except Exception as error:
                between = f"{type(error).__name__}: {error}"
        x = space["arguments"](i) if "arguments" in space else torch.tensor([1.0, 2.0, 3.0]) + i
        arguments = (model, x)
        if question.how == "export" and captured and i == 2 and given is step:
            with contextlib.suppress(moebius.MoebiusError), tempfile.TemporaryDirectory() as folder:
                step.export(str(Path(folder) / "step"))
                given = moebius.load(str(Path(folder) / "step"))
        if given is not step:
            arguments = (x,)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                found = given(*arguments)
        except moebius.MoebiusError as error:
            found = f"moebius: {type(error).__name__}: {error}"
            if given is not step:  # a loaded step says that it does not fit
                seen.calls.append(None)
                break
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        state: Any = None
        if given is step:
            try:
                state = [copied(space["look_at"](s)) for s in model.holders]
            except Exception as error:
                state = f"{type(error).__name__}: {error}"
        gradients = [None if p.grad is None else copied(p.grad) for p in model.parameters()] if given is step else None
        seen.calls.append((copied(found), state, gradients, printed.getvalue() + between))
    if captured:
        told = moebius.stats(step)
        seen.how = "native" if not told.graphs else "breaks" if told.breaks else "whole"


def copied(value: Any) -> Any:
    """What was seen, as plain values."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return (str(value.dtype), value.requires_grad, list(value.shape))
        return (str(value.dtype), value.requires_grad, value.detach().tolist())
    if isinstance(value, list | tuple):
        return [copied(v) for v in value]
    return value if isinstance(value, int | float | str | type(None)) else repr(type(value))


def difference(plain: list[Any], captured: list[Any]) -> str:
    if len(captured) > len(plain):
        return str(captured[-1])
    for i, (one, other) in enumerate(zip(plain, captured, strict=False)):
        if other is None:
            return ""
        loaded = one[1] is None or other[1] is None  # (its state is in the file)
        parts = ("result",) if loaded else ("result", "state", "gradients", "printed")
        for part, a, b in zip(parts, one, other, strict=False):
            if not same(a, b):
                return f"call {i}: {part}: plain {str(a)[:160]}, captured {str(b)[:160]}"
    return ""


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) is float and type(b) is float:
        return a == b or math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) or (a != a and b != b)
    return type(a) is type(b) and a == b

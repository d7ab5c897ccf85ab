"""``moebius doctor``: what works on this machine, and what is used instead of what does not."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from textwrap import wrap
from typing import Any

from .errors import MoebiusWarning
from .versions import OLDEST_TORCH, PYTHONS, RELEASES, TORCHES, dotted, is_tested, lacks, numbers, works_on

# mark, and its ANSI colour
MARKS = {"ok": ("✓", 32), "instead": ("–", 33), "missing": ("✗", 31)}


@dataclass
class Finding:
    """One line of the doctor's. status: "ok", "instead" (the note says what is used instead) or "missing" (needed)."""

    what: str
    found: str
    status: str
    note: str = ""


def examine() -> list[Finding]:
    """Look at everything, in the order in which it matters. One broken part never hides the others."""
    findings: list[Finding] = []
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        python, hook, torch, names, training, rows, triton, devices, distributed, compiler)
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # a doctor that dies of a patient's disease helps nobody
            findings.append(
                Finding(check.__name__, "could not be examined", "missing", f"{type(error).__name__}: {error}")
            )
    return findings


def installed(name: str) -> str | None:
    """A distribution's version, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def python() -> Iterator[Finding]:
    found = platform.python_version()
    if sys.implementation.name != "cpython":
        yield Finding("Python", f"{sys.implementation.name} {found}", "missing", "moebius needs CPython")
    elif sys.version_info[:2] not in PYTHONS:
        note = f"moebius works on CPython {dotted(PYTHONS[0])} to {dotted(PYTHONS[-1])}"
        yield Finding("Python", found, "missing", note)
    elif sys.version_info[:3] == (3, 13, 0):
        note = (
            "3.13.0 misses some attribute stores (gh-125608): guards take the slower, sound path; 3.13.1 has the mend"
        )
        yield Finding("Python", found, "instead", note)
    else:
        yield Finding("Python", found, "ok")


def hook() -> Iterator[Finding]:
    try:
        native = importlib.import_module("moebius.hook.native")
    except ImportError as error:
        note = f"{error}. Install again with a C compiler at hand: pip install --force-reinstall --no-deps moebius"
        yield Finding("frame hook", "not built", "missing", note)
        return
    if os.environ.get("MOEBIUS_DISABLE", "") not in ("", "0"):
        yield Finding(
            "frame hook", "switched off", "instead", "MOEBIUS_DISABLE is set: captured functions run natively"
        )
    else:
        yield Finding("frame hook", os.path.basename(native.__file__ or "built in"), "ok")


def torch() -> Iterator[Finding]:
    found = installed("torch")
    if found is None:
        yield Finding("torch", "not installed", "missing", "pip install torch")
    elif numbers(found) < OLDEST_TORCH:
        yield Finding("torch", found, "missing", works_on())
    elif not is_tested(found):
        note = f"not tested ({', '.join(RELEASES)} are): what is said of capture below was tried just now"
        yield Finding("torch", found, "instead", note)
    else:
        yield Finding("torch", found, "ok")


def names() -> Iterator[Finding]:
    """Whether this torch has what moebius takes of its private parts."""
    found = installed("torch")
    if found is None:
        return
    from .torch_facts.torch_names import NAMES, missing

    if gone := missing():
        yield Finding("torch's parts", f"{len(gone)} of {len(NAMES)} are missing", "missing", lacks(gone, found))
    else:
        yield Finding("torch's parts", f"all {len(NAMES)} that moebius uses", "ok")


def training() -> Iterator[Finding]:
    """Captures, lowers and trains a small MoE layer, and compares it with plain Python: on the CPU, and on the GPU."""
    if installed("torch") is None:
        return
    from .torch_facts.torch_names import missing

    if missing():  # torch itself may end the process, where a part of it is not there
        yield Finding("capture", "not tried", "missing", "torch's parts that it needs are missing")
        return
    works = not importlib.import_module("moebius.hook").is_disabled()
    for device in ("cpu", "cuda") if has_gpu() else ("cpu",):
        where = "" if device == "cpu" else ", on the GPU"
        try:
            if not importlib.import_module("moebius.hook").is_disabled():
                for finding in trained(importlib.import_module("moebius.trial").try_moe_step(device), where):
                    works &= finding.status != "missing"
                    yield finding
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            works = False
            yield Finding(f"capture{where}", "fails", "missing", note)
    if works:
        yield from first()


def first() -> Iterator[Finding]:
    """A step without experts, whose graph takes another way through torch and lowering. Nothing where it works."""
    selftest, captured = (importlib.import_module(f"moebius.{name}") for name in ("selftest", "cache.captured"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        failure = selftest.in_a_thread(lambda: selftest.try_first_step(captured.captured_once))
    said = [str(each.message) for each in told if issubclass(each.category, MoebiusWarning)]
    if failure or said:
        yield Finding("a step without experts", "fails", "missing", failure or said[0])


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def trained(outcome: Any, where: str) -> Iterator[Finding]:
    """What an outcome of the self-test says, for each thing that it tried."""
    graphs, breaks = outcome.graphs, outcome.breaks
    found = f"{counted(graphs, 'graph')}, {counted(len(breaks), 'graph break')}, {outcome.hits} of 2 hits"
    whole = (graphs, len(breaks), outcome.hits) == (1, 0, 2)
    note = "" if whole else "; ".join(breaks) or "the step runs natively"
    yield Finding(f"capture{where}", found, "ok" if whole else "missing", note)
    regions = f"{outcome.lowered} of {counted(outcome.regions, 'expert region')}"
    if outcome.lowered == outcome.regions == 1:
        yield Finding(f"lowering{where}", f"{regions}, kernel {outcome.kernels[0]}", "ok")
    else:
        note = "experts run as the loop that they are: " + ("; ".join(outcome.refusals) or "none was found")
        yield Finding(f"lowering{where}", regions, "instead", note)
    parts = (("loss", outcome.losses), ("gradients", outcome.gradients), ("parameters", outcome.parameters))
    found = "as plain Python, 3 steps" if outcome.equal else "not as plain Python"
    shown = ", ".join(f"{name} {distance:.0e}" for name, distance in parts)
    yield Finding(f"training{where}", found, "ok" if outcome.equal else "missing", f"apart, relative: {shown}")


def rows() -> Iterator[Finding]:
    if installed("torch") is None:
        return
    work = importlib.import_module("moebius.kernels.native.panel_work")
    if work.rows is None:
        note = "torch's operators do its work between the products, slower; build it: pip install -e ."
        yield Finding("expert rows in C", "not built", "instead", note)
    elif not work.rows.POOL:
        yield Finding("expert rows in C", "one thread", "instead", "torch's OpenMP threads were not found")
    else:
        yield Finding("expert rows in C", "built, in torch's threads", "ok")


def triton() -> Iterator[Finding]:
    found, with_torch = installed("triton"), installed("torch")
    gpu = has_gpu()
    if found is None:
        note = "the GPU runs the torch form of the experts; pip install triton" if gpu else "not needed without a GPU"
        yield Finding("Triton", "not installed", "instead", note)
        return
    pair = TORCHES.get(numbers(with_torch)) if with_torch else None
    if pair is not None and numbers(found) != pair:
        yield Finding(
            "Triton", found, "instead", f"torch {with_torch} goes with Triton {dotted(pair)}; others are untested"
        )
    elif gpu:
        yield Finding("Triton", found, "ok", "what lowering used on the GPU is said above")
    else:
        yield Finding("Triton", found, "instead", "no GPU here: experts run in their CPU form")


def load_torch() -> Any:
    """The torch module, or None where it is not installed."""
    return importlib.import_module("torch") if installed("torch") else None


def has_gpu() -> bool:
    torch_module = load_torch()
    return torch_module is not None and torch_module.cuda.is_available()


def devices() -> Iterator[Finding]:
    torch_module = load_torch()
    if torch_module is None:
        return
    name = platform.processor() or platform.machine()
    yield Finding("CPU", f"{name}, {torch_module.get_num_threads()} threads", "ok")
    if not torch_module.cuda.is_available():
        yield Finding("GPU", "none", "instead", "everything runs on the CPU")
        return
    for index in range(torch_module.cuda.device_count()):
        properties = torch_module.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        found = f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB"
        yield Finding(f"GPU {index}", found, "ok")


def distributed() -> Iterator[Finding]:
    torch_module = load_torch()
    if torch_module is None:
        return
    dist = torch_module.distributed
    if not dist.is_available():
        yield Finding("distributed", "not in this torch", "instead", "one process only: mesh= cannot be used")
        return
    there = [name for name, has in (("nccl", dist.is_nccl_available), ("gloo", dist.is_gloo_available)) if has()]
    status = "ok" if there else "instead"
    yield Finding("distributed", ", ".join(there) or "no backend", status, "" if there else "mesh= cannot be used")


def compiler() -> Iterator[Finding]:
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if found:
        yield Finding("C++ compiler", os.path.basename(found), "ok", 'for backend="inductor" on a CPU')
    else:
        yield Finding(
            "C++ compiler", "none", "instead", 'backend="inductor" needs one on a CPU; every other backend works'
        )


def render(findings: list[Finding]) -> str:
    """The findings as text, coloured on a terminal. Made without rich: a doctor must run where installs are broken."""
    terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = max(len(finding.what) for finding in findings)
    lines = [f"moebius {installed('moebius') or '(not installed)'}"]
    for finding in findings:
        mark, color = MARKS[finding.status]
        shown = f"\x1b[{color}m{mark}\x1b[0m" if terminal else mark
        lines.append(f"{shown}  {finding.what:<{width}}  {finding.found}")
        if finding.note:
            indent = " " * (width + 5)
            lines += wrap(finding.note, 100, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
    missing = [finding.what for finding in findings if finding.status == "missing"]
    lines.append(f"moebius cannot run here: mend {', '.join(missing)}" if missing else "moebius can run here")
    return "\n".join(lines)

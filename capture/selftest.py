"""Whether capture works here, by trying it: a small step, captured and run beside plain Python.

A torch that no test of ours has run on is tried before the first capture of a process, in a thread of its own, where
none of the program's modes are on. That it works is remembered on disk, for these versions of torch, Python, moebius.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .errors import MoebiusWarning
from .torch_facts.torch_fakes import FakeTensorMode
from .torch_facts.torch_names import missing
from .versions import __version__, is_tested, works_on

# Not functions of this file: capture does not look into what is its own.
STEPS = """
import torch
from torch import nn
from torch.nn import functional as F

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient

def first_step(layer, x):
    loss = Cube.apply(layer(x)).mean()
    loss.backward()
    with torch.no_grad():
        layer.weight.sub_(layer.weight.grad)
    return loss.detach()

class Layer(nn.Module):
    def __init__(self, experts=4, width=16, hidden=24):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, width) / 4)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / 4)

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).topk(2)
        mask = F.one_hot(chosen, len(self.gate_up)).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for expert in mask.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[expert])
            gate, up = (x[token] @ self.gate_up[expert].T).chunk(2, -1)
            h = F.silu(gate) * up
            out.index_add_(0, token, h @ self.down[expert].T * weight[token, slot, None])
        return out

def moe_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()
"""
CLOSE = 1e-5  # of the largest value: products in another order, in float32
Capture = Callable[[types.FunctionType, tuple], Any]  # captures a call and runs it; raises what capture raises


def steps() -> dict[str, Any]:
    """The functions of STEPS, as a program's."""
    namespace: dict[str, Any] = {"__name__": "self_test"}
    exec(compile(STEPS, "<self-test>", "exec"), namespace)
    return namespace


def apart(ours: Any, theirs: Any) -> float:
    """How far two tensors are apart, by the largest value of the second. Infinite where one is NaN or missing."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    ours, theirs = ours.detach().double(), theirs.detach().double()
    found = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    return found if found == found else float("inf")


# ----------------------------------------------------------------------------------------------------------------------
# Before the first capture, on a torch that was not tested
# ----------------------------------------------------------------------------------------------------------------------

WORKS: bool | None = True if is_tested(torch.__version__) else None  # None: not tried yet
LOCK = threading.Lock()


def works(capture: Capture) -> bool:
    """Whether capture works on this torch. The first call on one that is not tested tries; it warns where it fails."""
    global WORKS
    if WORKS is None:
        with LOCK:
            if WORKS is None:
                failure = None if is_remembered() else in_a_thread(lambda: try_first_step(capture))
                if failure is None:
                    remember()
                else:
                    warnings.warn(
                        f"moebius captures nothing: its self-test fails on torch {torch.__version__} ({failure}). "
                        f"All functions run natively. {works_on()}",
                        MoebiusWarning,
                        stacklevel=2,
                    )
                WORKS = failure is None
    return bool(WORKS)


def in_a_thread(function: Callable[[], str | None]) -> str | None:
    """What the function gives, or what it raises as text."""
    said: list[str | None] = []

    def run() -> None:
        try:
            said.append(function())
        except BaseException as error:  # capture's own signals, too
            said.append(f"{type(error).__name__}: {error}")

    with contextlib.suppress(Exception), FakeTensorMode():
        pass  # without a GPU, torch 2.11 crashes later where its first fakes were made in a thread that has ended
    thread = threading.Thread(target=run, name="moebius self-test")
    thread.start()
    thread.join()
    return said[0] if said else "it was cut short"


def try_first_step(capture: Capture) -> str | None:
    """One step of one layer with an autograd function, forward, backward, update. None, or what is wrong."""
    if gone := missing():  # also what this step does not need: another one would fail of it
        return f"it has no {', '.join(gone)}"
    step = steps()["first_step"]
    x = torch.arange(6.0, device="cpu", dtype=torch.float32).reshape(3, 2) / 4
    kind = {"bias": False, "device": "cpu", "dtype": torch.float32}
    plain, captured = (torch.nn.utils.skip_init(torch.nn.Linear, 2, 2, **kind) for _ in range(2))  # (draws nothing)
    with torch.no_grad():
        for layer in (plain, captured):
            layer.weight.copy_(torch.tensor([[0.5, -1.0], [0.25, 2.0]], dtype=torch.float32, device="cpu"))
    segment = capture(step, (captured, x))
    if segment.graph_break is not None:
        return f"a graph break: {segment.graph_break.reason}: {segment.graph_break.detail}"
    losses = segment.run(captured, x), step(plain, x)
    pairs = [losses, (captured.weight.grad, plain.weight.grad), (captured.weight, plain.weight)]
    return None if max(apart(*pair) for pair in pairs) <= CLOSE else "a captured step gives other values"


def versions() -> str:
    built = getattr(torch.version, "git_version", None)
    return f"torch {torch.__version__} {built}\nPython {sys.version}\n{platform.machine()}\nmoebius {__version__}\n"


def place() -> Path:
    folder = Path(os.environ.get("MOEBIUS_CACHE") or Path.home() / ".cache" / "moebius")
    return folder / f"works_torch-{torch.__version__}_python-{platform.python_version()}.txt"


def is_remembered() -> bool:
    """Whether a file says that capture worked with these versions. Any other content is ignored."""
    try:
        return place().read_text(encoding="utf-8") == versions()
    except (OSError, ValueError, RuntimeError):  # (no home)
        return False


def remember() -> None:
    """Only what works: what fails is tried again in the next process."""
    try:
        place().parent.mkdir(parents=True, exist_ok=True)
        place().write_text(versions(), encoding="utf-8")
    except (OSError, RuntimeError):
        pass

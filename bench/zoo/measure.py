"""One family: three whole training steps with moebius, with torch.compile, and without either, and what came of it.

A step is what a script does: zero_grad, forward with loss, backward, clip, AdamW. Each contender gets its own copy of
the model and its own optimizer, with the same weights and the same seeds.
"""

from __future__ import annotations

import copy
import gc
import importlib
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from peaks import peak_bytes

import moebius
from moebius.api import captured_of, report_of

from . import tiny

STEPS = 3
# The default backend sums an expert's tokens in another order than eager does. Of fp32's 6e-8 a rounding, over the few
# hundred additions in a row of these models, this is what is left; a wrong route or a lost token shows from 1e-2 on.
# Each step begins with eager's weights and optimizer state: AdamW turns a gradient that is nothing but rounding into a
# step as long as any, after which the two runs would be compared at different weights.
LOSS_TOLERANCE = 1e-5  # relative, at each of the three steps
GRADIENT_TOLERANCE = 5e-5  # norm of the difference over the norm, all gradients taken as one vector, at each step


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]):
    """The step, as a script writes it; the loss, detached."""
    optimizer.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


class Run:
    """One contender: its model, optimizer and step, and what each step left behind.

    losses: one scalar a step. gradients: after each step, every parameter's gradient (None where it has none).
    before: parameters, buffers and optimizer state before each step.
    cold_seconds: CPU time of the first step, of all threads of this process.
    """

    def __init__(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], step: Callable):
        self.model, self.inputs, self.step = model, inputs, step
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.losses: list[torch.Tensor] = []
        self.gradients: list[list[torch.Tensor | None]] = []
        self.before: list[list[torch.Tensor]] = []
        self.cold_seconds = 0.0

    def train(self, beside: Run | None = None) -> Run:
        """Three steps. beside: each step begins with the weights and the optimizer's state that this run had there."""
        for number in range(STEPS):
            if beside is not None:
                with torch.no_grad():
                    for mine, theirs in zip(state(self), beside.before[number], strict=True):
                        mine.copy_(theirs)
            self.before.append([tensor.detach().clone() for tensor in state(self)])
            torch.manual_seed(number)
            start = time.process_time()
            self.losses.append(self.step(self.model, self.optimizer, self.inputs).clone())
            if number == 0:
                self.cold_seconds = time.process_time() - start
            self.gradients.append([None if p.grad is None else p.grad.clone() for p in self.model.parameters()])
        return self

    def peak_bytes(self) -> int:
        """The most bytes of tensors that one more step holds above what there was when it began.

        In a process of its own, which the step leaves as it was.
        """
        gc.collect()  # else what earlier steps left in cycles is freed, or not, in the middle of this one
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(send, str(self.peak_of_a_step()).encode())
            finally:
                os._exit(0)
        os.close(send)
        with os.fdopen(receive) as answer:
            found = answer.read()
        os.waitpid(child, 0)
        if not found:
            raise RuntimeError("the step that was to be measured failed in its process")
        return int(found)

    def peak_of_a_step(self) -> int:
        torch.manual_seed(STEPS)
        return peak_bytes(lambda: self.step(self.model, self.optimizer, self.inputs))


def state(run: Run) -> list[torch.Tensor]:
    """Parameters, buffers and the optimizer's state."""
    kept = [value for slots in run.optimizer.state.values() for value in slots.values()]
    return [*run.model.parameters(), *run.model.buffers(), *(v for v in kept if isinstance(v, torch.Tensor))]


def equal_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def bitwise(run: Run, plain: Run) -> str | None:
    """None where losses, gradients, parameters, buffers and optimizer state are equal bit for bit; else what is not."""
    for number, (a, b) in enumerate(zip(run.losses, plain.losses, strict=True)):
        if not equal_bits(a, b):
            return f"the loss of step {number + 1} differs by {abs(a - b).item():.1e}"
    for number, (ours, theirs) in enumerate(zip(run.gradients, plain.gradients, strict=True)):
        for (name, _), x, y in zip(plain.model.named_parameters(), ours, theirs, strict=True):
            if not equal_bits(x, y):
                return f"the gradient of {name} differs at step {number + 1}"
    after, expected = state(run), state(plain)
    if len(after) != len(expected) or not all(map(equal_bits, after, expected)):
        return "the parameters, buffers or the optimizer's state differ after the last step"
    return None


def errors(run: Run, plain: Run) -> dict[str, float]:
    """The largest relative error of a loss, and of the gradients taken as one vector, over the three steps."""
    loss = max(abs(a - b).item() / max(abs(b).item(), 1e-9) for a, b in zip(run.losses, plain.losses, strict=True))
    gradient = 0.0
    for ours, theirs in zip(run.gradients, plain.gradients, strict=True):
        if any((a is None) != (b is None) for a, b in zip(ours, theirs, strict=True)):
            return {"loss": loss, "gradient": float("inf")}
        pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
        difference = sum((a - b).square().sum().item() for a, b in pairs) ** 0.5
        norm = sum(b.square().sum().item() for _, b in pairs) ** 0.5
        gradient = max(gradient, difference / max(norm, 1e-30))
    return {"loss": loss, "gradient": gradient}


def beyond(found: dict[str, float]) -> str | None:
    """None where the errors are within the tolerances."""
    if found["loss"] <= LOSS_TOLERANCE and found["gradient"] <= GRADIENT_TOLERANCE:
        return None
    return f"beyond the tolerance: loss {found['loss']:.1e}, gradients {found['gradient']:.1e}"


def place(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


def with_moebius(model: torch.nn.Module, inputs: dict[str, torch.Tensor], plain: Run, backend: str) -> dict[str, Any]:
    """What moebius made of the step with one backend."""
    captured = moebius.capture(train_step, backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(copy.deepcopy(model), inputs, captured).train(None if backend == "eager" else plain)
    record = captured_of(captured)
    assert record is not None
    report, stats = report_of(record), moebius.stats(captured)
    breaks = [{"reason": b.reason, "detail": b.detail, "at": place(b.file, b.line)} for b in report.breaks]
    result: dict[str, Any] = {
        "graphs": stats.graphs,
        "breaks": breaks,
        "recompiles": len(stats.recompiles),
        "regions": [
            {"lowered": r.lowered, "refusal": r.refusal, "at": place(r.file, r.line)} for r in report.expert_regions
        ],
        "cold_seconds": run.cold_seconds,
        "warnings": [str(w.message)[:300] for w in caught if "moebius" in str(w.message)],
        "errors": errors(run, plain),
    }
    if backend == "eager":
        result["differs"] = bitwise(run, plain)
    else:
        result["differs"] = beyond(result["errors"])
    result["peak_bytes"] = run.peak_bytes()
    return result


def built(family: str, experts: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model and its inputs; where the family has no such implementation of experts, with its own."""
    try:
        return tiny.build(family, experts)
    except ValueError:
        return tiny.build(family)


def ours(family: str, experts: str = "eager") -> dict[str, Any]:
    """The figures of moebius with both backends, beside eager's."""
    torch.set_num_threads(1)
    model, inputs = built(family, experts)
    plain = Run(copy.deepcopy(model), inputs, train_step).train()
    result: dict[str, Any] = {}
    for backend in ("eager", "moebius"):
        try:
            result[backend] = with_moebius(model, inputs, plain, backend)
        except Exception as error:  # a crash is a result of this family, and the others go on
            result[backend] = {"crash": f"{type(error).__name__}: {error}"[:400]}
        moebius.reset()
    result["plain"] = {"cold_seconds": plain.cold_seconds, "peak_bytes": plain.peak_bytes()}  # a step more: comes last
    return result


def memory(family: str, experts: str = "eager") -> dict[str, int]:
    """The peaks alone, with the default backend and without it, after three steps of each."""
    torch.set_num_threads(1)
    model, inputs = built(family, experts)
    steps: dict[str, Callable] = {"plain": train_step, "moebius": moebius.capture(train_step)}
    return {name: Run(copy.deepcopy(model), inputs, step).train().peak_bytes() for name, step in steps.items()}


def peer(family: str, experts: str = "eager") -> dict[str, Any]:
    """The same figures of ``torch.compile(backend="eager")`` without fullgraph."""
    torch.set_num_threads(1)
    dynamo = importlib.import_module("torch._dynamo.utils")  # here, so that a run without the peer does not load it
    model, inputs = built(family, experts)
    plain = Run(copy.deepcopy(model), inputs, train_step).train()
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
        graphs.append(gm)
        return gm.forward

    run = Run(copy.deepcopy(model), inputs, torch.compile(train_step, backend=backend)).train(plain)
    breaks = dynamo.counters["graph_break"]
    return {
        "graphs": len(graphs),
        "breaks": sum(breaks.values()),
        "reasons": [f"{reason.splitlines()[0]}" for reason, _ in breaks.most_common(3)],
        "cold_seconds": run.cold_seconds,
        "errors": errors(run, plain),  # not the bits: compiled, torch.optim takes other forms of the same step
        "differs": beyond(errors(run, plain)),
    }

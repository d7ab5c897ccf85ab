"""``captured.export(path)``."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from torch import fx

from ..cache.interfaces import Captured
from ..errors import ExportError, LoadError
from ..versions import __version__
from .archive import to_json, write_archive
from .checks import global_state
from .graphs import GraphWriter
from .guards import GuardWriter
from .load import assemble
from .residual import ResidualReader
from .unchanged import refuse_changed
from .values import encode, is_dense
from .world import State, World


def export(captured: Captured, path: str | os.PathLike) -> None:
    """Write the capture that ran the latest call to ``path``, as one file that ``moebius.load`` runs in any process.

    The step must have been called, and captured as one graph. What it changes in place (parameters, the optimizer's
    state, numbers that a scheduler sets) is in the file with the values it has now. Raises ExportError, saying what
    stands against it; then no file is written.
    """
    name = captured.function.__qualname__
    if not captured.segments:
        raise ExportError(f"{name} was not captured yet; call it once with what it is to be exported for")
    latest = captured.entry.targets[0][0]
    segment = next(s for s in captured.segments if s.guards.program is latest)
    if segment.graph_break is not None:
        b = segment.graph_break
        raise ExportError(
            f"{name} is not one graph: {b.file}:{b.line}: {b.reason}: {b.detail}. A file holds one graph; {b.hint}"
        )
    if captured.n_cells:
        raise ExportError(f"{name} continues another function; export that one")
    if segment.lowered is None:
        raise ExportError(f"{name} runs no tensor operator; there is nothing to export")
    if captured.options.mesh is not None:
        raise ExportError(f"{name} has its experts on the ranks of a mesh; export a step captured with mesh=None")
    gm = segment.lowered.gm
    world = World(segment.guards, segment_names(captured, segment))
    state = State(world)
    hints = [str(n.meta.get("source", n.target)) for n in gm.graph.nodes if n.op == "placeholder"]
    graphs = GraphWriter()
    graph = graphs.write(gm)  # (the first to refuse: its nodes know the user's lines)
    residual = ResidualReader(segment.run, world, state, hints)
    guards = GuardWriter(world, state, residual).write()
    refuse_changed(world, residual)
    # backward adds to what is there, whether or not the step reads it
    state.gradients.update(dict.fromkeys(n for n in state.fixed if state.tensors[n].grad is not None))
    gradients = {f"{name}.grad": state.tensors[name].grad for name in state.gradients}
    check_storages({**state.tensors, **graphs.tensors, **gradients})
    tensors, described = stored(state, graphs.tensors)
    program = {"arguments": [{"name": world.names[i], "number": i} for i in world.open], **residual.program()}
    if segment.owners is not None:
        order = {n.name: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
        owned = [pair for pair in segment.owners.items() if order.keys() >= set(pair)]
        program["owners"] = [[order[state], order[owner]] for state, owner in owned]
    about = {
        "name": name,
        "moebius": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "global state": segment_state(segment),
        "deterministic": captured.options.deterministic,
    }
    members = {
        "graph.json": to_json(graph),
        "program.json": to_json(program),
        "guards.json": to_json(guards),
        "state.json": to_json(described),
        "tensors.safetensors": serialize(tensors),
        "graph.py": readable(gm, name).encode(),
    }
    try:
        assemble(about, members, graphs.custom)
    except LoadError as error:
        raise ExportError(f"{name} cannot be written so that it can be read again: {error}") from error
    write_archive(path, about, members)


def segment_names(captured: Captured, segment: Any) -> tuple[str, ...]:
    """The names of the call's arguments, positionals first."""
    n_positional, kwnames = segment.call
    return captured.argument_names((None,) * n_positional, dict.fromkeys(kwnames))


def segment_state(segment: Any) -> dict[str, Any]:
    """torch's switches now. They are those of the capture where its guard on them holds."""
    for fact in segment.guards.facts:
        kind, *rest = fact.check
        if kind == "answers" and fact.record.source == "torch" and any(f() != result for f, result in rest[0]):
            raise ExportError(
                "torch's global state (grad mode, autocast, default dtype, …) is not what the step was captured under; "
                "export it under the same"
            )
    return global_state()


def check_storages(tensors: dict[str, torch.Tensor | None]) -> None:
    """Tensors that share memory would be two in the file."""
    seen: dict[tuple[Any, int], str] = {}
    for name, tensor in tensors.items():
        if tensor is None or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if key in seen:
            raise ExportError(
                f"{name} and {seen[key]} are views of one memory; a file would hold them twice. Make one of them from "
                "the other in the step"
            )
        seen[key] = name


def stored(state: State, constants: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(contiguous tensors by name, the JSON that makes the state of them)."""
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    for name, tensor in {**state.tensors, **constants}.items():
        if not is_dense(tensor.shape, tensor.stride()):
            raise ExportError(f"{name} has strides {tensor.stride()}; a file holds tensors without gaps and overlaps")
        tensors[name], described[name] = dense(tensor), layout_of(tensor)
    for name in state.gradients:
        gradient = state.tensors[name].grad
        if gradient is None or not is_dense(gradient.shape, gradient.stride()):
            raise ExportError(f"the gradient of {name} is gone, or has gaps; export right after a step")
        tensors[f"{name}.grad"] = dense(gradient)
        described[f"{name}.grad"] = layout_of(gradient) | {"requires_grad": False, "kind": "Tensor"}
    return tensors, {
        "tensors": described,
        "fixed": list(state.fixed),
        "cells": state.values,
        "gradients": list(state.gradients),
    }


def layout_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The JSON that says what a tensor is like, but for its numbers."""
    return {
        "dtype": encode(tensor.dtype)["dtype"],
        "device": str(tensor.device),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "requires_grad": tensor.requires_grad,
        "kind": type(tensor).__name__,
    }


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values on a CPU, contiguous; the strides are in the JSON."""
    return tensor.detach().cpu().contiguous()


def serialize(tensors: dict[str, torch.Tensor]) -> bytes:
    try:
        from safetensors.torch import save  # an extra: only export and load need it
    except ImportError:
        raise ExportError("export needs safetensors; install moebius[export]") from None
    return save({name: t.clone() if t._base is not None else t for name, t in tensors.items()})


def readable(gm: fx.GraphModule, name: str) -> str:
    """The graph as Python, for people. Nothing reads it."""
    parts = [f"# The graph of {name!r}, for reading. moebius.load runs graph.json; this text is never executed."]
    for path, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            parts.append(f"# {path or 'the step'}\n{module.code.strip()}")
    return "\n\n".join(parts) + "\n"

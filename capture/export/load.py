"""``moebius.load(path)``: an exported step, run in a process that captures nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moebius.lowering import whole_code
from moebius.lowering.step import going_on

from ..cache.deterministic import deterministic
from ..errors import GuardError, LoadError
from .archive import each, fields, from_json, index, need, read_archive
from .checks import Check, CheckReader, Fetch, describe, global_state
from .graphs import GraphReader
from .values import decode, encode, is_dense, read_device, read_dtype, read_pair

KINDS = ("Tensor", "Parameter", "Buffer")


class LoadedStep:
    """A captured step from a file: a callable that takes the arguments of the step that are not bound to it.

    Calling it checks the guards (GuardError), runs the graph, and updates the state in place. arguments: their names,
    in order; each may be given by position or by name. guards: what is checked, as text. graph: the GraphModule that
    runs. torch_version, name: of the step that was exported.
    """

    def __init__(self, about: dict[str, Any], graph: torch.fx.GraphModule, state: StepState, program: Program):
        self.name, self.torch_version = about["name"], about["torch"]
        self.graph, self.program, self.state = graph, program, state
        self.switches = about["global state"]
        run = graph.forward if program.owners is None else going_on(graph.forward, self.locate, program.owners, nothing)
        self.run_graph = deterministic(run) if about["deterministic"] else run
        self.arguments = [name for name, _ in program.arguments]

    def locate(self, error: BaseException) -> tuple[torch.fx.Node, dict[torch.fx.Node, Any]] | None:
        """The node that raised an error, and the values before it."""
        found = whole_code(self.graph, error)
        return None if found is None else (found.node, dict(found.values))

    @property
    def guards(self) -> list[str]:
        """What each call is checked for, in order."""
        switches = [f"torch: {name} is {value}" for name, value in self.switches.items()]
        return [*switches, *(check.text for check in self.program.checks)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.bind(args, kwargs)
        self.check(given)
        loaded = [load(given) for load in self.program.loads]
        grad = torch.is_grad_enabled()
        try:
            outputs = self.run_graph(*(loaded[i] for i in self.program.inputs))
        except BaseException:
            torch.set_grad_enabled(grad)  # a graph that failed in the optimizer's part has switched it off
            raise
        return self.program.finish(loaded, outputs, self.state.cells)

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """The arguments under the numbers that they had in the captured call."""
        names = self.arguments
        taken = dict(zip(names, args, strict=False))
        if len(args) > len(names) or set(kwargs) - set(names) or set(kwargs) & set(taken):
            raise TypeError(f"{self.name} takes ({', '.join(names)}); the other arguments of the step are in the file")
        taken.update(kwargs)
        missing = [n for n in names if n not in taken]
        if missing:
            raise TypeError(f"{self.name} is called without {', '.join(missing)}")
        given: list[Any] = [None] * self.program.count
        for name, number in self.program.arguments:
            given[number] = taken[name]
        return given

    def check(self, given: Sequence[Any]) -> None:
        """Raise GuardError for the first guard that does not hold."""
        now = global_state()
        if now != self.switches:
            name = next(n for n in now if now[n] != self.switches[n])
            raise GuardError(f"torch: {name} is {self.switches[name]}", str(now[name]))
        for check in self.program.checks:
            found = check.failure(given)
            if found is not None:
                raise GuardError(check.text, found)
        own = self.state.own_tensors()
        for tensor in tensors_in(given):
            if id(tensor) in own:
                raise GuardError("arguments are none of the step's own tensors", describe(tensor))

    def state_dict(self) -> dict[str, Any]:
        """Tensors (not copies) and numbers that the step reads and updates, by name."""
        return self.state.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Copy values into the state: all names, same shapes, dtypes and types. LoadError, and no change, otherwise."""
        self.state.load_state_dict(values)

    def __repr__(self) -> str:
        state = self.state.state_dict()
        return f"<loaded step {self.name}({', '.join(self.arguments)}), {len(state)} entries of state>"


def load(path: str | os.PathLike, allow: Iterable[str] = ()) -> LoadedStep:
    """Read a step that ``captured.export`` wrote. Nothing of it runs before it is called.

    allow: names of custom operators (``"library::operator"``) that the file may call and that you trust.
    Raises LoadError for a file that is damaged or hostile, that names an operator which is not allowed or which this
    torch does not have, or whose devices this machine does not have.
    """
    manifest, members = read_archive(path)
    try:
        return assemble(manifest, members, allow)
    except LoadError as error:
        raise LoadError(f"{os.fspath(path)} cannot be loaded: {error}") from None
    except Exception as error:  # what no check foresaw is still a bad file, and nothing of it has run
        raise LoadError(f"{os.fspath(path)} cannot be loaded: {type(error).__name__}: {error}") from error


def assemble(manifest: dict[str, Any], members: dict[str, bytes], allow: Iterable[str]) -> LoadedStep:
    about = fields(
        {k: v for k, v in manifest.items() if k not in ("format", "sha256")},
        "the manifest",
        {"name": str, "moebius": str, "torch": str, "python": str, "global state": dict, "deterministic": bool},
    )
    expected = global_state()
    switches = about["global state"]
    need(set(switches) == set(expected), "the manifest's global state")
    need(all(isinstance(v, bool | str) for v in switches.values()), "the manifest's global state")
    state = StepState(from_json(members["state.json"], "state.json"), members["tensors.safetensors"])
    reader = GraphReader(state.tensors, allow)
    graph = reader.read(from_json(members["graph.json"], "graph.json"))
    guards = from_json(members["guards.json"], "guards.json")
    program = Program(from_json(members["program.json"], "program.json"), guards, state, graph)
    used = reader.used | set(state.fixed) | state.cell_tensors | {f"{n}.grad" for n in state.gradients}
    need(used == set(state.tensors), "it holds tensors that nothing uses")
    return LoadedStep(about, graph, state, program)


# ----------------------------------------------------------------------------------------------------------------------
# State
# ----------------------------------------------------------------------------------------------------------------------


class StepState:
    """Tensors by name; those that are the same at each call (``fixed``); places whose value is replaced (``cells``)."""

    def __init__(self, value: Any, data: bytes):
        content = fields(value, "the state", {"tensors": dict, "fixed": list, "cells": dict, "gradients": list})
        raw = parse_tensors(data)
        need(set(raw) == set(content["tensors"]), "the tensors are not those of state.json")
        self.tensors = {name: make_tensor(name, described, raw) for name, described in content["tensors"].items()}
        self.fixed: list[str] = each(content["fixed"], "fixed tensors", self.known)
        self.gradients: list[str] = each(content["gradients"], "gradients", self.known)
        for name in self.gradients:
            gradient = self.tensors[self.known(f"{name}.grad")]
            owner = self.tensors[name]
            right = owner.requires_grad and gradient.shape == owner.shape and gradient.dtype == owner.dtype
            need(right and gradient.device == owner.device, f"the gradient of {name:.80} does not fit")
            owner.grad = gradient
        self.cells: dict[str, Any] = {}
        self.cell_tensors: set[str] = set()
        for name, cell in content["cells"].items():
            need(isinstance(cell, dict) and len(cell) == 1, "a place in the state")
            if "tensor" in cell:
                need(type(cell["tensor"]) is str, "a place in the state")
                self.cell_tensors.add(self.known(cell["tensor"]))
                self.cells[name] = self.tensors[cell["tensor"]]
            else:
                self.cells[name] = decode(fields(cell, "a place", {}, value=None)["value"])
        need(not set(self.cells) & set(self.fixed), "a name is there twice")

    def known(self, name: Any) -> str:
        need(type(name) is str and name in self.tensors, f"there is no tensor {name!r:.80}")
        return name

    def own_tensors(self) -> set[int]:
        """The ids of the tensors that are the same at each call, and of their gradients."""
        tensors = self.tensors.values()
        return {id(t) for t in tensors} | {id(t.grad) for t in tensors if t.grad is not None}

    def fetch(self, name: str) -> Fetch:
        """How a check or a load reaches a name of the state."""
        if name in self.cells:
            cells = self.cells
            return lambda arguments: cells[name]
        need(name in self.fixed, f"the state has no {name!r:.80}")
        tensor = self.tensors[name]
        return lambda arguments: tensor

    def fetch_gradient(self, name: str) -> Fetch:
        tensor = self.tensors[self.known(name)]
        return lambda arguments: tensor.grad

    def state_dict(self) -> dict[str, Any]:
        return {**{name: self.tensors[name] for name in self.fixed}, **self.cells}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        now = self.state_dict()
        if set(values) != set(now):
            raise LoadError(f"the state's names differ: {sorted(set(values) ^ set(now))[:6]}")
        for name, value in values.items():
            mine = now[name]
            if isinstance(mine, torch.Tensor):
                fits = isinstance(value, torch.Tensor) and value.shape == mine.shape and value.dtype == mine.dtype
            else:
                fits = type(value) is type(mine)
            if not fits:
                raise LoadError(f"{name} is {describe(mine)}; {describe(value)} cannot be loaded into it")
        with torch.no_grad():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    now[name].copy_(value)
                else:
                    self.cells[name] = decode(encode(value))


def parse_tensors(data: bytes) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load as parse
    except ImportError:
        raise LoadError("load needs safetensors; install moebius[export]") from None
    try:
        return parse(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError, TypeError) as error:
        raise LoadError(f"tensors.safetensors: {error}") from None


def make_tensor(name: str, value: Any, raw: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of the state: the values as stored, with the strides, device and class that it had."""
    content = fields(
        value,
        f"the tensor {name:.80}",
        {"dtype": str, "device": str, "shape": list, "stride": list, "requires_grad": bool, "kind": str},
    )
    data, dtype, device = raw[name], read_dtype(content["dtype"], None), read_device(content["device"])
    need(data.dtype == dtype and list(data.shape) == content["shape"], f"{name:.80} is not what state.json says")
    need(device.type != "meta" and (device.type != "cuda" or torch.cuda.is_available()), f"no device {device} here")
    need(device.type != "cuda" or (device.index or 0) < torch.cuda.device_count(), f"no device {device} here")
    strides = each(content["stride"], "strides", lambda n: index(n, 1 << 48, "a stride"))
    need(len(strides) == data.dim(), f"strides of {name:.80}")
    need(data.numel() == 0 or is_dense(data.shape, strides), f"{name:.80} has strides with gaps")
    need(content["kind"] in KINDS, f"{name:.80} is a {content['kind']!r:.40}")
    grad = content["requires_grad"]
    need(not grad or dtype.is_floating_point or dtype.is_complex, f"{name:.80} cannot require a gradient")
    made = torch.empty_strided(data.shape, strides, dtype=dtype, device=device)
    made.copy_(data)
    if content["kind"] == "Parameter":
        return torch.nn.Parameter(made, requires_grad=grad)
    return (torch.nn.Buffer(made) if content["kind"] == "Buffer" else made).requires_grad_(grad)


# ----------------------------------------------------------------------------------------------------------------------
# What is around the graph
# ----------------------------------------------------------------------------------------------------------------------



def read_owners(value: Any, inputs: Sequence[str]) -> dict[str, str] | None:
    """The inputs that are an optimizer's state -> those that are their parameters, by name; None if it is not known."""
    if value is None:
        return None
    found: dict[str, str] = {}
    for pair in each(value, "owners", lambda v: each(v, "an owner", lambda n: index(n, len(inputs), "an input"))):
        need(len(pair) == 2, "an owner")
        found[inputs[pair[0]]] = inputs[pair[1]]
    return found


def nothing() -> None:
    """When a graph has gone on without some gradients there is nothing to clear up: the state is the file's own."""


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, and in containers among them."""
    pending, seen = list(values), set()
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value


MADE: dict[str, type] = {"list": list, "dict": dict}
Expression = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]  # of loads, outputs, locals


class Program:
    """Loads before the graph, objects made, places set and the result after it."""

    def __init__(self, value: Any, guards: Any, state: StepState, graph: torch.fx.GraphModule):
        content = fields(
            value,
            "the program",
            {"arguments": list, "loads": list, "inputs": list, "make": list, "writes": list, "result": dict},
            owners=None,
        )
        self.state = state
        self.arguments: list[tuple[str, int]] = each(content["arguments"], "arguments", self.argument)
        numbers = [number for _, number in self.arguments]
        names = [name for name, _ in self.arguments]
        need(len(set(numbers)) == len(numbers) and len(set(names)) == len(names), "an argument is there twice")
        self.count = max(numbers, default=-1) + 1
        checks = CheckReader(self.count, state.fetch, state.fetch_gradient)
        self.checks: list[Check] = each(guards, "guards", checks.read)
        self.loads: list[Fetch] = each(content["loads"], "loads", checks.place)
        self.inputs: list[int] = each(content["inputs"], "inputs", lambda n: index(n, len(self.loads), "an input"))
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        need(len(placeholders) == len(self.inputs), "the graph has another number of inputs")
        self.owners = read_owners(content["owners"], [node.name for node in placeholders])
        result = graph.graph.output_node().args[0]
        if not isinstance(result, tuple):
            raise LoadError("the graph returns no tuple")
        self.outputs = len(result)
        self.n_made = len(content["make"])
        self.makers = [self.maker(item, i) for i, item in enumerate(content["make"])]
        self.writes = each(content["writes"], "writes", self.write)
        self.result = self.expression(content["result"])

    def argument(self, value: Any) -> tuple[str, int]:
        content = fields(value, "an argument", {"name": str, "number": int})
        return content["name"], index(content["number"], 1 << 12, "an argument's number")

    def maker(self, value: Any, position: int) -> tuple[str, list[Any]]:
        """kind and the expressions of the items. A tuple's items are made before it."""
        content = fields(value, "an object", {"make": str, "items": list})
        kind = content["make"]
        need(kind in ("tuple", *MADE), f"an object of the kind {kind!r:.40}")
        if kind == "dict":
            return kind, each(content["items"], "items", lambda item: read_pair(item, self.expression))
        limit = position if kind == "tuple" else self.n_made
        return kind, [self.expression(v, limit) for v in content["items"]]

    def write(self, value: Any) -> tuple[str, Expression]:
        content = fields(value, "a write", {"state": str, "value": dict})
        need(content["state"] in self.state.cells, f"the state has no place {content['state']!r:.80}")
        return content["state"], self.expression(content["value"])

    def expression(self, value: Any, limit: int | None = None) -> Expression:
        need(isinstance(value, dict) and len(value) == 1, "a value")
        ((kind, content),) = value.items()
        if kind == "out":
            out = index(content, self.outputs, "an output's number")
            return lambda loads, outputs, made: outputs[out]
        if kind == "load":
            load = index(content, len(self.loads), "a load's number")
            return lambda loads, outputs, made: loads[load]
        if kind == "local":
            local = index(content, self.n_made if limit is None else limit, "an object's number")
            return lambda loads, outputs, made: made[local]
        need(kind == "constant", f"a value of the kind {kind!r:.40}")
        constant = decode(content)
        need(type(constant) not in (list, dict), "a constant that can be changed")
        return lambda loads, outputs, made: constant

    def finish(self, loads: Sequence[Any], outputs: Sequence[Any], cells: dict[str, Any]) -> Any:
        """Make the objects, set the places, and give the result."""
        made: list[Any] = []
        for kind, items in self.makers:
            made.append(tuple(e(loads, outputs, made) for e in items) if kind == "tuple" else MADE[kind]())
        for (kind, items), new in zip(self.makers, made, strict=True):
            if kind == "list":
                new.extend(e(loads, outputs, made) for e in items)
            elif kind == "dict":
                new.update((key, e(loads, outputs, made)) for key, e in items)
        cells.update([(name, e(loads, outputs, made)) for name, e in self.writes])
        return self.result(loads, outputs, made)


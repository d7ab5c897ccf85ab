"""FX graphs as JSON and back.

A node is an input, a call of an allowed function, a method or an attribute of a tensor, a tensor constant, or a graph
of its own (the body of an expert loop). Reading builds a new ``torch.fx.Graph`` from checked parts: every name that FX
will write into the code that it generates is one of ours, or an identifier behind a prefix of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from moebius.lowering.step import ROLES, notes, role_of, texts
from moebius.lowering.step.checkpoint import checkpointed
from moebius.lowering.torch_private import custom_operator_name

from ..errors import ExportError, LoadError
from .archive import each, fields, index, need
from .operators import ATTRIBUTES, find, is_method, names
from .values import decode, encode

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}\Z")
MAX_DEPTH = 8  # graphs within graphs
MAX_NESTING = 64  # lists within lists in one argument


class GraphWriter:
    """Writes a graph module and those inside it. ``tensors`` collects its tensor constants by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.custom: set[str] = set()  # custom operators, as ``load`` is to allow them

    def write(self, gm: torch.nn.Module, path: str = "") -> dict[str, Any]:
        """The JSON of one graph. Raises ExportError for what a file cannot hold, with the user's line."""
        if not isinstance(gm, fx.GraphModule):
            raise ExportError(f"the graph calls a {type(gm).__name__}, which is no graph")
        order: dict[fx.Node, int] = {}
        nodes: list[dict[str, Any]] = []
        modules: dict[str, Any] = {}
        output: Any = None
        for node in gm.graph.nodes:
            if node.op == "output":
                output = self.argument(node.args[0], order, node)
                continue
            order[node] = len(nodes)
            nodes.append(self.node(gm, node, order, modules, path))
        return {"nodes": nodes, "output": output, "graphs": modules}

    def node(
        self, gm: fx.GraphModule, node: fx.Node, order: dict[fx.Node, int], modules: dict[str, Any], path: str
    ) -> dict[str, Any]:
        if node.op == "placeholder":
            return {"op": "input", "name": re.sub(r"\W", "_", str(node.target))[:190]}
        if node.op == "get_attr":
            return self.attribute(gm, str(node.target), modules, path)
        where = node.meta.get("where")
        written: dict[str, Any] = {"op": "", "args": [self.argument(a, order, node) for a in node.args]}
        if node.kwargs:
            written["kwargs"] = {k: self.argument(v, order, node) for k, v in node.kwargs.items()}
        if where and where[0]:
            written["line"] = f"{where[0].rpartition('/')[2]}:{where[1]}"
        if role := role_of(node):
            written["role"] = role
        if node.op == "call_method" and is_method(str(node.target)):
            return {**written, "op": "method", "target": str(node.target)}
        if node.target is getattr and len(node.args) == 2 and node.args[1] in ATTRIBUTES:
            return {**written, "op": "attribute", "target": node.args[1], "args": written["args"][:1]}
        name = self.name(node.target) if node.op == "call_function" else None
        if name is None:
            raise ExportError(f"{place(node)}{refusal(node.target)}")
        return {**written, "op": "call", "target": name}

    def name(self, target: Any) -> str | None:
        try:
            known = names().get(target)
        except TypeError:  # not hashable
            return None
        if known is None and (known := custom_operator_name(target)) is not None:
            self.custom.add(known.partition(".")[0])
        return known

    def attribute(self, gm: fx.GraphModule, target: str, modules: dict[str, Any], path: str) -> dict[str, Any]:
        held = gm
        for part in target.split("."):
            held = getattr(held, part)
        if isinstance(held, fx.GraphModule):
            name = target.replace(".", "_")
            modules[name] = self.write(held, f"{path}{name}.")
            return {"op": "graph", "name": name}
        if isinstance(held, torch.Tensor):
            name = f"constant.{path}{target}"
            self.tensors[name] = held
            return {"op": "tensor", "name": name}
        raise ExportError(f"the graph holds a {type(held).__name__}, which a file cannot")

    def argument(self, value: Any, order: dict[fx.Node, int], user: fx.Node) -> Any:
        def other(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return {"node": order[value]}
            raise ExportError(
                f"{place(user)}{user.target} gets a {type(value).__name__}, which cannot be written to a file"
            )

        return encode(value, other)


def place(node: fx.Node) -> str:
    where = node.meta.get("where")
    return f"{where[0]}:{where[1]}: " if where and where[0] else ""


class GraphReader:
    """Builds graphs from JSON. tensors: the file's tensors; allow: custom operators that the caller trusts."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], allow: Iterable[str] = ()):
        self.tensors, self.allow = tensors, frozenset(allow)
        self.used: set[str] = set()

    def read(self, value: Any, depth: int = 0) -> fx.GraphModule:
        """The graph module of one graph's JSON. Raises LoadError; no operator runs."""
        need(depth < MAX_DEPTH, "graphs are nested too deeply")
        content = fields(value, "a graph", {"nodes": list, "graphs": dict}, output=None)
        owner = torch.nn.Module()
        for name, inner in content["graphs"].items():
            need(IDENTIFIER.match(name), f"a graph is called {name!r:.80}")
            owner.add_module(f"graph_{name}", self.read(inner, depth + 1))
        graph = fx.Graph()
        made: list[fx.Node] = []
        for item in content["nodes"]:
            made.append(self.node(item, graph, made, owner))
        graph.output(self.argument(content["output"], made))
        return fx.GraphModule(owner, graph, class_name="Loaded")

    def node(self, item: Any, graph: fx.Graph, made: list[fx.Node], owner: torch.nn.Module) -> fx.Node:
        kind = item.get("op") if isinstance(item, dict) else None
        if kind in ("input", "graph", "tensor"):
            name = fields(item, "a node", {"op": str, "name": str})["name"]
            return self.input(kind, name, graph, made, owner)
        need(kind in ("call", "method", "attribute"), f"a node is a {kind!r:.40}")
        content = fields(item, "a node", {"op": str, "target": str, "args": list}, kwargs={}, line="", role="")
        target = content["target"]
        args = tuple(each(content["args"], "arguments", lambda a: self.argument(a, made)))
        need(type(content["kwargs"]) is dict and type(content["line"]) is str, "a node's fields")
        kwargs = {self.keyword(k): self.argument(v, made) for k, v in content["kwargs"].items()}
        if kind == "method":
            need(is_method(target), f"the method {target!r:.80} is not one that a file may name")
            need(args and isinstance(args[0], fx.Node), f"the method {target} has no tensor")
            node = graph.call_method(target, args, kwargs)
        elif kind == "attribute":
            need(target in ATTRIBUTES, f"the attribute {target!r:.80} is not one that a file may name")
            need(len(args) == 1 and isinstance(args[0], fx.Node) and not kwargs, f"attribute {target} of one tensor")
            node = graph.call_function(getattr, (args[0], target))
        else:
            node = graph.call_function(find(target, self.allow), args, kwargs)
        need(content["role"] in ("", *ROLES), "a node's fields")
        node.meta.update(where=content["line"], role=content["role"])
        return node

    def input(self, kind: str, name: str, graph: fx.Graph, made: list[fx.Node], owner: torch.nn.Module) -> fx.Node:
        if kind == "input":
            need(IDENTIFIER.match(f"in_{name}"), f"an input is called {name!r:.80}")
            need(all(node.op == "placeholder" for node in made), "inputs come first")
            need(all(node.target != f"in_{name}" for node in made), f"the input {name} is there twice")
            return graph.placeholder(f"in_{name}")
        if kind == "graph":
            need(IDENTIFIER.match(name) and hasattr(owner, f"graph_{name}"), f"there is no graph {name!r:.80}")
            return graph.get_attr(f"graph_{name}")
        need(name in self.tensors, f"there is no tensor {name!r:.80}")
        self.used.add(name)
        held = f"tensor_{len(list(owner.buffers(recurse=False)))}"
        owner.register_buffer(held, self.tensors[name])
        return graph.get_attr(held)

    def keyword(self, name: str) -> str:
        need(IDENTIFIER.match(name), f"an argument is called {name!r:.80}")
        return name

    def argument(self, value: Any, made: list[fx.Node]) -> Any:
        need(nesting(value) <= MAX_NESTING, "an argument is nested too deeply")

        def other(value: Any) -> fx.Node:
            if "node" not in value:
                raise LoadError(f"an argument of the kind {next(iter(value))!r:.40}")
            return made[index(value["node"], len(made), "a node's number")]

        return decode(value, other)


def nesting(value: Any) -> int:
    """How deep lists and objects are nested; stops counting at the limit."""
    depth, level = 0, [value]
    while level and depth <= MAX_NESTING:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, list):
                inner += item
            elif isinstance(item, dict):
                inner += item.values()
        level, depth = inner, depth + 1
    return depth


def refusal(target: Any) -> str:
    """Why a file cannot name what a node calls, and what to do."""
    if target is checkpointed:
        return "activation checkpointing is not written to files: capture the step without it for export"
    if getattr(target, "__module__", None) == texts.__name__:
        return "a text made of tensors' numbers (an f-string) is not written to files: return the tensors instead"
    if getattr(target, "__module__", None) == notes.__name__:
        return (
            "in some calls alone the step sets or appends something here, and no file can say when: return the value "
            "in each call, and set it outside of the step"
        )
    return f"{getattr(target, '__name__', target)} is not an operator that a file may name: keep it out of the step"

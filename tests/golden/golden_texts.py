"""What became of a captured function, as text that is the same in every process: graphs, guards, residual code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

import moebius.api

PACKAGE = Path(moebius.api.__file__).parent
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b|\b\d{14,}\b")
FOLDER = re.compile(r"[^\s'\"(]*/(?=[\w.-]+\.py\b)")  # of a file, wherever the checkout and the packages lie
CUT_OFF = re.compile(r'file "/[^"\s]*')  # a path in a text that was too long to be written whole
SECTIONS = ("graph", "lowered", "guards", "residual")


def sections(captured: Any) -> Iterator[tuple[str, str, str]]:
    """(which segment, which of SECTIONS, text) of a captured function and all below it."""
    for member_number, member in enumerate(captured.family()):
        for number, segment in enumerate(member.segments):
            where = f"{member.function.__qualname__} {member_number}.{number}"
            yield where, "graph", "" if segment.captured is None else graph_text(segment.captured.gm)
            yield where, "lowered", "" if segment.lowered is None else graph_text(segment.lowered.gm)
            yield where, "guards", "\n".join(guard_lines(segment)) + broken(segment.graph_break)
            run = segment.run
            yield where, "residual", steady(getattr(run, "residual_source", getattr(run, "__name__", "native")))


def graph_text(gm: fx.GraphModule) -> str:
    """Each graph, nested ones after the one that holds them: nodes with targets, arguments and what values are."""
    lines = []
    for name, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            lines.append(f"graph {name or 'root'}")
            lines += [node_line(node) for node in module.graph.nodes]
    return steady("\n".join(lines))


def node_line(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    kwargs = "".join(f", {key}={value}" for key, value in node.kwargs.items())
    arguments = ", ".join(map(str, node.args)) + kwargs
    return f"  {node.name} = {node.op} {target}({arguments}) : {shown(node.meta.get('val'))}"


def shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = tuple(value.stride()) if value.layout is torch.strided else value.layout
        grad = ", grad" if value.requires_grad else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{layout}{grad}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shown, value))})"
    return type(value).__name__


def guard_lines(segment: Any) -> Iterator[str]:
    for fact in segment.guards.facts:
        record = fact.record
        place = "moebius" if Path(record.file).is_relative_to(PACKAGE) else f"{record.file}:{record.line}"
        yield steady(f"{fact.check[0]}: {record.source}: {record.check} ({place})")


def broken(graph_break: Any) -> str:
    if graph_break is None:
        return ""
    return steady(f"\nbreak: {graph_break.reason}: {graph_break.detail} ({graph_break.file}:{graph_break.line})")


def steady(text: str) -> str:
    """Without addresses and folders."""
    return ADDRESS.sub("ADDRESS", CUT_OFF.sub('file "…', FOLDER.sub("", text)))

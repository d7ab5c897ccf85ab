"""The user's source, function by function, with what became of each line. Feeds the HTML report."""

from __future__ import annotations

import ast
import html
import itertools
import linecache
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from ..bytecode.user_code import is_library
from .model import Findings

# runs of unmarked lines longer than this are folded; so many stay visible on each side of the fold
FOLD_ABOVE = 8
FOLD_KEEPS = 2

TOKEN_CLASSES = (
    (Comment, "tc"),
    (String, "ts"),
    (Number, "tn"),
    (Keyword, "tk"),
    (Operator.Word, "tk"),
    (Name.Function, "tf"),
    (Name.Class, "tf"),
    (Name.Decorator, "td"),
    (Name.Builtin, "tb"),
)


@dataclass
class Listing:
    """One function (or module level) of the user's code.

    lines: (number, HTML of the text, how it ran or None); None stands for folded lines. counts: lines by how they ran.
    operations: line -> calls that the graphs make for it. library: installed code in which nothing stands out.
    """

    file: str
    name: str
    first: int
    lines: list[tuple[int, str, str | None] | None]
    counts: Counter = field(default_factory=Counter)
    operations: Counter = field(default_factory=Counter)
    library: bool = False


def listings(report: Findings) -> list[Listing]:
    """The functions that ran: the callable's own file, loops over experts, graph breaks, other files, libraries."""
    regions = {(region.file, region.line) for region in report.expert_regions}
    operations = Counter(
        (where[0], where[1])
        for graph in report.graphs
        for node in graph.nodes()
        if node.op.startswith("call_") and (where := node.meta.get("where"))
    )
    made = []
    for file, states in report.source_lines().items():
        text = linecache.getlines(file)
        if not text:
            continue
        for (name, first, last), marked in by_function("".join(text), states).items():
            last = min(last, len(text))
            colored = highlight("".join(text[first - 1 : last]))  # (of a large library a few functions are shown)
            lines = fold([(number, colored[number - first], marked.get(number)) for number in range(first, last + 1)])
            ops = Counter({number: operations[file, number] for number in marked if operations[file, number]})
            made.append(Listing(file, name, first, lines, Counter(marked.values()), ops))

    def rank(item: Listing) -> tuple:
        has_region = any(entry is not None and (item.file, entry[0]) in regions for entry in item.lines)
        item.library = (
            is_installed(item.file) and item.file != report.file and not has_region and not item.counts["break"]
        )
        return item.library, item.file != report.file, not has_region, not item.counts["break"], item.file, item.first

    made.sort(key=rank)
    return made


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package, to Python itself, or to us."""
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts)) or is_library(file)


def by_function(text: str, states: dict[int, str]) -> dict[tuple[str, int, int], dict[int, str]]:
    """Marked lines grouped by the innermost function they stand in, as (qualified name, first line, last line)."""
    spans: list[tuple[str, int, int]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    first = min([child.lineno, *(item.lineno for item in child.decorator_list)])
                    spans.append((name, first, child.end_lineno or child.lineno))
                walk(child, name + ".")
            else:
                walk(child, prefix)

    try:
        walk(ast.parse(text), "")
    except SyntaxError:
        spans.clear()
    groups: dict[tuple[str, int, int], dict[int, str]] = {}
    module = ("module level", max(1, min(states) - 3), max(states) + 3)
    for line, how in sorted(states.items()):
        around = [span for span in spans if span[1] <= line <= span[2]]
        span = min(around, key=lambda item: item[2] - item[1]) if around else module
        groups.setdefault(span, {})[line] = how
    return groups


def fold(lines: list[tuple[int, str, str | None]]) -> list[tuple[int, str, str | None] | None]:
    """Replace the middle of each long run of unmarked lines by None."""
    folded: list[tuple[int, str, str | None] | None] = []
    for is_unmarked, group in itertools.groupby(lines, lambda line: line[2] is None):
        run = list(group)
        folded += [*run[:FOLD_KEEPS], None, *run[-FOLD_KEEPS:]] if is_unmarked and len(run) > FOLD_ABOVE else run
    return folded


def highlight(text: str) -> list[str]:
    """Python source as HTML, one string a line, with a span around keywords, strings, comments, numbers and names."""
    out: list[str] = [""]
    for kind, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        name = next((css for token, css in TOKEN_CLASSES if kind in token), None)
        for index, piece in enumerate(value.split("\n")):
            if index:
                out.append("")
            if piece:
                safe = html.escape(piece, quote=False)
                out[-1] += f'<span class="{name}">{safe}</span>' if name else safe
    return out

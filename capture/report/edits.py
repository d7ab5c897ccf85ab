"""The smallest change of the user's own line that avoids a graph break: the line, and the line as it could be.

An edit is computed from the syntax tree of the user's file, and only where it leaves the results as they are: each rule
reads what the break met (its reason and detail) and the shape of the expression, and gives up on any other. What numpy
is asked for is tried on both sides: the expression as it stands on a sample array, and the one for tensors.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import linecache
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..bytecode.expressions import Excerpt

Change = tuple[ast.AST, str]  # a node, and the text that stands in its place
ARRAY = re.compile(r"ndarray \((\w+)\[([^]]*)]\)")
NUMBERS_OF = re.compile(r"^(\w+)\[([^]]*)]\.tolist\(\)")
ROUNDED = {"int": "", "math.trunc": "", "math.floor": ".floor()", "math.ceil": ".ceil()"}
MOST = 64  # of a sample's sizes
NAMES_OF_LOGGERS = ("logger", "log", "module_logger")


@dataclass(frozen=True)
class Edit:
    """line: the first line of the file that changes. before: the lines from it on that go; after: what comes for them.
    top: a line for the file's top, before its line ``top_line``; "" where there is none."""

    line: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    top: str = ""
    top_line: int = 0

    def applied(self, text: str) -> str:
        """The program with the edit in it."""
        lines = text.splitlines()
        lines[self.line - 1 : self.line - 1 + len(self.before)] = self.after
        if self.top:
            lines.insert(self.top_line - 1, self.top)
        return "\n".join(lines) + "\n"

    def rows(self) -> Iterator[tuple[int, str, str]]:
        """(line, "-" or "+", text) as a patch shows them, without the indentation that all have."""
        if self.top:
            yield self.top_line, "+", self.top
        both = [line for line in (*self.before, *self.after) if line.strip()]
        indent = min((len(line) - len(line.lstrip()) for line in both), default=0)
        for sign, lines in (("-", self.before), ("+", self.after)):
            for number, line in enumerate(lines, self.line):
                yield number, sign, line[indent:]


class Program:
    """A file of the user's: its text and its tree."""

    def __init__(self, text: str):
        self.text, self.tree = text, ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Which characters of the text a node is."""
        begin, end = (
            self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))  # type: ignore[attr-defined]
        )
        return begin, end

    def of(self, node: ast.AST, *changes: Change) -> str:
        """A node's text, with other texts for nodes in it."""
        begin, end = self.span(node)
        text = self.text[begin:end]
        for inner, new in sorted(changes, key=lambda change: -self.span(change[0])[0]):
            first, last = self.span(inner)
            text = text[: first - begin] + new + text[last - begin :]
        return text

    def primary(self, node: ast.AST) -> str:
        """The same, so that ``.name`` may follow."""
        kinds = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
        return self.of(node) if isinstance(node, kinds) else f"({self.of(node)})"

    def found(self, excerpt: Excerpt) -> ast.AST | None:
        """The node that an excerpt shows: of an attribute that is called, the call."""
        if excerpt.line > len(self.lines):
            return None
        whole, start = self.lines[excerpt.line - 1].rstrip(), self.starts[excerpt.line - 1]
        indent = len(whole) - len(whole.lstrip())
        if whole.strip() != excerpt.text:
            return None  # the file is another one by now
        begin, end = start + indent + excerpt.begin, start + indent + excerpt.end
        ends_there = excerpt.end == len(excerpt.text)
        nodes = [
            node for node in ast.walk(self.tree)
            if isinstance(node, ast.expr) and (span := self.span(node))[0] == begin
            and (span[1] == end or ends_there and span[1] > end)
        ]  # fmt: skip
        if len(nodes) != 1 or not self.says(nodes[0]):
            return None
        parent = self.parents[nodes[0]]
        called = isinstance(nodes[0], ast.Attribute) and isinstance(parent, ast.Call) and parent.func is nodes[0]
        return parent if called else nodes[0]

    def says(self, node: ast.AST) -> bool:
        """Whether a node stands where it says (before 3.12 the parts of an f-string do not)."""
        return ast.dump(ast.parse(f"({self.of(node)})", mode="eval").body) == ast.dump(node)

    def module_names(self) -> dict[str, str]:
        """What the names are that the file imports at its top: ``{"np": "numpy"}``."""
        found = {}
        for line in self.tree.body:
            if isinstance(line, ast.Import):
                found.update({a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                              for a in line.names})  # fmt: skip
            elif isinstance(line, ast.ImportFrom) and not line.level:
                found.update({a.asname or a.name: f"{line.module}.{a.name}" for a in line.names})
        return found

    def called(self, node: ast.AST) -> str:
        """``torch.tensor`` of a call ``t.tensor(...)`` in a file with ``import torch as t``; a builtin's own name."""
        parts: list[str] = []
        function = node.func if isinstance(node, ast.Call) else node
        while isinstance(function, ast.Attribute):
            parts.insert(0, function.attr)
            function = function.value
        if not isinstance(function, ast.Name) or self.is_set(function.id):
            return ""
        known = self.module_names().get(function.id) or (function.id if hasattr(builtins, function.id) else "")
        return ".".join([known, *parts]) if known else ""

    def is_set(self, name: str) -> bool:
        """Whether the file gives this name a value otherwise than by an import at its top."""
        return any(
            isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
            or isinstance(node, ast.arg) and node.arg == name
            or isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
            for node in ast.walk(self.tree)
        )  # fmt: skip

    def may_be_array(self, node: ast.AST) -> bool:
        """Whether it is, or comes from, what a file does with numpy."""
        arrays = [name for name, what in self.module_names().items() if what.partition(".")[0] == "numpy"]
        words = re.compile("|".join((r"\.numpy\b", r"\bfrom_numpy\b", *(rf"\b{name}\b" for name in arrays))))
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        sets = (
            each for each in ast.walk(self.tree) if isinstance(each, (ast.Assign, ast.AugAssign, ast.AnnAssign))
            and {name.id for name in ast.walk(each) if isinstance(name, ast.Name)} & names
        )  # fmt: skip
        return bool(words.search(self.of(node)) or any(words.search(self.of(each)) for each in sets))


def edit_of(reason: str, detail: str, excerpt: Excerpt | None) -> Edit | None:
    """What to write instead of the user's line that a break with this reason and detail stands at; None where no rule
    knows a line that gives the same."""
    if excerpt is None or reason not in RULES:
        return None
    try:
        program = parsed("".join(linecache.getlines(excerpt.file)))
        node = program.found(excerpt)
        if node is None:
            return None
        for rule in RULES[reason]:
            if (found := rule(program, node, detail)) is not None:
                return as_edit(program, *found)
    except (SyntaxError, ValueError, IndexError, RecursionError):  # the file is no program by now
        return None
    return None


@functools.lru_cache(maxsize=32)
def parsed(text: str) -> Program:
    return Program(text)


def as_edit(program: Program, node: ast.AST, new: str, top: str = "") -> Edit | None:
    """The edit that writes a text for a node, and a line at the top; None where the result is no program."""
    first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
    begin, end = program.span(node)
    stretch = program.text[program.starts[first - 1] : begin] + new + program.text[end : program.starts[last]]
    before = tuple(line.rstrip("\n") for line in program.lines[first - 1 : last])
    edit = Edit(first, before, tuple(stretch.splitlines()), top, top_line(program))
    edit = edit if top else Edit(first, before, edit.after)
    try:
        ast.parse(edit.applied(program.text))
    except SyntaxError:
        return None
    return edit


def top_line(program: Program) -> int:
    """The line behind the imports that the file begins with."""
    last = 0
    for number, line in enumerate(program.tree.body):
        if isinstance(line, (ast.Import, ast.ImportFrom)) or number == 0 and isinstance(line, ast.Expr):
            last = line.end_lineno or 0
        else:
            break
    return last + 1


# ----------------------------------------------------------------------------------------------------------------------
# Rules: (program, node, detail) -> (node, text that comes in its place[, line for the top]), or None
# ----------------------------------------------------------------------------------------------------------------------

Rule = Callable[[Program, Any, str], "tuple[ast.AST, str] | tuple[ast.AST, str, str] | None"]


def is_literal(node: ast.AST) -> bool:
    """Whether it is a number, None, or a tuple, list or slice of such."""
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, (str, bytes))
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(is_literal, node.elts))
    if isinstance(node, ast.Slice):
        return all(part is None or is_literal(part) for part in (node.lower, node.upper, node.step))
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and is_literal(node.operand)


def is_call(node: ast.AST, method: str) -> bool:
    """Whether it is ``something.method()``, without arguments."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        and not node.args and not node.keywords
    )  # fmt: skip


def only_argument(node: ast.AST) -> ast.expr | None:
    """Of a call with one argument, the argument."""
    one = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
    return node.args[0] if one and not isinstance(node.args[0], ast.Starred) else None  # type: ignore[attr-defined]


def numpy_operand(program: Program, node: ast.AST) -> ast.AST | None:
    """Of an expression whose other operands are literals, the array: ``a`` in ``np.mean(a, axis=0)``, ``a.mean()``,
    ``a * 2`` and ``a[0]``."""
    operands: list[ast.AST] = []
    if isinstance(node, ast.Call):
        if not all(keyword.arg and is_literal(keyword.value) for keyword in node.keywords):
            return None
        operands += node.args
        if not program.called(node).startswith("numpy."):
            operands += [node.func.value] if isinstance(node.func, ast.Attribute) else [node]
    elif isinstance(node, ast.BinOp):
        operands += [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        operands.append(node.operand)
    elif isinstance(node, ast.Subscript):
        operands += [node.value, node.slice]
    arrays = [each for each in operands if not is_literal(each)]
    return arrays[0] if len(arrays) == 1 and arrays[0] is not node else None


def of_arrays(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str] | None:
    """What numpy computes of an array that the graph makes, computed by torch: as far out as numpy is asked."""
    met = ARRAY.search(detail)
    if met is None or program.module_names().get("torch") != "torch":
        return None
    array = numpy_operand(program, node)
    if array is None:
        return None
    functions = [node]
    while numpy_operand(program, outer := outside(program, functions[-1])) is functions[-1]:
        functions.append(outer)
    sizes = [min(int(size), MOST) if size.isdigit() else 3 for size in re.findall(r"[^, ]+", met[2])]
    while (kind := same_by_torch(program, functions, array, sample_of(met[1], sizes))) is None:
        functions.pop()
        if not functions:
            return None
    last = functions[-1]
    outer = program.parents[last]
    called = program.called(outer)
    alone = only_argument(outer) is last
    tensor = f"torch.from_numpy({program.of(array)})"
    if is_call(array, "numpy"):
        tensor = program.of(array.func.value)  # type: ignore[attr-defined]
    text = program.of(last, (array, tensor), *by_torch(program, functions))
    text = text if isinstance(last, (ast.Call, ast.Subscript)) else f"({text})"
    if alone and called in ("torch.from_numpy", "torch.as_tensor"):
        return outer, text
    if kind == "number" and (alone and called in ("float", "int", "bool") or is_call(outside(program, last), "item")):
        return last, text
    asked = isinstance(outer, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Attribute))
    if called.startswith("numpy.") or kind == "array" and asked:
        return None  # numpy is asked again
    return last, text + (".item()" if kind == "number" else ".numpy()")


def outside(program: Program, node: ast.AST) -> ast.AST:
    """What a node is an operand of: of ``node.mean``, its call."""
    parent = program.parents[node]
    return program.parents[parent] if isinstance(parent, ast.Attribute) else parent


def by_torch(program: Program, functions: list[ast.AST]) -> list[Change]:
    """``np`` of each ``np.mean`` is ``torch``."""
    calls = [each.func for each in functions if program.called(each).startswith("numpy.")]  # type: ignore[attr-defined]
    return [(call.value, "torch") for call in calls if isinstance(call, ast.Attribute)]


def sample_of(dtype: str, sizes: list[int]) -> torch.Tensor:
    """A tensor of these sizes with positive and negative numbers."""
    count = math.prod(sizes)
    numbers = torch.arange(count, dtype=torch.int64, device="cpu").reshape(sizes) * 7 % 11 - 4
    return (numbers.double() / 3).to(getattr(torch, dtype))


def same_by_torch(program: Program, functions: list[ast.AST], array: ast.AST, sample: torch.Tensor) -> str | None:
    """Whether torch gives what numpy gives, tried on a sample: "array" or "number"; None if not."""
    numpy, last, changes = sys.modules.get("numpy"), functions[-1], by_torch(program, functions)
    if numpy is None:
        return None
    given = sample.clone()
    try:
        with warnings.catch_warnings(), numpy.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            plain = program.of(last, (array, "a"), *((node, "numpy") for node, _ in changes))
            wanted = eval(f"({plain})", {"numpy": numpy, "a": sample.clone().numpy()})  # noqa: S307 (literals beside it)
            made = eval(f"({program.of(last, (array, 'a'), *changes)})", {"torch": torch, "a": given})  # noqa: S307
    except Exception:
        return None
    if not isinstance(made, torch.Tensor) or not isinstance(wanted, (numpy.ndarray, numpy.generic)):
        return None
    expected = torch.from_numpy(numpy.asarray(wanted))
    equal = expected.shape == made.shape and expected.dtype == made.dtype and torch.equal(given, sample)
    if not equal or not torch.allclose(expected, made, rtol=1e-5, atol=1e-6, equal_nan=True):
        return None
    return "number" if isinstance(wanted, numpy.generic) else "array"


def of_tensors(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str] | None:
    """``torch.tensor([a, b])`` of tensors: ``torch.stack([a, b]).detach()``; ``torch.tensor(a)``: a copy."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or not detail.endswith(" of tensors"):
        return None
    name, given = program.called(node), node.args[0]
    if name not in ("torch.tensor", "torch.as_tensor") or {k.arg for k in node.keywords} - {"dtype", "device"}:
        return None
    to = f".to({', '.join(program.of(keyword) for keyword in node.keywords)})" if node.keywords else ""
    if isinstance(given, (ast.List, ast.Tuple)):
        stays = "device" in to or torch.get_default_device().type == "cpu"  # (it is made there, of tensors on the CPU)
        others = (ast.Constant, ast.List, ast.Tuple, ast.Starred)
        if not stays or not given.elts or any(isinstance(each, others) for each in given.elts):
            return None
        function = program.of(node.func).rpartition(".")[0]
        return (node, f"{function}.stack({program.of(given)}).detach(){to}") if function else None
    one = isinstance(given, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.BinOp, ast.Compare, ast.UnaryOp))
    return (node, f"{program.primary(given)}.detach().clone(){to}") if one and name == "torch.tensor" else None


def of_whole_numbers(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str] | None:
    """``int(t)`` of a tensor of floats: ``int(t.long())``."""
    given = only_argument(node)
    if given is None or (called := program.called(node)) not in ROUNDED:
        return None
    if is_call(given, "item"):
        given = given.func.value  # type: ignore[attr-defined]
    elif not re.search(r"a tensor (float|bfloat)", detail):
        return None
    if program.may_be_array(given):
        return None
    rounded = program.primary(given) + ROUNDED[called]
    return node, f"int({rounded}.long())"


def of_lists(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str] | None:
    """What Python does with ``t.tolist()``, done with the tensor, or with its numbers one by one."""
    known = NUMBERS_OF.match(detail)
    if known is None or not is_call(node, "tolist"):
        return None
    tensor = node.func.value  # type: ignore[attr-defined]
    if is_call(tensor, "numpy"):
        tensor = tensor.func.value
    if program.may_be_array(tensor):
        return None
    text, dims, parent = program.primary(tensor), known[2].count(",") + bool(known[2]), program.parents[node]
    called, alone = program.called(parent), only_argument(parent) is node
    if alone and called in ("max", "min") and dims == 1:
        return parent, f"{text}.{called}().item()"
    if alone and called == "len" and dims:
        return parent, f"len({program.of(tensor)})"
    if alone and called == "torch.tensor" and known[1] == str(torch.get_default_dtype()).removeprefix("torch."):
        return parent, f"{text}.detach().clone()"
    if isinstance(parent, ast.Subscript) and parent.value is node and dims == 1:
        if isinstance(parent.ctx, ast.Load) and not isinstance(parent.slice, ast.Slice):
            return parent, f"{text}[{program.of(parent.slice)}].item()"
    looped = program.parents[parent] if called in ("enumerate", "zip") else parent
    iterated = isinstance(looped, (ast.For, ast.comprehension)) and looped.iter in (node, parent)
    if iterated and dims in (1, 2):
        numbers = "[v.item() for v in {}]"
        return node, numbers.format(program.of(tensor)) if dims == 1 else f"[{numbers.format('row')} for row in {text}]"
    return None


def of_indices(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str] | None:
    """A list of numbers that is never changed, indexed by a tensor: a tensor of them, and its number."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return None
    if program.module_names().get("torch") != "torch" or (values := constant_list(program, node.value)) is None:
        return None
    index: ast.AST = node.slice
    if is_call(index, "item"):
        index = index.func.value  # type: ignore[attr-defined]
    elif program.called(index) == "int" and (given := only_argument(index)) is not None:
        index = given
    elif "a tensor indexes" not in detail:
        return None
    if program.may_be_array(index) or not isinstance(index, (ast.Name, ast.Call, ast.Subscript, ast.Attribute)):
        return None
    kinds = {type(value) for value in values}
    if kinds not in ({int}, {float}):
        return None
    dtype = ", dtype=torch.float64" if kinds == {float} else ""
    return node, f"torch.tensor({program.of(node.value)}{dtype})[{program.of(index)}].item()"


def constant_list(program: Program, node: ast.AST) -> list[Any] | None:
    """The numbers of a list or tuple that stands there, or that a name of the module has for good."""
    if isinstance(node, ast.Name):
        uses = [each for each in ast.walk(program.tree) if isinstance(each, ast.Name) and each.id == node.id]
        stores = [each for each in uses if not isinstance(each.ctx, ast.Load)]
        reads = [program.parents[each] for each in uses if isinstance(each.ctx, ast.Load)]
        only_read = all(isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Load) for each in reads)
        if len(stores) != 1 or not only_read or program.parents[stores[0]] not in program.tree.body:
            return None
        assigned = program.parents[stores[0]]
        node = assigned.value if isinstance(assigned, ast.Assign) else node
    if not isinstance(node, (ast.List, ast.Tuple)) or not node.elts or not is_literal(node):
        return None
    return list(ast.literal_eval(node))


def of_membership(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str] | None:
    """``3 in t.tolist()``: ``bool((t == 3).any())``."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not is_call(node.comparators[0], "tolist"):
        return None
    tensor = node.comparators[0].func.value  # type: ignore[attr-defined]
    if not isinstance(node.left, ast.Constant) or not is_literal(node.left) or program.may_be_array(tensor):
        return None
    text = f"bool(({program.primary(tensor)} == {program.of(node.left)}).any())"
    kinds = {ast.In: text, ast.NotIn: f"(not {text})"}
    return (node, kinds[type(node.ops[0])]) if type(node.ops[0]) in kinds else None


def of_sets(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str] | None:
    """``len(set(t.tolist()))``: how many ``t.unique()`` has."""
    numbers, outer = only_argument(node), program.parents[node]
    if program.called(node) != "set" or numbers is None or not is_call(numbers, "tolist"):
        return None
    tensor = numbers.func.value  # type: ignore[attr-defined]
    if program.called(outer) != "len" or only_argument(outer) is not node or program.may_be_array(tensor):
        return None
    return outer, f"{program.primary(tensor)}.unique().numel()"


def of_identities(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str] | None:
    """``id(a) == id(b)``: ``a is b``."""
    compared = program.parents[node]
    if not isinstance(compared, ast.Compare) or len(compared.ops) != 1:
        return None
    both = [only_argument(side) for side in (compared.left, *compared.comparators) if program.called(side) == "id"]
    word = {ast.Eq: "is", ast.NotEq: "is not"}.get(type(compared.ops[0]))
    names = [program.of(each) for each in both if isinstance(each, (ast.Name, ast.Attribute, ast.Subscript))]
    return (compared, f"{names[0]} {word} {names[1]}") if word and len(names) == 2 else None


def of_loggers(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str, str] | None:
    """``logging.getLogger("name")`` in the step: a name of the module."""
    if program.called(node) != "logging.getLogger" or node.keywords:  # type: ignore[attr-defined]
        return None
    given = node.args  # type: ignore[attr-defined]
    if not all(isinstance(each, ast.Constant) or program.of(each) == "__name__" for each in given):
        return None
    words = set(re.findall(r"\w+", program.text))
    name = next((name for name in NAMES_OF_LOGGERS if name not in words), None)
    return None if name is None else (node, name, f"{name} = {program.of(node)}")


def of_bars(program: Program, node: ast.AST, detail: str) -> tuple[ast.AST, str] | None:
    """A loop over ``tqdm(things)`` in the step: over the things; the bar goes around the step."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
        return None
    name, parent = program.called(node).rpartition(".")[2], program.parents[node]
    looped = program.parents[parent] if program.called(parent) in ("enumerate", "zip") else parent
    if name not in ("tqdm", "trange") or not isinstance(looped, (ast.For, ast.comprehension)):
        return None
    things = program.of(node.args[0])
    return node, f"range({things})" if name == "trange" else things


RULES: dict[str, tuple[Rule, ...]] = {
    "tensor read as a number": (of_arrays, of_whole_numbers, of_lists, of_indices),
    "numpy array that the graph makes": (of_arrays, of_whole_numbers, of_lists, of_indices),
    "tensor machinery used as a value": (of_arrays,),
    "size that depends on values": (of_indices,),
    "tensor made from tensors' numbers": (of_tensors,),
    "data-dependent branch": (of_membership,),
    "hash of a number that varies": (of_sets,),
    "id()": (of_identities,),
    "function outside of the graph": (of_loggers,),
    "progress bar": (of_bars,),
}

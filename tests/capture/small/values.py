"""Functions over small tensors whose way the data decides: branches in branches, in loops over experts, over rows and
while a value says so, with `continue`, `break` and `return`; tensors, numbers and lists that some iterations set,
writes in place, handlers, gradients, and questions about what such branches leave.

Matrices are `a b m`, vectors `u v`, scalars `s t`, numbers `n k`, lists `parts log`. A name may be unset where it
is read.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz.choices import Choices, pick
from steps.compare import TOLERANCE, Entry, Snapshot, first_difference

from moebius import capture, reset, stats
from moebius.api import captured_of
from moebius.lowering import expert_loop

DEEPEST, STATEMENTS = 4, 14
BATCHES = (
    # index, flag, what is added to x
    ((0, 1, 2, 3), (1, 0, 1, 0), 1.0),
    ((3, 3, 1, 0), (0, 1, 0, 0), -7.0),
    ((0, 2, 2, 1), (1, 1, 0, 1), -1.5),
    ((1, 1, 1, 1), (0, 0, 0, 0), 0.25),
    ((2, 0, 2, 0, 1, 3), (0, 0, 1, 1), -3.0),
    ((2, 2, 2, 2), (1, 1, 1, 1), 4.0),
)

HEAD = """\
def step(x, index, flag, w, kept):
    a, b = torch.zeros_like(x), x * 1
    m, u, v = x @ w, x[0] * 1, x.sum(0)
    s, t = x.sum(), x[0, 0] * 2
    n, k, parts, log, d = 1, 0.5, [], [], {}
"""
TAIL = """\
    return a, b, m, u, v, s, t, n, k, parts, log, d
"""
BACKWARD = """\
    loss = a.sum() + (b * m).mean() + u.sum() * s + v.max()
    if loss.requires_grad:
        loss.backward()
"""
HELPER = """\
    def helper(c, e):
        if {0}:
            return c * 2
        {1}
        return c + e
"""

MATRICES = (
    "{m} + {m}", "{m} * 0.5", "{m} * {s}", "{m} * {v}", "{m} - {v}", "torch.tanh({m})", "x * {k}", "x + {n}",
    "{m} @ w", "torch.zeros_like({m})", "{m}.clone()", "{m}.detach()", "{m}", "x", "torch.where({m} > 0, {m}, {m})",
    "{m}.relu()", "x * {e}", "{m} + {e}", "{m}.index_add(0, token, x[token] * 2)", "{m}.view(-1, 3)", "{m}[:]",
    "{m}.masked_fill({m} > 1, 0.5)", "torch.stack([{v}, {v}, {v}, {v}])", "{m}.flip(0)", "{m} / {n}",
)  # fmt: skip
RARE_MATRICES = (
    "{m}.double()", "{m}.t().contiguous().t()", "torch.cat([{m}, {m}])[: len(x)]", "helper({m}, {n})",
    "helper({m}, {e})", "x.expand_as(x)", "d['a']", "d.get('a', {m})", "torch.empty_like({m}).fill_(1)",
    "({m} if {c} else {m})", "log[0] * {m}", "torch.nn.functional.linear({m}, w)",
)  # fmt: skip
VECTORS = (
    "{v} + {v}", "{v} * {k}", "{m}[0]", "{m}.sum(0)", "{m}[{e}]", "x[{e}]", "{v} * {s}", "{v}.clone()", "{v}",
    "x[token].sum(0)", "{m}[index == {e}].sum(0)", "w[0]", "{m}.view(-1)[:3]", "torch.relu({v})", "{v} - {e}",
)  # fmt: skip
RARE_VECTORS = (
    "torch.cat(parts).sum(0)", "torch.stack(parts).mean(0).mean(0)", "x[{e} + 2]", "x[{n}]", "{m}[{n}]",
    "torch.cat([p * 2 for p in parts]).sum(0)", "torch.linalg.inv(w * {s})[0]", "{v}.double()", "x[index[{e}] + 1]",
    "sum(p.sum(0) for p in parts) + {v}", "torch.stack([{v} for i in range(3)])[0]",
)  # fmt: skip
SCALARS = (
    "{s} + 1", "{s} * {k}", "{m}.sum()", "{v}.max()", "{s} - {s}", "{m}[0, 0]", "{v}[1]", "flag[{e}] * {s}", "{s}",
    "{v}.sum() * {n}", "(index == {e}).sum() * {s}", "{m}.mean()", "{s}.clone()",
)  # fmt: skip
NUMBERS = (
    "{n} + 1", "{n} + 1", "token.shape[0]", "len(parts)", "{n} * 2", "{n} + token.numel()", "int(flag[{e}])",
    "len(log)", "index[{n}].item()", "int({s})", "x.shape[0]", "{n} - 1", "flag.sum().item()",
)  # fmt: skip
FLOATS = ("{k} * 0.5", "{k} + 1", "float({s})", "{s}.item()", "1 / {n}", "{k} + {n}", "-{k}")
CONDITIONS = (
    "{s} > 0", "flag[{e}] > 0", "flag[{e}]", "{m}.sum() > 4", "(index == {e}).any()", "token.numel() == 0",
    "token.shape[0]", "flag.sum() > 1", "{v}.max() > {v}.min()", "index.sum() > 4", "index[0] > 0", "{s} < {s}",
    "(index == {e}).sum() > 1", "flag.any()", "not flag.all()", "{v}[0] < 1", "token.numel() > 0",
)  # fmt: skip
RARE_CONDITIONS = (
    "{n} > 1", "parts", "len(parts) > 1", "{e} == 2", "{m}.requires_grad", "{s}.item() > 0", "bool({s} > 0)",
    "{m} is {m}", "'a' in d", "torch.equal({m}, {m})", "{k} > 1", "len(token) > 1", "{v}.dtype == x.dtype",
    "{m}.shape == x.shape", "{s} > {k}", "index.tolist()[0] > 1", "{m}.isnan().any()",
)  # fmt: skip
QUESTIONS = (
    "{m}.requires_grad", "{v}.requires_grad", "{m} is {m}", "{v} is {v}", "{m}.is_leaf", "{m}.dtype", "{v}.dtype",
    "{m}.shape[0]", "{s}", "{v}", "{m}[0]", "{n}", "{k}", "len(parts)", "{s}.item()", "{m}._version", "{m}.stride()",
    "{m}.is_contiguous()", "{m}.grad_fn is None", "(m is x, a is b)", "u._base is None", "token.shape[0]", "e",
    "{m}.data_ptr() == x.data_ptr()", "{v}.tolist()", "{m}._is_view()", "torch.is_grad_enabled()", "str({n})",
    "torch.result_type({m}, {v})", "id({m}) == id({m})", "{m}.untyped_storage().nbytes()", "'b' in d",
)  # fmt: skip
WRITES = (
    "{m}.add_(1)", "{m}.mul_({s})", "{m}[{e}] = {v}", "{m}[token] += x[token]", "{m}[0] += {v}", "{v}.add_({v})",
    "{m}.index_add_(0, token, x[token] * {k})", "{m} += {m}", "{v} *= 2", "{s} += 1", "{m}[index == {e}] = 0.5",
    "{m}.copy_({m})", "{v}[0] = {s}", "{m}.zero_()", "{m}.view(-1)[:3].mul_(2)", "{m}[{n}] = 1", "{s}.mul_({n})",
    "{m}.data.mul_(0.5)", "{v}.detach().add_(1)", "torch.add({m}, 1, out={m})", "flag[{e}] = 0", "index[0] = {n} % 4",
    "x.add_(1)", "{m}.requires_grad_()", "{m}.detach_()", "kept[0].add_(1)",
)  # fmt: skip
LISTS = (
    "parts.append(x[token])", "parts.append({m}[:1])", "parts.append(x[index == {e}] * {k})", "parts.append({m})",
    "log.append({s})", "log.append({v})", "parts.append(x[token] @ w)", "parts.append({m}[token])", "log.append({n})",
    "parts.append({v}[None])", "parts.append(x[{e} : {e} + 1])",
)  # fmt: skip
RARE_LISTS = (
    "parts += [{m}]", "parts = []", "parts = [torch.cat(parts)]", "parts.pop()", "log.insert(0, {s})", "d['a'] = {m}",
    "d['b'] = {n}", "kept.append({m}.detach())", "kept[0] = {v}", "parts = parts + [{m}]", "parts.extend([{m}, {m}])",
    "del parts[0]", "parts[-1] = {m}", "parts[0].add_(1)", "parts = [x[index == i] for i in range(4) if flag[i]]",
    "d = {{**d, 'b': {s}}}", "log = [{s}]", "log.append((n, [{v}]))", "parts.sort(key=len)", "kept[1]['s'] = {s}",
)  # fmt: skip
FAILING = ("u = {v} + x[{e} + 2]", "v = torch.cat(parts)[0]", "u = x[{n} + 1]", "k = 1 / n", "u = w.inverse()[0]")


class Values:
    """Writes one program."""

    def __init__(self, choices: Choices):
        self.choices, self.iterations, self.tame = choices, 0, choices.below(3) > 0
        self.statements = self.left = STATEMENTS // 2 if self.tame else STATEMENTS
        self.helps = False  # whether there is a helper
        self.experts: list[str] = []  # names of the iteration's expert in the loops around

    def percent(self) -> int:
        return self.choices.below(100)

    def filled(self, *tables: tuple[str, ...]) -> str:
        """An expression of the first table, or sometimes of the second."""
        rarely = 2 if self.tame else 12
        table = tables[1] if len(tables) > 1 and self.percent() < rarely else tables[0]
        text = pick(self.choices, table)
        while text.startswith("helper") and not self.helps:
            text = pick(self.choices, table)
        for mark, names in (("{m}", "abm"), ("{v}", "uv"), ("{s}", "st"), ("{n}", "n"), ("{k}", "k")):
            while mark in text:
                text = text.replace(mark, pick(self.choices, names), 1)
        while "{e}" in text:
            text = text.replace("{e}", self.expert(), 1)
        while "{c}" in text:
            text = text.replace("{c}", self.filled(CONDITIONS), 1)
        return text.replace("{{", "{").replace("}}", "}")

    def expert(self) -> str:
        return pick(self.choices, self.experts) if self.experts and self.percent() < 85 else str(self.choices.below(4))

    def condition(self) -> str:
        text = self.filled(CONDITIONS, RARE_CONDITIONS)
        if self.percent() < 12:
            text += f" {pick(self.choices, ('and', 'or'))} {self.filled(CONDITIONS, RARE_CONDITIONS)}"
        return text

    def simple(self) -> str:
        kind = self.percent()
        if kind < 32:
            target = pick(self.choices, "abm")
            if self.percent() < 35:
                target += f", {pick(self.choices, 'abm')}"
                return f"{target} = {self.filled(MATRICES)}, {self.filled(MATRICES)}"
            return f"{target} = {self.filled(MATRICES, RARE_MATRICES)}"
        if kind < 42:
            return f"{pick(self.choices, 'uvp')} = {self.filled(VECTORS, RARE_VECTORS)}"
        if kind < 49:
            return f"{pick(self.choices, 'st')} = {self.filled(SCALARS)}"
        if kind < 55:
            return f"n = {self.filled(NUMBERS)}" if self.percent() < 60 else f"k = {self.filled(FLOATS)}"
        if kind < 70:
            return self.filled(WRITES)
        if kind < 83:
            return self.filled(LISTS, RARE_LISTS)
        if kind < 94:
            if self.tame and self.percent() < 70:  # what most steps do at a time
                return f"a = {self.filled(MATRICES)}"
            return f"{'log.append' if kind < 92 else 'print'}({self.filled(QUESTIONS)})"
        if kind < 97:
            return f"token = torch.where(index == {self.expert()})[0]"
        return pick(self.choices, ("u = u + p", "log.append(p)", "p = u", "p = None", "del p"))

    def statement(self, depth: int, looping: bool) -> list[str]:
        self.left -= 1
        margin, kind = "    " * depth, self.percent()
        if depth > DEEPEST or self.left < 0:
            kind = 60 + kind * 40 // 100
        if kind < 32:
            return self.branch(depth, looping)
        if kind < 46:
            return self.loop(depth)
        if kind < (48 if self.tame else 54):
            return self.handled(depth, looping)
        if kind < 56:
            return [f"{margin}with torch.no_grad():", *self.block(depth + 1, looping)]
        if kind < 66 and depth > 1:
            if looping and self.percent() < 75:
                return [margin + pick(self.choices, ("continue", "continue", "break"))]
            if self.percent() < 12:
                return [margin + pick(self.choices, ("return a, u, log, parts", "raise ValueError(n)", "return b, s"))]
        return [margin + self.simple()]

    def branch(self, depth: int, looping: bool) -> list[str]:
        margin = "    " * depth
        lines = [f"{margin}if {self.condition()}:", *self.block(depth + 1, looping)]
        if self.percent() < 12:
            lines += [f"{margin}elif {self.condition()}:", *self.block(depth + 1, looping)]
        if self.percent() < 25:
            lines += [f"{margin}else:", *self.block(depth + 1, looping)]
        return lines

    def loop(self, depth: int) -> list[str]:
        margin, kind = "    " * depth, self.percent()
        self.iterations += 1
        name, inside = ("e" if not self.experts else f"e{self.iterations}"), f"{margin}    "
        if kind < 35:
            head = [f"{margin}for {name} in range(4):"]
            if self.percent() < 70:
                head.append(f"{inside}token = torch.where(index == {name})[0]")
        elif kind < 75:
            over = (
                "torch.nn.functional.one_hot(index, 4).sum(0).gt(0).nonzero()", "flag.nonzero()", "index.unique()",
                "(x.sum(1) > 0).nonzero().flatten()", "index.unique().tolist()", "flag.nonzero()[:, 0].tolist()",
                "(index == 2).nonzero()", "torch.where(flag > 0)[0]",
            )  # fmt: skip
            head = [f"{margin}for {name} in {pick(self.choices, over)}:"]
            if self.percent() < 50:
                head.append(f"{inside}token = torch.where(index == {name})[0]")
        elif kind < 88:
            over = ("(x, b)", "parts[:3]", "[0, 2, 1]", "enumerate(flag)", "x", "zip(x, flag)", "list(parts)", "token")
            chosen = pick(self.choices, over)
            if chosen in ("enumerate(flag)", "zip(x, flag)"):
                target, number = (f"{name}, f", True) if chosen[0] == "e" else ("u, t", False)
            else:
                target, number = (name, True) if chosen in ("[0, 2, 1]", "token") else ("u", False)
            head = [f"{margin}for {target} in {chosen}:"]
            if not number:
                return head + self.block(depth + 1, True)
        else:
            name = f"w{self.iterations}"
            head = [f"{margin}{name} = 0", f"{margin}while {self.condition()}:", f"{inside}{name} += 1"]
            head += [f"{inside}if {name} > 3:", f"{inside}    break"]
        self.experts.append(name)
        lines = head + self.block(depth + 1, True)
        self.experts.pop()
        return lines

    def handled(self, depth: int, looping: bool) -> list[str]:
        margin = "    " * depth
        lines = [f"{margin}try:", *self.block(depth + 1, looping)]
        if self.percent() < 40:
            lines.append(f"{margin}    {self.filled(FAILING)}")
        kinds = ("IndexError", "RuntimeError", "Exception", "(IndexError, ValueError)", "ZeroDivisionError")
        named = self.percent() < 85
        if named:
            lines += [f"{margin}except {pick(self.choices, kinds)}:", *self.block(depth + 1, looping)]
            if self.percent() < 15:
                lines += [f"{margin}else:", *self.block(depth + 1, looping)]
        if not named or self.percent() < 15:
            lines += [f"{margin}finally:", *self.block(depth + 1, False)]
        return lines

    def block(self, depth: int, looping: bool) -> list[str]:
        return [line for _ in range(1 + self.choices.below(3)) for line in self.statement(depth, looping)]

    def program(self) -> str:
        head = [*HEAD.splitlines(), f"    token = torch.where(index == {self.choices.below(4)})[0]"]
        if self.percent() < 25:
            self.experts = ["e"]
            head += HELPER.format(self.condition(), self.simple()).splitlines()
            self.experts, self.helps = [], True
        body: list[str] = []
        while self.left > 0 and len(body) < 40:
            body += self.statement(1, False)
        tail = BACKWARD if self.percent() < 40 else ""
        return "\n".join([*head, *body, *(tail + TAIL).splitlines(), ""])


def generate(choices: Choices) -> str:
    """A program that Python compiles, and that has a loop or a branch."""
    while True:
        source = Values(choices).program()
        try:
            compile(source, "<program>", "exec")
        except SyntaxError:  # a name that is a local of the helper alone and the like
            continue
        return source


def batch(number: int, source: str) -> list[Any]:
    """Fresh arguments of one call."""
    index, flag, shift = BATCHES[number]
    dtype = torch.float64 if len(source) % 3 else torch.float32
    x = torch.arange(3.0 * len(index), dtype=dtype).view(-1, 3) * 0.5 + shift
    w = (torch.arange(9.0, dtype=dtype).view(3, 3) * 0.1 - 0.3 + torch.eye(3, dtype=dtype)).requires_grad_()
    x.requires_grad_(len(source) % 5 == 0 and number != 3)
    return [x, torch.tensor(index), torch.tensor(flag), w, [torch.ones(3, dtype=dtype), {}]]


@dataclass
class Told:
    """What one call showed. undone: an exception's note says what of it is not done, so that no more is compared."""

    entries: list[Entry] = field(default_factory=list)
    undone: bool = False


def told(function: Any, number: int, source: str) -> Told:
    arguments, out, shown = batch(number, source), io.StringIO(), Told()
    result, words = None, "none"
    torch.manual_seed(number)
    with contextlib.redirect_stdout(out):
        try:
            result = function(*arguments)
        except Exception as error:
            words = f"{type(error).__name__}: {error}; context {type(error.__context__).__name__}"
            shown.undone = any("is not done" in note for note in getattr(error, "__notes__", ()))
    at = f"call {number}: "
    shown.entries += [(f"{at}exception", words), (f"{at}printed", out.getvalue())]
    look = Snapshot(shown.entries, at)
    for name, value in zip(("result", "x", "index", "flag", "w", "kept"), (result, *arguments), strict=True):
        try:
            look.walk(name, value)
        except RuntimeError as error:  # torch does not say of a view that was made under no_grad
            shown.entries.append((name, str(error)))
    return shown


def is_captured(function: Any) -> bool:
    """Whether a graph of a captured function holds a loop or branch."""
    captured = captured_of(function)
    assert captured is not None
    graphs = [s.captured.gm for member in captured.family() for s in member.segments if s.captured is not None]
    return any(node.target is expert_loop for gm in graphs for node in gm.graph.nodes)


@dataclass
class Outcome:
    """differs: what differs between the program captured and plain, or "". decided: whether a graph holds a loop or
    branch. undone: how many calls raised what has a note that not all is done."""

    differs: str = ""
    graphs: int = 0
    breaks: int = 0
    decided: bool = False
    undone: int = 0


def difference(source: str, backend: str = "eager") -> Outcome:
    """Six calls of one program, captured and plain. With ``backend="moebius"`` numbers are compared to rounding."""
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(source, "<program>", "exec"), namespace)
    step: Any = namespace["step"]
    reset()
    captured, outcome = capture(step, backend=backend), Outcome()
    for number in range(len(BATCHES)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = told(captured, number, source)
        with warnings.catch_warnings(record=True):
            plain = told(step, number, source)
        failed = [str(warning.message) for warning in caught if "could not capture" in str(warning.message)]
        if ours.undone:
            outcome.undone += 1
        tolerance = TOLERANCE if backend == "moebius" else 0.0
        found = "" if ours.undone else first_difference(plain.entries, ours.entries, tolerance)
        if failed or found:
            outcome.differs = f"[{backend}] {found} {failed or ''}"
            break
    known = stats(captured)
    outcome.graphs, outcome.breaks, outcome.decided = known.graphs, known.breaks, is_captured(captured)
    return outcome

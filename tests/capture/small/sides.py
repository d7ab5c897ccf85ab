"""Functions whose returns the data chooses: `if`, `elif`, `else`, `match`, conditional expressions, `and`, `or`, `not`
and chained comparisons, in functions that are called, in loops, in methods of modules. Both sides return the same kind
of thing, an argument itself or a new tensor, or something else; some change Python's objects, draw, raise or write in
place.

Matrices `a b c`, scalars `r s`, a number `n`.
"""

from __future__ import annotations

from fuzz.choices import Choices, pick

STATEMENTS, DEEPEST = 9, 3
HEAD = """\
def step(x, index, flag, w, kept):
    a, b, r, s, n, log = x @ w, x * 1, x.sum(), x[0, 0] * 2, 2, []
"""
BACKWARD = """\
    loss = a.sum() + (b * a).mean() + s
    if loss.requires_grad:
        loss.backward()
"""
MATRICES = (
    "{m} + {m}", "{m} * 0.5", "{m} * {s}", "torch.tanh({m})", "{m} @ w", "{m}.detach()", "{m}", "x", "{m}.clone()",
    "{m}[:]", "{m}.relu()", "({m} if {c} else {m} + 1)", "{m} - n", "torch.zeros_like({m})", "torch.rand_like({m})",
    "{m}.flip(0)", "{m}.add_(1)", "{m}.detach().requires_grad_()",
)  # fmt: skip
RARE_MATRICES = (
    "{m}.double()", "{m}[:2]", "{m}.t().contiguous().t()", "kept[0] * {m}", "{m}.conj()", "{m}.view(-1, 3)",
    "torch.nn.Parameter({m}.detach())", "({m} if {c} else {s} * {m} if {c} else x)",
)  # fmt: skip
SCALARS = ("{s} + 1", "{m}.sum()", "{s} * {s}", "{s}", "{m}[0, 0]", "({s} if {c} else {m}.mean())", "{s}.clone()",
           "({s} or {m}.sum())", "({s} and {s} * 2)", "({m}.sum() and {s} or {s} + 1)")
CONDITIONS = (
    "{s} > 0", "{m}.sum() > 4", "flag[0] > 0", "flag[1]", "index.sum() > 4", "{s} < {s}", "flag.any()",
    "-3 < {s} < 6", "0 < {s} <= {m}.sum()", "not flag.all()", "index[0].item() > 0", "not {s} > 1", "{s}.item() > 0.5",
    "torch.isfinite({s})", "{m}[0, 0] != 1", "flag.sum().item()", "{s}.item()", "not {s}.item() < 1",
    "{s}.item() + n > {m}.mean().item()", "{m}.sum().item() != {s}.item()", "flag[0].item()",
)  # fmt: skip
RARE_CONDITIONS = ("n > 1", "len(log) > 1", "{m}.requires_grad", "kept[1]", "{m} is {m}", "{m}.dtype == x.dtype")
WRITES = ("{m}.add_(1)", "{m}.mul_({s})", "{m}[0] = 0.5", "{s}.add_(1)", "{m}.data.mul_(2)", "x.data.add_(1)",
          "{m} += 1", "{m}.copy_({m})")  # fmt: skip
STATE = ("log.append({s})", "kept[1]['n'] = n", "kept.append({m}.detach())", "kept[0].add_(1)", "log.append(n)",
         "print(n)", "n += 1", "kept[0] = {m}.detach()")  # fmt: skip
FAILING = ("raise ValueError(n)", "r = x[n + 5].sum()", "r = w.inverse()[0, 0]", "assert {s} > 0")
RETURNS = {
    "matrix": ("{M}",),
    "pair": ("({M}, {S})", "({M}, {S})", "{M}, {S}"),
    "dict": ("{{'a': {M}, 's': {S}, 'n': 3}}", "dict(a={M}, s={S}, n=3)"),
    "nested": ("({M}, None, [{S}, 'x'], {{'m': {M}}})",),
    "nothing": ("None", ""),
    "number": ("{s}.item()", "n", "1", "2.5"),
    "truth": ("True", "False", "{s} > 0", "{s} > 0 or {m}.sum() > 4", "{s} < 1 and flag[1]", "-3 < {s} < 6"),
    "any": ("{M}", "{S}", "None", "({M}, 1)", "({M}, 2)", "n", "log", "kept"),
}
USES = {
    "matrix": ("a = f{0}({m}, {s}, n)", "b = f{0}({m}, {s}, n) + {m}", "log.append(f{0}({m}, {s}, n))"),
    "pair": ("a, s = f{0}({m}, {s}, n)", "log.append(f{0}({m}, {s}, n))"),
    "dict": ("d = f{0}({m}, {s}, n)\n{1}a, s = d['a'], d['s'] + d['n']", "log.append(f{0}({m}, {s}, n))"),
    "nested": ("a, _, (s, _), d = f{0}({m}, {s}, n)\n{1}b = d['m'] + b",),
    "nothing": ("f{0}({m}, {s}, n)", "log.append(f{0}({m}, {s}, n))"),
    "number": ("log.append(f{0}({m}, {s}, n))", "a = a * f{0}({m}, {s}, n)"),
    "truth": ("if f{0}({m}, {s}, n):\n{1}    a = {m} * 2", "log.append(f{0}({m}, {s}, n))"),
    "any": ("log.append(f{0}({m}, {s}, n))",),
}
ASKED = ("{m}.requires_grad", "{m} is {m}", "{m}.is_leaf", "{m}.dtype", "{m}._version", "{m}.stride()", "{s}.item()",
         "({m} is x, a is b)", "{m}.grad_fn is None", "{m}.data_ptr() == x.data_ptr()", "{m}.storage_offset()",
         "{m}._is_view()", "{m}.is_conj()", "type({m}).__name__", "{m}.is_contiguous()")  # fmt: skip


class Sides:
    """Writes one program."""

    def __init__(self, choices: Choices):
        self.choices, self.left, self.kind = choices, STATEMENTS, "any"
        self.matrices, self.scalars = "abc", "rs"
        self.rarely = 2 if choices.below(3) else 14

    def percent(self) -> int:
        return self.choices.below(100)

    def filled(self, *tables: tuple[str, ...]) -> str:
        table = tables[1] if len(tables) > 1 and self.percent() < self.rarely else tables[0]
        text = pick(self.choices, table)
        marks = (
            ("{M}", lambda: self.filled(MATRICES, RARE_MATRICES)), ("{S}", lambda: self.filled(SCALARS)),
            ("{c}", self.condition), ("{m}", lambda: pick(self.choices, self.matrices)),
            ("{s}", lambda: pick(self.choices, self.scalars)),
        )  # fmt: skip
        for mark, made in marks:
            while mark in text:
                text = text.replace(mark, made(), 1)
        return text.replace("{{", "{").replace("}}", "}")

    def condition(self) -> str:
        text = self.filled(CONDITIONS, RARE_CONDITIONS)
        kind = self.percent()
        if kind < 24:
            text = f"{text} {pick(self.choices, ('and', 'or'))} {self.condition()}"
        elif kind < 28:
            text = f"not ({text} {pick(self.choices, ('and', 'or'))} {self.condition()})"
        elif kind < 31:
            text = f"({text} if {self.condition()} else {self.condition()})"
        return text

    def returned(self) -> str:
        return f"return {self.filled(RETURNS[self.kind])}".rstrip()

    def simple(self) -> str:
        kind = self.percent()
        if kind < 45:
            return f"{pick(self.choices, self.matrices)} = {self.filled(MATRICES, RARE_MATRICES)}"
        if kind < 65:
            return f"{pick(self.choices, self.scalars)} = {self.filled(SCALARS)}"
        if kind < 85:
            return self.filled(WRITES)
        if kind < 85 + self.rarely // 2:
            return self.filled(STATE)
        if kind < 85 + self.rarely:
            return f"log.append({self.filled(ASKED)})"
        return f"{pick(self.choices, self.matrices)} = {self.filled(MATRICES)}"

    def statement(self, depth: int, looping: bool) -> list[str]:
        self.left -= 1
        margin, kind = "    " * depth, self.percent()
        if depth > DEEPEST or self.left < 0:
            kind = 55 + kind * 45 // 100
        if kind < 36:
            return self.branch(depth, looping)
        if kind < 42:
            return self.match(depth, looping)
        if kind < 48:
            head = pick(self.choices, ("for i in range(2):", "for row in x:", "for c in (a, b):"))
            return [margin + head, *self.block(depth + 1, True)]
        if kind < 50:
            return [f"{margin}with torch.no_grad():", *self.block(depth + 1, looping)]
        if kind < 52:
            handler = [f"{margin}except (ValueError, IndexError):", *self.block(depth + 1, looping)]
            return [f"{margin}try:", *self.block(depth + 1, looping), *handler]
        if kind < 55 and self.percent() < self.rarely * 3:
            return [margin + self.filled(FAILING)]
        if kind < 68 and depth > 1:
            leave = pick(self.choices, ("continue", "break")) if looping and self.percent() < 40 else self.returned()
            return [margin + leave]
        return [margin + self.simple()]

    def branch(self, depth: int, looping: bool) -> list[str]:
        margin = "    " * depth
        lines = [f"{margin}if {self.condition()}:", *self.block(depth + 1, looping)]
        while self.percent() < 25:
            lines += [f"{margin}elif {self.condition()}:", *self.block(depth + 1, looping)]
        if self.percent() < 45:
            lines += [f"{margin}else:", *self.block(depth + 1, looping)]
        return lines

    def match(self, depth: int, looping: bool) -> list[str]:
        margin = "    " * depth
        subject = pick(self.choices, ("index[0].item()", "int(flag[1])", "flag.sum().item()", "n"))
        lines = [f"{margin}match {subject}:"]
        for case in ("0", "1 | 2", "k if k > 2", "_")[self.choices.below(2) : 3 + self.choices.below(2)]:
            lines += [f"{margin}    case {case}:", *self.block(depth + 2, looping)]
        return lines

    def block(self, depth: int, looping: bool) -> list[str]:
        lines = [line for _ in range(1 + self.choices.below(2)) for line in self.statement(depth, looping)]
        if self.percent() < 35:
            lines.append("    " * depth + self.returned())
        return lines

    def function(self, number: int) -> list[str]:
        self.kind = pick(self.choices, ("matrix", "matrix", "pair", "pair", "dict", "nested", "nothing", *RETURNS))
        self.left = STATEMENTS
        lines = [f"    def f{number}(c, r, n):", "        a, b, s = c * 1, c, r + 1"]
        while self.left > 2:
            lines += self.statement(2, False)
        return [*lines, f"        {self.returned()}"]

    def program(self) -> str:
        head, body, kinds = HEAD.splitlines(), [], []
        for number in range(1 + self.choices.below(2)):
            head += self.function(number)
            kinds.append(self.kind)
        self.kind, self.matrices = "any", "ab"
        for _ in range(2 + self.choices.below(2)):
            number = self.choices.below(len(kinds))
            inside = "    " * (1 + (self.percent() < 25))
            if len(inside) > 4:
                body.append("    for i in range(2):" if self.percent() < 50 else f"    if {self.condition()}:")
            use = self.filled(USES[kinds[number]]).replace("{0}", str(number)).replace("{1}", inside)
            body.append(inside + use)
            if self.percent() < 25:
                body.append("    " + self.simple())
        tail = BACKWARD if self.percent() < 50 else ""
        return "\n".join([*head, *body, *tail.splitlines(), "    return a, b, s, n, log", ""])


def generate(choices: Choices) -> str:
    """A program that Python compiles."""
    while True:
        source = Sides(choices).program()
        try:
            compile(source, "<program>", "exec")
        except SyntaxError:  # a case behind one that takes all
            continue
        return source

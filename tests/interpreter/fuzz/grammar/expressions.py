"""Expressions, by the kind of value that they mostly give."""

from __future__ import annotations

from .core import POOLS, Core

BINARY = ("+", "-", "*", "//", "%", "&", "|", "^", ">>", "/", "@")
COMPARE = ("==", "<", ">", "!=", "<=", ">=", "is", "is not", "in", "not in")
BUILTIN_ATTRIBUTES = ("n", "tag", "missing", "value", "total", "__class__", "__dict__", "slot")


KINDS = ("int", "(int, str)", "Num", "list")
INTEGER = ("+", "-", "//", "%", "&", "|", "^", ">>")
MAPPERS = ("map", "filter")
ITERATED = ("list", "list", "any")
LAMBDA_ARGUMENTS = ("1", "1, 2", "q=2", "w=3", "", "1, 2, v=3")


TENSORS = {
    "int": ("tensor(2)", "tensor(0)", "tensor(-1)"),
    "list": ("[tensor(1), 2]", "[tensor([1, 2]), tensor(3)]", "tensor([1, 2, 3])", "tensor([[1, 2], [3, 4]])"),
    "dict": ("{'k': tensor(3)}",),
    "obj": ("Num(tensor(4))", "Box(tensor([1, 2]))", "tensor([1, 2, 3])"),
    "any": ("tensor(1.5)", "tensor([0.5, -2.0])", "(tensor(1), 2)", "tensor([True, False])"),
}


class Expressions(Core):
    """`expr(kind, depth)` gives an expression in parentheses where it needs them."""

    def expr(self, kind: str, depth: int) -> str:
        if depth <= 0:
            return self.leaf(kind)
        if self.chance(4):
            return "(" + self.leaf(self.pick(tuple(POOLS))) + ")"  # the wrong kind, on purpose
        common = [
            (6, lambda: self.leaf(kind)),
            (1, lambda: self.choice(kind, depth)),
            (1, lambda: self.logged(kind, depth)),
        ]
        if self.walrus and self.on("walrus"):
            common.append((1, lambda: self.named(kind, depth)))
        if self.may_suspend() and self.scope.is_generator:
            common.append((1, lambda: self.yielded(depth)))
        if self.may_suspend() and self.scope.is_async:
            common.append((2, lambda: self.awaited(depth)))
        functions = [s for s in self.scope.visible_functions() if s.kind == "plain"]
        if functions and self.on("functions"):
            common.append((2, lambda: self.call_of(self.pick(functions), depth)))
        own = getattr(self, f"{kind}_expr")
        return str(self.one_of([*common, (9, lambda: own(depth))]))

    def leaf(self, kind: str) -> str:
        name = self.name(kind)
        if self.chance(60):
            return name
        literals = {
            "int": ("0", "1", "2", "3", "7", "-1", "True"),
            "str": ("'s'", "''", "'xyz'", "'a b'"),
            "list": ("[]", "[1, 2]", "[3, 1, 2]", "[0]", "[(1, 2), (3, 4)]"),
            "dict": ("{}", "{'k': 1}", "{1: 2, 'k': 3}"),
            "obj": ("Num(1)", "Num(2)", "Box(1)", "Seq(2)", "Row(3)"),
            "any": ("None", "1.5", "(1, 2)", "{1, 2}", "b'y'", "...", "range(3)", "'k'", "2j", "frozenset()"),
        }
        if self.tensors and self.chance(30):
            return self.pick(TENSORS.get(kind, literals[kind]))
        return self.pick(literals[kind])

    def any_expr(self, depth: int) -> str:
        return str(
            self.one_of(
                [
                    (3, lambda: self.expr(self.pick(("int", "str", "list", "dict", "obj")), depth)),
                    (2, lambda: self.tuple_display(depth)),
                    (1, lambda: f"{{{self.star_items(depth)}}}"),
                    (2, lambda: self.comparison(depth)),
                    (1, lambda: self.lambda_(depth)),
                    (1, lambda: self.attribute(depth)),
                    (1, lambda: self.subscript(depth)),
                    (1, lambda: f"{self.expr('list', depth - 1)}.pop()"),
                    (1, lambda: f"next({self.generator_expression(depth)}, None)"),
                    (1, lambda: f"getattr({self.expr('obj', depth - 1)}, '{self.pick(BUILTIN_ATTRIBUTES)}', None)"),
                    (
                        1,
                        lambda: f"isinstance({self.expr('any', depth - 1)}, {self.pick(KINDS)})",
                    ),
                ]
            )
        )

    # --- numbers

    def int_expr(self, depth: int) -> str:
        one = depth - 1
        return str(
            self.one_of(
                [
                    (
                        4,
                        lambda: f"({self.expr('int', one)} {self.pick(INTEGER)} {self.expr('int', one)})",
                    ),
                    (1, lambda: f"({self.expr('int', one)} * {self.expr('int', one)} % 1009)"),
                    (1, lambda: f"({self.expr('int', one)} ** {self.pick(('2', '0', '-1'))} % 1009)"),
                    (1, lambda: f"({self.pick(('-', '+', '~', 'not '))}{self.expr('int', one)})"),
                    (2, lambda: self.comparison(depth)),
                    (2, lambda: f"len({self.expr(self.pick(('list', 'str', 'dict', 'obj')), one)})"),
                    (1, lambda: f"sum({self.generator_expression(depth)})"),
                    (1, lambda: f"{self.expr('list', one)}[{self.expr('int', one)}]"),
                    (1, lambda: f"{self.expr('obj', one)}.n"),
                    (1, lambda: f"int({self.expr('int', one)})"),
                    (1, lambda: f"{self.expr('dict', one)}['k']"),
                    (1, lambda: f"max({self.expr('int', one)}, {self.expr('int', one)})"),
                    (1, lambda: f"({self.expr('int', one)} {self.pick(('and', 'or'))} {self.expr('int', one)})"),
                ]
            )
        )

    def comparison(self, depth: int) -> str:
        """One or several, chained."""
        kind = self.pick(("int", "int", "obj", "any"))
        parts = [self.expr(kind, depth - 1)]
        for _ in range(self.pick((1, 1, 2, 3))):
            parts += [self.pick(COMPARE), self.expr(self.pick((kind, kind, "list")), depth - 1)]
        return "(" + " ".join(parts) + ")"

    # --- strings

    def str_expr(self, depth: int) -> str:
        one = depth - 1
        options = [
            (1, lambda: f"({self.expr('str', one)} + {self.expr('str', one)})[:9]"),
            (1, lambda: f"str({self.expr('int', one)})"),
            (1, lambda: f"{self.expr('str', one)}.upper()"),
            (1, lambda: f"('%s/%r' % ({self.expr('int', one)}, {self.expr('obj', one)}))"),
            (1, lambda: f"'-'.join({self.expr('list', one)})"),
            (1, lambda: f"{self.expr('str', one)}[{self.slice_text(depth)}]"),
            (1, lambda: f"({self.expr('str', one)} or {self.expr('str', one)})"),
        ]
        if not self.in_fstring and self.on("fstrings"):
            options.append((4, lambda: self.fstring(depth)))
        return str(self.one_of(options))

    def fstring(self, depth: int) -> str:
        self.in_fstring = True
        pieces = []
        for _ in range(self.between(1, 3)):
            value = self.expr(self.pick(("int", "str", "obj", "any")), depth - 1)
            suffix = self.pick(("", "!r", "!s", "!a", ":>4", "!r:<8.6", ":{i}", "="))
            pieces.append(self.pick(("", "x", "{{")) + "{ (" + value + ")" + suffix + "}")
        self.in_fstring = False
        if self.version >= (3, 14) and self.chance(25):
            return 'str(t"' + "".join(pieces) + '")[:60]'
        return 'f"' + "".join(pieces) + '"[:30]'

    # --- containers

    def list_expr(self, depth: int) -> str:
        one = depth - 1
        return str(
            self.one_of(
                [
                    (3, lambda: f"[{self.star_items(depth)}]"),
                    (3, lambda: self.comprehension(depth, "[", "]")),
                    (2, lambda: f"{self.expr('list', one)}[{self.slice_text(depth)}]"),
                    (1, lambda: f"({self.expr('list', one)} + {self.expr('list', one)})[:7]"),
                    (1, lambda: f"sorted({self.expr('list', one)}, key={self.lambda_of_one(depth)})"),
                    (1, lambda: f"list({self.expr(self.pick(('list', 'str', 'dict', 'obj', 'any')), one)})[:7]"),
                    (
                        1,
                        lambda: (
                            f"list({self.pick(MAPPERS)}({self.lambda_of_one(depth)}, {self.expr('list', one)}[:5]))"
                        ),
                    ),
                    (1, lambda: f"list(zip({self.expr('list', one)}, {self.expr('str', one)}))[:5]"),
                    (1, lambda: f"[*{self.generator_expression(depth)}]"),
                    (1, lambda: f"list({self.expr('dict', one)}.{self.pick(('items', 'keys', 'values'))}())"),
                ]
            )
        )

    def dict_expr(self, depth: int) -> str:
        one = depth - 1
        return str(
            self.one_of(
                [
                    (3, lambda: self.dict_display(depth)),
                    (
                        2,
                        lambda: self.comprehension(
                            depth, "{", "}", self.pick(("q: ", "(q, 1): ", "i: ", "str(q): ", "say('key', q): "))
                        ),
                    ),
                    (1, lambda: f"({self.expr('dict', one)} | {self.expr('dict', one)})"),
                    (1, lambda: f"dict({self.expr('dict', one)}, k={self.expr('int', one)})"),
                    (1, lambda: f"dict(**{self.expr('dict', one)})"),
                ]
            )
        )

    def key(self, depth: int) -> str:
        return self.expr(self.pick(("int", "str", "str", "obj")), depth)

    def dict_display(self, depth: int) -> str:
        parts = []
        for _ in range(self.between(1, 3)):
            if self.chance(20):
                parts.append(f"**{self.expr('dict', depth - 1)}")
            else:
                parts.append(f"{self.key(depth - 1)}: {self.expr('int', depth - 1)}")
        return "{" + ", ".join(parts) + "}"

    def star_items(self, depth: int) -> str:
        parts = []
        for _ in range(self.between(1, 3)):
            if self.chance(20):
                parts.append(f"*{self.expr('list', depth - 1)}[:3]")
            else:
                parts.append(self.expr(self.pick(("int", "int", "str", "obj")), depth - 1))
        return ",\n  ".join(parts) if self.chance(20) and not self.in_fstring else ", ".join(parts)

    def tuple_display(self, depth: int) -> str:
        return f"({self.star_items(depth)},)"

    def slice_text(self, depth: int) -> str:
        parts = [self.pick(("", self.expr("int", depth - 2), "1", "-1")) for _ in range(self.pick((2, 3)))]
        if len(parts) == 3 and parts[2] not in ("", "1", "-1"):
            parts[2] = f"({parts[2]} or 1)"
        return ":".join(parts)

    def obj_expr(self, depth: int) -> str:
        one = depth - 1
        options = [
            (5, lambda: f"({self.expr('obj', one)} {self.pick(BINARY)} {self.expr(self.pick(('obj', 'int')), one)})"),
            (2, lambda: f"({self.expr('int', one)} {self.pick(BINARY)} {self.expr('obj', one)})"),
            (1, lambda: f"(-{self.expr('obj', one)})"),
            (2, lambda: f"{self.pick(('Num', 'Box', 'Seq', 'Row', 'Bag', 'Dying'))}({self.expr('int', one)})"),
            (1, lambda: f"({self.expr('obj', one)} {self.pick(('and', 'or'))} {self.expr('obj', one)})"),
            (1, lambda: f"{self.expr('obj', one)}.link"),
            (1, lambda: f"{self.expr('obj', one)}[{self.expr('int', one)}]"),
            (1, lambda: f"{self.expr('obj', one)}({self.expr('int', one)})"),
        ]
        classes = self.scope.visible_classes()
        if classes:
            options.append((6, lambda: f"{self.pick(classes)}({self.expr('int', one)})"))
        return str(self.one_of(options))

    # --- comprehensions and lambdas

    def comprehension(self, depth: int, opening: str, closing: str, key: str = "") -> str:
        is_async = self.scope.is_async and self.may_suspend() and opening != "(" and self.on("async")
        walrus, suspends = self.walrus, self.suspends
        if self.scope.kind == "class":
            self.walrus = False
        self.suspends = suspends and is_async and self.version >= (3, 11)
        generator, self.scope.is_generator = self.scope.is_generator, False
        clauses = []
        variables = []
        for number in range(self.pick((1, 1, 1, 2))):
            self.walrus, inner = False, self.walrus
            variable = self.pick(("q", "q", "(q, w)", "*q, w", "q")) if number == 0 else "w"
            variables.append(variable)
            if is_async and self.chance(30):
                clauses.append(f"async for {variable} in AIter({self.expr('int', depth - 1)})")
            else:
                clauses.append(
                    f"for {variable} in {self.expr(self.pick(ITERATED), depth - 1)}{self.pick(('[:3]', ''))}"
                )
            self.walrus = inner
            if self.chance(30):
                clauses.append(f"if {self.expr('int', depth - 1)}")
            clauses.append("if not spent()")
        item = self.pick(
            ("q", "q", f"(q, {self.expr('int', depth - 1)})", self.expr("int", depth - 1), self.logged_name("q"))
        )
        if self.on("nesting") and depth > 1 and self.chance(20):
            item = self.comprehension(depth - 1, "[", "]")
        elif self.on("closures") and self.chance(15):
            item = "(lambda: q)()" if self.chance(50) else "(lambda r=q: (r, q))()"
        self.walrus, self.suspends, self.scope.is_generator = walrus, suspends, generator
        return f"{opening}{key}{item} {' '.join(clauses)}{closing}"

    def generator_expression(self, depth: int) -> str:
        suspends, self.suspends = self.suspends, False
        text = self.comprehension(depth, "(", ")")
        self.suspends = suspends
        return text

    def logged_name(self, name: str) -> str:
        return f"say('{name}', {name})"

    def lambda_(self, depth: int) -> str:
        suspends, self.suspends = self.suspends, False
        walrus, self.walrus = self.walrus, False
        default = self.expr("int", depth - 1)
        body = self.expr(self.pick(("int", "any")), depth - 1)
        self.suspends, self.walrus = suspends, walrus
        return f"(lambda q=0, *r, w={default}, **t: (q, r, w, {body}))({self.pick(LAMBDA_ARGUMENTS)})"

    def lambda_of_one(self, depth: int) -> str:
        suspends, self.suspends = self.suspends, False
        walrus, self.walrus = self.walrus, False
        text = self.pick(("say('key', q)", "(q, 0)[1]", "repr(q)", f"({self.expr('int', depth - 1)}, 0)[1]"))
        self.suspends, self.walrus = suspends, walrus
        return f"lambda q: {text}"

    # --- what every kind may be

    def choice(self, kind: str, depth: int) -> str:
        return f"({self.expr(kind, depth - 1)} if {self.expr('int', depth - 1)} else {self.expr(kind, depth - 1)})"

    def logged(self, kind: str, depth: int) -> str:
        return f"say('{self.fresh('v')}', {self.expr(kind, depth - 1)})"

    def named(self, kind: str, depth: int) -> str:
        name = self.name(kind)
        if self.scope.kind == "function" and name not in self.scope.foreign:
            self.scope.bound.add(name)
        return f"({name} := {self.expr(kind, depth - 1)})"

    def yielded(self, depth: int) -> str:
        if self.scope.is_async or self.chance(70):
            return f"(yield {self.expr('any', depth - 1)})"
        return f"(yield from {self.iterable(depth)})"

    def iterable(self, depth: int) -> str:
        generators = [s for s in self.scope.visible_functions() if s.kind == "generator"]
        if generators and self.chance(60):
            return self.call_of(self.pick(generators), depth)
        return self.pick(
            (self.expr("list", depth - 1) + "[:3]", "Seq(2)", "Row(2)", "Echo()", self.expr("any", depth - 1))
        )

    def awaited(self, depth: int) -> str:
        coroutines = [s for s in self.scope.visible_functions() if s.kind == "coroutine"]
        if coroutines and self.chance(50):
            return f"(await {self.call_of(self.pick(coroutines), depth)})"
        value, other = self.expr("int", depth - 1), self.expr("any", depth - 1)
        return f"(await {self.pick((f'Pause({value})', 'Pause(1)', 'Pause(0)', f'({other})'))})"

    def attribute(self, depth: int) -> str:
        return f"{self.expr('obj', depth - 1)}.{self.pick(BUILTIN_ATTRIBUTES)}"

    def subscript(self, depth: int) -> str:
        holder = self.pick(("list", "dict", "obj", "any", "str"))
        key = self.pick((self.expr("int", depth - 1), self.key(depth - 1), self.slice_text(depth)))
        return f"{self.expr(holder, depth - 1)}[{key}]"

"""Functions with every kind of parameter, closures, global and nonlocal, decorators, calls, type parameters."""

from __future__ import annotations

from .core import NAMES, Core, Lines, Scope, Signature

# What a script does to a generator. Exceptions are made as they are thrown: one in a list would keep its frames alive.
STEPS = (
    "None",
    "None",
    "None",
    "1",
    "1",
    "2",
    "lambda: Oops('in')",
    "lambda: Worse('in')",
    "'close'",
    "GeneratorExit",
    "lambda: KeyError",
    "lambda: StopIteration(2)",
)


class Functions(Core):
    """`def` in all its kinds, and calls that mostly fit."""

    def declare(self, names: list[str]) -> Lines:
        raise NotImplementedError

    def function(self, depth: int) -> Lines:
        lines = self.make_function(depth, "plain")
        return [*lines, *self.call_statement(depth, latest=True), *self.look_after()] if self.chance(80) else lines

    def look_after(self) -> Lines:
        """What an inner function has made of this one's variables."""
        names = [name for name in NAMES if name in self.scope.sure]
        return [f"note('{self.fresh('after')}', {', '.join(names)})"] if names and self.chance(60) else []

    def make_function(self, depth: int, kind: str) -> Lines:
        if self.scope.kind == "class" or self.left <= 2:
            return self.block(depth - 1)
        signature = self.signature(kind)
        lines = self.decorators()
        decorated = bool(lines)
        inner = Scope("function", self.scope)
        inner.is_async = kind in ("coroutine", "asyncgen")
        inner.is_generator = kind in ("generator", "asyncgen")
        type_parameters = self.type_parameters()
        header = (
            f"{'async ' if inner.is_async else ''}def {signature.name}{type_parameters}({self.parameters(signature)})"
        )
        header += self.pick(("", "", " -> say('returns', int)", " -> 'text'"))
        lines.append(header + ":")
        lines += self.indent(self.body(inner, signature, depth))
        if decorated and kind != "plain":
            signature.kind = kind
        self.scope.functions.append(signature)
        return lines

    def signature(self, kind: str) -> Signature:
        signature = Signature(
            self.fresh({"plain": "f", "generator": "gen", "coroutine": "co", "asyncgen": "ag"}[kind]), kind, []
        )
        if self.chance(50):
            signature.required = list(dict.fromkeys(self.pick(NAMES) for _ in range(self.between(1, 2))))
            if self.chance(20):
                signature.positional_only = self.between(1, len(signature.required))
        if self.chance(30):
            signature.optional = [n for n in [self.pick(("u", "v", "i", "o"))] if n not in signature.required]
        if self.chance(20):
            signature.keyword_only = ["kw"]
        signature.var_positional, signature.var_keyword = self.chance(20), self.chance(20)
        return signature

    def parameters(self, signature: Signature) -> str:
        suspends, self.suspends = self.suspends, self.suspends and self.scope.kind == "function"
        parts = []
        for number, name in enumerate(signature.required):
            parts.append(name + self.pick(("", "", ": int", ": say('annotated', 1)")))
            if number + 1 == signature.positional_only:
                parts.append("/")
        parts += [f"{name}={self.expr('int', 1)}" for name in signature.optional]
        if signature.var_positional:
            parts.append("*rest")
        elif signature.keyword_only:
            parts.append("*")
        parts += [f"{name}={self.expr('int', 1)}" for name in signature.keyword_only]
        if signature.var_keyword:
            parts.append("**more")
        self.suspends = suspends
        return ", ".join(parts)

    def type_parameters(self) -> str:
        if self.version < (3, 12) or not self.on("type_parameters") or not self.chance(25):
            return ""
        last = "P = int" if self.version >= (3, 13) else "**P"
        return self.pick(("[T]", "[T: int]", "[T: (int, str), *U]", f"[T, {last}]", "[**Q]", "[T: say('bound', 1)]"))

    def decorators(self) -> Lines:
        if not self.on("decorators") or not self.chance(25):
            return []
        shown = self.expr("int", 1)
        return ["@" + self.pick(("same", f"around({shown})", "around(2)")) for _ in range(self.between(1, 2))]

    def body(self, inner: Scope, signature: Signature, depth: int, arguments: tuple[str, ...] = ()) -> Lines:
        """The body of a function in scope `inner`: declarations, statements, a return."""
        outer, self.scope = self.scope, inner
        walrus, suspends, fstring = self.walrus, self.suspends, self.in_fstring
        self.walrus = self.suspends = True
        self.in_fstring = False
        parameters = {*signature.required, *signature.optional, *signature.keyword_only}
        inner.bound |= parameters
        inner.sure |= parameters
        lines, local = self.declarations(inner, parameters)
        nothing = "return" if signature.kind == "asyncgen" else "return 0"
        lines.append(f"if spent(): {nothing}")
        first = len(lines)
        lines += self.declare(local)
        if signature.var_positional:
            lines.append("note('rest', rest)")
        if signature.var_keyword:
            lines.append("note('more', more)")
        lines += self.block(depth - 1)
        if inner.is_generator:
            if self.chance(15):
                lines += ["o, p = Dying(1), Dying(2)"]
                inner.bound |= {"o", "p"} - inner.foreign
            lines += ["yield i" if self.chance(50) else "yield"]
            if self.chance(10):
                lines += [self.pick(("next(iter([]))", "raise StopIteration(i)", "raise StopAsyncIteration"))]
            lines += self.block(depth - 1, 2)
        if signature.kind != "asyncgen" and self.chance(60):
            lines.append(f"return {self.expr(self.pick(('int', 'any')), 2)}")
        lines[first:first] = self.declare_late(inner, parameters)
        self.scope, self.walrus, self.suspends, self.in_fstring = outer, walrus, suspends, fstring
        return lines

    def declarations(self, inner: Scope, parameters: set[str]) -> tuple[Lines, list[str]]:
        """global and nonlocal statements; and the names that the function gives a first value itself."""
        lines, local = [], []
        for name in NAMES:
            if name in parameters:
                continue
            way = self.pick(
                ("local",) * 9 + ("free", "free", "free", "nonlocal", "nonlocal", "global", "global", "unset")
            )
            if not self.on("closures") and way in ("nonlocal", "global"):
                way = "local"
            if way == "nonlocal" and self.enclosing(inner, name):
                lines.append(f"nonlocal {name}")
                inner.foreign.add(name)
            elif way == "global":
                lines.append(f"global {name}")
                inner.foreign.add(name)
            elif way == "local":
                local.append(name)
                inner.bound.add(name)
                inner.sure.add(name)
        return lines, local

    def declare_late(self, inner: Scope, parameters: set[str]) -> Lines:
        """First values of the names that the body came to bind: most of them, as reading one without is an error."""
        late = [name for name in NAMES if name in inner.bound - inner.sure - inner.foreign - parameters]
        return self.declare([name for name in late if self.chance(85)])

    def enclosing(self, inner: Scope, name: str) -> bool:
        """Whether an enclosing function surely binds the name, so that nonlocal may name it."""
        outer = inner.outer
        while outer is not None:
            if outer.kind == "function":
                return name in outer.sure
            outer = outer.outer
        return False

    # --- calls

    def call_of(self, signature: Signature, depth: int) -> str:
        kinds = {**{n: "any" for n in ("u", "v", "kw")}}
        arguments = []
        keyword_from = len(signature.required) - (
            self.below(2) if len(signature.required) > signature.positional_only else 0
        )
        for number, name in enumerate(signature.required):
            value = self.expr(kinds.get(name) or kind_of(name), depth - 1)
            arguments.append(f"{name}={value}" if number >= keyword_from else value)
        for name in (*signature.optional, *signature.keyword_only):
            if self.chance(40):
                arguments.append(f"{name}={self.expr('int', depth - 1)}")
        positional = keyword_from == len(signature.required)
        if signature.var_positional and self.chance(50) and positional:
            arguments.insert(len(signature.required), f"*{self.expr('list', depth - 1)}[:3]")
        if self.chance(30) and (signature.var_keyword or self.chance(20)):
            words = ("**{Word('y'): 3}", "**{'y': 3}, **{Word('z'): 4}", "**{Word('y'): 3}, **{Word('y'): 4}")
            ways = (f"**{self.expr('dict', depth - 1)}", "**{'z': 1}", "**Bag(1)", "z=2")
            arguments.append(self.pick((*ways, *words) if self.words else ways))
        if self.chance(4):
            arguments = self.pick(([], ["1", "2", "3", "4"], ["nope=1"], [*arguments, "**3"], ["*3"]))
        return f"{signature.name}({', '.join(arguments)})"

    def call_statement(self, depth: int, latest: bool = False) -> Lines:
        """Run what was defined: call functions, step generators, drive coroutines; `latest`: the newest one here."""
        if latest and self.scope.functions:
            return self.use(self.scope.functions[-1], depth)
        found = self.scope.visible_functions()
        if not found:
            return self.make_function(depth, "plain")
        return self.use(self.pick(found), depth)

    def use(self, signature: Signature, depth: int) -> Lines:
        walrus, self.walrus = self.walrus, False
        suspends, self.suspends = self.suspends, False
        call = self.call_of(signature, 2)
        steps = [self.pick(STEPS) for _ in range(self.between(1, 5))]
        script = ", ".join(["None", *steps] if self.chance(70) else steps)
        self.walrus, self.suspends = walrus, suspends
        if signature.kind == "plain":
            return [f"note('{self.fresh('r')}', {call})"]
        if signature.kind == "generator":
            driven, listed = f"drive_generator(lambda: {call}, [{script}])", f"note('all', list({call})[:9])"
            return self.pick(([driven], [listed], [f"for q in {call}:", "    note('each', q)"]))
        if signature.kind == "coroutine":
            return [f"drive_coroutine(lambda: {call}, [{script}])"]
        return [f"drive_coroutine(lambda: drain_async(lambda: {call}, [{script}]), [0, 0, 1])"]

    def alias(self, depth: int) -> Lines:
        """`type X = …` of 3.12."""
        if self.version < (3, 12):
            return self.call_statement(depth)
        name = self.fresh("Alias")
        value = self.pick(("int", "list[i]", "say('alias', int)", "missing"))
        lines = [f"type {name}{self.pick(('', '[T]'))} = {value}"]
        return [*lines, f"note('alias', {name}.__name__)", f"note('value', {name}.__value__)"]


def kind_of(name: str) -> str:
    from .core import KIND_OF

    return KIND_OF.get(name, "any")

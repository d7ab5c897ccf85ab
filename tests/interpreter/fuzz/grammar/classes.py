"""Class bodies, metaclasses, properties, descriptors, super(), slots, attribute hooks, operators in Python."""

from __future__ import annotations

from .core import Core, Lines, Scope, Signature

DUNDERS = (
    "__add__",
    "__radd__",
    "__iadd__",
    "__sub__",
    "__rsub__",
    "__eq__",
    "__lt__",
    "__gt__",
    "__call__",
    "__or__",
    "__ror__",
    "__getitem__",
    "__contains__",
    "__mul__",
    "__matmul__",
    "__imatmul__",
    "__ne__",
)


INSTANCE_ATTRIBUTES = ("n", "value", "tag", "total", "missing", "mx", "i", "made")
CLASS_ATTRIBUTES = ("n", "i", "total", "made", "tag", "__name__", "__qualname__", "absent", "value")
OPERATORS = ("+", "-", "|", "<", "==", "@", "!=")


class Classes(Core):
    """`class` with everything that may stand in its body."""

    def body(self, inner: Scope, signature: Signature, depth: int, arguments: tuple[str, ...] = ()) -> Lines:
        raise NotImplementedError

    def type_parameters(self) -> str:
        raise NotImplementedError

    def caught(self, lines: Lines) -> Lines:
        raise NotImplementedError

    def class_(self, depth: int) -> Lines:
        if self.left <= 2:
            return self.block(0)
        name = self.fresh("C")
        visible = self.scope.visible_classes()
        bases = self.pick(("", "Box", "Num", "Box, Num", "Row", "Dying", "Seq", *visible))
        keywords = self.pick(("", "", "", "metaclass=Meta", "metaclass=Meta, flag=1", "flag=2"))
        type_parameters = self.type_parameters()
        if type_parameters and keywords.startswith("metaclass"):
            type_parameters = ""
        header = ", ".join(text for text in (bases, keywords) if text)
        lines = self.pick(([], [], [], ["@same"]))
        lines = [*lines, f"class {name}{type_parameters}({header}):"]
        inner = Scope("class", self.scope)
        outer, self.scope = self.scope, inner
        walrus, suspends, fstring = self.walrus, self.suspends, self.in_fstring
        self.walrus, self.suspends, self.in_fstring = True, False, False
        body: Lines = []
        if keywords == "flag=2":
            body.append("def __init_subclass__(cls, **kwargs): note('subclass', cls.__name__, kwargs)") if self.chance(
                40
            ) else None
        body += self.pick(([], [], ["n = 4"], ["i = 3", "i += 1"], ["xs = [1]"], ["'doc'"]))
        if outer.kind == "function" and outer.sure and self.on("closures") and self.chance(20):
            body.insert(0, f"nonlocal {sorted(outer.sure)[0]}")
            inner.foreign.add(sorted(outer.sure)[0])
        for _ in range(self.between(1, 3)):
            body += self.member(name, depth)
        self.scope, self.walrus, self.suspends, self.in_fstring = outer, walrus, suspends, fstring
        outer.classes.append(name)
        lines += self.indent(body)
        return [*lines, *self.use_class(name)]

    def member(self, cls: str, depth: int) -> Lines:
        return list(
            self.one_of(
                [
                    (3, self.dunder),
                    (2, self.method),
                    (2, self.property_),
                    (2, self.init),
                    (1, self.hook),
                    (1, self.static),
                    (1, lambda depth: [f"total = Loud({self.expr('int', 1)})"]),
                    (2, lambda depth: self.block(min(depth - 1, 1), 2)),
                    (1, lambda depth: ["__slots__ = ('slot', 'link')"] if self.chance(30) else ["link = None"]),
                    (
                        1,
                        lambda depth: [
                            f"made = [say('in class', q) for q in {self.pick(('range(2)', self.name('list'), 'xs'))}]"
                        ],
                    ),
                    (1, lambda depth: [f"{'i' if 'i' in self.scope.foreign else 'i: int'} = {self.expr('int', 1)}"]),
                ],
                depth,
            )
        )

    def define(self, name: str, parameters: list[str], depth: int, first: Lines, kind: str = "plain") -> Lines:
        inner = Scope("function", self.scope)
        inner.is_generator = kind == "generator"
        signature = Signature(name, kind, parameters)
        body = self.body(inner, signature, min(depth, 2))
        return [f"def {name}({', '.join(parameters)}):", *self.indent([*first, *body])]

    def declared_first(self, lines: Lines, extra: Lines) -> Lines:
        """Put `extra` after the header; global and nonlocal statements may come after it: they name other variables."""
        return [lines[0], *self.indent(extra), *lines[1:]]

    def dunder(self, depth: int) -> Lines:
        name = self.pick(DUNDERS)
        first = [f"note('{name}', other)"]
        if name == "__getitem__":  # what is iterated through it ends
            first.append("if spent(): raise IndexError")
        answer = self.pick(
            (
                ["return NotImplemented"],
                ["return (self, other)[0]"],
                ["raise Oops('dunder')"],
                [f"return super().{name}(other)"],
                ["return 1"],
            )
        )
        if self.chance(60):
            return [f"def {name}(self, other=None):", *self.indent([*first, "if spent(): return 0", *answer])]
        return self.define(name, ["self", "other"], depth, first)

    def method(self, depth: int) -> Lines:
        name = self.pick(("method", "make", "plain"))
        extra = self.pick(
            (
                [],
                ["note('class', __class__.__name__)"],
                ["note('super', super().__init__)" if False else "note('super', super().tag)"],
                ["note('up', super().method(1))"],
                ["note('bound', self.method.__name__)"],
                ["note('two', super(__class__, self).method(1))"],
            )
        )
        lines = self.define(name, ["self", "a"], depth, [])
        return self.declared_first(lines, extra)

    def init(self, depth: int) -> Lines:
        extra = self.pick(
            (["super().__init__(n)"], ["self.n = n"], ["self.n, self.link = n, self"], ["object.__init__(self)"], [])
        )
        lines = ["def __init__(self, n=0, *args):", "    note('init', n)", *self.indent(extra)]
        if self.chance(15):
            lines += ["def __new__(cls, *args):", "    note('new', args)", "    return super().__new__(cls)"]
        return lines

    def property_(self, depth: int) -> Lines:
        name = self.pick(("value", "n", "tag"))
        lines = ["@property", *self.define(name, ["self"], depth, [f"note('get {name}')"])]
        if self.chance(60):
            lines += [
                f"@{name}.setter",
                *self.define(name, ["self", "a"], depth, [f"note('set {name}', a)", "self.__dict__['seen'] = a"]),
            ]
        if self.chance(20):
            lines += [f"@{name}.deleter", f"def {name}(self): note('deleted')"]
        return lines

    def hook(self, depth: int) -> Lines:
        return self.pick(
            (
                [
                    "def __getattr__(self, name):",
                    "    note('missing', name)",
                    "    if name[0] == 'm': return 3",
                    "    raise AttributeError(name)",
                ],
                [
                    "def __getattribute__(self, name):",
                    "    if name[:2] != '__': note('attribute', name)",
                    "    return super().__getattribute__(name)",
                ],
                [
                    "def __setattr__(self, name, value):",
                    "    note('sets', name, value)",
                    "    super().__setattr__(name, value)",
                ],
                ["def __delattr__(self, name):", "    note('dels', name)", "    object.__delattr__(self, name)"],
                ["def __class_getitem__(cls, key): return say('class item', key)"],
                ["def __del__(self): note('finalized')"],
                ["def __bool__(self): return say('bool', False)"],
                ["def __hash__(self): return say('hash', 3)"],
                ["def __iter__(self):", "    yield 1", "    note('iterating')", "    yield 2"],
                ["def __len__(self): return say('len', 2)"],
                [
                    "def __enter__(self): return say('enters', 1)",
                    "def __exit__(self, *args): note('exits', len(args), args[0])",
                ],
                ["def __index__(self): return say('index', 1)"],
                ["def __missing__(self, key): return key"],
                ["def __format__(self, spec): return say('format', spec)"],
                ["def __repr__(self): return 'C'"],
            )
        )

    def static(self, depth: int) -> Lines:
        kind = self.pick(("staticmethod", "classmethod"))
        parameters = ["a"] if kind == "staticmethod" else ["cls", "a"]
        return [f"@{kind}", *self.define(self.pick(("make", "plain")), parameters, depth, [])]

    def use_class(self, name: str) -> Lines:
        target = self.pick(("o", "p"))
        if target not in self.scope.foreign:
            self.scope.bound.add(target)
        lines = [f"{target} = {name}({self.pick(('1', '', '2', '7'))})"]
        for _ in range(self.between(2, 5)):
            use = self.pick(
                (
                    f"note('attribute', {target}.{self.pick(INSTANCE_ATTRIBUTES)})",
                    f"{target}.{self.pick(('n', 'value', 'total', 'link', 'other'))} = {self.expr('int', 1)}",
                    f"note('method', {target}.{self.pick(('method', 'make', 'plain'))}({self.expr('int', 1)}))",
                    f"{target}.{self.pick(('n', 'value', 'total'))} += {self.expr('int', 1)}",
                    f"note('operator', {target} {self.pick(OPERATORS)} {self.expr(self.pick(('int', 'obj')), 1)})",
                    f"note('class', {name}.{self.pick(CLASS_ATTRIBUTES)})",
                    f"del {target}.{self.pick(('n', 'value', 'total', 'link'))}",
                    f"note('item', {name}[{self.expr('int', 1)}])",
                    f"note('instance', isinstance({self.expr('any', 1)}, {name}))",
                    f"note('names', {name}.__annotations__)",
                    f"with {target}: note('inside')",
                    f"note('iterated', [*{target}][:3])",
                )
            )
            lines += self.caught([use]) if self.chance(60) else [use]
        return lines

"""Simple statements and control flow."""

from __future__ import annotations

from .core import KIND_OF, NAMES, Core, Lines

AUGMENTED = ("+=", "-=", "*=", "//=", "|=", "%=", "&=", "^=", ">>=", "@=", "/=")
IMPORTS = (
    "import math\nnote('module', math.floor(2.5))",
    "import os.path as path\nnote('module', path.__name__ == 'x')",
    "from collections import OrderedDict as od, deque\nnote('deque', deque([1]))",
    "import no_such_module_here",
    "from math import no_such_name",
    "import collections.abc\nnote('abc', collections.abc.Sized.__name__)",
    "from . import nothing",
)


CHANGED = ("n", "total", "value", "link")
EXECUTED = ("x = 1", "del i", "raise Oops(1)", "def z(): return i")


class Statements(Core):
    """`block(depth)` gives the lines of one to three statements."""

    def block(self, depth: int, most: int = 3) -> Lines:
        lines: Lines = []
        for _ in range(self.between(1, most)):
            if self.left <= 0:
                break
            lines += (
                self.caught(self.statement(depth)) if self.on("guarding") and self.chance(20) else self.statement(depth)
            )
        return lines or ["pass"]

    def caught(self, lines: Lines) -> Lines:
        """What these statements raise is logged, so that what follows them runs."""
        return ["try:", *self.indent(lines), "except Exception as error:", f"    caught('{self.fresh('t')}', error)"]

    def statement(self, depth: int) -> Lines:
        self.left -= 1
        simple = [
            (5, self.assign),
            (4, self.augment),
            (9, self.log_value),
            (1, self.delete),
            (1, self.assert_),
            (2, self.unpack),
            (2, self.mutate),
            (1, self.annotated),
            (1, self.import_),
            (1, self.look_around),
        ]
        inside = self.scope.outer is not None and self.scope.outer.kind != "module"  # not main itself: it should go on
        if inside or self.chance(20):
            simple.append((1, self.raise_))
        if self.scope.kind == "function" and self.scope.returns and (inside or self.chance(10)):
            simple.append((1, self.return_))
        if self.scope.in_loop and self.scope.jumps:
            simple.append((2, self.leave_loop))
        if self.may_suspend() and (self.scope.is_generator or self.scope.is_async):
            simple.append((4, self.suspend))
        if depth <= 0 or self.left <= 0:
            return self.one_of(simple, 2)
        nested = [(3, self.if_), (3, self.for_), (1, self.while_)]
        for family, weight, method in self.nested():
            if self.on(family):
                nested.append((weight, method))
        return self.one_of([(12, lambda depth: self.one_of(simple, 2)), *((w * 2, m) for w, m in nested)], depth)

    def nested(self) -> list[tuple[str, int, object]]:
        raise NotImplementedError

    # --- binding

    def bind(self, name: str) -> str:
        if name not in self.scope.foreign:
            self.scope.bound.add(name)
        return name

    def assign(self, depth: int) -> Lines:
        kind = self.pick(("int", "list", "obj", "any", "dict", "str"))
        targets = [self.bind(self.name(kind))]
        if self.chance(20):
            targets.append(self.target(depth))
        return [" = ".join([*targets, self.expr(kind, depth)])]

    def target(self, depth: int) -> str:
        """A name, attribute, item or slice that can be assigned to."""
        return str(
            self.one_of(
                [
                    (3, lambda: self.bind(self.pick(NAMES))),
                    (2, lambda: f"{self.expr('obj', 1)}.{self.pick(('n', 'total', 'value', 'link', 'fresh', 'slot'))}"),
                    (2, lambda: f"{self.name('list')}[{self.expr('int', 1)}]"),
                    (2, lambda: f"{self.name('dict')}[{self.expr('str', 1)}]"),
                    (1, lambda: f"{self.expr('obj', 1)}[{self.expr('int', 1)}]"),
                ]
            )
        )

    def annotated(self, depth: int) -> Lines:
        kind = self.pick(("int", "obj"))
        note = self.pick(("int", "say('annotation', int)", "'text'"))
        if self.scope.kind == "function" or self.chance(50):
            name = self.name(kind)
            if name not in self.scope.foreign:
                self.scope.bound.add(name)
                return [f"{name}: {note} = {self.expr(kind, depth)}"]
        return [f"{self.name('obj')}.n: {note} = {self.expr(kind, depth)}"]

    def unpack(self, depth: int) -> Lines:
        shape = self.pick(("{}, {}", "{}, *{}", "*{}, {}", "[{}, {}]", "({}, {}), {}", "{}, *{}, {}", "{}, {}, {}"))
        count = shape.count("{}")
        targets = [self.target(depth) for _ in range(count)]
        text = shape.format(*targets)
        if self.chance(60):
            fitting = {
                1: ("Seq(4)", "'xyz'"),
                2: ("Seq(2)", "(1, 2)", "{1: 2, 3: 4}"),
                3: ("(3, 2, 1)", "Row(3)", "'abc'"),
            }
            value = "((1, 2), 3)" if "(" in shape else self.pick(fitting[1 if "*" in shape else count])
        else:
            value = self.pick(
                (
                    self.expr("list", depth),
                    f"{self.tuple_display(depth)}",
                    "Seq(3)",
                    "Row(2)",
                    "((1, 2), 3)",
                    f"{self.name('int')}, {self.name('any')}",
                    self.expr("any", depth),
                )
            )
        names = ", ".join(target for target in targets if target.isidentifier())
        return [f"{text} = {value}", *([f"note('{self.fresh('u')}', {names})"] if names else [])]

    def tuple_display(self, depth: int) -> str:
        raise NotImplementedError

    def augment(self, depth: int) -> Lines:
        kind = self.pick(("int", "int", "obj", "list", "dict", "attribute", "item", "slice"))
        if kind == "int":
            operator = self.pick(("+=", "-=", "//=", "%=", "^=", "|=", ">>="))
            return [f"{self.bind(self.name('int'))} {operator} {self.expr('int', depth)}"]
        if kind == "list":
            return [f"{self.bind(self.name('list'))} += {self.expr(self.pick(('list', 'str')), 1)}[:2]"]
        if kind == "dict":
            return [f"{self.bind('d')} |= {self.expr('dict', depth)}"]
        operator = self.pick(AUGMENTED)
        value = self.expr(self.pick(("int", "obj")), depth)
        if kind == "obj":
            return [f"{self.bind(self.name('obj'))} {operator} {value}"]
        if kind == "attribute":
            return [f"{self.expr('obj', 1)}.{self.pick(CHANGED)} {self.pick(('+=', '-=', '|='))} {value}"]
        if kind == "item":
            holder = self.pick((self.name("list"), self.name("dict"), self.expr("obj", 1)))
            return [f"{holder}[{self.expr(self.pick(('int', 'str')), 1)}] {self.pick(('+=', '-=', '|='))} {value}"]
        return [f"{self.name('list')}[{self.expr('int', 1)}:{self.expr('int', 1)}] += {self.expr('list', 1)}[:2]"]

    def delete(self, depth: int) -> Lines:
        return [
            str(
                self.one_of(
                    [
                        (2, lambda: f"del {self.bind(self.pick(NAMES))}"),
                        (1, lambda: f"del {self.name('list')}[{self.expr('int', 1)}]"),
                        (1, lambda: f"del {self.name('list')}[{self.expr('int', 1)}:]"),
                        (1, lambda: f"del {self.name('dict')}[{self.expr('str', 1)}]"),
                        (1, lambda: f"del {self.expr('obj', 1)}.{self.pick(('n', 'total', 'value', 'link', 'fresh'))}"),
                        (1, lambda: f"del {self.name('list')}[0], {self.expr('obj', 1)}[1]"),
                    ]
                )
            )
        ]

    # --- effects

    def log_value(self, depth: int) -> Lines:
        kind = self.pick(("int", "any", "obj", "list", "str", "dict"))
        if self.chance(15):
            return [f"print({self.expr(kind, depth)}, end=';')"]
        return [f"note('{self.fresh('n')}', {self.expr(kind, depth)})"]

    def mutate(self, depth: int) -> Lines:
        return [
            str(
                self.one_of(
                    [
                        (2, lambda: f"{self.name('list')}.append({self.expr(self.pick(('int', 'obj')), depth)})"),
                        (1, lambda: f"{self.name('list')}.insert({self.expr('int', 1)}, {self.expr('int', 1)})"),
                        (1, lambda: f"{self.name('list')}.sort(key={self.lambda_of_one(depth)})"),
                        (1, lambda: f"{self.name('list')}.extend({self.iterable(depth)})"),
                        (
                            1,
                            lambda: (
                                f"{self.name('list')}[{self.name('int')}:{self.name('int')}] = {self.iterable(depth)}"
                            ),
                        ),
                        (1, lambda: f"{self.name('dict')}.update({self.expr('dict', depth)})"),
                        (
                            1,
                            lambda: (
                                f"note('d', {self.name('dict')}.setdefault({self.expr('str', 1)}, {self.name('int')}))"
                            ),
                        ),
                        (1, lambda: f"{self.bind('ys')} = {self.bind('xs')} = {self.expr('list', depth)}"),
                        (1, lambda: f"setattr({self.expr('obj', 1)}, 'n', {self.expr('int', depth)})"),
                        (1, lambda: f"{self.bind(self.name('obj'))} = None"),
                    ]
                )
            )
        ]

    def lambda_of_one(self, depth: int) -> str:
        raise NotImplementedError

    def iterable(self, depth: int) -> str:
        raise NotImplementedError

    def assert_(self, depth: int) -> Lines:
        return [f"assert {self.expr('int', depth)}" + self.pick(("", f", {self.expr('any', depth)}"))]

    def import_(self, depth: int) -> Lines:
        if not self.on("imports"):
            return self.log_value(depth)
        if self.scope.outer is None and self.chance(50):
            return ["from math import *", "note('star', floor(1.5))"]
        return self.pick(IMPORTS).split("\n")

    def look_around(self, depth: int) -> Lines:
        """locals(), globals(), vars(), dir(), exec, eval, compile, and builtins that are shadowed."""
        if not self.on("reflection"):
            return self.augment(depth)
        shadow = self.pick(("len", "sum", "max", "sorted", "isinstance"))
        return self.pick(
            (
                ["note('locals', sorted(locals()))"],
                ["note('names', [key for key in ('i', 'o', 'main', 'g') if key in globals()])"],
                [f"note('vars', sorted(vars({self.expr('obj', 1)})))"],
                ["note('dir', [key for key in dir() if len(key) < 3])"],
                [f"note('eval', eval(\"{self.eval_text()}\"))"],
                [f"exec(\"i = 5; note('exec', i); {self.pick(EXECUTED)}\")"],
                [f"note('eval', eval('i + k', {{'i': 1}}, {{'k': {self.expr('int', 1)}}}))"],
                [f"{shadow} = lambda *args, **kwargs: say('{shadow}', len(args) if '{shadow}' != 'len' else 2)"],
                ["note('frame', __import__('sys')._getframe().f_code.co_name)"],
                [f"note('compiled', eval(compile('{self.pick(('i', '1 + 2', 's * 2'))}', 'inner', 'eval')))"],
            )
        )

    def eval_text(self) -> str:
        return self.pick(("i + 1", "[i for i in range(3)]", "say('e', 1)", "len(xs)", "missing", "(lambda: i)()"))

    # --- control flow

    def if_(self, depth: int) -> Lines:
        test = self.pick(
            (
                self.expr("int", 2),
                self.expr("any", 2),
                f"{self.name('any')} is None",
                f"{self.name('obj')} is not None",
                f"{self.expr('int', 1)} and {self.expr('obj', 1)} or {self.expr('int', 1)}",
                f"not ({self.expr('int', 1)} or {self.expr('obj', 1)})",
            )
        )
        lines = [f"if {test}:", *self.indent(self.block(depth - 1))]
        if self.chance(30):
            lines += [f"elif {self.expr('int', 2)}:", *self.indent(self.block(depth - 1))]
        if self.chance(40):
            lines += ["else:", *self.indent(self.block(depth - 1))]
        return lines

    def for_(self, depth: int) -> Lines:
        prefix = ""
        source = self.pick(
            (
                self.expr("list", 2),
                self.name("list"),
                self.name("list"),
                "range(3)",
                f"range({self.expr('int', 1)})",
                self.name("dict"),
                f"{self.name('dict')}.items()",
                self.iterable(2),
                self.expr("any", 2),
                f"enumerate({self.name('list')})",
                f"reversed({self.name('list')})",
                f"iter({self.name('list')})",
            )
        )
        if self.scope.is_async and self.may_suspend() and self.chance(40):
            prefix = "async "
            generators = [s for s in self.scope.visible_functions() if s.kind == "asyncgen"]
            source = f"AIter({self.expr('int', 1)})"
            if generators and self.chance(60):
                source = self.call_of(self.pick(generators), 2)
        target = self.pick((self.bind(self.name("int")), self.bind(self.name("int")), self.target(1)))
        if "enumerate" in source or "items()" in source or self.chance(5):
            target = f"{self.bind('a')}, {self.bind('b')}"
        body = self.loop_body(depth)
        if self.chance(20) and not prefix:
            changed = self.name("list")
            body.append(self.pick((f"{changed}.append(9)", f"{changed}.pop()", f"{changed}.clear()", "d['new'] = 1")))
        lines = [f"{prefix}for {target} in {source}:", *self.indent(body)]
        if self.chance(30):
            lines += ["else:", *self.indent(self.block(depth - 1))]
        return lines

    def loop_body(self, depth: int) -> Lines:
        outer, self.scope.in_loop = self.scope.in_loop, True
        jumps, self.scope.jumps = self.scope.jumps, True
        lines = ["if spent(): break", *self.block(depth - 1)]
        self.scope.in_loop, self.scope.jumps = outer, jumps
        return lines

    def while_(self, depth: int) -> Lines:
        counter = self.fresh("c")
        test = self.pick(
            (
                f"{counter} < 3",
                f"{counter} < 3 and {self.expr('int', 1)}",
                "True",
                f"({self.expr('int', 1)})",
                f"{self.name('any')} is None",
                f"{self.name('obj')} is not None",
            )
        )
        body = [*self.loop_body(depth)]
        lines = [f"{counter} = 0", f"while {test}:", "    if spent(): break", f"    {counter} += 1"]
        lines += [f"    if {counter} > 4: break", *self.indent(body)]
        if self.chance(30):
            lines += ["else:", *self.indent(self.block(depth - 1))]
        return lines

    def leave_loop(self, depth: int) -> Lines:
        leave = self.pick(("break", "continue"))
        return [f"if {self.expr('int', 1)}: {leave}"] if self.chance(60) else [leave]

    def return_(self, depth: int) -> Lines:
        if self.scope.is_generator and self.scope.is_async:
            return ["return"]
        value = f"return {self.expr(self.pick(('int', 'any', 'obj')), depth)}"
        return [f"if {self.expr('int', 1)}: {value}"] if self.chance(60) else [value]

    def raise_(self, depth: int) -> Lines:
        text = f"raise {self.exception(depth)}"
        if self.chance(25):
            text += f" from {self.pick(('None', self.exception(depth), 'ValueError', '3'))}"
        return [f"if {self.expr('int', 1)}: {text}"] if self.chance(50) else [text]

    def suspend(self, depth: int) -> Lines:
        if self.scope.is_async and not (self.scope.is_generator and self.chance(60)):
            return [f"note('awaited', await Pause({self.expr('int', 1)}))"]
        if self.scope.is_async or self.chance(70):
            return [f"{self.bind(self.name('any'))} = yield {self.expr('any', depth)}"]
        return [f"note('delegated', (yield from {self.iterable(depth)}))"]

    def declare(self, names: list[str]) -> Lines:
        """Give the variables of a new function or class their first values."""
        values = {
            "int": ("2", "0", "5"),
            "str": ("'ab'", "'k'"),
            "list": ("[1, 2, 3]", "[]"),
            "dict": ("{'k': 2}", "{}"),
            "obj": ("Num(1)", "Box(2)", "Num(3)", "Num(4)", "Row(3)", "Dying(1)", "Slotted(1)", "Seq(3)"),
            "any": ("None", "(1, 2)", "'k'", "[4]"),
        }
        return [f"{name} = {self.pick(values[KIND_OF[name]])}" for name in names]

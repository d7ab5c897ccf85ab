"""match statements: every kind of pattern."""

from __future__ import annotations

from .core import Core, Lines


class Matching(Core):
    """`match` over values of every kind."""

    def match_(self, depth: int) -> Lines:
        subject = self.pick(
            (
                self.expr("any", 2),
                self.expr("list", 2),
                self.expr("dict", 2),
                self.expr("obj", 2),
                self.pick((self.expr("str", 2), "'k'", "b'k1'", "bytearray(b'k')")),  # sequences, but to no pattern
                f"({self.name('int')}, {self.name('list')})",
                "Point(1, 2)",
                "Bag(1)",
                f"{self.name('any')}",
            )
        )
        lines = [f"match {subject}:"]
        for _ in range(self.between(1, 4)):
            self.captured: set[str] = set()
            guard = f" if {self.expr('int', 1)}" if self.chance(25) else ""
            pattern = self.pattern(2)
            if pattern.isidentifier() and not guard:
                guard = " if say('guard', 0)"  # an irrefutable case must be the last one
            lines.append(f"    case {pattern}{guard}:")
            lines += self.indent(
                self.indent(
                    [
                        f"note('{self.fresh('case')}', {', '.join(sorted(self.captured)) or 0})",
                        *self.block(depth - 1, 2),
                    ]
                )
            )
        if self.chance(40):
            lines += ["    case _:", *self.indent(self.indent(self.block(depth - 1, 1)))]
        return lines

    def capture(self) -> str:
        free = [name for name in ("a", "b", "i", "xs", "m1", "m2") if name not in self.captured]
        if not free:
            return "_"
        name = self.pick(free)
        self.captured.add(name)
        if name not in self.scope.foreign:
            self.scope.bound.add(name)
        return name

    def capture_after(self, mark: str) -> str:
        """`mark` and a name, where one is left: `_` may not stand there."""
        name = self.capture()
        return "" if name == "_" else mark + name

    def pattern(self, depth: int) -> str:
        if depth <= 0:
            return str(
                self.one_of(
                    [
                        (2, self.capture),
                        (2, lambda: self.pick(("1", "'k'", "None", "True", "-1", "2.5"))),
                        (1, lambda: "_"),
                    ]
                )
            )
        one = depth - 1
        return str(
            self.one_of(
                [
                    (2, lambda: self.pattern(0)),
                    (3, lambda: f"[{', '.join(self.pattern(one) for _ in range(self.between(0, 3)))}]"),
                    (2, lambda: f"[{self.pattern(one)}, *{self.capture()}]"),
                    (1, lambda: f"(*_, {self.pattern(one)})"),
                    (2, lambda: "{'k': " + self.pattern(one) + "}"),
                    (1, lambda: "{'k': " + self.pattern(one) + self.capture_after(", **") + "}"),
                    (1, lambda: "{1: _, 'k': " + self.pattern(one) + "}"),
                    (2, lambda: f"{self.pick(('int', 'str', 'list'))}({self.pattern(one)})"),
                    (1, lambda: f"{self.pick(('int', 'Point', 'dict'))}()"),
                    (1, lambda: f"{self.pick(('Num', 'Box'))}(n={self.pattern(one)})"),
                    (2, lambda: f"Point({self.pattern(one)}, y={self.pattern(one)})"),
                    (1, lambda: f"Point({self.pattern(one)}, {self.pattern(one)}, {self.pattern(one)})"),
                    (1, lambda: self.pick(("int() | str()", "[1, _] | [_, 2]", "None | False | 3"))),
                    (1, lambda: self.refutable(one) + self.capture_after(" as ")),
                    (1, lambda: "Box.tag"),
                ]
            )
        )

    def refutable(self, depth: int) -> str:
        """A pattern that can fail: no bare name, which the compiler wants last."""
        text = self.pattern(depth)
        return f"[{text}]" if text.replace("_", "a").isidentifier() or " as " in text else f"({text})"

"""try in all its forms, with-blocks, and what is raised."""

from __future__ import annotations

from .core import Core, Lines

CAUGHT = (
    "Oops",
    "Exception",
    "(TypeError, ValueError)",
    "KeyError",
    "ZeroDivisionError",
    "Worse",
    "BaseException",
    "(Oops, LookupError)",
    "AttributeError",
    "NameError",
    "int",
    "StopIteration",
    "RuntimeError",
    "Quiet",
    "",
)


class Exceptions(Core):
    """Statements that raise, catch and clean up."""

    def exception(self, depth: int) -> str:
        return str(
            self.one_of(
                [
                    (3, lambda: f"Oops({self.expr('int', 1)})"),
                    (2, lambda: "Worse('w')"),
                    (1, lambda: "ValueError"),
                    (1, lambda: f"KeyError({self.expr('str', 1)})"),
                    (1, lambda: "StopIteration(4)"),
                    (1, lambda: "Quiet()"),
                    (1, lambda: "NotImplemented"),
                    (1, lambda: "ExceptionGroup('g', [Oops(1), Worse(2), ExceptionGroup('h', [KeyError(3)])])"),
                    (1, lambda: "GeneratorExit()"),
                    (1, lambda: f"{self.name('any')}"),
                ]
            )
        )

    def try_(self, depth: int) -> Lines:
        lines = ["try:", *self.indent(self.block(depth - 1))]
        if self.chance(75):
            for _ in range(self.pick((1, 1, 2))):
                kind = self.pick(CAUGHT)
                name = self.pick((" as error", " as error", "", " as a", " as i"))
                if not kind:
                    lines += ["except:", *self.indent(self.handler("", depth))]
                    break
                shown = f"say('{self.fresh('match')}', {kind})" if self.chance(10) else kind
                lines += [f"except {shown}{name}:", *self.indent(self.handler(name[4:], depth))]
            if self.chance(25):
                lines += ["else:", *self.indent(self.block(depth - 1))]
            if self.chance(40):
                lines += self.finally_(depth)
        else:
            lines += self.finally_(depth)
        return lines

    def handler(self, name: str, depth: int) -> Lines:
        lines = []
        if name:
            lines.append(self.pick((f"caught('{self.fresh('e')}', {name})", f"note('handler', {name})")))
        lines += self.block(depth - 1, 2)
        lines += self.pick(
            (
                [],
                [],
                [],
                ["raise"],
                [f"raise Worse('handler') from {name or 'None'}"],
                ["raise KeyError('again')"],
                [f"{name}.add_note('noted')" if name else "pass", "raise"],
                [f"a = {name}" if name else "pass"],
                [f"del {name}" if name else "pass"],
            )
        )
        return lines

    def finally_(self, depth: int) -> Lines:
        lines = ["finally:", *self.indent(self.block(depth - 1, 2))]
        if self.scope.jumps:
            leave = ["pass", "pass"]
            if self.scope.in_loop:
                leave += ["break", "continue"]
            if (
                self.scope.returns
                and self.scope.kind == "function"
                and not (self.scope.is_async and self.scope.is_generator)
            ):
                leave.append(f"return {self.expr('int', 1)}")
            if self.chance(30):
                lines.append("    " + self.pick(leave))
        return lines

    def try_star(self, depth: int) -> Lines:
        scope = self.scope
        group = self.pick(
            (
                "ExceptionGroup('g', [Oops(1), Worse(2), ExceptionGroup('h', [KeyError(3), Oops(4)])])",
                "Oops('bare')",
                "ExceptionGroup('k', [KeyError(1)])",
                "BaseExceptionGroup('q', [Quiet(), TypeError(1)])",
            )
        )
        lines = ["try:", *self.indent(self.block(depth - 1, 2)), f"    raise {group}"]
        jumps, scope.jumps = (scope.jumps, scope.returns), False
        scope.returns = False
        in_loop, scope.in_loop = scope.in_loop, False
        for kind in (self.pick(("Oops", "Worse", "(KeyError, Worse)")), self.pick(("KeyError", "Exception", "Quiet"))):
            lines.append(f"except* {kind} as error:")
            lines += self.indent([f"caught('{self.fresh('g')}', error)", *self.block(depth - 1, 2)])
            lines += self.indent(
                self.pick(
                    ([], [], ["raise"], ["raise Worse('star')"], ["raise error"], ["error.add_note('n')", "raise"])
                )
            )
        (scope.jumps, scope.returns), scope.in_loop = jumps, in_loop
        if self.chance(20):
            lines += ["else:", *self.indent(self.block(depth - 1, 1))]
        if self.chance(30):
            lines += self.finally_(depth)
        return lines

    def with_(self, depth: int) -> Lines:
        prefix, manager = "", "Guard"
        if self.scope.is_async and self.may_suspend() and self.chance(50):
            prefix, manager = "async ", "AGuard"
        items = []
        for _ in range(self.pick((1, 1, 2))):
            text = self.pick(
                (
                    f"{manager}({self.expr('int', 1)}, {self.pick((1, 2, 3, 1, 4, 5))})",
                    f"{manager}((1, 2))",
                    f"{manager}((1, 2), 2)",
                )
                * 3
                + (self.expr("obj", 1),)
            )
            items.append(text + self.pick(("", f" as {self.target(1)}", " as (a, b)")))
        if len(items) > 1 and self.chance(20):
            items = ["(" + ",\n  ".join(items) + ")"]
        return [f"{prefix}with {', '.join(items)}:", *self.indent(self.block(depth - 1))]

    def nested_finally(self, depth: int) -> Lines:
        """Several finally blocks that a jump or an exception leaves one after the other."""
        inner = self.pick(([], [f"raise {self.exception(1)}"], self.block(0, 1)))
        lines = ["try:", "    try:", *self.indent(self.indent([*self.block(depth - 2, 2), *inner]))]
        lines += self.indent(["finally:", *self.indent([f"note('{self.fresh('f')}')", *self.block(depth - 2, 1)])])
        lines += self.pick(
            (
                ["finally:", *self.indent([f"note('{self.fresh('f')}')"])],
                ["except Oops as error:", *self.indent(self.handler("error", depth - 1))],
            )
        )
        return lines

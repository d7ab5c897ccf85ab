"""Definitions of generators, coroutines and async generators. What steps them is in functions.py and the prelude."""

from __future__ import annotations

from .core import Core, Lines


class Suspending(Core):
    """`def` with yield, `async def`, and both."""

    def make_function(self, depth: int, kind: str) -> Lines:
        raise NotImplementedError

    def call_statement(self, depth: int, latest: bool = False) -> Lines:
        raise NotImplementedError

    def generator(self, depth: int) -> Lines:
        return self.defined_and_used(depth, "generator")

    def coroutine(self, depth: int) -> Lines:
        return self.defined_and_used(depth, "coroutine")

    def async_generator(self, depth: int) -> Lines:
        return self.defined_and_used(depth, "asyncgen")

    def defined_and_used(self, depth: int, kind: str) -> Lines:
        lines = self.make_function(depth, kind)
        return [*lines, *self.call_statement(depth, latest=True)]

    def pipeline(self, depth: int) -> Lines:
        """A generator that outlives the statement that made it, stepped between other statements."""
        name = self.fresh("it")
        source = self.generator_text(depth)
        lines = [f"{name} = {source}"]
        for _ in range(self.between(1, 2)):
            lines += [f"note('{name}', next({name}, 'end'))", *self.block(0, 1)]
        return [
            *lines,
            self.pick((f"{name}.close()", f"del {name}", f"note('rest', list({name})[:5])", f"{name} = None")),
        ]

    def generator_text(self, depth: int) -> str:
        found = [s for s in self.scope.visible_functions() if s.kind == "generator"]
        if found:
            suspends, self.suspends = self.suspends, False
            text = self.call_of(self.pick(found), 1)
            self.suspends = suspends
            return text
        return f"(say('lazy', q) for q in {self.name('list')} if not spent())"

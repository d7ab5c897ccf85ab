"""Tokens of context variables that are alive where a graph ends.

``ContextVar.reset`` takes the token of the ``set`` that it undoes, and nothing but ``set`` makes one. A variable that
had a value gets that once more and then the one that it has now, of which the token is. One that had none is unset
until the residual code sets it for the first time: that gives the token.
"""

from __future__ import annotations

import contextvars
from typing import Any

from ..hook import ABSENT
from ..python.methods import ContextToken
from ..values.residual_program import Expression, Literal, Write, method
from ..values.values import CannotRebuild
from .interfaces import Builder


class Tokens:
    """Those of one residual function. (It refers to no emitter: what a call was given dies with its last reference.)"""

    def __init__(self) -> None:
        self.first: dict[int, Expression] = {}  # by id of the variable: what setting it for the first time gives
        self.given: set[int] = set()  # ids of variables whose first token stands for one of the trace's

    def set(self, emitter: Builder, variable: contextvars.ContextVar, value: Any) -> Expression:
        """The variable gets a value. The name of the token that the first set of it gives."""
        made = method(emitter.value(variable), "set", emitter.value(value))
        name = emitter.fresh()
        emitter.lines.append(Write(name, made))
        return self.first.setdefault(id(variable), name)

    def token(self, emitter: Builder, token: ContextToken, now: Any) -> Expression:
        """The name of one that resets as the trace's does. now: what the variable has where the graph ends."""
        variable, key = token.variable, id(token.variable)
        if token.used:
            name = emitter.assign(token, method(emitter.value(variable), "set", Literal(None)))
            emitter.lines.append(method(emitter.value(variable), "reset", name))
            return name
        if now is ABSENT or (token.before is ABSENT and key in self.given):
            raise CannotRebuild(f"two tokens of context variable {variable.name} are alive across a graph break")
        if token.before is not ABSENT:
            self.set(emitter, variable, token.before)
            return emitter.assign(token, method(emitter.value(variable), "set", emitter.value(now)))
        self.given.add(key)
        return emitter.assign(token, self.first.get(key) or self.set(emitter, variable, now))

"""Objects of C++ that a step asks for a number or name and nothing else: the rank, size and name of a process group.

What one answers is a fact: a guard asks it again at each call. That it is this group (``torch.distributed`` has another
one after ``destroy_process_group``) is a guard of the place where it was found.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed

from moebius.interpreter import is_kind

from ..heap.objects import Objects

GETTER = re.compile(r"\w+\(self: [\w.]+\) -> (int|str|bool)\b")  # pybind11's text of a method without arguments
COUNTS = frozenset({"_get_sequence_number_for_group"})  # of what was sent: another answer each time


def getters(cls: type) -> Iterator[Any]:
    """The C++ functions behind a class's attributes and behind its methods that take and change nothing."""
    for name, member in vars(cls).items():
        if is_kind(member, property):
            yield member.fget
        elif name not in COUNTS and GETTER.match(getattr(member, "__doc__", None) or ""):
            yield member.__func__


QUESTIONS: frozenset[Any] = frozenset(
    getters(torch.distributed.ProcessGroup) if torch.distributed.is_available() else ()
)


class Questions:
    """Those of one trace."""

    def __init__(self, objects: Objects):
        self.objects, self.guards = objects, objects.guards
        self.functions: dict[Any, Callable[..., Any]] = {
            question: functools.partial(self.ask, question) for question in QUESTIONS
        }

    def ask(self, question: types.BuiltinFunctionType, obj: Any) -> Any:
        """``question(obj)``."""
        answer = question(obj)
        self.objects.note("process group")
        source = self.objects.need(obj).source
        self.guards.holds(source.name, f"answers {answer!r}"[:80], Answer(question, answer), source)
        return answer


class Answer:
    """A guard: the object gives this to the question, which may raise where it does not."""

    __slots__ = ("answer", "question")

    def __init__(self, question: Callable[[Any], Any], answer: Any):
        self.question, self.answer = question, answer

    def __call__(self, obj: Any) -> bool:
        return self.question(obj) == self.answer

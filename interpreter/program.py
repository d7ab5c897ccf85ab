"""What a code object is decoded into: instructions with folded arguments, and what running them needs to know."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any
from weakref import ref

from .sentinels import UNSET

CO_OPTIMIZED, CO_VARARGS, CO_VARKEYWORDS = 0x01, 0x04, 0x08


@dataclass(slots=True, eq=False)
class Instruction:
    """One instruction: `argval` is what `arg` refers to, `target` a jump's index, `operand` what the handler gets.

    `opname` is the name of the oldest instruction that does this (tables/), which may not be that of `opcode`.
    """

    index: int
    opname: str
    opcode: int
    arg: int | None
    argval: Any
    target: int | None
    offset: int
    line: int | None
    operand: Any = None

    def __str__(self) -> str:
        shown = "" if self.arg is None else f" {self.arg} ({self.argval!r:.60})"
        return f"{self.index}: {self.opname}{shown}"


class Program:
    """A decoded code object. It does not keep the code object alive: frames do."""

    __slots__ = (
        "reference", "instructions", "steps", "handlers", "localsplus", "cell_indices", "n_args", "simple_call", "tail",
        "n_bound", "binder", "stubs", "shell", "index_of", "opaque", "optimized", "copies", "joins", "live", "begins",
    )  # fmt: skip

    def __init__(self, code: CodeType) -> None:
        self.reference = ref(code)
        self.instructions: list[Instruction] = []
        self.steps: list[tuple[Callable[..., int | None], Any]] = []  # handlers with their operands
        self.handlers: list[tuple[int, int, bool] | None] = []
        self.index_of: dict[int, int] = {}
        # CPython's localsplus: an argument that is a cell has one slot
        extra = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
        self.localsplus: tuple[str, ...] = code.co_varnames + extra + code.co_freevars
        cells = set(code.co_cellvars)
        first_free = len(self.localsplus) - len(code.co_freevars)
        self.cell_indices = frozenset(
            i for i, name in enumerate(self.localsplus) if i >= first_free or name in cells
        )
        flags = code.co_flags
        self.optimized = bool(flags & CO_OPTIMIZED)  # a function's code; any other has its globals for namespace
        self.n_args = code.co_argcount
        self.n_bound = (
            code.co_argcount + code.co_kwonlyargcount + bool(flags & CO_VARARGS) + bool(flags & CO_VARKEYWORDS)
        )
        self.simple_call = self.n_bound == self.n_args
        self.tail: list[Any] = [UNSET] * (len(self.localsplus) - self.n_bound)
        self.binder: Any = None
        self.stubs: dict[int, CodeType] | None = None
        self.shell: Any = None
        self.copies: dict[int, int] | None = None  # of blocks that return; who asks for them finds them
        self.joins: dict[int, int] | None = None  # where ways meet, the same
        self.live: list[set[str]] | None = None  # the locals that are read later, before each instruction
        self.begins = 0  # a generator: where it is made. What fails before is no place in a traceback
        self.opaque = False  # see natives.py; a code object belongs to one module

    @property
    def code(self) -> CodeType:
        code = self.reference()
        assert code is not None
        return code

    def handler_at(self, index: int) -> tuple[int, int, bool] | None:
        """(target index, stack depth, push lasti) of the handler that guards instruction `index`, or None."""
        return self.handlers[index]


class Forget:
    """Called when a code object dies: what is known of it goes, before its id can be another's.

    At the end of the process that is after the names of the module that knows it are gone.
    """

    __slots__ = ("key", "known")

    def __init__(self, key: int, *known: dict[int, Any]) -> None:
        self.key, self.known = key, known

    def __call__(self, reference: ref[CodeType]) -> None:
        for of_codes in self.known:
            of_codes.pop(self.key, None)

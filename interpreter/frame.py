"""The activation record of one interpreted code object."""
from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, Generic, Protocol, TypeVar

from .program import Instruction, Program
from .sentinels import UNSET

# Whether locals() in a comprehension that is inlined in a class or module body leaves the body's names out (3.13.0)
HIDDEN_ALONE = eval("[locals() for a in (1,)]", {"b": 1}) == [{"a": 1}]
FRESH_LOCALS = sys.version_info >= (3, 13)  # PEP 667: each locals() of a function is a new dict


class Variables(Protocol):
    """What a frame asks of its domain: the operations on the values of its variables."""

    def load_cell(self, cell: Any) -> Any: ...
    def build_map(self, pairs: list[tuple[Any, Any]]) -> Any: ...
    def dict_update(self, target: Any, other: Any) -> None: ...
    def set_item(self, obj: Any, key: Any, value: Any) -> None: ...
    def del_item(self, obj: Any, key: Any) -> None: ...
    def is_users(self, name: str) -> bool: ...


D = TypeVar("D", bound=Variables)


class Frame(Generic[D]):
    """One activation. `pc` is the index of the instruction that runs now, or that the frame is suspended at.

    `locals` is in CPython's localsplus order (variable names, then cells that are not arguments, then free variables);
    cells are real `types.CellType`. `names` is the namespace of a class or module body, None in a function.
    `value` is what the frame returned or yielded last; `suspended` tells the two apart.
    `exc_item` is the generator's own [handled exception, outer item] link, None in an ordinary frame.
    """

    __slots__ = (
        "program", "code", "locals", "stack", "pc", "globals", "builtins", "names", "function", "closure", "back",
        "domain", "value", "suspended", "kw_names", "reraise", "exc_item", "locals_dict", "thrown_args", "native",
        "origin", "shell", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        code: CodeType,
        locals_: list[Any],
        globals_: dict[str, Any],
        builtins_: Mapping[str, Any],
        domain: D,
        function: FunctionType | None = None,
        names: Any = None,
        closure: tuple[Any, ...] = (),
    ) -> None:
        self.program = program
        self.code = code
        self.locals = locals_
        self.stack: list[Any] = []
        self.pc = 0
        self.globals = globals_
        self.builtins = builtins_
        self.names = names
        self.function = function
        self.closure = closure
        self.back: Frame | None = None
        self.domain = domain
        self.value: Any = None
        self.suspended = False
        self.kw_names: tuple[str, ...] = ()
        self.reraise: int | None = None  # what is raised, is raised again: the pc that the frame is then shown at
        self.exc_item: list[Any] | None = None
        self.locals_dict: dict[str, Any] | None = None
        self.thrown_args: list[Any] | None = None
        self.native: FrameType | None = None  # the frame object that stands for it, where one was made
        self.origin: tuple[Any, ...] | None = None  # a coroutine's cr_origin
        self.shell: Any = None  # a weak reference to the generator

    @property
    def instruction(self) -> Instruction:
        return self.program.instructions[self.pc]

    @property
    def line(self) -> int | None:
        return self.program.instructions[self.pc].line

    def values(self) -> list[Any]:
        """The local variables' values in localsplus order, cells read through, UNSET where there is none."""
        found = []
        for index, value in enumerate(self.locals):
            if index in self.program.cell_indices and type(value) is CellType:
                value = self.domain.load_cell(value)
            found.append(value)
        return found or [UNSET] * len(self.program.localsplus)  # it has returned

    def variables(self) -> dict[str, Any]:
        """Name -> value of the local variables that are set, cells read through (what `locals()` reports)."""
        pairs = zip(self.program.localsplus, self.values(), strict=False)  # it has no values once it has returned
        return {name: value for name, value in pairs if value is not UNSET}

    def hidden(self) -> dict[str, Any]:
        """The variables of comprehensions that are inlined in a class or module body (PEP 709), where one runs."""
        if self.program.optimized or not self.code.co_varnames:
            return {}
        pairs = zip(self.code.co_varnames, self.values(), strict=False)  # free variables of like names follow
        return {name: value for name, value in pairs if value is not UNSET}

    def namespace(self) -> Any:
        """What locals() gives here: the body's namespace, or the variables (up to 3.12 always in the same dict)."""
        make = self.domain.build_map
        if self.names is not None:
            hidden = self.hidden()
            if not hidden:
                return self.names
            if HIDDEN_ALONE:
                return make([*(self.variables() | hidden).items()])
            found = make([])
            self.domain.dict_update(found, self.names)  # the namespace may be a mapping in Python
            self.domain.dict_update(found, hidden)
            return found
        shown = {name: value for name, value in self.variables().items() if self.domain.is_users(name)}
        if FRESH_LOCALS:
            return make([*(shown | (self.locals_dict or {})).items()])  # stored through f_locals, see locals_proxy.py
        if self.locals_dict is None:
            self.locals_dict = make([])
        for name in self.program.localsplus:
            if name in shown:
                self.domain.set_item(self.locals_dict, name, shown[name])
            elif name in self.locals_dict:
                self.domain.del_item(self.locals_dict, name)
        return self.locals_dict

    def __repr__(self) -> str:
        return f"<Frame {self.code.co_qualname} at {self.code.co_filename}:{self.line}, pc {self.pc}>"


def opened(frame: Frame | None) -> Iterator[Frame]:
    """The frame and those that it was called from, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.back

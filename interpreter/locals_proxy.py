"""`frame.f_locals` of an interpreted function from 3.13 on: a view that reads and writes its variables (PEP 667).

As FrameLocalsProxy of Objects/frameobject.c does, with its errors. What is no variable's name is kept beside them.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from reprlib import recursive_repr
from typing import Any

from .frame import Frame
from .sentinels import UNSET


def has_pop() -> bool:
    """Whether the running Python's own proxy has it: only a function's frame has a proxy."""
    return hasattr(sys._getframe().f_locals, "pop")


def deletion_error(key: str) -> Exception | None:
    """What deleting a key from the running Python's own proxy raises: up to 3.13.0 nothing can be deleted."""
    proxy = sys._getframe().f_locals
    proxy["extra"] = None
    try:
        del proxy[key]
    except (TypeError, ValueError) as error:
        return error.with_traceback(None)
    return None


OF_VARIABLE, OF_EXTRA = deletion_error("key"), deletion_error("extra")


class FrameLocalsProxy:
    """The variables of `frame`; holds `native`, the frame object that it was read from."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, frame: Frame, native: Any) -> None:
        self._frame, self._native = frame, native

    def _ended(self) -> Any:
        """The frame object's own proxy, once the frame has ended and left its variables there; None before."""
        return None if self._frame.native is self._native else self._native.f_locals

    def _index(self, key: Any) -> int | None:
        names = self._frame.program.localsplus
        return names.index(key) if isinstance(key, str) and key in names and self._frame.locals else None

    def _extra(self) -> dict[Any, Any]:
        frame = self._frame
        if frame.locals_dict is None:
            frame.locals_dict = {}
        return frame.locals_dict

    def __getitem__(self, key: Any) -> Any:
        if (ended := self._ended()) is not None:
            return ended[key]
        index = self._index(key)
        value = UNSET if index is None else self._frame.values()[index]
        if value is UNSET:
            value = self._extra().get(key, UNSET)
        if value is UNSET:
            raise KeyError(f"local variable '{key!r}' is not defined")
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        if (ended := self._ended()) is not None:
            ended[key] = value
            return
        frame, index = self._frame, self._index(key)
        if index is None:
            self._extra()[key] = value
        elif index in frame.program.cell_indices and type(frame.locals[index]).__name__ == "cell":
            frame.locals[index].cell_contents = value
        else:
            frame.locals[index] = value

    def __delitem__(self, key: Any) -> None:
        if (ended := self._ended()) is not None:
            del ended[key]
            return
        error = OF_VARIABLE if self._index(key) is not None else OF_EXTRA
        if error is not None:
            raise type(error)(*error.args)
        del self._extra()[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if (ended := self._ended()) is not None:
            return ended.pop(key, *default)
        if self._index(key) is not None and OF_VARIABLE is not None:
            raise type(OF_VARIABLE)(*OF_VARIABLE.args)
        return self._extra().pop(key, *default)

    def copy(self) -> dict[Any, Any]:
        if (ended := self._ended()) is not None:
            return dict(ended)
        return {**self._frame.variables(), **self._extra()}

    def __contains__(self, key: Any) -> bool:
        return key in self.copy()

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.copy()))

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self.copy()))

    def __len__(self) -> int:
        return len(self.copy())

    def __eq__(self, other: object) -> Any:
        if isinstance(other, FrameLocalsProxy):
            return self._frame is other._frame
        if isinstance(other, dict):
            return self._frame.domain.compare("==", self.copy(), other)
        return NotImplemented

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other) if isinstance(other, (dict, FrameLocalsProxy)) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy() if isinstance(other, (dict, FrameLocalsProxy)) else NotImplemented

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    @recursive_repr("{...}")
    def __repr__(self) -> str:
        return repr(self.copy())

    def keys(self) -> list[Any]:
        return list(self.copy())

    def values(self) -> list[Any]:
        return list(self.copy().values())

    def items(self) -> list[tuple[Any, Any]]:
        return list(self.copy().items())

    def get(self, key: Any, default: Any = None) -> Any:
        return self.copy().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, other: Any) -> None:
        for key in other.keys():
            self[key] = other[key]


if not has_pop():  # 3.13.0
    del FrameLocalsProxy.pop
MutableMapping.register(FrameLocalsProxy)

"""What a program sees of the frames that the machine runs: frame objects, f_locals, parts of generators."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from .frame import FRESH_LOCALS, Frame, opened
from .locals_proxy import FrameLocalsProxy
from .order import clear
from .sentinels import UNSET
from .shells import frame_of, user_code
from .tracebacks import caller_of, fill, is_machine_module, note_of, outlive, stub_frame


def references_to_a_local() -> int:
    local = object()
    return sys.getrefcount(local)


OF_A_LOCAL = references_to_a_local()  # from 3.14 the call that asks adds none


class Shown:
    """The machine's frames, as native frame objects."""

    frame: Frame | None
    entry_code: CodeType  # of `enter`, which native code calls

    if TYPE_CHECKING:

        def delegate(self, frame: Frame) -> Any: ...

    def drop_locals(self, frame: Frame) -> None:
        """The variables of a frame that has returned go."""
        native = frame.native
        if native is not None:
            frame.native = None
            if sys.getrefcount(native) > OF_A_LOCAL:  # that is: with the program
                outlive(native, frame)
                note = note_of(native)
                if note is not None:
                    note.line, note.lasti = frame.line, frame.instruction.offset
        clear(frame.locals)

    def show_suspended(self, frame: Frame) -> None:
        """A frame object of a suspended generator's that the program holds has its variables; see `reenter`."""
        native = frame.native
        if native is not None and sys.getrefcount(native) > OF_A_LOCAL + 1:
            fill(native, frame)

    def awaited_by(self, coroutine: Any) -> Any:
        """What a coroutine is awaiting at the moment, or None."""
        frame = frame_of(coroutine)
        if frame is None:
            return coroutine.cr_await
        receiver = self.delegate(frame)
        return None if receiver is UNSET else receiver

    def shown_part(self, obj: Any, name: str) -> Any:
        """An attribute of domain/attributes.py's SHOWN_PARTS."""
        if name == "f_code":
            return user_code(obj.f_code)
        if name.startswith("f_"):
            return self.frame_part(obj, name)
        if name == "__callback__":
            return getattr(obj.__callback__, "interprets", obj.__callback__)
        return self.generator_part(obj, name)

    def generator_part(self, generator: Any, name: str) -> Any:
        """An attribute such as gi_code, cr_frame or gi_yieldfrom, of the interpreted frame instead of its shell."""
        native = getattr(generator, name)
        if name.endswith("_code"):
            return user_code(native)
        frame = frame_of(generator)
        if frame is None:
            return native
        if name == "cr_origin":
            return frame.origin
        if name.endswith("_frame"):
            return None if native is None else self.show(frame)
        receiver = self.delegate(frame)
        return None if receiver is UNSET else receiver

    def frame_at(self, depth: int) -> Frame | None:
        """The frame `depth` calls above the innermost one, or None."""
        return next(islice(opened(self.frame), max(depth, 0), None), None)

    def native_frame(self, depth: int) -> Any:
        """sys._getframe(depth): a frame object with the right code, globals and line's function."""
        for found in islice(chain(opened(self.frame), self.callers()), max(depth, 0), None):
            return self.show(found) if isinstance(found, Frame) else found
        raise ValueError("call stack is not deep enough")

    def callers(self) -> Iterator[FrameType]:
        """The native frame that called the machine, and those that called that."""
        native: FrameType | None = sys._getframe()
        while native is not None and not (
            native.f_code is self.entry_code and native.f_locals["self"] is self
        ):
            native = native.f_back
        while native is not None and is_machine_module(native):
            native = native.f_back
        while native is not None:
            yield native
            native = native.f_back

    def show(self, frame: Frame) -> Any:
        """A native frame object for an interpreted frame; what changes with the frame is asked of that."""
        if frame.native is None:
            frame.native = stub_frame(frame, False)
        return frame.native

    def frame_shown_as(self, native: FrameType) -> Frame | None:
        """The interpreted frame that a frame object stands for, until it ends."""
        note = note_of(native)
        frame = None if note is None else note.frame()
        return frame if frame is not None and frame.native is native else None

    def is_running(self, frame: Frame) -> bool:
        return frame in opened(self.frame)

    def frame_part(self, native: Any, name: str) -> Any:
        """The parts of a frame object that change with the frame, of one that `show` made."""
        frame = self.frame_shown_as(native)
        if frame is None:
            return self.ended_part(native, name)
        if name == "f_back":
            if frame.back is not None:
                return self.show(frame.back)
            return next(self.callers(), None) if self.is_running(frame) else None
        if name == "f_lineno":
            return frame.line
        if name == "f_lasti":
            return frame.instruction.offset
        if FRESH_LOCALS and (frame.names is None or frame.hidden()):
            return FrameLocalsProxy(frame, native)
        return frame.namespace()

    def ended_part(self, native: FrameType, name: str) -> Any:
        """The same of a frame that has ended, or of a native one."""
        if name == "f_back":
            back = None if native.f_back is not None else caller_of(native)
            return native.f_back if back is None else self.show(back)
        note = note_of(native) if name in ("f_lineno", "f_lasti") else None
        if note is None or note.lasti < 0:
            return getattr(native, name)
        return note.line if name == "f_lineno" else note.lasti

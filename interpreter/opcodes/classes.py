"""Class creation and annotations."""
from __future__ import annotations

from typing import Any

from ..registry import Frame, opcode


@opcode("LOAD_BUILD_CLASS")
def load_build_class(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.append(frame.domain.load_build_class(frame))


@opcode("SETUP_ANNOTATIONS")
def setup_annotations(frame: Frame, stack: list[Any], operand: Any) -> None:
    frame.domain.setup_annotations(frame)

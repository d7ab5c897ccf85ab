"""What a frame may only hold and pass on: tensors among the arguments that tracing does not follow (DTensors, other
subclasses, sparse ones; sets of them), and values that are others in each call."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from ..guards.sources import Source
from .residual_program import Expression, Residual
from .values import Break, SymbolicObject


class UnfollowedTensor(Break):
    """A tensor of a kind that tracing does not follow was met, or tensors in something that does not let it."""


class OpaqueTensor(SymbolicObject, named="Tensor"):
    """Stands for such a tensor, which the frame may hold and pass on. What is done with it is a graph break; where the
    root frame does it, each operation would be one more, and the whole frame runs natively."""

    __slots__ = ("kind", "source", "why")
    kind: type

    def __init__(self, kind: type, source: Source, why: UnfollowedTensor):
        self.kind, self.source, self.why = kind, source, why

    def refuse(self, what: str) -> NoReturn:
        raise Break(self.why.reason, self.why.detail, self.why.hint)

    def expression(self, emitter: Residual) -> Expression:
        return emitter.load(self.source)


class Refuses(Protocol):
    """The places that vary (``heap.varying``)."""

    def refuse_one(self, name: str) -> NoReturn: ...


class Varying(OpaqueTensor):
    """Stands for a value that was another one in each of the last captures, of which only the type is known."""

    __slots__ = ("places",)

    def __init__(self, kind: type, source: Source, places: Refuses):
        self.kind, self.source, self.places = kind, source, places

    def refuse(self, what: str) -> NoReturn:
        self.places.refuse_one(self.source.name)


def uses_one(stack: list[Any], argument: int | None) -> bool:
    """Whether one of these is among the operands of an instruction, or in a list or tuple among them."""
    operands = stack[-3 - (argument or 0) :]
    inner = [item for operand in operands if type(operand) in (list, tuple) for item in operand]
    kinds = map(type, (*operands, *inner))  # (isinstance asks a proxy of the user's for its class)
    return any(issubclass(kind, OpaqueTensor) and not issubclass(kind, Varying) for kind in kinds)

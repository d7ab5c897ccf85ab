"""Of what kind a value is, without asking the value.

``isinstance`` asks an object whose type does not fit for its ``__class__``: code of the user's, in a proxy or a mock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    import types

    from typing_extensions import TypeIs

T = TypeVar("T")


@overload
def is_kind(value: Any, kinds: type[T]) -> TypeIs[T]: ...
@overload
def is_kind(value: Any, kinds: types.UnionType | tuple[Any, ...]) -> bool: ...
def is_kind(value: Any, kinds: Any) -> bool:
    """``isinstance(value, kinds)`` by the value's own type."""
    return issubclass(type(value), kinds)

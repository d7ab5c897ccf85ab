"""Of what kind a value is, without asking the value.

``isinstance`` asks an object whose type does not fit for its ``__class__``: code of the user's, in a proxy or a mock.
``is_kind(value, kinds)`` is ``issubclass(type(value), kinds)``. It is asked a thousand times for each parameter that a
step updates, and so it is in C (objects.c).
"""

from __future__ import annotations

from .natives import reentry

is_kind = reentry.is_kind

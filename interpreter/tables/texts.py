"""Messages of errors that the machine raises itself and that differ between versions; the type's name goes into {}."""
from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    NOT_AWAITABLE = "'{}' object can't be awaited"
    NOT_A_CONTAINER = "argument of type '{}' is not a container or iterable"
else:
    NOT_AWAITABLE = "object {} can't be used in 'await' expression"
    NOT_A_CONTAINER = "argument of type '{}' is not iterable"
COUNTS_TOO_MANY = sys.version_info >= (3, 14)  # `a, b = 1, 2, 3` says how many there are of a list, tuple or dict

"""What differs between Python versions: which handler runs an opcode and how its argument reads. One file a version."""
from __future__ import annotations

import sys

if "t" in sys.abiflags:  # as setup.py and the C code do, for who copied the files
    raise ImportError("moebius does not run on the free-threaded build of CPython yet: use the default build")
ITERATOR_PLACES = 1  # on the stack, of an iterator that a `for` or `yield from` drives
COUNTED: tuple[type, ...] = ()  # types that it counts through, and makes no iterator
if sys.version_info[:2] == (3, 11):
    from .v311 import TABLE
elif sys.version_info[:2] == (3, 12):
    from .v312 import TABLE
elif sys.version_info[:2] == (3, 13):
    from .v313 import TABLE
elif sys.version_info[:2] == (3, 14):
    from .v314 import TABLE
elif sys.version_info[:2] == (3, 15):
    from .v315 import COUNTED, ITERATOR_PLACES, TABLE  # type: ignore[assignment]
else:
    raise ImportError(
        f"moebius.interpreter reads the bytecode of Python 3.11 to 3.15; this is {sys.version.split()[0]}"
    )

__all__ = ["COUNTED", "ITERATOR_PLACES", "TABLE"]

"""What differs between Python versions: which handler runs an opcode and how its argument reads. One file a version."""
from __future__ import annotations

import sys

if sys.version_info[:2] == (3, 11):
    from .v311 import TABLE
elif sys.version_info[:2] == (3, 12):
    from .v312 import TABLE
elif sys.version_info[:2] == (3, 13):
    from .v313 import TABLE
elif sys.version_info[:2] == (3, 14):
    from .v314 import TABLE
else:
    raise ImportError(
        f"moebius.interpreter reads the bytecode of Python 3.11 to 3.14; this is {sys.version.split()[0]}"
    )

__all__ = ["TABLE"]

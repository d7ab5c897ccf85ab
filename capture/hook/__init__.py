"""The C extension and its Python face: guarded entries, guard programs and the frame hook.

What may live here: C that CPython's headers alone can build (never libtorch), the one place for private CPython names
(`cpython_private.h`), and the stub that types it (`native.pyi`, which says what each name is). No policy: what is
captured, and which guards there are, is decided by the rooms that call this one.
"""

from moebius.hook.native import *  # noqa: F403 (the stub has their names)

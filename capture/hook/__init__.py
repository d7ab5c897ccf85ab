"""The C extension and its Python face: guarded entries, guard programs and the frame hook.

What may live here: C that CPython's headers alone can build (never libtorch), the one place for private CPython names
(`cpython_private.h`), and the stub that types it. No policy: what is captured, and which guards there are, is decided
by the rooms that call this one.
"""

from moebius.hook.native import (
    ABSENT,
    CHECKS,
    Entry,
    GuardProgram,
    attach,
    attached,
    calibrate_tensors,
    call_hooked,
    call_unhooked,
    copy_set,
    detach,
    disable,
    enable,
    evaluator,
    features,
    finish,
    forget_frames,
    is_disabled,
    is_hooked,
    mark_skip,
    own_attributes,
    read_tensors_by_attributes,
    set_frame_callback,
    set_settler,
    settle,
    use_watchers,
)

__all__ = [
    "ABSENT",
    "CHECKS",
    "Entry",
    "GuardProgram",
    "attach",
    "attached",
    "calibrate_tensors",
    "call_hooked",
    "call_unhooked",
    "copy_set",
    "detach",
    "disable",
    "enable",
    "evaluator",
    "features",
    "finish",
    "forget_frames",
    "is_disabled",
    "is_hooked",
    "mark_skip",
    "own_attributes",
    "read_tensors_by_attributes",
    "set_frame_callback",
    "set_settler",
    "settle",
    "use_watchers",
]

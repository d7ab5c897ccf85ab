"""Functions of C that tell a number or name of the process, the thread or torch's settings: a guard asks them again.

What the step itself sets is set in a call that is a graph break, or is known of the trace (``torch_private``).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from ..guards.recorder import GuardRecorder
from ..torch_facts import torch_flags
from ..values.values import Break

PLAIN = (bool, int, str)
ASKED: frozenset[Any] = frozenset({threading.get_ident, threading.get_native_id, os.getpid, *torch_flags.GETTERS})


class ProcessFacts:
    """Those of one trace."""

    def __init__(self, guards: GuardRecorder):
        self.guards = guards
        self.functions: dict[Any, Callable[..., Any]] = {one: functools.partial(self.ask, one) for one in ASKED}

    def ask(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """``function()``."""
        name, answer = f"{function.__name__}()", None if args or kwargs else function()
        if type(answer) not in PLAIN:
            raise Break("call into C", f"{name} gives what is not plain", "call it outside of the step")
        self.guards.answers(name, f"gives {answer!r}"[:80], (function, answer))
        return answer

"""torch's global switches that no guard looks at: which attention kernels may be used, autograd's anomaly mode.

A step that reads one is guarded by what it read. One that throws one gets a node at its place, so that a context that
throws it and throws it back (``sdpa_kernel``, ``detect_anomaly``) is a part of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moebius.lowering.step import leave_autocast

from ..tensors.graphs import ELSEWHERE
from ..torch_facts import torch_private
from ..values.values import Break
from .parts import Parts

HINT = "throw it around the step"


class Switches:
    """Those of one trace. thrown: the writers that were called so far."""

    def __init__(self, domain: Parts):
        self.domain, self.objects, self.tensors = domain, domain.objects, domain.tensors
        self.thrown: set[Callable[..., Any]] = set()
        self.heap, self.guards = domain.objects.heap, domain.objects.guards
        self.heap.now["switch"] = switch_now
        self.functions: dict[Any, Callable[..., Any]] = {torch.is_grad_enabled: self.grad_mode}
        for writer, readers in torch_private.SWITCHES.items():
            self.functions[writer] = functools.partial(self.throw, writer)
            self.functions |= {reader: functools.partial(self.read, reader, writer) for reader in readers}
        self.functions |= {reader: functools.partial(self.read, reader) for reader in torch_private.ASKED}
        self.functions |= {w: functools.partial(self.throw_state, w) for w in torch_private.STATE_WRITERS}
        self.functions[torch.get_autocast_dtype] = self.autocast_dtype
        self.functions |= {reader: functools.partial(self.read_state, reader) for reader in torch_private.STATE_OF_ALL}

    def read(self, reader: Callable[[], Any], writer: Callable[..., Any] | None = None) -> Any:
        """What the switch is: as the call found it, or as the step has thrown it."""
        value = reader()
        answer = tuple(value) if type(value) is list else value
        self.heap.read("switch", reader, None, answer)
        if writer not in self.thrown:
            asked = functools.partial(as_tuple, reader) if type(value) is list else reader
            self.guards.answers(f"torch's {reader.__name__}()", f"is {answer}", (asked, answer))
        return self.objects.made(value)

    def read_state(self, reader: Callable[[], Any]) -> Any:
        """A part of the state that is guarded as a whole, and that backward finds as forward does."""
        value = reader()
        if self.heap.listening:
            self.heap.read("switch", reader, None, value)
        return value

    def grad_mode(self) -> bool:
        """``torch.is_grad_enabled()``, guarded with the rest of torch's state."""
        self.tensors.writer.refuse_question("is_grad_enabled()")
        return torch.is_grad_enabled()

    def autocast_dtype(self, device: str) -> torch.dtype:
        """``torch.get_autocast_dtype``: torch's own guard looks at it only where autocast is on."""
        value = torch.get_autocast_dtype(device)
        ask = functools.partial(torch.get_autocast_dtype, device)
        self.heap.read("switch", ask, None, value)
        if torch.set_autocast_dtype not in self.thrown:
            self.guards.answers(f"torch.get_autocast_dtype({device!r})", f"is {value}", (ask, value))
        return value

    def throw(self, writer: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Thrown now, as fakes are laid out by it, and again by a node; tracing ends with all of them as they were."""
        scope = self.tensors.writer
        if not self.tensors.runs_once:
            raise Break("switch of torch's", f"{writer.__name__} {ELSEWHERE}", HINT)
        read = self.domain.plain_contents
        args, kwargs = (
            tuple(self.tensors.flag(read(a)) for a in args),
            {name: self.tensors.flag(read(a)) for name, a in kwargs.items()},
        )
        self.heap.write(writer)
        writer(*args, **kwargs)
        self.thrown.add(writer)
        scope.call(writer, *args, **kwargs)

    def throw_state(self, writer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One of the switches that guards look at as a whole: thrown now for the fakes, and kept as a node."""
        args = tuple(self.tensors.flag(a) for a in args)
        clears = writer is torch.clear_autocast_cache  # (which holds copies of real weights, where a block is open)
        result = None if clears else writer(*args, **kwargs)
        self.thrown.add(writer)
        domain, scope, node = self.domain, self.tensors.writer, writer
        frame = domain.machine.frame
        if self.tensors.whole_step:
            if clears and frame is not None and frame.code is torch_private.AUTOCAST_EXIT:
                return result  # ``leave_autocast`` does that
            node = leave_autocast if writer is torch.autocast_decrement_nesting else writer
        scope.call(node, *args, **kwargs)
        return result


def switch_now(reader: Callable[[], Any], key: Any, then: Any) -> Any:
    value = reader()
    return tuple(value) if type(value) is list else value


def as_tuple(reader: Callable[[], Any]) -> tuple:
    return tuple(reader())

"""One in n captured calls, next to plain Python."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..bytecode.hidden_frames import hidden
from ..cache.calls import WatchedGraphs
from ..cache.interfaces import Captured
from ..errors import MoebiusWarning
from ..hook import call_unhooked, finish
from ..report.records import Difference
from ..trace.recorder import Recordings
from ..trace.segment import Segment
from .compare import Comparison
from .copies import RandomState, copy_call
from .nodes import Ran, Recorder, first_difference, kept


class Shadow:
    """Counts a captured function's calls and checks every ``every``-th one, the first one included."""

    def __init__(self, every: int):
        self.every, self.count, self.busy = every, 0, False
        self.differences: list[Difference] = []
        self.verified = 0

    def around(self, owner: Captured, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, checked on every n-th call."""

        @hidden
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.busy or (self.count - 1) % self.every:
                return run(*args, **kwargs)
            self.busy = True
            try:
                return self.verify(owner, complete(run), args, kwargs)
            finally:
                self.busy = False

        return checked

    def verify(self, owner: Captured, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Both runs, plain Python first; gives (or raises) what the captured one does."""
        before = RandomState()
        try:
            twin = copy_call(owner.function, args, kwargs)
        except Exception as error:
            before.restore()
            warnings.warn(
                f"moebius: a call of {owner.function.__qualname__} cannot be verified, its arguments cannot be copied: "
                f"{type(error).__name__}: {error}",
                MoebiusWarning,
                stacklevel=2,
            )
            return run(*args, **kwargs)
        before.restore()
        recorder = Recorder()
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), recorder:
            warnings.simplefilter("ignore")  # they come once, from the captured run
            want, want_error = outcome(lambda: call_unhooked(twin.function, *twin.args, **twin.kwargs))
        want_random = RandomState()
        before.restore()
        graphs: list[Ran] = []
        with watched_graphs(owner, graphs):
            got, got_error = outcome(lambda: run(*args, **kwargs))
        found = None
        if type(got_error) is not type(want_error):
            found = f"captured {spoken(got_error)}, plain Python {spoken(want_error)}"
        elif got_error is None and want_random.differs(RandomState()):
            found = "another number of random numbers was drawn"
        comparison = Comparison()
        found = found or comparison.difference(got, want, "result")
        for name, original, copied in twin.pairs:
            found = found or comparison.difference(original, copied, name)
        self.verified += 1
        if found:
            after = RandomState()
            node, place = first_difference(graphs, recorder)
            after.restore()
            if place is not None:
                Recordings.mark(*place, f"call {self.count} differs from plain Python here: {node}")
            self.differences.append(Difference(found, node, self.count))
            warnings.warn(
                f"moebius: call {self.count} of {owner.function.__qualname__} differs from plain Python: {found}; "
                f"first node that differs: {node}",
                MoebiusWarning,
                stacklevel=2,
            )
        if got_error is not None:
            raise got_error
        return got


def complete(run: Callable[..., Any]) -> Callable[..., Any]:
    """The run with what goes on after its graph breaks."""
    return lambda *args, **kwargs: finish(run(*args, **kwargs))


def outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def spoken(error: BaseException | None) -> str:
    return "returns" if error is None else f"raises {type(error).__name__}: {error}"[:200]


def watched_graphs(owner: Captured, ran: list[Ran]) -> WatchedGraphs:
    """The graphs that run meanwhile."""

    def tell(captured: Captured, segment: Segment) -> Callable[[tuple], None] | None:
        code, graph = captured.function.__code__, segment.captured
        if graph is None:
            return None
        return lambda inputs: ran.append((code, graph.gm, tuple(map(copied, inputs))))

    return WatchedGraphs([(one, segment) for one in owner.family() for segment in one.segments], tell)


def copied(value: Any) -> Any:
    return kept(value).requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

"""The options of ``capture``, checked once, where they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from .errors import OptionError

if TYPE_CHECKING:
    from moebius.lowering import LoweringOptions


@dataclass(frozen=True)
class Options:
    """What ``capture(...)`` and ``explain(...)`` take.

    backend: "moebius", "eager", a torch.compile backend's name, or ``(gm, example_inputs) -> callable``. fullgraph: a
    graph break is a GraphBreakError. dynamic: None (a size becomes symbolic the second time it changes), True or
    False. deterministic: torch's deterministic algorithms while a captured call runs, so that two runs are equal to
    the bit; an operator that has none raises torch's error, which says so. verify: n > 0 also runs one in n calls as
    plain Python, on copies, and compares. mesh, plan: ranks of a ``torch.distributed.DeviceMesh``, each with
    its part of the batch and of the experts. precision,
    save: of the experts that lowering makes, as ``moebius.kernels.experts`` takes them: "fp8", "fp8_block", "mxfp8", a
    Precision or a Budget; "default", "fp8" or "recompute". Both are refused with backend="eager", which lowers
    nothing. whole_step: whether a backend of torch.compile, or a callable, gets forward, backward and optimizer as one
    graph of torch's operators where they can be one (None: yes, in one process); else it gets the graphs before and
    behind ``backward()``. Ours always have the whole.
    """

    backend: str | Callable[..., Any] = "moebius"
    fullgraph: bool = False
    dynamic: bool | None = None
    mesh: Any = None
    plan: Any = "auto"
    precision: Any = None
    save: str = "default"
    verify: int = 0
    deterministic: bool = False
    whole_step: bool | None = None

    def run_alike(self, other: Options) -> bool:
        """Whether a graph captured with these options is run as one that was captured with the others."""
        names = ("backend", "mesh", "plan", "precision", "deterministic", "whole_step")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def in_one_graph(self) -> bool:
        """Whether backward is to be in the graph."""
        from moebius.lowering import OWN

        return self.backend in OWN or (self.whole_step is not False and self.mesh is None)

    def for_lowering(self) -> LoweringOptions:
        """Those that reach down to lowering."""
        from moebius.lowering import LoweringOptions

        return LoweringOptions(self.backend, self.mesh, self.plan, self.precision, self.save)


class CaptureOptions(TypedDict, total=False):
    """The keyword arguments of ``capture``, for type checkers: the fields of ``Options``."""

    backend: str | Callable[..., Any]
    fullgraph: bool
    dynamic: bool | None
    mesh: Any
    plan: Any
    precision: Any
    save: str
    verify: int
    deterministic: bool
    whole_step: bool | None


def make_options(given: dict[str, Any]) -> Options:
    """Options from keyword arguments; OptionError names what is wrong and what there is."""
    known = {f.name for f in fields(Options)}
    for name in given:
        if name not in known:
            raise OptionError(f"capture has no option {name!r}; there are {', '.join(sorted(known))}")
    options = Options(**given)
    if options.dynamic not in (None, True, False):
        raise OptionError(f"dynamic={options.dynamic!r}: use None, True or False")
    if not isinstance(options.deterministic, bool):
        raise OptionError(f"deterministic={options.deterministic!r}: use True or False")
    if options.whole_step is not None and not isinstance(options.whole_step, bool):
        raise OptionError(f"whole_step={options.whole_step!r}: use None (yes, in one process), True or False")
    if not isinstance(options.fullgraph, bool):
        raise OptionError(f"fullgraph={options.fullgraph!r}: use True (a graph break is an error) or False")
    if type(options.verify) is not int or options.verify < 0:
        raise OptionError(f"verify={options.verify!r}: use 0 (off) or n, to compare one in n calls with plain Python")
    if options.whole_step and options.mesh is not None:
        raise OptionError("whole_step=True is for one process, and mesh= has several; leave out one")
    if options.verify and options.mesh is not None:
        raise OptionError("verify= compares with plain Python in one process, and mesh= has several; leave out one")
    from moebius.lowering import LoweringError
    from moebius.lowering import check_options as check_lowering

    try:
        check_lowering(options.for_lowering())
    except LoweringError as error:
        raise OptionError(str(error)) from None
    return options

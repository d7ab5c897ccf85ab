"""What is known, and taken to be so, of sizes that vary: what this takes of torch's private names, in one place.

Checked on torch 2.13.0 (CPU with Python 3.11, CUDA with 3.12 and 3.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from .torch_private import equal_where
from .torch_sizes import limits


class Relations(list):
    """What a ShapeEnv has assumed of its sizes so far. places: for each, what ``where`` gave as it came."""

    def __init__(self, where: Callable[[], Any]) -> None:
        super().__init__()
        self.where, self.places = where, list[Any]()

    def append(self, relation: Any) -> None:
        super().append(relation)
        self.places.append(self.where())

    def __reduce__(self) -> Any:
        return list, (list(self),)  # for the key of torch's cache on disk: the trace is none of its business


class Listener:
    """Who is asked, and told, while sizes are assumed.

    given: the sizes that the operator which asks was given. assume: told of two of these that torch takes to be equal,
    though the data decides it, before it does so. (Where a size may be 1 and is spread over another, torch's fakes ask
    nobody, and an operator that was given both would run with either.) takes: whether a slice of so
    many rows is taken to be so long.
    """

    def __init__(self, given: Callable[[], set[Any]] = set) -> None:
        self.given = given
        self.assume: Callable[[Any, Any], None] = lambda one, other: None
        self.takes: Callable[[int, slice, int], bool] = lambda size, part, length: False

    def __reduce__(self) -> Any:
        return Listener, ()  # for the key of torch's cache on disk


class Sizes(ShapeEnv):
    """torch's, which looks for no line by itself (it imports Inductor and torch.export for it): ``Relations`` does.

    regions: those that the trace is in. ``holds`` of each has the conditions that are certain in it, with their truth.
    """

    regions: Sequence[Any] = ()
    listener = Listener()

    def guard_or_defer_runtime_assert(  # type: ignore[override]  # (torch keeps what it was asked)
        self, orig_expr: Any, msg: str, fx_node: Any = None
    ) -> bool:
        """What a branch around says is certain in it, and nothing is taken from it for what stands behind."""
        return self.is_held(orig_expr) or super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)

    def is_held(self, relation: Any) -> bool:
        """Whether a branch around says that two sizes are equal."""
        said = [one for region in self.regions for one in region.holds] if isinstance(relation, sympy.Eq) else ()
        return any(equal_where(*relation.args, *one) for one in said)

    def _maybe_guard_rel(self, expr: Any) -> None:  # type: ignore[override]  # (torch keeps what it was asked)
        for relation in expr.args if isinstance(expr, sympy.Or) else (expr,):
            if isinstance(relation, sympy.Eq) and 1 not in relation.args and free_unbacked_symbols(relation):
                if self.listener.given().issuperset(relation.args):
                    self.listener.assume(*relation.args)
        super()._maybe_guard_rel(expr)

    def _get_user_frame(self) -> None:
        return None

    def evaluate_sym_node(self, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
        """What branches around say answers first, and is kept nowhere. (What torch can do without, it does: a layout
        that is known in a branch alone would stay with the tensor.)"""
        if self.is_held(sym_node.expr):
            return True
        if self.regions and not size_oblivious and fallback_value is None:
            known = dict(self.ranges_here())
            if not known.keys().isdisjoint(sym_node.expr.free_symbols):
                before, self.var_to_range = self.var_to_range, {**self.var_to_range, **known}
                try:
                    bounds = self.bound_sympy(sym_node.expr)
                finally:
                    self.var_to_range = before
                if bounds.is_singleton():
                    return bounds.lower
        return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)

    def ranges_here(self) -> Iterator[tuple[sympy.Symbol, Any]]:
        """The symbols of which branches say more than was known, with the range that each is in."""
        limited = [limit for region in self.regions for one in region.holds for limit in limits(*one)]
        for symbol in {symbol: None for symbol, *_ in limited if symbol in self.var_to_range}:
            whole = self.var_to_range[symbol]
            low, high = whole.lower, whole.upper
            for _, least, most, other in (limit for limit in limited if limit[0] == symbol):
                low = low if least is None else sympy.Max(low, least)
                high = high if most is None else sympy.Min(high, most)
                low += int(other == low)
            if low <= high:
                yield symbol, type(whole)(low, high)


def nowhere() -> None:
    """No line: the trace is over. (A ShapeEnv lives as long as what was captured, and must hold no trace.)"""

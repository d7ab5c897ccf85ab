"""Inputs that are one tensor in some calls and two in others: items of a sample, arguments, attributes, what a closure
holds. Never a wrong answer; where the step cannot tell, few captures and no break."""

from __future__ import annotations

import itertools
import warnings
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius import capture, reset, stats
from moebius.tensors.aliases import Aliases

Pair = namedtuple("Pair", "first second")
Tensors = list[torch.Tensor]
GLOBAL = torch.full((3,), 7.0)

# How three tensors come into the step: what a call passes, and how the step finds them there.
PLACES: dict[str, tuple[Callable[[Tensors], Any], Callable[[Any], Tensors]]] = {
    "arguments": (lambda t: tuple(t), list),
    "items of a list": (lambda t: list(t), list),
    "items of a dict": (lambda t: dict(zip("abc", t, strict=True)), lambda d: [d["a"], d["b"], d["c"]]),
    "attributes": (lambda t: SimpleNamespace(a=t[0], b=t[1], c=t[2]), lambda s: [s.a, s.b, s.c]),
    "named tuples in a list": (
        lambda t: [Pair(t[0], t[1]), Pair(t[1], t[2])],
        lambda ps: [ps[0].first, ps[0].second, ps[1].second],
    ),
    "lists in a list": (lambda t: [[t[0], t[1]], [t[2]]], lambda rows: [x for row in rows for x in row]),
    "an argument and a global": (lambda t: (t[0], t[1]), lambda t: [*t, GLOBAL]),
}


def read(ts: Tensors) -> Any:
    return torch.stack(ts).sum(0) * ts[0]


def written(ts: Tensors) -> Any:
    ts[0].add_(1)
    return ts[1] * 2 + ts[2]


def last_written(ts: Tensors) -> Any:
    before = ts[0] + ts[1]
    ts[2][0] = 5
    return before, ts[0] * ts[1]


def written_through_a_view(ts: Tensors) -> Any:
    ts[1][:2].mul_(3)
    return ts[0] + ts[2]


def written_through_data(ts: Tensors) -> Any:
    ts[0].data -= 1
    return ts[1] * ts[2]


def data_set(ts: Tensors) -> Any:
    ts[0].data = torch.ones(3)
    return ts[1] + ts[2]


def foreach(ts: Tensors) -> Any:
    torch._foreach_add_(ts[:1], 1.0)
    return ts[1] + ts[2]


def out(ts: Tensors) -> Any:
    torch.add(ts[1], 1, out=ts[2])
    return ts[0] * 2


def kept(ts: Tensors) -> Any:
    return [ts[0], ts[1] + 1, ts[2], {"x": ts[1], "y": ts[0]}]


def compared(ts: Tensors) -> Any:
    return ts[0] * (2 if ts[0] is ts[1] else 3) + (1 if ts[2] is not ts[0] else 0)


def in_a_list(ts: Tensors) -> Any:
    return ts[0] * (any(t is ts[0] for t in ts[1:]) + 1)


def in_a_set(ts: Tensors) -> Any:
    return ts[0] * len({*ts})


def keys_of_a_dict(ts: Tensors) -> Any:
    counts: dict = {}
    for t in ts:
        counts[t] = counts.get(t, 0) + 1
    return ts[0] * len(counts) + counts[ts[2]]


def keys_of_a_frozenset(ts: Tensors) -> Any:
    return ts[0] * (ts[1] in frozenset(ts[:1]))


def attribute_set(ts: Tensors) -> Any:
    ts[0].mark = 3  # type: ignore[attr-defined]
    found = getattr(ts[1], "mark", 1)
    for t in ts:
        if hasattr(t, "mark"):
            del t.mark
    return ts[2] * found


def gradients(ts: Tensors) -> Any:
    ones = [t.detach().requires_grad_() if t is not ts[0] else t for t in ts]
    return (ones[1] * ones[2]).sum(), ts[0]


def requires(ts: Tensors) -> Any:
    ts[0].requires_grad_()
    loss = (ts[0] * ts[1] * 2 + ts[2]).sum()
    loss.backward()
    grads = [t.grad for t in ts]
    found = [None if g is None else g.clone() for g in grads]
    ts[0].grad = None
    ts[0].requires_grad_(False)
    return found


def gradient_set(ts: Tensors) -> Any:
    ts[0].grad = torch.ones(3)
    found = ts[1].grad
    ts[0].grad = None
    return ts[2] * (1 if found is None else 2)


def a_view_is_kept(ts: Tensors) -> Any:
    return ts[0][:2], ts[1].view(3, 1), ts[2]


def twice(ts: Tensors) -> Any:
    rows = [torch.relu(t) for t in ts]
    return rows[0] @ rows[1] + rows[2].sum()


def sizes(ts: Tensors) -> Any:
    return ts[0].new_zeros(ts[1].shape[0]) + ts[2].numel()


USES = {
    f.__name__: f
    for f in (
        read, written, last_written, written_through_a_view, written_through_data, data_set, foreach, out, kept,
        compared, in_a_list, in_a_set, keys_of_a_dict, keys_of_a_frozenset, attribute_set, gradients, requires,
        gradient_set, a_view_is_kept, twice, sizes,
    )
}  # fmt: skip
CANNOT_TELL = {"read", "kept", "a_view_is_kept", "twice", "sizes"}
# Which of three tensors stand at the three places, call by call. (3 is the global.)
ORDERS = {
    "apart first": [(0, 1, 2), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2, 2, 2), (0, 1, 2), (1, 0, 1), (0, 2, 1), (1, 1, 0)],
    "together first": [(0, 0, 0), (0, 1, 2), (1, 1, 0), (0, 1, 1), (1, 0, 1), (2, 2, 2), (0, 2, 1), (0, 0, 1)],
    "with the global": [(0, 1, 2), (3, 1, 2), (1, 3, 3), (0, 0, 1), (3, 3, 3), (2, 1, 0), (1, 2, 3), (0, 1, 2)],
}
REPEATED = 3
FEW = 5


def comparable(value: Any, ts: Tensors) -> Any:
    """A result with numbers, and of which tensors that were there it is made."""
    if isinstance(value, torch.Tensor):
        places = [i for i, t in enumerate(ts) if t is value]
        memory = [i for i, t in enumerate(ts) if t.data_ptr() == value.data_ptr()]
        return value.tolist(), places, memory, value.requires_grad
    if isinstance(value, list | tuple):
        return [comparable(item, ts) for item in value]
    return {k: comparable(v, ts) for k, v in value.items()} if isinstance(value, dict) else value


def trial(place: str, use: str, order: str) -> tuple[list[int], Any]:
    """The calls that captured; each is compared with plain Python, what it leaves behind too."""
    pack, unpack = PLACES[place]

    def step(given: Any) -> Any:
        return USES[use](unpack(given))

    def step_of_three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return USES[use]([a, b, c])

    spread = place == "arguments"
    plain: Any = step_of_three if spread else step
    captured, missed = capture(plain, backend="eager"), []
    for i, chosen in enumerate(ORDERS[order] * REPEATED):
        outcomes = []
        for function in (plain, captured):
            GLOBAL.data = torch.full((3,), 7.0)
            ts = [*(torch.tensor([1.0, -2.0, 0.5]) * (j + 1) + i for j in range(3)), GLOBAL]
            given = pack([ts[j] for j in chosen])
            before = stats(captured).misses
            result = function(*given) if spread else function(given)
            left = [(t.tolist(), t.requires_grad, t.grad, vars(t)) for t in ts]
            outcomes.append((comparable(result, ts), left))
            if stats(captured).misses > before:
                missed.append(i)
        assert outcomes[0] == outcomes[1], (i, chosen)
    return missed, captured


CASES = [*itertools.product(PLACES, USES, ORDERS)]


@pytest.mark.share(30)
@pytest.mark.parametrize("place, use, order", CASES)
def test_never_a_wrong_answer(place: str, use: str, order: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        missed, captured = trial(place, use, order)
    if use in CANNOT_TELL:
        assert len(missed) <= FEW and max(missed) < len(ORDERS[order]) + 1, missed
        assert stats(captured).breaks == 0


TELLING = ["in_a_set", "keys_of_a_dict", "requires", "attribute_set", "gradient_set"]


@pytest.mark.parametrize("use", TELLING)
def test_where_no_guard_is_made_though_the_step_can_tell_it_is_wrong(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Aliases, "can_tell", lambda self: set())
    reset()  # (the use may have been left to Python, whose answers are right)
    wrong = 0
    for order in ORDERS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial("items of a list", use, order)
        except AssertionError:
            wrong += 1
    assert wrong


def test_where_all_are_told_apart_it_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Aliases, "can_tell", lambda self: {id(p) for p, _ in self.begun})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        missed, captured = trial("items of a list", "read", "together first")
    assert len(missed) > FEW or stats(captured).breaks

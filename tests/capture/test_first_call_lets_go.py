"""What a first call was given dies with its last reference, not at the next garbage collection."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

from moebius import capture


class Holder:
    """What a step is given besides tensors."""


def whole(x: torch.Tensor, holder: Holder) -> torch.Tensor:
    holder.kept = x * 2
    return holder.kept.sum()


def broken(x: torch.Tensor, holder: Holder) -> torch.Tensor:
    y = x * 2
    print(end="")
    return (y + len(vars(holder))).sum()


def broken_below(x: torch.Tensor, holder: Holder) -> torch.Tensor:
    def inner() -> torch.Tensor:
        print(end="")
        return x * 2

    return inner().sum() + len(vars(holder))


def with_generator(x: torch.Tensor, holder: Holder) -> torch.Tensor:
    def thrice() -> Iterator[Holder]:
        for _ in range(3):
            yield holder

    return sum(x.sum() for _ in thrice())


def with_experts(x: torch.Tensor, holder: Holder) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(x > e)[0]
        out.index_add_(0, rows, x[rows] * e)
    return out.sum()


def data_branch(x: torch.Tensor, holder: Holder) -> torch.Tensor:
    if x.sum() > 0:
        x = x + 1
    return x.sum()


def counts(x: torch.Tensor, holder: Holder) -> torch.Tensor:
    holder.steps += 1
    return x * holder.steps


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "step", [whole, broken, broken_below, with_generator, with_experts, data_branch, counts], ids=lambda f: f.__name__
)
def test_arguments_die_with_their_last_reference(step) -> None:  # type: ignore[no-untyped-def]
    captured = capture(step)
    for _ in range(2):  # the first call captures; the second looks again at what had a graph break
        x, holder = torch.ones(3), Holder()
        holder.steps = 3
        gc.collect()
        gc.disable()
        try:
            captured(x, holder)
            vars(holder).clear()
            dead = weakref.ref(x), weakref.ref(holder)
            del x, holder
            assert [ref() is None for ref in dead] == [True, True]
        finally:
            gc.enable()


def test_a_generator_left_half_way_in_a_trace_does_nothing_when_it_dies() -> None:
    """The trace's own copy of it, that is: the rest of it runs once, natively."""
    log: list[str] = []

    def step() -> None:
        class Item:
            pass

        def half() -> Iterator[None]:
            try:
                yield None
            finally:
                log.append("closed")
                del Item[0]  # type: ignore[attr-defined]

        def take() -> None:
            for _ in half():
                break

        try:
            take()
        finally:
            log.append("after")

    ignored: list[str] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda info: ignored.append(type(info.exc_value).__name__)
    try:
        step()
        native, log[:] = log[:], []
        expected, ignored[:] = ignored[:], []
        capture(step)()
        gc.collect()
    finally:
        sys.unraisablehook = before
    assert (log, ignored) == (native, expected)


class Outputs:
    """What a model returns: its loss, and more that nobody asks for."""

    def __init__(self, loss: torch.Tensor, logits: torch.Tensor):
        self.loss, self.logits = loss, logits


def model_with_a_break(x: torch.Tensor, alive: list) -> Outputs:
    print(end="")
    found = Outputs((x * 2).sum(), x * 3)
    alive.append(weakref.ref(found))
    return found


def only_the_loss(x: torch.Tensor, alive: list) -> torch.Tensor:
    loss = model_with_a_break(x, alive).loss
    print(end="")
    alive.append(alive[-1]() is not None)
    return loss + 1


def test_the_rest_of_a_models_outputs_is_gone_when_only_the_loss_is_used() -> None:
    """After a break in the model the frame goes on with the loss, and does not hold the logits through backward."""
    captured = capture(only_the_loss)
    for _ in range(3):
        ours, plain = [], []
        x = torch.ones(3)
        assert torch.equal(captured(x, ours), only_the_loss(x, plain))
        assert ours[-1] is plain[-1] is False

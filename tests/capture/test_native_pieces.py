"""Functions that know nothing of torch run natively as one piece where they break the graph."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.hook import ABSENT
from moebius.tensors.array_calls import ArrayCalls
from moebius.trace import native_pieces

CALLS = 8


def masks(shape: tuple[int, ...], length: int) -> np.ndarray:
    """As fairseq's ``compute_mask_indices``."""
    rows, size = shape
    mask = np.full((rows, size), False)
    for row in range(rows):
        starts = np.random.choice(size - length, 2, replace=False)
        mask[row, np.unique(np.asarray([s + k for s in starts for k in range(length)]))] = True
    return mask


def box(shape: tuple[int, ...], part: float) -> tuple[Any, ...]:
    """As timm's ``rand_bbox``."""
    h, w = shape[-2:]
    cut = np.sqrt(1 - part)
    y, x = np.random.randint(0, h), np.random.randint(0, w)
    half = int(h * cut) // 2
    return np.clip(y - half, 0, h), np.clip(y + half, 0, h), np.clip(x - half, 0, w), np.clip(x + half, 0, w)


class Store:
    """As spinningup's replay buffer."""

    def __init__(self) -> None:
        self.obs, self.reward = np.zeros((20, 3), np.float32), np.zeros(20, np.float32)
        self.at = self.size = 0

    def store(self, obs: Any, reward: float) -> None:
        self.obs[self.at] = obs
        self.reward[self.at] = reward
        self.at = (self.at + 1) % 20
        self.size = min(self.size + 1, 20)

    def some(self, n: int) -> dict[str, Any]:
        found = np.random.randint(0, self.size, size=n)
        return {"obs": self.obs[found], "reward": self.reward[found]}


def with_masks(store: Store, x: torch.Tensor) -> Any:
    mask = torch.from_numpy(masks((4, 9), 2))
    return (x.sum() * mask).sum()


def with_a_box(store: Store, x: torch.Tensor) -> Any:
    a, b, c, d = box(x.shape, 0.4)
    return x[int(a) : int(b), int(c) : int(d)].sum()


def with_a_store(store: Store, x: torch.Tensor) -> Any:
    store.store(np.arange(3.0), 2.0)
    batch = store.some(4)
    return x.sum() * torch.as_tensor(batch["obs"]).sum() + torch.as_tensor(batch["reward"]).mean()


STEPS = (with_masks, with_a_box, with_a_store)


def breaks_of(step: Any) -> set[tuple[str, int, bool]]:
    """The graph breaks of a step that is plain Python's: file and line, and whether the frame is one piece."""
    plain, own, captured = Store(), Store(), capture(step, backend="eager")
    for i in range(CALLS):
        x = torch.arange(81.0).view(9, 9) * i
        np.random.seed(i)
        want, after = step(plain, x), np.random.rand()
        np.random.seed(i)
        assert torch.equal(captured(own, x), want) and np.random.rand() == after
        assert np.array_equal(own.obs, plain.obs) and (own.at, own.size) == (plain.at, plain.size)
    found = report_of(captured_of(captured)).breaks
    return {(one.file, one.line, native_pieces.NO_TENSORS in one.detail) for one in found}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_one_piece(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame of a function that knows no torch is cut in two nowhere."""
    monkeypatch.setattr(ArrayCalls, "call", lambda *_: ABSENT)  # (what is in the graph is no break)
    found = breaks_of(step)
    pieces = {(file, line) for file, line, whole in found if whole}
    monkeypatch.setattr(native_pieces, "knows_no_torch", lambda *_: False)
    before = breaks_of(step)
    assert pieces and len({place[:2] for place in found}) <= len(before)
    assert not any(whole for _, _, whole in before)
    if step is not with_a_box:
        assert len({place[:2] for place in found}) < len(before)


SUM = torch.sum


def names_torch(values: Any) -> Any:
    return torch.sum(values)


def names_a_function(values: Any) -> Any:
    return SUM(values)


def names_it_inside(values: Any) -> Any:
    return [lambda: torch.ones(1) for _ in values]


def in_a_cell(held: Any) -> types.FunctionType:
    return lambda values: (held, values)


def names_none(values: Any) -> Any:
    return np.sum(values)


HELD = torch.ones(1)
MODULE = torch.nn.Linear(1, 1)
GIVEN: dict[str, tuple[Any, Any, bool]] = {
    "numbers": (names_none, [1.0], True),
    "an array": (names_none, np.ones(2), True),
    "an object with arrays": (names_none, Store(), True),
    "a size": (names_none, HELD.shape, True),
    "nothing in a cell": (in_a_cell(1.0), 1.0, True),
    "torch by name": (names_torch, 1.0, False),
    "a function of torch's": (names_a_function, 1.0, False),
    "torch in a function inside": (names_it_inside, 1.0, False),
    "a tensor": (names_none, HELD, False),
    "a list of tensors": (names_none, [HELD], False),
    "a dict of tensors": (names_none, {"x": HELD}, False),
    "a model": (names_none, MODULE, False),
    "an object with a model": (names_none, types.SimpleNamespace(model=MODULE), False),
    "an optimizer": (names_none, (torch.optim.SGD([HELD]),), False),
    "a tensor in a cell": (in_a_cell(HELD), 1.0, False),
    "a dtype": (names_none, torch.float32, False),
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN)
def test_what_knows_torch(case: str) -> None:
    function, given, knows_none = GIVEN[case]
    assert native_pieces.knows_no_torch(function, (given,)) is knows_none


def test_an_unset_cell_is_not_read() -> None:
    def inner() -> Any:
        return later

    assert native_pieces.knows_no_torch(inner, ())
    later = HELD
    assert not native_pieces.knows_no_torch(inner, ())


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).sum()


def outer(work: Any, x: Any) -> Any:
    np.random.rand()
    return work(x)


def test_what_it_calls_is_captured() -> None:
    """It is given a function that knows torch, which the hook meets."""
    model = torch.nn.Linear(3, 3)

    def work(x: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x)

    class Wrapped:
        def __init__(self, x: torch.Tensor):
            self.inside = types.SimpleNamespace(x=x)

    def unwrapped(box: Any) -> Any:
        return work(box.inside.x)

    def step(box: Any) -> Any:
        return outer(unwrapped, box)

    captured = capture(step, backend="eager")
    for i in range(3):
        box = Wrapped(torch.full((2, 3), float(i)))
        assert torch.equal(captured(box), step(box))
    assert stats(captured).graphs

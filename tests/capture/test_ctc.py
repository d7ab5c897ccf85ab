"""``ctc_loss`` with lengths in tensors is in the graph, as torch's operator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moebius import capture, stats
from moebius.tensors import tensors

REDUCTIONS = ("none", "mean", "sum")
LENGTHS = ("long", "int", "list")
TARGETS = ("rows", "in one row")
BACKENDS = ("eager", "moebius")


def batch(n: int, lengths: str, targets: str) -> tuple[Any, ...]:
    torch.manual_seed(n)
    wanted = torch.randint(1, 4, (n,))
    labels = torch.randint(1, 6, (n, 4))
    if targets == "in one row":
        labels = torch.cat([row[:k] for row, k in zip(labels, wanted.tolist(), strict=True)])
    frames = torch.randint(8, 11, (n,))
    if lengths == "list":
        return torch.randn(10, n, 3), labels, frames.tolist(), wanted.tolist()
    kind = torch.int if lengths == "int" else torch.long
    return torch.randn(10, n, 3), labels, frames.to(kind), wanted.to(kind)


def trained(reduction: str, captured: str = "") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, labels: torch.Tensor, frames: Any, wanted: Any) -> Any:
        scores = model(x).log_softmax(-1)
        loss = F.ctc_loss(scores, labels, frames, wanted, reduction=reduction, zero_infinity=True)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        return loss.detach()

    return (capture(step, backend=captured) if captured else step), model


CELLS = [*itertools.product(REDUCTIONS, LENGTHS, TARGETS, BACKENDS)]


@pytest.mark.share(8)
@pytest.mark.parametrize(("reduction", "lengths", "targets", "backend"), CELLS, ids=str)
def test_it_trains_as_plain_python_does(reduction: str, lengths: str, targets: str, backend: str) -> None:
    (plain, want), (step, got) = trained(reduction), trained(reduction, backend)
    for n in (3, 4, 2, 5):
        given = batch(n, lengths, targets)
        torch.testing.assert_close(step(*given), plain(*given), rtol=0, atol=0 if backend == "eager" else 1e-6)
        for a, b in zip(got.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0 if backend == "eager" else 1e-6)
            assert a.grad.stride() == b.grad.stride()
    assert lengths == "list" or not stats(step).breaks


def test_switched_off_it_is_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "has_open_lengths", lambda *_, **__: False)
    step, _ = trained("mean", "eager")
    step(*batch(3, "long", "rows"))
    assert stats(step).breaks


@pytest.mark.parametrize("handled", [False, True])
def test_lengths_that_do_not_fit_raise_where_the_step_does(handled: bool) -> None:
    def step(x: torch.Tensor, labels: torch.Tensor, frames: Any, wanted: Any) -> Any:
        y = x.log_softmax(-1) * 1.0
        if not handled:
            return F.ctc_loss(y, labels, frames, wanted)
        try:
            return F.ctc_loss(y, labels, frames, wanted)
        except RuntimeError:
            return "too long"

    captured = capture(step, backend="eager")
    x, labels, frames, wanted = batch(3, "long", "rows")
    x = torch.cat([x, x], -1)
    for more in (0, 0, 5, 0, 5):
        given = (x, labels, frames + more, wanted)
        outcomes = []
        for run in (step, captured):
            try:
                outcomes.append(run(*given))
            except RuntimeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_a_leaf_gets_its_gradient() -> None:
    def step(x: torch.Tensor, labels: torch.Tensor, frames: Any, wanted: Any) -> Any:
        F.ctc_loss(x, labels, frames, wanted).backward()
        return x.grad.stride(), x.grad.sum()

    captured = capture(step, backend="eager")
    for turned in (False, True):
        given = batch(3, "long", "rows")
        x = torch.randn(3, 10, 6).transpose(0, 1) if turned else torch.randn(10, 3, 6)
        outcomes = []
        for run in (step, captured):
            leaf = x.clone().requires_grad_()
            outcomes.append((*run(leaf, *given[1:]), leaf.grad))
        assert outcomes[0][0] == outcomes[1][0] and torch.equal(outcomes[0][2], outcomes[1][2])


@pytest.mark.parametrize("given", [{"reduction": "other"}, {"nothing": 1}, {"blank": "x"}, {"blank": 99}], ids=str)
def test_arguments_that_do_not_fit_are_told_by_torch(given: dict[str, Any]) -> None:
    def step(*args: Any) -> Any:
        return F.ctc_loss(*args, **given)

    x, *others = batch(3, "long", "rows")
    args = (torch.cat([x, x], -1).log_softmax(-1), *others)
    captured, told = capture(step, backend="eager"), []
    for run in (step, captured):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            run(*args)
        told.append((error.type, str(error.value)))
    assert told[0] == told[1]

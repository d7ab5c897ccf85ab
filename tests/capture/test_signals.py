"""A signal's handler that raises (Ctrl-C, a time limit) at any moment of a training step: capturing, or in its graph.

What the step has done by then is what plain Python would have done at some moment of it; the next step is the one that
plain Python takes from there.
"""

from __future__ import annotations

import copy
import random
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moebius
from moebius import capture
from moebius.hook.signals import WAITING
from moebius.tensors.tensors import TensorOperations

CUTS = 8


class Interrupted(KeyboardInterrupt):
    pass


@pytest.fixture
def alarm():
    """Sets a time in seconds after which Interrupted is raised in the main thread; 0 takes it back."""

    def raises(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, raises)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def make_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, scheduler


def step(model, optimizer, scheduler, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss.detach()


def tensors_of(training):
    model, optimizer, scheduler = training
    numbers = [scheduler.last_epoch, optimizer.param_groups[0]["lr"]]
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [*model.state_dict().values(), *state, *map(torch.tensor, numbers)]


@pytest.mark.share(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("longest", [0.8, 0.004], ids=["while capturing", "warm"])
def test_the_step_after_an_interrupt_is_plain_pythons(alarm, longest):
    draw = random.Random(0)
    cuts = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trial in range(20 * CUTS):
            if cuts == CUTS:
                break
            if trial == 0 or longest > 0.1:
                moebius.reset()
                training, captured = make_training(), capture(step, backend="eager")
                if longest < 0.1:
                    for _ in range(3):
                        captured(*training, torch.randn(6, 8), torch.randint(4, (6,)))
            batch = torch.randn(6, 8), torch.randint(4, (6,))
            try:
                alarm(draw.uniform(1e-4, longest))
                captured(*training, *batch)
                alarm(0)
            except Interrupted:
                cuts += 1
            other = make_training()
            for mine, theirs in zip(other, training, strict=True):
                mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
            assert torch.equal(captured(*training, *batch), step(*other, *batch))
            for mine, theirs in zip(tensors_of(training), tensors_of(other), strict=True):
                assert torch.equal(mine, theirs)
    assert cuts == CUTS


# ----------------------------------------------------------------------------------------------------------------------
# While capture works, handlers wait
# ----------------------------------------------------------------------------------------------------------------------


class Sent:
    """Signals that arrive as capture works on its first operator, and what their handlers met."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
        self.handled: list[tuple[int, bool]] = []
        self.left = list(numbers)
        computed = TensorOperations.computed

        def sends(*args, **kwargs):
            self.inside = True
            try:
                while self.left:
                    signal.raise_signal(self.left.pop(0))
                return computed(*args, **kwargs)
            finally:
                self.inside = False

        self.inside = False
        monkeypatch.setattr(TensorOperations, "computed", sends)

    def notes(self, number, frame) -> None:
        self.handled.append((number, self.inside))

    def raises(self, number, frame) -> None:
        self.notes(number, frame)
        raise Interrupted(number)


@pytest.fixture
def handlers():
    """Sets handlers of signals for the time of a test."""
    before = {}

    def sets(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield sets
    for number, handler in before.items():
        signal.signal(number, handler)


def double(x):
    return x * 2 + 1


def test_a_handler_that_returns_waits_and_the_call_goes_on(monkeypatch, handlers):
    sent = Sent(monkeypatch, signal.SIGUSR1)
    handlers(signal.SIGUSR1, sent.notes)
    captured = capture(double, backend="eager")
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 3.0))
    assert sent.handled == [(signal.SIGUSR1, False)]
    assert signal.getsignal(signal.SIGUSR1) == sent.notes
    assert moebius.stats(captured).graphs == 0
    for _ in range(2):
        captured(torch.ones(2))
    assert (moebius.stats(captured).graphs, moebius.stats(captured).hits) == (1, 1)


def test_a_handler_that_raises_ends_the_call(monkeypatch, handlers):
    sent = Sent(monkeypatch, signal.SIGUSR1, signal.SIGUSR2)
    handlers(signal.SIGUSR1, sent.raises)
    handlers(signal.SIGUSR2, sent.notes)
    captured = capture(double, backend="eager")
    with pytest.raises(Interrupted):
        captured(torch.ones(2))
    assert sent.handled == [(signal.SIGUSR1, False), (signal.SIGUSR2, False)]
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 3.0))


def test_the_second_of_a_kind_does_not_wait(monkeypatch, handlers):
    sent = Sent(monkeypatch, signal.SIGUSR1, signal.SIGUSR1)
    handlers(signal.SIGUSR1, sent.raises)
    with pytest.raises(Interrupted):
        capture(double, backend="eager")(torch.ones(2))
    assert sent.handled == [(signal.SIGUSR1, True), (signal.SIGUSR1, False)]


def test_switched_off_a_handler_runs_where_capture_works(monkeypatch, handlers):
    sent = Sent(monkeypatch, signal.SIGUSR1)
    handlers(signal.SIGUSR1, sent.notes)
    monkeypatch.setattr(WAITING, "begin", lambda stops: None)
    capture(double, backend="eager")(torch.ones(2))
    assert sent.handled == [(signal.SIGUSR1, True)]


def test_what_c_handles_and_what_is_ignored_stays(monkeypatch, handlers):
    handlers(signal.SIGUSR1, signal.SIG_IGN)
    Sent(monkeypatch, signal.SIGUSR1)
    captured = capture(double, backend="eager")
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 3.0))
    assert moebius.stats(captured).graphs == 1
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN

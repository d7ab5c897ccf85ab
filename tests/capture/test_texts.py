"""Text of what only the running step knows, and printed lines: the same letters, in the same order, without a break."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from answers import shown

from moebius import capture, stats


class Trainer:
    def __init__(self):
        self.steps = 0


def printed(x):
    loss = x.sum()
    print(f"loss {loss.item():.4f}", loss, sep=" | ", end=";\n")
    return loss


def percent(x):
    loss = x.sum()
    return "loss %.3f after %d" % (loss.item(), 3)  # noqa: UP031


def filled(x):
    loss = x.sum()
    return "{:.3f} {text:>12} {}".format(loss.item(), "b", text=loss.item())


def joined(x):
    loss = x.mean()
    line = ", ".join([f"{loss.item():.2f}", "b", str(loss), repr(loss.item())])
    line += "."
    return line + f"{loss.item()!r:>30}", {"text": line}


def nested_spec(x):
    return f"{x.sum().item():>{10}.{3}f}"


def in_place_between(x):
    print(x)
    x = x.clone()
    x.mul_(2)
    print(x)
    return x


def of_sizes(x):
    return f"{tuple(x.shape)} {x.shape[0]}", {f"size {x.shape[0]}": 1}


STEPS = [printed, percent, filled, joined, nested_spec, in_place_between, of_sizes]


@pytest.mark.parametrize("step", STEPS)
def test_text_of_the_running_step(step):
    captured = capture(step, backend="eager")
    for seed in range(4):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        assert shown(captured, x) == shown(step, x)
    assert stats(captured).misses == 1 and stats(captured).breaks == 0


def test_a_counter_in_a_line_is_no_recompile_after_it_was_seen_to_change():
    def step(trainer, x):
        trainer.steps += 1
        print(f"step {trainer.steps}: {x.sum().item():.3f}")
        return x + 1

    captured, ours, theirs = capture(step, backend="eager"), Trainer(), Trainer()
    for seed in range(8):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        assert shown(captured, ours, x) == shown(step, theirs, x)
    assert stats(captured).breaks == 0 and stats(captured).graphs <= 3


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x + 1 if f"{x.sum().item():.0f}" == "3" else x,
        lambda x: (x, f"{x.sum().item()}".upper()),
        lambda x: {f"{x.sum().item()}": x},
        lambda x: (x, len(f"{x.sum().item():.1f}")),
        lambda x: [x for letter in f"{x.sum().item():.1f}"],
    ],
    ids=["compare", "method", "key", "length", "iterate"],
)
def test_what_looks_into_a_text_is_a_break_and_never_an_old_text(step):
    captured = capture(step, backend="eager")
    for value in (1.0, 30.0, 1.0, -2.0):
        x = torch.full((3,), value)
        assert shown(captured, x) == shown(step, x)
    assert stats(captured).breaks


def test_a_line_before_a_failing_operator_is_printed():
    def step(x, i):
        print("before", x.sum().item())
        y = x[i]
        print("after")
        return y

    captured = capture(step, backend="eager")
    x = torch.arange(3.0)
    assert shown(captured, x, torch.tensor([0])) == shown(step, x, torch.tensor([0]))
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(IndexError):
        captured(x, torch.tensor([7]))
    assert out.getvalue() == "before 3.0\n"


def test_a_stream_of_the_users_own_is_a_break():
    class Tee:
        def __init__(self):
            self.lines = []

        def write(self, text):
            self.lines.append(text)

    def step(x):
        y = x + 1
        print("here", y)
        return y * 2

    captured, tee = capture(step, backend="eager"), Tee()
    x = torch.ones(2)
    captured(x)
    with contextlib.redirect_stdout(tee):
        assert torch.equal(captured(x), step(x))
    assert tee.lines == ["here", " ", "tensor([2., 2.])", "\n"] * 2
    assert [b for b in stats(captured).recompiles if "stdout" in b.guard]

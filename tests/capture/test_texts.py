"""Text of what only the running step knows, and printed lines: the same letters, in the same order, without a break."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

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


class Pair(NamedTuple):
    rows: int
    columns: int


class Named:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"Named({self.name})"


LEAVES = {
    "size": lambda x: x.shape,
    "part": lambda x: x.shape[:1],
    "none": lambda x: x.shape[2:],
    "number": lambda x: x.shape[0],
    "read": lambda x: x.sum().item(),
    "tensor": lambda x: x.sum(),
    "plain": lambda x: "it's",
    "own": lambda x: Named(x.shape[0]),
    "row": lambda x: Pair(*x.shape),
}
HELD = {
    "itself": lambda v: v,
    "list": lambda v: [v, 1, v],
    "one": lambda v: (v,),
    "dict": lambda v: {"a": v, 3: None},
    "deep": lambda v: {"a": [(v, "%s")], "b": ()},
}
WRITTEN = {
    "f-string": lambda v: f"got {v}.",
    "!r": lambda v: f"{v!r} %",
    "str": lambda v: "got " + str(v),
    "repr": repr,
    "format": lambda v: "{0} {1!r} {{}}".format(v, v),  # noqa: UP030, UP032
    "percent": lambda v: "%d%% %s and %r %5.2f" % (3, v, v, 0.5),  # noqa: UP031
    "wide": lambda v: f"{v!s:>60}|{str(v):<60}",
    "join": lambda v: ", ".join(map(str, (v, v))),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("held", HELD)
def test_text_of_what_holds_sizes_numbers_and_tensors(held, written):
    """Whatever holds it and however it is written: one graph for all sizes, and Python's letters."""

    def step(x):
        return [WRITTEN[written](HELD[held](leaf(x))) for leaf in LEAVES.values()], x * 2

    captured = capture(step, backend="eager", fullgraph=True)
    for rows in (2, 3, 5, 7, 4):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        assert shown(captured, x) == shown(step, x)
    assert stats(captured).misses == 2


def test_a_message_that_nobody_reads_costs_no_capture():
    def step(x):
        torch._assert(x.dim() == 2, f"expected rows and columns, got {x.shape}")
        assert x.shape[1] == 4, f"got {list(x.shape)}"
        return x * 2

    captured = capture(step, backend="eager", fullgraph=True)
    for rows in (2, 3, 5, 7, 4):
        captured(torch.randn(rows, 4))
    assert stats(captured).misses == 2


class Writes:
    def __init__(self, items):
        self.items = items

    def __repr__(self):
        self.items.append(0)
        return "?"


def in_itself(x):
    items = [x.shape[0]]
    items.append(items)
    return repr(items)


def written_to(x):
    items = [x.shape[0]]
    items.append(Writes(items))
    return repr(items) if len(items) < 4 else ""


@pytest.mark.parametrize("step", [in_itself, written_to])
def test_a_list_that_is_in_itself_or_changes_as_it_is_written_is_left_to_python(step):
    captured = capture(step, backend="eager")
    for rows in (2, 3, 5):
        assert captured(torch.ones(rows)).replace(", 0", "") == step(torch.ones(rows)).replace(", 0", "")
    assert stats(captured).breaks


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

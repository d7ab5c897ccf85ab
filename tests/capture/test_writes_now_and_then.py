"""What a step writes now and then, as a number of the call decides: what is written × how the branch is written.

``if step % log_every == 0: losses.append(loss.item())``: once the branch has gone the other way, both sides are in the
graph, and the write is done where the side was come to. What reads it later in the step gets plain Python's answer.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.api import captured_of
from moebius.heap.conditional_writes import ConditionalWrites

CALLS = 40
SHORT = (13, 17, 20, 26, 29, 39)  # of these calls the batch is short: with each combination of the branches
Write = Callable[[int, torch.Tensor, Any], Any]


def a_number(i, loss, state):
    state.log.append(loss.item())


def a_count(i, loss, state):
    state.log.append(i)


def a_constant(i, loss, state):
    state.log.append("epoch")


def a_text(i, loss, state):
    state.log.append(f"step {i}: {loss.item():.4f}")


def a_tuple(i, loss, state):
    state.log.append((i, loss.item(), "train"))


def a_row(i, loss, state):
    row = {"step": i}
    state.log.append(row)
    row["loss"] = loss.item()
    row["more"] = [i, {"nested": loss.item()}]


@dataclasses.dataclass
class Row:
    step: int
    loss: float
    more: Any = None


def an_object(i, loss, state):
    row = Row(i, loss.item())
    state.log.append(row)
    row.more = [i, Row(i, loss.item(), row)]


def a_row_twice(i, loss, state):
    row = [i]
    state.log.append(row)
    state.ring.append(row)
    row.append(row)


def an_older_row(i, loss, state):
    state.log.append(state.fresh)


def an_older_list(i, loss, state):
    state.log.append(state.empty)
    state.ring.append(state.empty)


def a_tensor(i, loss, state):
    state.log.append(loss.detach())


def a_view(i, loss, state):
    state.log.append(loss.detach().view(1)[0].cpu())


def a_new_tensor(i, loss, state):
    state.log.append(loss.detach().mul(2).clone())


def what_a_side_computes(i, loss, state):
    state.log.append((loss.detach() * 2).sqrt().item() + i)


def several(i, loss, state):
    state.log.extend([i, loss.item()])
    state.log.append(i + 1)


def a_ring(i, loss, state):
    state.ring.append(loss.item())


def a_key(i, loss, state):
    state.table["loss"] = loss.item()


def a_key_of_the_call(i, loss, state):
    state.table[i] = loss.item()


def keys_in_their_order(i, loss, state):
    state.table[f"b{i}"] = 1
    state.table["a"] = i
    state.table[i] = 2
    state.table["c"] = loss.item()


def an_update(i, loss, state):
    state.table.update({"x": i}, y=loss.item())


def an_attribute(i, loss, state):
    state.last = loss.item()


def a_new_attribute(i, loss, state):
    state.saw = i


def an_attribute_of_no_number(i, loss, state):
    state.best = (i, loss.item())


def attributes(i, loss, state):
    state.n = i
    state.name = f"s{i}"
    state.n += 1
    state.saw = [i]


def a_log_that_is_long(i, loss, state):
    state.rows["train"].append(loss.item())


WRITES: tuple[Write, ...] = (
    a_number, a_count, a_constant, a_text, a_tuple, a_row, an_object, a_row_twice, an_older_row, an_older_list,
    a_tensor, a_view, a_new_tensor, what_a_side_computes, several, a_ring, a_key, a_key_of_the_call,
    keys_in_their_order, an_update, an_attribute, a_new_attribute, an_attribute_of_no_number, attributes,
    a_log_that_is_long,
)  # fmt: skip


def look(state):
    last = state.log[-1] if state.log else None
    state.read = (len(state.log), last, len(state.ring), list(state.table.items()), state.best, state.last)


def once(write, i, loss, state):
    if i % 5 == 4:
        write(i, loss, state)


def with_an_else(write, i, loss, state):
    if i % 5 == 4:
        write(i, loss, state)
    else:
        state.other.append(i)


def on_both_sides(write, i, loss, state):
    if i % 5 == 4:
        write(i, loss, state)
    else:
        write(-i, loss, state)


def one_in_the_other(write, i, loss, state):
    if i % 2 == 0:
        state.other.append(i)
        if i % 5 == 4:
            write(i, loss, state)
        state.other.append(loss.item())


def of_three(write, i, loss, state):
    if i % 5 == 4:
        write(i, loss, state)
    elif i % 3 == 2:
        write(2 * i, loss, state)
    else:
        state.other.append(1.5)


def two_in_a_row(write, i, loss, state):
    if i % 5 == 4:
        write(i, loss, state)
    if i % 3 == 2:
        write(i, loss, state)


def with_a_line(write, i, loss, state):
    if i % 5 == 4:
        print("before", i)
        write(i, loss, state)
        print("behind", loss.item())


def behind_an_append(write, i, loss, state):
    state.log.append("each")
    state.table["each"] = i
    if i % 5 == 4:
        write(i, loss, state)


def before_an_append(write, i, loss, state):
    if i % 5 == 4:
        write(i, loss, state)
    state.log.append("each")
    state.ring.append("each")
    state.table["each"] = i
    state.table["a"] = i


def read_later(write, i, loss, state):
    if i % 5 == 4:
        write(i, loss, state)
    look(state)


def read_before(write, i, loss, state):
    look(state)
    if i % 5 == 4:
        write(i, loss, state)


def read_there(write, i, loss, state):
    if i % 5 == 4:
        write(i, loss, state)
        look(state)


def that_returns(write, i, loss, state):
    def inner():
        if i % 5 == 4:
            write(i, loss, state)
            return 1.0
        return 0.0

    state.total += inner()


SHAPES = (
    once, with_an_else, on_both_sides, one_in_the_other, of_three, two_in_a_row, with_a_line, behind_an_append,
    before_an_append, read_later, read_before, read_there, that_returns,
)  # fmt: skip
SETTLED = 6  # captures: the first, the number, each number that begins to decide, the short batch, a new list


def build(write: Write, shape: Callable[..., None]) -> tuple[Callable[..., Any], Any]:
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = types.SimpleNamespace(
        log=[], ring=collections.deque(maxlen=3), table={}, other=[], last=0.5, best=None, n=0, total=0.0,
        rows=collections.defaultdict(list), fresh=None, empty=None, read=None,
    )  # fmt: skip

    def step(x, i):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        state.fresh, state.empty = {"made": i}, []
        shape(write, i, loss, state)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, state


def shown(value: Any, met: tuple[int, ...] = ()) -> Any:
    """What can be compared, with which objects are one."""
    if id(value) in met:
        return f"the one {met.index(id(value))} above"
    met = (*met, id(value))
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.requires_grad, value.shape
    if isinstance(value, dict):
        return type(value), [(key, shown(item, met)) for key, item in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), [shown(item, met) for item in value]
    return shown(vars(value), met) if isinstance(value, types.SimpleNamespace | Row) else value


def batch(i: int) -> torch.Tensor:
    return torch.randn(2 if i in SHORT else 5, 4, generator=torch.Generator().manual_seed(i))


@pytest.mark.share(8)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("write, shape", list(itertools.product(WRITES, SHAPES)), ids=lambda f: f.__name__)
def test_what_is_written_now_and_then_is_plain_pythons(write, shape, backend, capsys):
    plain, wanted = build(write, shape)
    step, found = build(write, shape)
    captured = capture(step, backend=backend)
    for i in range(CALLS):
        expected, printed = plain(batch(i), i), capsys.readouterr().out
        assert torch.equal(captured(batch(i), i), expected), i
        assert capsys.readouterr().out == printed, i
        assert shown(found) == shown(wanted), i
    log = found.log
    assert write is not a_row_twice or log[-1] is log[-1][1]
    if shape in (once, with_an_else, one_in_the_other, two_in_a_row, with_a_line, behind_an_append, that_returns):
        known = captured_of(captured)
        assert not [s for one in known.family() for s in one.segments if s.graph_break is not None]
        # (a list in a dict: once more, where both of two branches write and the batch is short)
        assert stats(captured).misses <= SETTLED + (write is a_log_that_is_long and shape is two_in_a_row)


def calls_that_captured(step: Callable[..., Any]) -> int:
    captured = capture(step, backend="eager")
    for i in range(CALLS):
        captured(batch(i), i)
    return stats(captured).misses


@pytest.mark.parametrize("write", [a_number, a_row, a_tensor, a_key, a_new_attribute], ids=lambda f: f.__name__)
def test_switched_off_each_side_is_captured(write, monkeypatch):
    assert calls_that_captured(build(write, two_in_a_row)[0]) <= SETTLED
    monkeypatch.setattr(ConditionalWrites, "side_of", lambda *_: None)
    assert calls_that_captured(build(write, two_in_a_row)[0]) > SETTLED


def a_row_that_is_returned(i, log, other):
    if i % 5 == 4:
        row = [i]
        log.append(row)
        return row
    return [0]


def a_row_that_goes_on(i, log, other):
    row = [0]
    if i % 5 == 4:
        row = [i]
        log.append(row)
    return row


def a_row_of_both_branches(i, log, other):
    if i % 2 == 0:
        row = {}
        if i % 5 == 4:
            log.append(row)
        other.append(row)
        row["i"] = i
    return log[-1] if log else None


def a_list_of_two_branches(i, log, other):
    row = []
    if i % 5 == 4:
        log.append(row)
    if i % 3 == 2:
        other.append(row)
    return None


def a_pair_in_two_lists(i, log, other):
    if i % 5 == 4:
        pair = (i, [i])
        log.append(pair)
        other.append([pair, pair])
    return None


@pytest.mark.parametrize(
    "program",
    [a_row_that_is_returned, a_row_that_goes_on, a_row_of_both_branches, a_list_of_two_branches, a_pair_in_two_lists],
    ids=lambda f: f.__name__,
)
def test_what_has_several_names_is_one_object(program):
    def run(step):
        log, other, found = [], [], []
        for i in range(CALLS):
            _, given = step(torch.ones(2), i, log, other)
            parts = [part for one in (*log, *other) if type(one) in (list, tuple) for part in one]
            every = [given, *log, *other, *parts]
            every = [one for one in every if type(one) in (list, dict, tuple)]
            found.append((repr(every), [[a is b for a in every] for b in every]))
        return found

    def step(x, i, log, other):
        return x * 2, program(i, log, other)

    assert run(capture(step, backend="eager")) == run(step)


def raises_behind(i, x, log):
    if i % 5 == 4:
        log.append(i)
    return x[torch.tensor(i // 20) * 9]


def raises_there(i, x, log):
    if i % 5 == 4:
        log.append(i)
        log.append(1 / (i - 29))
    return x


def raises_before(i, x, log):
    y = x[torch.tensor(i // 20) * 9]
    if i % 5 == 4:
        log.append(i)
    return y


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("program", [raises_behind, raises_there, raises_before], ids=lambda f: f.__name__)
def test_what_was_written_before_an_error_stays_and_is_written_once(program, backend):
    def run(step):
        log, found = [], []
        for i in range(CALLS):
            try:
                found.append(step(torch.arange(3.0), i, log).tolist())
            except (IndexError, ZeroDivisionError) as error:
                found.append((type(error), str(error)))
            found.append(list(log))
        return found

    def step(x, i, log):
        return program(i, x * 2, log)

    wanted = run(step)
    assert run(capture(step, backend=backend)) == wanted
    assert any(type(one) is tuple for one in wanted)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_key_that_goes_and_comes_again_is_the_last_one(is_read):
    def run(step):
        table, found = {}, []
        for i in range(CALLS):
            step(torch.ones(2), i, table)
            found.append(list(table.items()))
            table.pop("b", None)
        return found

    def step(x, i, table):
        count = len(table) if is_read else 0
        table["a"] = 0
        table.pop("a")
        if i % 5 == 4:
            table["b"] = i
        table["a"] = i
        return x * count

    assert run(capture(step, backend="eager")) == run(step)


FAILING = {"a number": "1 / (x.sum().item() - 12)", "an index": "x[torch.tensor(i // 3)]"}
BEHIND = {
    "behind it": "if i % 3 == 0:\n    log.append(i)\n    FAILING\n    log.append(-i)",
    "behind an inner one": "if i % 3 == 0:\n    if i > 5:\n        log.append(i)\n    FAILING\n    log.append(-i)",
    "before it": "if i % 3 == 0:\n    FAILING\n    log.append(i)",
    "behind the branch": "if i % 3 == 0:\n    log.append(i)\nFAILING",
    "in another branch": "if i % 3 == 0:\n    log.append(i)\nif i % 2 == 0:\n    FAILING",
    "where it is set again": (
        "row, state.seen = state.rows[:1], i\nif i % 3 == 1:\n    state.last = row\nstate.last = FAILING"
    ),
}


@pytest.mark.parametrize("where", BEHIND)
@pytest.mark.parametrize("handled", [True, False])
@pytest.mark.parametrize("failing", FAILING)
def test_what_is_written_before_an_error_stands(failing: str, handled: bool, where: str) -> None:
    lines = BEHIND[where].replace("FAILING", FAILING[failing]).splitlines()
    if handled:
        error = "IndexError" if "index" in failing else "ZeroDivisionError"
        lines = ["try:", *(f"    {line}" for line in lines), f"except {error}:", "    log.append('handled')"]
    source = "def step(x, i):\n" + "".join(f"    {line}\n" for line in [*lines, "return x * 2"])

    def outcome(wrap):
        state = types.SimpleNamespace(seen=None, last=None, rows=torch.arange(3.0))
        space = {"torch": torch, "log": [], "state": state}
        exec(source, space)
        step, errors = wrap(space["step"]), []
        for i in range(16):
            try:
                x = torch.full((3,), 4.0 if i in (6, 12) else i + 1.0)
                errors.append(step(x, i).tolist())
            except (IndexError, ZeroDivisionError) as error:
                errors.append((str(error)[:20], state.seen, state.last))
        return errors, space["log"]

    plain = outcome(lambda step: step)
    for backend in ("eager", "moebius"):
        assert outcome(lambda step, backend=backend: capture(step, backend=backend)) == plain

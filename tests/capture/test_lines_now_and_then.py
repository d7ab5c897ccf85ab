"""What a step prints now and then, as a number of the call decides: what is printed × how often × where it stands.

``if step % log_every == 0: print(f"loss {loss.item():.4f}")``: once it has gone the other way, both sides are in the
graph, so that two such branches and a batch that is short are not eight captures.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.api import captured_of

CALLS = 40
SHORT = (13, 17, 20, 26, 39)  # of these calls the batch is short: with each combination of the branches
LOG = logging.getLogger("now and then")
Body = Callable[[int, torch.Tensor, nn.Module, Any], None]


def words(i, loss, model, state):
    print("step", i)


def an_item(i, loss, model, state):
    print("step %d loss %.4f" % (i, loss.item()))  # noqa: UP031


def a_format(i, loss, model, state):
    print("{:3d} {:5.2f}".format(i, loss.item()), end=";\n")  # noqa: UP032


def an_f_string(i, loss, model, state):
    print(f"step {i} loss {loss.item():.4f} of {state.all}")


def a_tensor(i, loss, model, state):
    print(loss.detach(), model.bias.detach())


def operators(i, loss, model, state):
    norm = sum(p.detach().square().sum() for p in model.parameters()).sqrt()
    print(f"norm {norm:.4f}", (loss.detach() > 1).float().mean().item())


def a_mean(i, loss, model, state):
    mean = state.sum / 5
    print(f"{mean:.3f}", f"{math.exp(-mean):.3f}")
    state.sum = 0.0


def a_count(i, loss, model, state):
    print(state.count)
    state.count = 0


def a_clock(i, loss, model, state):
    began = time.time()
    print(began > state.began)


def one_of_two(i, loss, model, state):
    if i % 4 == 1:
        print("one", i)
    else:
        print("other", i, loss.item())


def a_line_in_parts(i, loss, model, state):
    line = f"step {i}"
    print(line)
    line = line + f", loss {loss.item():.3f}"
    print(line)


def a_log(i, loss, model, state):
    LOG.warning("step %d", i)


BODIES: tuple[Body, ...] = (
    words, an_item, a_format, an_f_string, a_tensor, operators, a_mean, a_count, a_clock, one_of_two, a_line_in_parts,
    a_log,
)  # fmt: skip


def between(body: Body, other: Body) -> Callable[..., Any]:
    """One of them before backward, the other behind the optimizer's step."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = types.SimpleNamespace(all=0, sum=0.0, count=0, began=0.0)

    def step(x, i):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        state.all += 1
        state.count += 2
        state.sum += loss.item()
        if i % 3 == 2:
            body(i, loss, model, state)
        loss.backward()
        optimizer.step()
        if (i + 1) % 5 == 0:
            other(i, loss, model, state)
        return loss.detach(), state.sum, state.count

    return step


def run(step: Callable[..., Any]) -> tuple[str, list[Any]]:
    torch.manual_seed(3)
    lines, results = io.StringIO(), []
    handler = logging.StreamHandler(lines)
    LOG.handlers, LOG.propagate = [handler], False
    with contextlib.redirect_stdout(lines):
        for i in range(CALLS):
            results.append(step(torch.randn(2 if i in SHORT else 5, 4), i))
            print("behind", i)
    return lines.getvalue(), results


def built(body: Body, other: Body) -> Callable[..., Any]:
    torch.manual_seed(1)
    return between(body, other)


@pytest.mark.share(4)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("body, other", list(itertools.product(BODIES, BODIES)), ids=lambda f: f.__name__)
def test_lines_are_printed_where_plain_python_prints_them(body, other, backend):
    wanted, expected = run(built(body, other))
    captured = capture(built(body, other), backend=backend)
    printed, found = run(captured)
    assert printed == wanted
    for (a, *numbers), (b, *others) in zip(expected, found, strict=True):
        assert torch.equal(a, b) and numbers == others
    known = captured_of(captured)
    assert not [s for one in known.family() for s in one.segments if s.graph_break is not None]
    assert stats(captured).misses <= 4  # the first, one for each branch that goes another way, one for the short batch


def an_exponent(i, loss, model, state):
    print("before", i)
    print(math.exp(loss.item() + (1e4 if i > 20 else 1)))
    print("behind it")


def a_quotient(i, loss, model, state):
    print("before", i)
    print(1 / (i - 29))


def a_row(i, loss, model, state):
    print("before", i)
    print(model.weight.detach()[(loss.detach() * (i // 20)).long() + (i > 30) * 3].sum().item())


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("body", [an_exponent, a_quotient, a_row], ids=lambda f: f.__name__)
def test_what_was_printed_before_an_error_is_printed_once(body, backend):
    def safely(step):
        def one(*args):
            try:
                return step(*args)
            except (ArithmeticError, IndexError) as error:
                return type(error), str(error)

        return one

    wanted, expected = run(safely(built(body, words)))
    printed, found = run(safely(capture(built(body, words), backend=backend)))
    assert printed == wanted
    assert [str(one) for one in found] == [str(one) for one in expected]
    assert any(isinstance(one[0], type) for one in expected)


def test_an_append_in_the_branch_is_done_where_it_was_come_to():
    state = types.SimpleNamespace(rows=[])

    def step(x, i):
        y = x * 2
        if i % 3 == 2:
            print("row", i)
            state.rows.append(i)
        return y

    captured = capture(step, backend="eager")
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        for i in range(12):
            captured(torch.ones(2), i)
    assert state.rows == [2, 5, 8, 11]
    assert lines.getvalue() == "".join(f"row {i}\n" for i in state.rows)

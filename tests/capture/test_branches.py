"""An ``if`` on values without ``else`` is a loop of one iteration. What that cannot say has a side exit. Same bits."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.lowering.step import require_branch

ONE_GRAPH, BROKEN = [], []


def one_graph(function):
    ONE_GRAPH.append(function)
    return function


def broken(function):
    BROKEN.append(function)
    return function


@one_graph
def replaces_a_local(x):
    y = x * 2
    if y.sum() > 0:
        y = y * 3
    return y


@one_graph
def returns(x):
    if x.sum() > 0:
        return x * 2
    return x


@one_graph
def two_bodies(x):
    if x.sum() > 0:
        y = x * 2
    else:
        y = x * 3
    return y


@one_graph
def counts(x):
    n = 0
    if x.sum() > 0:
        n = n + 1
        x = x * 2
    return x * n


def lengths_of(x):
    return ((x + 1).abs().long() % 4).tolist()  # 2, 3, 0 and 0, 1, 2 and 2, 1, 2


def segments(x, skip, after):
    """Rows in segments whose lengths the data says, an empty one left out; where the next begins, the branch says."""
    y, start = x.new_zeros(16), 0
    for i, length in enumerate(lengths_of(x)):
        if skip(length):
            continue
        y[start : start + length] += (i + 1) * x.sum()
        start += after(length)
    return y * start


@one_graph
def a_number_that_an_empty_iteration_leaves_alone(x):
    return segments(x, lambda n: n == 0, lambda n: n)


@one_graph
def the_same_by_its_truth(x):
    y, start = x.new_zeros(16), 0
    for i, length in enumerate(lengths_of(x)):
        if length:
            y[start : start + length] += (i + 1) * x.sum()
            start += length
    return y * start


@one_graph
def a_number_that_an_empty_iteration_would_change(x):
    return segments(x, lambda n: n == 0, lambda n: n + 1)


@one_graph
def a_number_that_a_iteration_left_out_would_change(x):
    return segments(x, lambda n: n == 1, lambda n: n)


@one_graph
def own_locals(x):
    if x.sum() > 0:
        z = x * 5
        x = x + z
    return x


@broken
def reads_what_is_perhaps_unbound(x):
    if x.sum() > 0:
        z = x * 5
        x = x + z
    try:
        return x + z
    except UnboundLocalError:
        return x


@one_graph
def writes_in_place(x):
    y = x.clone()
    w = y
    if x.sum() > 0:
        y.mul_(2)
    return y + w


@one_graph
def writes_what_is_perhaps_an_alias(x):
    y = x.clone()
    w = y
    if x.sum() > 0:
        y = y * 2
    y.add_(1)
    return y + w


@one_graph
def appends(x):
    found = []
    if x.sum() > 0:
        found.append(x)
    return x * len(found)


@one_graph
def nested(x):
    if x.sum() > 0:
        if x[0] > 2:
            x = x * 7
        x = x + 1
    return x


@one_graph
def two_conditions(x):
    if x.sum() > 4:
        x = x * 7
    elif x[0] > 0:
        x = x + 1
    return x


@one_graph
def in_a_while_loop(x):
    i = 0
    while i < 3:
        if x.sum() > 0:
            x = x - 1
        i += 1
    return x


@one_graph
def continue_in_a_loop(x):
    for i in range(4):
        if x.sum() < 0:
            continue
        if i == 2:
            continue
        x = x - i
    return x


@broken
def leaves_the_loop(x):
    for i in range(4):
        if x.sum() < 0:
            break
        x = x - i
    return x


@broken
def raises(x):
    try:
        if x.sum() > 0:
            x = x * 2
            raise ValueError
    except ValueError:
        x = x + 100
    return x


@one_graph
def in_a_try(x):
    try:
        if x.sum() > 0:
            x = x * 2
    finally:
        x = x + 100
    return x


@one_graph
def returns_in_a_helper(x):

    def f(x):
        if x.sum() > 0:
            return x * 2
        return x

    def g(x):
        if x.sum() > 0:
            x = f(x)
        return x

    return g(x) + 1


@one_graph
def with_a_context(x):
    if x.sum() > 0:
        with torch.no_grad():
            z = x * 2
        x = x + z
    return x


@one_graph
def conditions_joined(x):
    y = x * 1
    if x.sum() > 0 and x[0] > 1:
        y = y * 4
    if x.sum() > 0 or x[1] > 1:
        y = y * 4
    return y


@one_graph
def an_expression(x):
    return x * 2 if x.sum() > 0 else x * 3


@one_graph
def another_number_of_rows(x):
    y = x
    if x.sum() > 0:
        y = x[:1]
    return y.sum()


@broken
def another_rank(x):
    y = x
    if x.sum() > 0:
        y = x[:1, None]
    return y.sum()


@broken
def none_or_tensor(x):
    y = None
    if x.sum() > 0:
        y = x * 2
    return x if y is None else y


@broken
def unbinds(x):
    y = x * 2
    if x.sum() > 0:
        del y
    try:
        return y
    except UnboundLocalError:
        return x


@one_graph
def condition_that_is_kept(x):
    if (s := x.sum()) > 0:
        x = x * s
    return x * s


@broken
def changes_a_cell(x):
    y = x * 1

    def f():
        nonlocal y
        y = y * 3

    if x.sum() > 0:
        f()
    return y


@broken
def yields(x):

    def g():
        for i in range(3):
            if x.sum() > i:
                yield (x * i)

    out = x * 1
    for r in g():
        out = out + r
    return out


@broken
def another_dtype(x):
    y = x * 1
    if x.sum() > 0:
        y = y.double()
    return y.sum().float()


@one_graph
def guard_against_nan(x):
    y = x * 2
    if torch.isnan(y).any():
        y = torch.nan_to_num(y)
    return y


@broken
def backward_inside(x):
    y = (x * x).sum()
    if y > 3:
        y.backward()
    return x.grad if x.grad is not None else x * 0


@one_graph
def one_side_with_gradients(x):
    y = x.detach() * 1
    if x.sum() > 0:
        y = y * x
    return y


@one_graph
def writes_a_view(x):
    y = x * 1
    v = y.view(-1)
    if x.sum() > 0:
        v.mul_(3)
    y.add_(v)
    return y


@one_graph
def on_a_number(x):
    v = x.sum().item()
    if v > 2:
        x = x * v
    return x


@broken
def keeps_the_iteration(x):
    for i in range(3):
        if x.sum() > i:
            last = i
            x = x * 2
    try:
        return x * last
    except UnboundLocalError:
        return x


@broken
def prints(x):
    if x.sum() > 0:
        print("positive")
        x = x * 2
    return x


VALUES = ([1.0, 2.0, 3.0], [-1.0, -2.0, -3.0], [5.0, -2.0, 1.0])


def outcome(function, values):
    x = torch.tensor(values, requires_grad=True)
    result = function(x)
    if result.requires_grad:
        result.sum().backward()
    return result, x.grad


@pytest.mark.share(18)
@pytest.mark.parametrize("function", ONE_GRAPH + BROKEN, ids=lambda f: f.__name__)
def test_same_as_plain_python(function):
    captured = capture(function)
    for values in (*VALUES, *VALUES):
        (found, found_grad), (expected, expected_grad) = outcome(captured, values), outcome(function, values)
        assert torch.equal(found, expected)
        assert (found_grad is None) == (expected_grad is None)
        assert found_grad is None or torch.equal(found_grad, expected_grad)
    if function in ONE_GRAPH:
        counted = stats(captured)
        assert (counted.graphs, counted.breaks, len(counted.recompiles)) == (1, 0, 0)
    else:
        nodes = [n.target for graph in report_of(captured_of(captured)).graphs for n in graph.gm.graph.nodes]
        assert stats(captured).breaks or require_branch in nodes  # a side exit, which no loop of one iteration has


def test_a_branch_is_no_expert_region():
    captured = capture(replaces_a_local)
    captured(torch.ones(3))
    assert not report_of(captured_of(captured)).expert_regions


@pytest.mark.parametrize("asked", ["x.sum()", "x.sum().item()", "x.sum().numpy() * 1.0"])
@pytest.mark.parametrize("against", ["0.5", "limit", "x.shape[0]", "held['limit']", "x.mean().item()", "len(held)"])
def test_a_branch_whatever_the_value_is_compared_with(asked, against):
    source = f"def step(x, limit, held):\n    t = x * 2\n    if {asked} > {against}:\n        t = t + 1\n    return t"
    namespace = {}
    exec(source, namespace)
    plain = namespace["step"]
    step = capture(plain, backend="eager")
    for call in range(10):
        x = torch.randn(2 + call % 4, generator=torch.Generator().manual_seed(call))
        given = (x, call / 7, {"limit": call / 8, **dict.fromkeys(range(call % 3))})
        assert torch.equal(step(*given), plain(*given))
    assert not stats(step).breaks
    assert not [one.guard for one in stats(step).recompiles if one.guard == "branch on data"]

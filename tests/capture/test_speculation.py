"""Branches on data inside a graph: whichever way the data goes, what plain Python does is what we do."""

from __future__ import annotations

import contextlib
import copy
import itertools
import traceback

import pytest
import torch

import moebius
from moebius import capture, stats
from moebius.trace import speculation

BACKENDS = ["moebius", "eager"]


class Holder:
    def __init__(self):
        self.log = []
        self.count = 0
        self.kept = None


def direct(x, h):
    h.log.append("begin")
    y = x * 2
    if y.sum() > 0:
        h.log.append("positive")
        return y + 1
    h.log.append("other")
    return y - 1


def number(x, h):
    total = x.sum().item()
    h.count += 1
    if total > 0.5:
        h.kept = total
        return x * total
    return x - total


def not_a_number(x, h):
    y = x.exp()
    flag = torch.isinf(y).any().item()
    h.log.append("asked")
    if not flag:
        return y
    h.log.append("skipped")
    return None


def whole_number(x, h):
    n = (x > 0).sum().item()
    h.log.append("counted")
    if n > 1:
        return x + n
    return x


def rows_there(x, h):
    rows = torch.nonzero(x > 0).squeeze(-1)
    h.log.append(1)
    if rows.numel() == 0:
        h.log.append("none")
        return x.sum()
    return x[rows].sum() * 2


def random_before(x, h):
    noise = torch.rand(3)
    h.kept = torch.nn.functional.dropout(x + noise, 0.5)
    if x.sum() > 0:
        return noise + torch.rand(3)
    return noise * torch.rand(3) + h.kept


def written_before(x, h):
    view = x[1:]
    before = x * 1
    view.mul_(3)
    if view.sum() > 0:
        x.add_(1)
        return before[1:] + view
    x.sub_(1)
    return before[1:] - view


def deep(h, y):
    h.log.append("deep")
    with torch.no_grad():
        if bool((y.mean() > 0).all()):
            h.log.append(torch.is_grad_enabled())
            return y * 2
        h.log.append("flat")
    h.log.append(torch.is_grad_enabled())
    return y * 3


def inlined(x, h):
    return sum([deep(h, x + i) for i in range(2)]) + deep(h, x)


def in_blocks(x, h):
    try:
        with contextlib.suppress(KeyError):
            if x.sum() > 0:
                h.log.append("raise")
                raise KeyError("k")
            h.log.append("no raise")
        h.log.append("after with")
    finally:
        h.log.append("finally")
    return x + 1


def in_a_handler(x, h):
    try:
        raise ValueError("v")
    except ValueError as error:
        if x.sum() > 0:
            raise RuntimeError("positive") from error
        h.log.append(str(error))
    return x


def raises(x, h):
    h.log.append("check")
    if not x.sum() <= 0:
        raise ArithmeticError("must not be positive")
    return x * 2


def while_loop(x, h):
    iterations = 0
    while x.abs().sum() > 2.5:
        x = x / 2
        iterations += 1
    h.log.append(iterations)
    return x


def closure(x, h):
    scale = 1.0

    def up():
        nonlocal scale
        scale *= 2
        return scale

    up()
    if x.sum() > 0:
        up()
    h.log.append(scale)
    return x * up()


def two_branches(x, h):
    if x[0] > 0:
        h.log.append("first")
        x = x + 1
    if x[1] > 0:
        h.log.append("second")
        x = x * 2
    elif not x[2] > 0:
        h.log.append("third")
    return x


def expression(x, h):
    y = x + (1.0 if x.sum() > 0 else 2.0)
    return (x.sum() > 0 and h.log.append("yes")) or y


def asked_twice(x, h):
    yes = x.sum() > 0
    if yes:
        h.log.append("yes")
        h.log.append("once more")
        h.log.append("and again")
    y = yes or x * 2
    return y + 1


class Lazy:
    @property
    def positive(self):
        return self.x.sum() > 0


def fresh_objects(x, h):
    lazy = Lazy()
    lazy.x = x * 3
    pair = {"lazy": lazy, "list": [lazy.x, h.log]}
    h.kept = pair
    if lazy.positive:
        pair["list"].append(lazy.x + 1)
    return pair["list"][-1] if torch.is_tensor(pair["list"][-1]) else lazy.x


def chained(x, h):
    rows = [1, 2]
    open_one, last = itertools.chain(rows, (i * 2 for i in rows), rows), itertools.chain([5])
    unopened = itertools.chain(iter(rows), itertools.chain(rows, [7]))
    h.log.append([next(open_one), next(open_one), next(open_one), next(last)])
    rows.append(9)
    if x.sum() > 0:
        h.log.append("positive")
    h.log += [list(open_one), list(last), list(unopened)]
    return x * len(h.log)


class Checked:
    """An object whose ``__init__`` asks for data before it is done."""

    def __init__(self, x, h):
        h.log.append("begun")
        self.x = x * 2
        if not (self.x > -50).all():
            h.log.append("low")
            raise ValueError("too low")
        self.kept = h
        if x.sum() > 0:
            h.log.append("positive")
            self.y = 1


class Further(Checked):
    def __init__(self, x, h):
        super().__init__(x + 1, h)
        h.log.append("made")


class Says(Checked):
    def __init__(self, x, h):
        if x.sum() > 3:
            return 3  # noqa: PLE0101 (a TypeError of type.__call__)
        super().__init__(x, h)


def in_init(x, h):
    try:
        made = (Further if len(h.log) else Checked)(x, h)
    except ValueError:
        h.log.append("caught")
        return x
    h.kept = made.kept is h
    return made.x + len(vars(made))


def in_inits(x, h):
    h.log.append("outer")
    made = [Further(x, h), Checked(*(x, h)), Further(h=h, x=x)]
    return [m.x for m in made] + [sorted(vars(m)) for m in made]


def init_that_returns(x, h):
    return Says(x, h).x


def called_while_its_arguments_are_read(x, h):
    def joined(*parts):
        y = torch.cat(parts)
        h.log.append(len(parts))
        if y.sum() > 0:
            return y + len(parts)
        return y - len(parts)

    return joined(*map(joined, [x, x - 1])) * 10


class Mean:
    def __init__(self, *parts):
        self.value = sum(parts)
        if self.value.sum() > 0:
            self.value = self.value / len(parts)


def made_while_its_arguments_are_read(x, h):
    return Mean(*map(as_value, map(Mean, [x, x * 2]))).value


def as_value(mean):
    return mean.value


nameless = lambda x, h: direct(x, h)  # noqa: E731 (its name is no identifier)


CASES = [
    nameless, direct, number, not_a_number, whole_number, rows_there, random_before, written_before, inlined, in_blocks,
    in_a_handler, raises, while_loop, closure, two_branches, expression, asked_twice, fresh_objects,
    chained, in_init, in_inits,
]  # fmt: skip
INPUTS = [[1.0, 2, 3], [1.0, 1, 1], [-1.0, -2, -3], [100.0, -1, -1], [-1.0, 5, -1], [-4.0, 1, 1], [1.0, 2, 3]]


def seen(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: seen(v) for k, v in value.items()}
    if isinstance(value, list):
        return [seen(v) for v in value]
    return seen(vars(value)) if isinstance(value, (Lazy, Holder)) else value


def outcome(function, values):
    torch.manual_seed(0)
    x, holder = torch.tensor(values), Holder()
    found = {"error": None}
    try:
        found["result"] = seen(function(x, holder))
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        found["error"] = (type(error), str(error), line, getattr(error, "__notes__", []))
        found["cause"] = repr(error.__cause__), repr(error.__context__)
    found.update(x=x.tolist(), holder=seen(holder), random=torch.rand(2).tolist(), grad=torch.is_grad_enabled())
    return found


@pytest.mark.share(16)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_both_ways(function, backend):
    captured = capture(function, backend=backend)
    for values in (*INPUTS, *INPUTS):
        assert outcome(captured, values) == outcome(function, values), values


@pytest.mark.parametrize("function", [called_while_its_arguments_are_read, made_while_its_arguments_are_read])
def test_below_the_arguments_of_the_same_call(function):
    """``f(*map(f, parts))``: the inner call's result is an argument, not what the instruction gives."""
    captured = capture(function)
    for values in (*INPUTS, *INPUTS):
        assert outcome(captured, values) == outcome(function, values), values


def test_an_init_that_returns_something():
    """It is Python's TypeError, whichever way the branch in it goes."""

    def without_line(function, values):
        found = outcome(function, values)
        return found | {"error": found["error"] and found["error"][:2]}

    captured = capture(init_that_returns)
    for values in (*INPUTS, *INPUTS):
        assert without_line(captured, values) == without_line(init_that_returns, values), values


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_one_graph_while_the_data_goes_one_way(function):
    captured = capture(function)
    for _ in range(4):
        outcome(captured, [-1.0, -0.5, -0.25])
    now = stats(captured)
    assert now.graphs == 1 and now.breaks == 0 and now.misses == 1, now


def test_a_branch_that_keeps_changing_becomes_a_graph_break():
    captured = capture(direct)
    for i in range(20):
        values = [(-1.0) ** i] * 3
        assert outcome(captured, values) == outcome(direct, values)
    now = stats(captured)
    assert now.breaks == 1 and now.graphs == 3
    assert [r.guard for r in now.recompiles] == ["branch on data"] * 3
    assert all(r.line == direct.__code__.co_firstlineno + 3 for r in now.recompiles)


def test_a_rare_way_does_not_cost_the_graph():
    captured = capture(direct)
    for i in range(1, 121):
        values = [-1.0 if i % 40 == 0 else 1.0] * 3
        assert outcome(captured, values) == outcome(direct, values)
    assert stats(captured).recompiles == [] and stats(captured).misses == 1


def test_with_the_check_switched_off_the_answer_is_wrong(monkeypatch):
    def unchecked(value, expected, place, *live):
        return None

    monkeypatch.setattr(speculation, "require_branch", unchecked)
    captured = capture(direct)
    assert outcome(captured, [1.0, 2, 3]) == outcome(direct, [1.0, 2, 3])
    assert outcome(captured, [-1.0, -2, -3]) != outcome(direct, [-1.0, -2, -3])


def test_what_should_hold_everywhere_is_expected_to():
    """``if not valid.all(): raise …`` is no error in the first call, whatever many operators decide it."""

    def checked(x, steps):
        for _ in range(steps):
            x = x * 0.99
        if not (x < 200).all():
            raise ValueError("too large")
        return x

    captured = capture(checked)
    for _ in range(2):
        assert captured(torch.ones(3), 100).shape == (3,)
    assert stats(captured).graphs == 1 and not stats(captured).recompiles
    with pytest.raises(ValueError, match="too large"):
        captured(torch.ones(3) * 1e4, 100)


# ----------------------------------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.seen == 0:
            self.seen.add_(10)
        self.seen += 1
        return self.second(torch.relu(self.first(x)))


def training(step, net, make_optimizer, batches):
    optimizer = make_optimizer(net.parameters())
    losses = [step(net, optimizer, batch) for batch in batches]
    return [loss.item() for loss in losses], [p.detach().clone() for p in net.parameters()], net.seen.item()


def guarded(net, optimizer, x):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    if torch.isfinite(loss):
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if norm < 1e3:
            optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_that_skip_bad_batches(backend):
    torch.manual_seed(1)
    net = Net()
    twin = copy.deepcopy(net)
    batches = [torch.randn(5, 4) for _ in range(8)]
    batches[5] = batches[5] * float("inf")
    captured = capture(guarded, backend=backend)
    want = training(guarded, net, lambda p: torch.optim.AdamW(p, 1e-2), batches)
    found = training(captured, twin, lambda p: torch.optim.AdamW(p, 1e-2), batches)
    assert str(found) == str(want)  # (NaN losses compare by their text)
    assert stats(captured).breaks == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_looking_ahead_changes_nothing(backend):
    """Which way a branch goes is guessed by running operators ahead: none that keeps running statistics."""

    def step(norm, x):
        y = norm(x)
        return y * 2 if y.mean() > 0 else y

    torch.manual_seed(0)
    norm, twin = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    captured = capture(step, backend=backend)
    for _ in range(3):
        x = torch.randn(6, 4)
        assert torch.equal(captured(norm, x), step(twin, x))
        assert all(map(torch.equal, norm.buffers(), twin.buffers()))


def scaled(net, optimizer, scaler, x):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_scaler(backend):
    torch.manual_seed(1)
    net = Net()
    twin = copy.deepcopy(net)
    batches = [torch.randn(5, 4) for _ in range(9)]
    batches[5] = batches[5] * float("inf")
    captured = capture(scaled, backend=backend)

    def run(step, model):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        found = training(lambda m, o, x: step(m, o, scaler, x), model, lambda p: torch.optim.AdamW(p, 1e-2), batches)
        return found, scaler.state_dict()

    assert str(run(captured, twin)) == str(run(scaled, net))
    last = stats(captured)
    assert last.breaks == 0, last


def test_a_guess_looks_at_what_was_written_in_place(monkeypatch):
    """Of numbers that were written since nothing is guessed, so it goes as for a list that most often has items."""

    def step(x, index):
        counts = index.new_zeros(3)
        counts.scatter_add_(0, index, torch.ones_like(index))
        parts, start = [], 0
        for end in counts.cumsum(0).tolist():
            if end == start:
                continue
            parts.append(x[start:end] * 2)
            start = end
        found = torch.cat(parts) if len(parts) else x.new_empty(0)
        return found.view(len(index), 2) + 1

    def graphs():
        moebius.reset()
        captured = capture(step)
        for index in ([0, 2, 2], [1, 1, 1], [0, 1, 2]):
            given = torch.arange(6.0).view(3, 2), torch.tensor(index)
            assert torch.equal(captured(*given), step(*given))
        return stats(captured).graphs

    assert graphs() == 1
    monkeypatch.setattr(speculation, "writes_into", lambda node: [])
    assert graphs() > 1


def recurrent(cell, x, far):
    """As xLSTM's sLSTM: only the first time step finds the normaliser empty. far: too many operators to run ahead."""
    state = torch.zeros(3)
    for step in range(x.shape[0]):
        new = cell * x[step]
        for _ in range(far):
            new = torch.sin(new)
        state = new if torch.all(state == 0.0) else torch.maximum(state, new) + state
    return state.sum()


@pytest.mark.parametrize("far", [1, 30])
def test_a_branch_goes_as_it_went_before(far):
    """Where the data of a later time step is out of sight, the steps before it tell more than a habit."""
    captured = capture(recurrent, backend="eager")
    for number in range(3):
        cell, x = torch.rand(3) + 0.5, torch.rand(9, 3) + 0.1
        assert torch.equal(captured(cell, x, far), recurrent(cell, x, far)), number
    assert stats(captured).graphs == 1 and stats(captured).hits >= 1, stats(captured)


def settles(x, limit):
    iterations = 0
    while (x.square().sum() > limit).item():
        x, iterations = x * 0.75, iterations + 1
    return x, iterations


def test_a_loop_until_the_data_is_right():
    """The way of the iterations before is not followed for ever."""
    captured = capture(settles, backend="eager")
    for limit in (1e-3, 1e-3, 1e-30, 1e-30, 1e-30, 1e-3):
        mine, plain = captured(torch.ones(4), limit), settles(torch.ones(4), limit)
        assert torch.equal(mine[0], plain[0]) and mine[1] == plain[1]

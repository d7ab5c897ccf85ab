"""Activation checkpointing inside the graph: plain Python's numbers, and no more kept for backward than it keeps."""

from __future__ import annotations

import contextlib

import pytest
import torch
from expert_layer import HitExperts
from gradient_programs import kept
from torch import nn
from torch.utils.checkpoint import checkpoint

import moebius.lowering.step.checkpoint as lowered
from moebius import capture, explain, stats
from moebius.regions.checkpoints import Read

F = torch.nn.functional


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        self.norm, self.dropout = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x, scale=1.0):
        return self.norm(x + self.dropout(self.second(F.silu(self.first(x))))) * scale


class Model(torch.nn.Module):
    def __init__(self, block, options):
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(2))
        self.options = options

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.options is not None else block(x)
        return x


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def build(block, options):
    torch.manual_seed(0)
    model = Model(block, options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def check(block, options, backend="eager", steps=3):
    ours, theirs, captured = build(block, options), build(block, options), capture(step, backend=backend)
    for seed in range(steps):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        results = []
        for function, args in ((captured, ours), (step, theirs)):
            torch.manual_seed(seed)
            results.append((function(*args, x.clone().requires_grad_()), torch.get_rng_state()))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        state, expected = ours[0].state_dict(), theirs[0].state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    return stats(captured)  # while the models live: what was captured for them goes with them


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": False},
        {"use_reentrant": False, "preserve_rng_state": False},
        {"use_reentrant": False, "scale": 2.0},
        {"use_reentrant": True},
        {"use_reentrant": True, "preserve_rng_state": False},
    ],
    ids=["plain", "other random numbers in backward", "a keyword of the block's own", "reentrant", "reentrant, others"],
)
def test_a_checkpointed_block_is_inside_the_graph(options):
    """BatchNorm's running numbers and dropout show that backward runs the block once more, with the same mask."""
    seen = check(Block, options)
    assert seen.graphs == 1 and seen.breaks == 0


def test_it_keeps_no_more_for_backward_than_plain_python():
    def forward(model, x):
        return model(x).sum()

    x = torch.randn(6, 8, requires_grad=True)
    sizes = {}
    kinds = {"checkpointed": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}, "whole": None}
    for name, options in kinds.items():
        model, _ = build(Block, options)
        captured = capture(forward, backend="eager")
        captured(model, x)
        sizes[name] = kept(captured, model, x)
        assert sizes[name] <= kept(forward, model, x)
    assert sizes["checkpointed"] < 0.5 * sizes["whole"]


class Nested(Block):
    """Checkpointed calls inside of the block's own: one after another, and one in the other."""

    def __init__(self, inner=False):
        super().__init__()
        self.inner = inner

    def half(self, x):
        x = x + self.dropout(self.second(F.silu(self.first(x))))
        return x + checkpoint(F.silu, self.first(x), use_reentrant=False, determinism_check="none")[:, :8]

    def forward(self, x):
        for _ in range(2):
            x = self.norm(checkpoint(self.half, x, use_reentrant=self.inner))
        return checkpoint(lambda t: t, x, use_reentrant=False)


@pytest.mark.parametrize("preserve", [True, False])
def test_checkpointed_calls_inside_of_others(preserve):
    options = {"use_reentrant": False, "preserve_rng_state": preserve}
    seen = check(Nested, options)
    assert seen.graphs == 1 and seen.breaks == 0

    def forward(model, x):
        return model(x).sum()

    model, _ = build(Nested, options)
    captured, x = capture(forward, backend="eager"), torch.randn(6, 8, requires_grad=True)
    captured(model, x)
    assert kept(captured, model, x) <= kept(forward, model, x)


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True)])
def test_a_reentrant_one_among_them_is_a_break(outer, inner):
    assert check(lambda: Nested(inner), {"use_reentrant": outer}).breaks


@pytest.mark.parametrize("reentrant", [False, True])
def test_experts_in_a_checkpointed_block_are_lowered(reentrant):
    def forward(model, x):
        return model(x).sum()

    options = {"use_reentrant": reentrant}
    (ours, _), (theirs, _) = build(HitExperts, options), build(HitExperts, options)
    x = torch.randn(16, 8, requires_grad=True)
    report = explain(forward)(ours, x)
    assert [r.lowered for r in report.expert_regions] == [True, True] and not report.breaks
    captured = capture(forward)
    captured(ours, x).backward()
    forward(theirs, x).backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    whole, _ = build(HitExperts, None)
    assert kept(captured, ours, x) < 0.5 * kept(capture(forward), whole, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_loops_that_are_not_lowered_run_inside_the_block(reentrant):
    seen = check(HitExperts, {"use_reentrant": reentrant})
    assert seen.graphs == 1 and seen.breaks == 0


class Counts(Block):
    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Prints(Block):
    def forward(self, x):
        print(x.sum().item())
        return super().forward(x)


@pytest.mark.parametrize(
    ("block", "options"),
    [(Counts, {"use_reentrant": False}), (Prints, {"use_reentrant": False}), (Counts, {"use_reentrant": True})],
    ids=["changes an object", "prints", "reentrant"],
)
def test_what_cannot_be_run_twice_is_a_break(block, options, capsys):
    seen = check(block, options)
    assert seen.breaks
    lines = capsys.readouterr().out.splitlines()
    assert lines == [] or (len(lines) == 24 and all(lines.count(line) % 2 == 0 for line in lines))


def test_effects_of_a_checkpointed_block_happen_as_often_as_in_plain_python():
    ours, theirs, captured = build(Counts, {"use_reentrant": False}), build(Counts, {"use_reentrant": False}), None
    captured = capture(step, backend="eager")
    for _ in range(2):
        captured(*ours, torch.ones(6, 8))
        step(*theirs, torch.ones(6, 8))
    assert [b.calls for b in ours[0].blocks] == [b.calls for b in theirs[0].blocks] == [4, 4]


def test_without_gradients_nothing_is_checkpointed():
    model, _ = build(Block, {"use_reentrant": False})
    captured = capture(lambda m, x: m(x), backend="eager")
    with torch.no_grad():
        model.eval()
        x = torch.randn(6, 8)
        assert torch.equal(captured(model, x), model(x))
    assert stats(captured).breaks == 0


def test_an_operator_that_fails_in_a_checkpointed_block_is_the_users_error():
    class Picks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, i):
            return (self.weight * 2)[i]

    def forward(module, i, log):
        log.append("before")
        value = checkpoint(module, i, use_reentrant=False)
        log.append("after")
        return value.sum()

    captured, module, log = capture(forward, backend="eager"), Picks(), []
    captured(module, torch.tensor([1]), log)
    with pytest.raises(IndexError):
        captured(module, torch.tensor([9]), log)
    assert log == ["before", "after", "before"]


def test_an_argument_written_to_before_backward_is_the_error_that_torch_raises():
    def forward(weight, x):
        x = x * 2
        y = checkpoint(lambda t: (t * weight).sin(), x, use_reentrant=False)
        x.add_(1)
        return y.sum()

    captured = capture(forward, backend="eager")
    for function in (forward, captured, captured):
        with pytest.raises(RuntimeError, match="inplace operation"):
            function(torch.ones(3, requires_grad=True), torch.ones(3)).backward()


def test_what_a_native_checkpoint_runs_twice_is_plain_both_times():
    """It compares the tensors that it saves; a graph that came between would save others."""
    torch.manual_seed(0)
    model = HitExperts()
    plain = HitExperts()
    plain.load_state_dict(model.state_dict())

    def step(model, x):
        out = checkpoint(model, x, use_reentrant=False, context_fn=contexts)  # an option that is a graph break
        out.square().mean().backward()
        return out

    def contexts():
        return contextlib.nullcontext(), contextlib.nullcontext()

    captured = capture(step)
    for rows in (6, 6, 9):
        x, y = (torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for _ in range(2))
        captured(model, x.requires_grad_())
        step(plain, y.requires_grad_())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert stats(captured).breaks


class Cast(Block):
    """Autocast inside of the call: backward, which runs it again, may end within."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Twice(Block):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.second(F.silu(self.first(x)))
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            return self.second(F.silu(self.first(x))).float()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("block", [Cast, Twice])
def test_autocast_in_a_checkpointed_block_is_left(block, reentrant):
    """Else the weights' copies of one step would be there in the next."""
    seen = check(block, {"use_reentrant": reentrant}, steps=4)
    assert seen.graphs == 1 and seen.breaks == 0
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


def test_autocast_that_is_not_put_back_is_a_wrong_answer(monkeypatch):
    def losses(function):
        (model, optimizer), found = build(Cast, {"use_reentrant": False}), []
        for seed in range(4):
            torch.manual_seed(seed)
            found.append(function(model, optimizer, torch.randn(6, 8)))
        return found

    plain = losses(step)
    monkeypatch.setattr(lowered, "modes_put_back", lambda devices: contextlib.nullcontext())
    try:
        assert not all(map(torch.equal, losses(capture(step, backend="eager")), plain))
    finally:
        while torch.autocast_decrement_nesting() > 0:
            pass
        torch.clear_autocast_cache()


class Reads(Block):
    """What a checkpointed call reads, backward reads again."""

    def __init__(self):
        super().__init__()
        self.scale, self.shifts = torch.ones(8), [torch.zeros(8)]

    def forward(self, x):
        return super().forward(x).sin() * self.scale + sum(self.shifts).cos() * x.sin()


def set_attribute(model, n):
    model.blocks[0].scale = torch.full((8,), 1.0 + n)


def append(model, n):
    model.blocks[1].shifts.append(torch.ones(8))


def in_place(model, n):
    model.blocks[0].scale.mul_(1.5)


def unrelated(model, n):
    model.steps = n
    model.blocks[0].calls += 1


def nothing(model, n):
    pass


def changing_step(model, optimizer, x, n, between, after):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    between(model, n)
    loss.backward()
    after(model, n)
    optimizer.step()
    return loss.detach()


def run_changing(step, between, after, options):
    (model, optimizer), losses = build(Reads, options), []
    for n in range(4):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(n)).requires_grad_()
        torch.manual_seed(n)
        losses.append(step(model, optimizer, x, n, between, after))
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.share(3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("between", "after", "breaks"),
    [
        (set_attribute, nothing, True),
        (append, nothing, True),
        (in_place, nothing, False),
        (unrelated, nothing, False),
        (nothing, set_attribute, False),
    ],
)
def test_what_a_call_reads_is_what_it_is_at_backward(between, after, breaks, reentrant, monkeypatch):
    options = {"use_reentrant": reentrant}
    captured = capture(changing_step, backend="eager")
    ours, plain = run_changing(captured, between, after, options), run_changing(changing_step, between, after, options)
    assert all(map(torch.equal, ours, plain))
    model, optimizer = build(Reads, options)
    report = explain(changing_step, backend="eager")(
        model, optimizer, torch.ones(6, 8).requires_grad_(), 1, between, after
    )
    assert any("before backward" in b.detail for b in report.breaks) == breaks
    if breaks:
        monkeypatch.setattr(Read, "is_unchanged", lambda read: True)
        ours = run_changing(capture(changing_step, backend="eager"), between, after, options)
        assert not all(map(torch.equal, ours, plain))


MADE = {  # what the call reads of it -> what the step does with it before backward
    "sum(made['list'])": "made['list'].append(3.0)",
    "made['list'][0]": "made['list'][0] = 3.0",
    "made['dict'].get('k', 1.0)": "made['dict']['k'] = 3.0",
    "(2.0 if 'k' in made['dict'] else 1.0)": "made['dict']['k'] = 3.0",
    "len(made['set'])": "made['set'].add(2)",
    "made['in'][0][0]": "made['in'][0][0] = 3.0",
}


@pytest.mark.parametrize("reads", MADE)
@pytest.mark.parametrize("between", [True, False])
def test_a_list_or_dict_of_the_step_that_a_call_reads(reads, between):
    world = {"torch": torch, "checkpoint": checkpoint}
    change = MADE[reads] if between else "pass"
    exec(
        f"""def step(x, w):
  made = {{"list": [2.0], "dict": {{}}, "set": {{1}}, "in": ([2.0],)}}
  def call(x):
    return torch.tanh(x * w * {reads}) * x
  y = checkpoint(call, x, use_reentrant=False)
  {change}
  y.sum().backward()
  return y.detach(), w.grad""",
        world,
    )
    captured = capture(world["step"], backend="eager")
    for n in range(3):
        x, weights = torch.arange(4.0) + n, [torch.ones(4, requires_grad=True) for _ in range(2)]
        for a, b in zip(world["step"](x, weights[0]), captured(x, weights[1]), strict=True):
            assert torch.equal(a, b)
    assert between or not stats(captured).breaks


def test_a_variable_that_later_iterations_of_a_loop_set():
    """A closure finds its last value when backward runs the call again."""

    def step(weights, x):
        for i in range(3):
            x = checkpoint(lambda t: (t @ weights[i]).tanh(), x, use_reentrant=False)  # noqa: B023
        loss = x.sum()
        return torch.autograd.grad(loss, weights, allow_unused=True)

    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    x = torch.randn(2, 4)
    found, expected = capture(step, backend="eager")(weights, x), step(weights, x)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Counting(nn.Module):
    """A buffer that the checkpointed call adds to: ``Module.__setattr__`` sets it to what it is already."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("load", torch.zeros(3))

    def forward(self, x):
        with torch.no_grad():
            self.load += x.detach().sum(0)
        return self.lin(x)


@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_a_buffer_that_the_call_adds_to(backend):
    def step(module, x):
        checkpoint(module, x, use_reentrant=False).sum().backward()

    plain, ours = Counting(), Counting()
    ours.load_state_dict(plain.state_dict())
    captured = capture(step, backend=backend, fullgraph=True)
    for _ in range(3):
        x = torch.rand(4, 3)
        step(plain, x)
        captured(ours, x)
    assert torch.equal(plain.load, ours.load) and plain.load.any()
    assert torch.equal(plain.lin.weight.grad, ours.lin.weight.grad)


def appends(x, items):
    items.append(1)
    return (x * len(items)).sin()


def changed_in_the_next(w):
    """What one checkpointed call has made, the next one changes, and once more in backward."""

    def first(w):
        made = []
        made.append(0)
        return w.sin(), made

    y, made = checkpoint(first, w, use_reentrant=False)
    checkpoint(appends, y, made, use_reentrant=False).sum().backward()
    return len(made), w.grad


def made_for_the_call(w):
    """Nothing is read between the making of the list and the call."""
    y = checkpoint(lambda w, items: (w * len(items)).sin(), w, items := [1], use_reentrant=False)
    items.append(2)
    y.sum().backward()
    return len(items), w.grad


class Box:
    n = 0


def made_before_a_dict_of_its_own(w):
    """The ``__dict__`` of an object is as old as the object, whenever it is asked for."""
    box = Box()
    box.n = 1

    def call(w):
        box.__dict__["n"] += 1
        return (w * box.n).sin()

    checkpoint(call, w, use_reentrant=False).sum().backward()
    return box.n, w.grad


@pytest.mark.parametrize("step", [changed_in_the_next, made_for_the_call, made_before_a_dict_of_its_own])
def test_what_the_step_made_before_the_call_is_older_than_it(step):
    captured = capture(step)
    for _ in range(2):
        expected, found = (f(torch.ones(2, requires_grad=True)) for f in (step, captured))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

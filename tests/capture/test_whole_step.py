"""zero_grad → forward → loss → backward → clip → optimizer → schedule as one graph, equal to Python to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from moebius import capture, explain, stats

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, nesterov, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, a tensor as rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "AdamW, two groups": lambda p: two_groups(list(p)),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}
SCHEDULES = {
    "lambda": (lambda o: schedules.LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)), 1),
    "cosine": (lambda o: schedules.CosineAnnealingLR(o, 10), 1),
    "step": (lambda o: schedules.StepLR(o, 2), 2),
    "milestones": (lambda o: schedules.MultiStepLR(o, [2, 4]), 3),
    "sequence": (
        lambda o: schedules.SequentialLR(
            o, [schedules.LinearLR(o, total_iters=2), schedules.CosineAnnealingLR(o, 10)], [2]
        ),
        3,
    ),
}


def two_groups(parameters):
    return torch.optim.AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}])


def build(make_optimizer, make_schedule=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 4))
    optimizer = make_optimizer(model.parameters())
    return model, optimizer, make_schedule(optimizer) if make_schedule else None


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(count)]


def step(model, optimizer, schedule, x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if schedule is not None:
        schedule.step()
    return loss.detach(), norm


def equal(a, b):
    """Parameters, gradients and optimizer state, bit for bit."""
    for (model, optimizer, *_), (other, other_optimizer, *_) in ((a, b),):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
            assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad))
            state, expected = optimizer.state.get(p, {}), other_optimizer.state.get(q, {})
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key
        for group, expected in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
            assert group["lr"] == expected["lr"]


KEPT: list = []  # what was captured goes when its model dies


def train(function, captured, make_optimizer, make_schedule=None, steps=5):
    mine, plain = build(make_optimizer, make_schedule), build(make_optimizer, make_schedule)
    for x, y in batches(steps):
        found, expected = captured(*mine, x, y), function(*plain, x, y)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        equal(mine, plain)
    KEPT[:] = mine, plain
    return mine, plain


# ----------------------------------------------------------------------------------------------------------------------
# The step
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), [(n, "eager") for n in OPTIMIZERS] + [("AdamW", "moebius")])
def test_a_step_is_one_graph_and_the_second_step_is_the_same(name, backend):
    captured = capture(step, backend=backend, fullgraph=True)
    train(step, captured, OPTIMIZERS[name])
    counts = stats(captured)
    assert (counts.graphs, counts.breaks, counts.hits, counts.recompiles) == (1, 0, 4, [])


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_inside_the_step(name):
    """The learning rate is an input. What a schedule branches on is guarded, so a few graphs serve the run."""
    make, recompiles = SCHEDULES[name]
    captured = capture(step, backend="eager", fullgraph=True)
    mine, plain = train(step, captured, OPTIMIZERS["AdamW"], make, steps=7)
    assert mine[2].last_epoch == plain[2].last_epoch == 7
    assert mine[2].get_last_lr() == plain[2].get_last_lr()
    assert len(stats(captured).recompiles) <= recompiles


def test_a_rate_set_outside_is_not_a_recompile():
    captured = capture(step, fullgraph=True)
    mine, plain = build(OPTIMIZERS["AdamW"]), build(OPTIMIZERS["AdamW"])
    for i, (x, y) in enumerate(batches(4)):
        for _, optimizer, _ in (mine, plain):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        torch.testing.assert_close(captured(*mine, x, y), step(*plain, x, y), rtol=0, atol=0)
        equal(mine, plain)
    assert stats(captured).recompiles == []


def test_the_graph_reads_as_the_step_does():
    report = explain(step, fullgraph=True)(*build(OPTIMIZERS["AdamW"]), *batches(1)[0])
    (graph,) = report.graphs
    first = step.__code__.co_firstlineno
    lines = {}
    for node in graph.gm.graph.nodes:
        if node.op.startswith("call") and node.meta["stack"]:
            lines.setdefault(node.meta["stack"][0][1] - first, []).append(node)
    assert [n for n in lines[1] if n.target.__name__ == "set_gradient"]
    assert [n for n in lines[3] if n.target == "backward"]
    assert lines[4] and any("_foreach_norm" in str(n.target) for n in lines[4])
    assert any(n.target == "addcdiv_" for n in lines[5])


# ----------------------------------------------------------------------------------------------------------------------
# Gradients
# ----------------------------------------------------------------------------------------------------------------------


def test_gradients_accumulate_over_micro_batches():
    def accumulate(model, optimizer, _, x, y):
        total = 0.0
        for half_x, half_y in zip(x.split(2), y.split(2), strict=True):
            loss = torch.nn.functional.mse_loss(model(half_x), half_y) / 3
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    captured = capture(accumulate, backend="eager", fullgraph=True)
    train(accumulate, captured, OPTIMIZERS["AdamW"])
    assert stats(captured).graphs == 1


def test_gradients_that_were_there_before_are_added_to():
    def backward_only(model, optimizer, _, x, y):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    captured = capture(backward_only, backend="eager", fullgraph=True)
    train(backward_only, captured, OPTIMIZERS["SGD"])
    assert stats(captured).graphs == 2  # without gradients, and with


def test_zeroed_gradients_keep_their_tensors():
    def keep(model, optimizer, _, x, y):
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = capture(keep, backend="eager", fullgraph=True)
    mine, _ = train(keep, captured, OPTIMIZERS["SGD"], steps=3)
    before = [p.grad for p in mine[0].parameters()]
    captured(*mine, *batches(1)[0])
    assert all(p.grad is g for p, g in zip(mine[0].parameters(), before, strict=True))


def test_a_frozen_parameter_has_no_gradient_and_no_state():
    def frozen(p):
        parameters = list(p)
        parameters[0].requires_grad_(False)
        return torch.optim.AdamW(parameters, lr=0.01)

    captured = capture(step, backend="eager", fullgraph=True)
    mine, _ = train(step, captured, frozen)
    first = next(mine[0].parameters())
    assert first.grad is None and first not in mine[1].state


def test_gradients_by_autograd_grad():
    def derive(model, optimizer, _, x, y):
        loss = torch.nn.functional.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= 0.1 * g
        return loss.detach()

    captured = capture(derive, backend="eager", fullgraph=True)
    train(derive, captured, OPTIMIZERS["SGD"])
    assert stats(captured).graphs == 1


@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_which_gradients_are_none_is_up_to_the_data(backend):
    """A batch leaves one of two layers out; what is accumulated for it stays."""

    def derive(model, optimizer, _, x, y):
        rows = x[:, 0] > 0.5
        first, second = model[0], model[2]
        loss = second(torch.nn.functional.silu(x @ first.weight.T)).mean()
        for layer in (first, second):
            if rows.any():
                loss = loss + layer.weight.square().mean()
        wanted = list(model.parameters())
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        for p, g in zip(wanted, gradients, strict=True):
            if g is not None:
                p.grad = g if p.grad is None else p.grad + g
        return loss.detach()

    captured = capture(derive, backend=backend)
    train(derive, captured, OPTIMIZERS["SGD"])
    assert stats(captured).breaks == 1


def test_a_gradient_hook_runs_between_two_graphs():
    seen = []

    def hooked(p):
        parameters = list(p)
        parameters[0].register_hook(lambda g: seen.append(g.shape) or g * 2)
        return torch.optim.SGD(parameters, lr=0.1)

    captured = capture(step, backend="eager")
    train(step, captured, hooked)
    assert len(seen) == 10 and stats(captured).breaks >= 1


class Rows(torch.nn.Module):
    """Uses ``scale`` for rows that begin with a positive number; autograd leaves it without a gradient if none does."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.base = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        out = x * self.base
        for row in torch.nonzero(x[:, 0] > 0):
            out = out.index_add(0, row, self.scale[None])
        return out


class Trainer:
    def __init__(self):
        self.model = Rows()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.log = []

    def backward(self, loss):
        self.log.append("before")
        loss.backward()
        self.log.append("after")
        return 2

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        count = self.backward(loss)
        self.log.append(count)
        self.optimizer.step()
        return loss.detach() * count


@pytest.mark.parametrize("order", ["++-+--+", "+--", "++++"])
def test_a_parameter_that_a_batch_leaves_out_is_left_out_by_the_optimizer(order):
    ours, theirs, captured = Trainer(), Trainer(), capture(Trainer.step, backend="eager")
    for sign in order:
        x = torch.ones(3, 4) if sign == "+" else -torch.ones(3, 4)
        assert torch.equal(captured(ours, x), theirs.step(x))
        assert all(torch.equal(p, q) for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True))
        assert [p.grad is None for p in ours.model.parameters()] == [p.grad is None for p in theirs.model.parameters()]
    assert ours.log == theirs.log
    assert stats(captured).recompiles == [] and stats(captured).graphs == 1


def test_a_function_that_reads_no_gradient_does_not_mind_a_missing_one():
    def gradients(model, x):
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    model, captured = Rows(), capture(gradients, backend="eager")
    for x in (torch.ones(3, 4), -torch.ones(3, 4), torch.ones(3, 4)):
        captured(model, x)
        assert (model.scale.grad is None) == bool(x[0, 0] < 0)
    assert stats(captured).graphs == 1 and not stats(captured).recompiles


def test_what_a_loop_carries_on_has_the_history_of_its_iterations():
    """Backward must reach what only the loop's iterations used, though the value that they carry had another
    history."""
    ours, theirs, captured = Trainer(), Trainer(), capture(Trainer.step, backend="eager")
    for trainer, call in ((ours, captured), (theirs, Trainer.step)):
        call(trainer, torch.ones(3, 4))
    assert not torch.equal(ours.model.scale, torch.ones(4))
    assert torch.equal(ours.model.scale, theirs.model.scale)
    assert stats(captured).graphs == 1 and stats(captured).breaks == 0


# ----------------------------------------------------------------------------------------------------------------------
# Numbers
# ----------------------------------------------------------------------------------------------------------------------


def test_reading_the_loss_at_the_end_is_no_break():
    def logged(model, optimizer, log, x, y):
        loss, norm = step(model, optimizer, None, x, y)
        log.append(loss.item())
        return {"loss": loss.item(), "scaled": loss.item() * 2 + 1, "norm": float(norm), "root": math.sqrt(loss.item())}

    captured = capture(logged, backend="eager", fullgraph=True)
    mine, plain = train(logged, captured, OPTIMIZERS["AdamW"], lambda _: [])
    assert mine[2] == plain[2] and len(mine[2]) == 5 and all(type(v) is float for v in mine[2])
    assert stats(captured).graphs == 1


def test_a_branch_on_the_loss_is_in_the_graph():
    def guarded(model, optimizer, _, x, y):
        loss = torch.nn.functional.mse_loss(model(x), y)
        if math.isfinite(loss.item()):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    captured = capture(guarded, backend="eager")
    train(guarded, captured, OPTIMIZERS["SGD"])
    assert stats(captured).breaks == 0 and stats(captured).graphs == 1


def test_an_average_by_hand():
    def averaged(model, optimizer, average, x, y):
        found = step(model, optimizer, None, x, y)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name not in average:
                    average[name] = p.clone()
                average[name].mul_(0.9).add_(p, alpha=0.1)
        return found

    captured = capture(averaged, backend="eager", fullgraph=True)
    mine, plain = train(averaged, captured, OPTIMIZERS["SGD"], lambda _: {})
    for name, value in plain[2].items():
        assert torch.equal(mine[2][name], value)


def test_a_rate_of_another_type_is_noticed():
    captured = capture(step, backend="eager", fullgraph=True)
    mine, plain = build(OPTIMIZERS["SGD"]), build(OPTIMIZERS["SGD"])
    for rate, (x, y) in zip((0.1, 1, True, torch.tensor(0.5), 0.25), batches(5), strict=True):
        for _, optimizer, _ in (mine, plain):
            optimizer.param_groups[0]["lr"] = rate
        torch.testing.assert_close(captured(*mine, x, y), step(*plain, x, y), rtol=0, atol=0)
        equal(mine, plain)


def test_autocast_around_the_forward_pass_is_inside_the_graph():
    def mixed(model, optimizer, schedule, x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach(), torch.tensor(torch.is_autocast_enabled("cpu"))

    captured = capture(mixed, backend="eager")
    train(mixed, captured, OPTIMIZERS["AdamW"])
    assert stats(captured).graphs == 1 and stats(captured).breaks == 0


class Counting:
    def __init__(self):
        self.model, self.steps, self.log, self.position = torch.nn.Linear(4, 4), 0, [], 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.log.append((self.steps, loss.item()))
        return loss.detach()

    def every_third(self, x):
        self.steps = self.steps + 1
        return x * 2 if self.steps % 3 == 0 else x

    def index(self, x):
        row = x[self.position]
        self.position += 1
        return row


@pytest.mark.parametrize(("name", "graphs"), [("step", 1), ("every_third", 2), ("index", 8)])
def test_what_a_step_counts_in_is_an_input_from_the_first_call(name, graphs):
    torch.manual_seed(0)
    ours = Counting()
    torch.manual_seed(0)
    theirs = Counting()
    captured = capture(getattr(Counting, name), backend="eager")
    for seed in range(8):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(captured(ours, x), getattr(theirs, name)(x))
        assert (ours.steps, ours.position, ours.log) == (theirs.steps, theirs.position, theirs.log)
        assert type(ours.steps) is int
    assert stats(captured).graphs <= graphs

"""Batches that leave experts without gradients: one graph, and clipping and optimizer pass over them as in Python."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from answers import told

import moebius.trace.segment
import moebius.trace.speculation
from moebius import capture, stats
from moebius.lowering.step import MissingGradientError

F = torch.nn.functional
EXPERTS = 4
BATCHES = [(0, 1), (2,), (0, 2), (1,), (0, 1, 2, 3), (3,), (0,), (1, 2)]


class Experts(torch.nn.Module):
    """Row i goes to the expert that its first number names."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Linear(4, 6) for _ in range(EXPERTS))
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x):
        out = x.new_zeros(len(x), 6)
        for number, expert in enumerate(self.up):
            rows = torch.nonzero(x[:, 0] == number)[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, F.silu(expert(x[rows])))
        return self.head(out)


def batch(numbers, seed):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = torch.tensor([numbers[i % len(numbers)] for i in range(6)])
    return x


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, nesterov, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),  # (with momentum torch itself fails here)
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW, two groups": lambda p: two_groups(list(p)),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adafactor, foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "RMSprop, foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "NAdam, foreach": lambda p: torch.optim.NAdam(p, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.1),
}


def two_groups(parameters):
    return torch.optim.AdamW([{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:], "weight_decay": 0.0}])


def plain(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def clipped(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm


def clipped_by_value(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def averaged(model, optimizer, x):
    loss = clipped(model, optimizer, x)
    with torch.no_grad():
        for p, average in zip(model.parameters(), model.average, strict=True):
            average.mul_(0.9).add_(p, alpha=0.1)
    return loss


def twice(model, optimizer, x):
    optimizer.zero_grad()
    total = 0.0
    for part in x.split(3):
        loss = model(part).square().mean()
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def moved(model, optimizer, x):
    """``Module.to`` looks at gradients too, before there is a backward: they are what zero_grad made them."""
    optimizer.zero_grad()
    model.head = model.head.to(torch.float32)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def moved_between(model, optimizer, x):
    """After a backward a gradient is read in ``Module.to``, and set: that is up to Python."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    model.up[1] = model.up[1].to(torch.float32)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def counted(model, optimizer, x):
    """Its own code asks for gradients: how many there are is a number of Python's."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    count = len([p for p in model.parameters() if p.grad is not None])
    optimizer.step()
    return torch.tensor(float(count)) * model.head.bias.detach().sum()


def two_steps(model, optimizer, x):
    """After the first backward there is another one: what follows the first is up to Python, the loss with it."""
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.dropout(model(x), 0.2).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


def counts_states(model, optimizer, x):
    """Which parameters have state is a fact of Python's as well."""
    plain(model, optimizer, x)
    first = next(model.parameters())
    found = [len(optimizer.state), first in optimizer.state, sum(p in optimizer.state for p in model.parameters())]
    return torch.tensor([*found, len(list(optimizer.state)), optimizer.state.get(first) is None])


def counts_states_by_another_name(model, optimizer, x):
    plain(model, optimizer, x)
    return torch.tensor([len(model.states), model.up[1].weight in model.states])


def given_by_grad(model, optimizer, x):
    """``torch.autograd.grad`` for each half; what was computed before it is used after it."""
    optimizer.zero_grad()
    total = 0.0
    for part in x.split(3):
        logits = model(part)
        with torch.autocast("cpu", torch.bfloat16):
            model.aux = (logits @ logits.T).logsumexp(-1)
            loss = logits.square().mean() + model.aux.mean()
        given = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for p, g in zip(model.parameters(), given, strict=True):
            if g is not None:
                p.grad = g if p.grad is None else p.grad + g
        total = total + loss.detach()
    optimizer.step()
    return total


def asks_for_all_states_before(model, optimizer, x):
    first = not optimizer.state
    plain(model, optimizer, x)
    return torch.tensor([first, len(optimizer.state)])


def asks_for_one_state_before(model, optimizer, x):
    found = [model.up[0].weight in optimizer.state, optimizer.state.get(model.up[1].weight) is None]
    plain(model, optimizer, x)
    return torch.tensor([*found, model.up[0].weight in optimizer.state])


def makes_an_empty_state_before(model, optimizer, x):
    """The dict of states makes an entry where there is none."""
    found = len(optimizer.state[model.up[2].weight])
    plain(model, optimizer, x)
    return torch.tensor([found, len(optimizer.state[model.up[2].weight])])


ASKING_BEFORE = [asks_for_all_states_before, asks_for_one_state_before, makes_an_empty_state_before]


def ignored(value):
    pass


def goes_on_with_noise(model, optimizer, x):
    """What was drawn before backward is handed over after it, and no graph asks for it: nobody can draw it again."""
    optimizer.zero_grad()
    drawn = F.dropout(x, 0.5).sum()
    model(x).square().mean().backward()
    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)
    optimizer.step()
    ignored(drawn)
    return x.sum()


def normed_by_hand(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    optimizer.step()
    return norm


def scaled(model, optimizer, x):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def with_closure(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


def build(make):
    torch.manual_seed(0)
    model = Experts()
    made = make(model.parameters())
    model.states = made.state
    model.average = [torch.zeros_like(p) for p in model.parameters()]
    return model, made


def compare(step, make, batches=BATCHES, backend="eager", exact=True):
    """Captured and plain side by side, to the bit. Returns the counts."""
    mine, other = build(make), build(make)
    captured = capture(step, backend=backend)
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for number, numbers in enumerate(batches):
        torch.manual_seed(number)
        found = captured(*mine, batch(numbers, number))
        torch.manual_seed(number)
        expected = step(*other, batch(numbers, number))
        torch.testing.assert_close(found, expected, **close)
        for p, q in zip(mine[0].parameters(), other[0].parameters(), strict=True):
            torch.testing.assert_close(p, q, **close)
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, **close)
            state, wanted = mine[1].state.get(p, {}), other[1].state.get(q, {})
            assert state.keys() == wanted.keys() and (p in mine[1].state) == (q in other[1].state)
            for key in wanted:
                value, right = torch.as_tensor(state[key]), torch.as_tensor(wanted[key])
                torch.testing.assert_close(value, right, **close)
        for average, right in zip(mine[0].average, other[0].average, strict=True):
            torch.testing.assert_close(average, right, **close)
    return stats(captured)


# ASGD and RAdam branch on their state's numbers; nobody sets the gradients of what Muon does not train to None
MORE_GRAPHS = {"ASGD", "RAdam", "Muon"}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_pass_over_what_has_no_gradient(name):
    counts = compare(clipped, OPTIMIZERS[name])
    if name not in MORE_GRAPHS:
        assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, [])


@pytest.mark.share(3)
@pytest.mark.parametrize("step", [plain, clipped_by_value, averaged, moved], ids=lambda f: f.__name__)
def test_any_set_of_experts_is_one_graph(step):
    counts = compare(step, OPTIMIZERS["AdamW, foreach"])
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, [])


@pytest.mark.parametrize("step", [plain, clipped], ids=lambda f: f.__name__)
def test_with_the_experts_in_one_operator(step):
    counts = compare(step, OPTIMIZERS["AdamW"], backend="moebius", exact=False)
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, [])


OTHERS = [
    twice, two_steps, counts_states, counts_states_by_another_name, counted, goes_on_with_noise, moved_between,
    normed_by_hand, scaled, with_closure, given_by_grad,
]  # fmt: skip


@pytest.mark.share(1)
@pytest.mark.parametrize("step", OTHERS, ids=lambda f: f.__name__)
def test_where_others_ask_for_gradients_the_answer_is_pythons(step):
    compare(step, OPTIMIZERS["AdamW"])


@pytest.mark.share(2)
@pytest.mark.parametrize("step", ASKING_BEFORE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["AdamW", "SGD, momentum", "AdamW, two groups"])
def test_what_the_step_has_asked_before_is_as_it_was(step, name):
    compare(step, OPTIMIZERS[name], BATCHES[1:])


def test_without_the_states_owners_it_would_be_wrong(monkeypatch):
    """The state of a parameter without a gradient must not be touched: its step would count."""
    original = moebius.trace.segment.going_on
    without = lambda fn, locate, owners, done: original(fn, locate, {}, done)  # noqa: E731
    monkeypatch.setattr(moebius.trace.segment, "going_on", without)
    with pytest.raises(AssertionError):
        compare(clipped, OPTIMIZERS["AdamW"])


def test_without_what_python_goes_on_with_it_would_fail(monkeypatch):
    monkeypatch.setattr(moebius.trace.speculation.Speculation, "live", lambda self: ())
    with pytest.raises(MissingGradientError):
        compare(goes_on_with_noise, OPTIMIZERS["AdamW"])


def test_without_knowing_of_the_second_backward_it_would_fail(monkeypatch):
    from moebius.tensors import gradients

    monkeypatch.setattr(gradients.Gradients, "wants_python", lambda self: None)
    with pytest.raises(MissingGradientError):
        compare(two_steps, OPTIMIZERS["AdamW"])


def test_without_asking_who_asks_it_would_be_wrong(monkeypatch):
    """A count of gradients is a constant of the graph."""
    from moebius.tensors import gradients

    monkeypatch.setattr(gradients, "treats_each_alone", lambda file: True)
    with pytest.raises(AssertionError):
        compare(counted, OPTIMIZERS["AdamW"], batches=[(0, 1, 2, 3), (0, 1)])


@pytest.mark.parametrize("step", [counts_states, counts_states_by_another_name], ids=lambda f: f.__name__)
def test_without_asking_who_asks_for_states_it_would_be_wrong(step, monkeypatch):
    from moebius.tensors import gradients

    monkeypatch.setattr(gradients.Gradients, "others_ask", lambda self: None)
    with pytest.raises(AssertionError):
        compare(step, OPTIMIZERS["AdamW"], batches=[(0, 1), (2,)])


def test_parked_state_keeps_nothing_alive():
    model, optimizer = build(OPTIMIZERS["AdamW"])
    captured = capture(plain, backend="eager")
    for number, numbers in enumerate(BATCHES[:2]):
        captured(model, optimizer, batch(numbers, number))
    dead = weakref.ref(optimizer), weakref.ref(model.up[3].weight)
    del optimizer
    gc.collect()
    assert dead[0]() is None and dead[1]() is not None
    del model
    gc.collect()
    assert dead[1]() is None


def test_state_that_is_loaded_meanwhile_counts():
    """A checkpoint gives an expert that had no state here the state that it had there."""
    mine, other = build(OPTIMIZERS["AdamW"]), build(OPTIMIZERS["AdamW"])
    captured = capture(plain, backend="eager")
    trained = build(OPTIMIZERS["AdamW"])
    plain(*trained, batch((0, 1, 2, 3), 9))
    for number, numbers in enumerate([(0, 1), (2, 0), (3, 1), (0, 1, 2, 3), (2,)]):
        if number == 2:
            for _, optimizer in (mine, other):
                optimizer.load_state_dict(copy.deepcopy(trained[1].state_dict()))
        found, expected = captured(*mine, batch(numbers, number)), plain(*other, batch(numbers, number))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for p, q in zip(mine[0].parameters(), other[0].parameters(), strict=True):
            assert torch.equal(p, q)
        assert list(mine[1].state_dict()["state"]) == list(other[1].state_dict()["state"])


@pytest.mark.parametrize("foreach", [None, True, False])
def test_values_are_clipped_where_nothing_has_a_gradient(foreach):
    """torch's grouping in C takes no empty list; what it says is what plain Python says."""

    def step(model):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=foreach)

    model = torch.nn.Linear(2, 2)
    assert told(capture(step), model) == told(step, model) and told(step, model)

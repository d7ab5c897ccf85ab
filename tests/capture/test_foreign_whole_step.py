"""A foreign backend gets the whole step as one graph; where it cannot, backward runs between two."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import moebius
from moebius import capture, explain, stats

optim = torch.optim
OPTIMIZERS = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (optim.Adam, {"lr": 0.01}),
    "adamw": (optim.AdamW, {"lr": 0.01, "foreach": False}),
    "adamw foreach": (optim.AdamW, {"lr": 0.01, "foreach": True}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01}),
}
# clipping, schedule, batches to a step: each two of them in all combinations
PAIRS = [(False, False, 1), (True, False, 2), (False, True, 2), (True, True, 1)]


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x_TD):
        return self.down(torch.tanh(self.up(x_TD)))


class Routed(nn.Module):
    """A loop over experts that lowering replaces by the operator."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.gate_up_E2ND, self.down_EDN = nn.Parameter(torch.randn(4, 32, 8)), nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x_TD):
        weight_TK, index_TK = torch.topk(torch.softmax(self.router(x_TD), -1), 2)
        out_TD = torch.zeros_like(x_TD)
        for e in range(4):
            token, slot = torch.where(index_TK == e)
            gate, up = functional.linear(x_TD[token], self.gate_up_E2ND[e]).chunk(2, dim=-1)
            h = functional.linear(functional.silu(gate) * up, self.down_EDN[e])
            out_TD.index_add_(0, token, h * weight_TK[token, slot, None])
        return out_TD


class Graphs:
    """A backend that notes what it is given, and runs it with what another one makes of it."""

    def __init__(self, name=None):
        self.given = []
        self.name, self.runs = name, 0

    def __call__(self, gm, examples):
        self.given.append(gm)
        run = gm.forward if self.name is None else torch._dynamo.lookup_backend(self.name)(gm, examples)

        def counted(*inputs):
            self.runs += 1
            return run(*inputs)

        return counted


def trained(backend, kind=Dense, which="sgd", clip=False, schedule=False, parts=1, calls=3):
    """What some steps return, and everything that they leave: parameters, gradients, optimizer state."""
    torch.manual_seed(0)
    model = kind()
    make, options = OPTIMIZERS[which]
    optimizer = make(model.parameters(), **options)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.9) if schedule else None

    def step(batch):
        optimizer.zero_grad()
        for x_TD, y_TD in batch:
            loss = functional.mse_loss(model(x_TD), y_TD)
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return loss

    run = capture(step, backend=backend)
    losses = [run([(torch.randn(5, 8), torch.randn(5, 8)) for _ in range(parts)]) for _ in range(calls)]
    state = [t for one in optimizer.state.values() for t in one.values() if isinstance(t, torch.Tensor)]
    left = [*losses, *model.parameters(), *(p.grad for p in model.parameters()), *state, *model.buffers()]
    assert stats(run).breaks == 0 or backend not in ("moebius", "eager")
    return left, run


def same_bits(expected, actual):
    return len(expected) == len(actual) and all(map(torch.equal, expected, actual))


@pytest.mark.share(9)
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize(("clip", "schedule", "parts"), PAIRS)
def test_one_graph_with_the_bits_of_eager(which, clip, schedule, parts):
    backend = Graphs()
    expected, _ = trained("eager", Dense, which, clip, schedule, parts)
    actual, run = trained(backend, Dense, which, clip, schedule, parts)
    assert stats(run).breaks == 0
    assert len(backend.given) == stats(run).graphs  # (a schedule's first call has another graph)
    assert backend.runs == 3  # each call, and none of the lowered graph in its place
    for gm in backend.given:
        assert all(type(n.target) is not str for n in gm.graph.nodes if n.op == "call_function")
        assert any("tanh_backward" in str(n.target) for n in gm.graph.nodes)
    assert same_bits(expected, actual)


class Dropping(Dense):
    def forward(self, x_TD):
        return super().forward(functional.dropout(x_TD, 0.5))


class Cast(Dense):
    def forward(self, x_TD):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out_TD = super().forward(x_TD)
        return out_TD.float()


class Normed(Dense):
    """Buffers that forward writes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x_TD):
        return super().forward(self.norm(x_TD))


@pytest.mark.parametrize("kind", [Dropping, Cast, Normed])
def test_draws_casts_and_buffers(kind):
    backend = Graphs()
    expected, _ = trained("eager", kind)
    actual, run = trained(backend, kind)
    assert backend.runs == 3 and stats(run).breaks == 0
    assert same_bits(expected, actual)


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", [Dense, Routed])
@pytest.mark.parametrize("which", ["momentum", "adamw"])
def test_through_aot_eager(kind, which):
    """Routed: against the lowered graph, as the operator sums in another order than the loop."""
    backend = Graphs("aot_eager")
    expected, _ = trained("eager" if kind is Dense else "moebius", kind, which, clip=True, schedule=True)
    actual, run = trained(backend, kind, which, clip=True, schedule=True)
    assert stats(run).breaks == 0 and len(backend.given) == stats(run).graphs
    assert same_bits(expected, actual)


def test_the_experts_stay_one_operator():
    backend = Graphs()
    trained(backend, Routed)
    names = [str(n.target) for n in backend.given[-1].graph.nodes if "moebius" in str(n.target)]
    assert len(names) == 2, names  # it and its backward


@pytest.mark.timeout(240)
def test_inductor_trains_alike(caplog):
    """Inductor fuses sums, and multiplies and adds in other orders: 1e-5 is some hundred times float32's rounding, for
    values of about 1 after four steps. It warns of nothing (keys of its cache on disk hold the sizes' relations)."""
    monitored = logging.getLogger("torch._inductor")
    monitored.addHandler(caplog.handler)
    expected, _ = trained("eager", Dense, "momentum", clip=True)
    actual, run = trained("inductor", Dense, "momentum", clip=True)
    monitored.removeHandler(caplog.handler)
    assert stats(run).breaks == 0
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(("wanted", "graphs"), [(None, 1), (True, 1), (False, 2)])
def test_who_does_not_want_it(wanted, graphs):
    backend = Graphs("aot_eager")
    model = Dense()
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def step(x_TD):
        optimizer.zero_grad()
        loss = model(x_TD).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = capture(step, backend=backend, whole_step=wanted)
    run(torch.ones(2, 8))
    assert len(backend.given) == stats(run).graphs == graphs


@pytest.mark.timeout(240)
def test_a_backend_that_rounds_numbers():
    """Inductor's code has a learning rate as a float32: of a step in float64 it gets the parts."""
    found = []
    for backend in ("eager", "inductor"):
        p_D = nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimizer = optim.SGD([p_D], lr=0.1)

        def step(p_D, optimizer):
            optimizer.zero_grad()
            loss = p_D.square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = capture(step, backend=backend)
        for rate in (0.1, 0.07, 0.013):
            optimizer.param_groups[0]["lr"] = rate
            run(p_D, optimizer)
        found.append(p_D.detach())
    torch.testing.assert_close(*found, rtol=1e-15, atol=0.0)
    assert any("float32" in stop.detail for stop in explain(run)(p_D, optimizer).breaks)


def test_the_loss_has_a_history_that_is_freed():
    (loss, *_), _ = trained(Graphs(), calls=1)
    assert loss.requires_grad and not loss.is_leaf
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_numbers_of_the_step_are_python_s():
    """A text of the loss, and arithmetic on it, stand behind the graph."""
    x_TD = torch.randn(5, 8)

    def losses(backend):
        torch.manual_seed(0)
        model = Dense()
        optimizer = optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            loss = model(x_TD).square().mean()
            loss.backward()
            before = loss.item()
            loss.detach().mul_(0.0)  # what was read stays read
            optimizer.step()
            return before * 3.0, before

        run = capture(step, backend=backend)
        return [run() for _ in range(3)], stats(run).breaks

    backend = Graphs()
    assert losses(backend) == losses("eager")
    assert len(backend.given) == 1 and losses(backend)[1] == 0


# ----------------------------------------------------------------------------------------------------------------------
# What is refused: backward runs between two graphs then, and the report says why
# ----------------------------------------------------------------------------------------------------------------------


def hooked(model, optimizer, x_TD):
    model.up.weight.register_hook(lambda g: g * 2)


def gradient_before(model, optimizer, x_TD):
    model(x_TD).sum().backward()


def with_history(model, optimizer, x_TD):
    loss = model(x_TD).square().mean()
    loss.backward()
    optimizer.step()
    return model(x_TD).sum()


def plain(model, optimizer, x_TD):
    loss = model(x_TD).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def with_a_region(model, optimizer, x_TD):
    h = model(x_TD)
    for e in range(4):
        rows = torch.where(x_TD[:, 0] > e * 0.1)[0]
        h = h.index_add(0, rows, torch.atan(h[rows]))
    loss = h.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def without_backward(model, optimizer, x_TD):
    return model(x_TD).sum().detach()


def sets_gradients(model, optimizer, x_TD):
    loss = model(x_TD).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad = p.grad * 2
    optimizer.step()
    return loss.detach()


REFUSED = {
    "gradient hooks": (plain, hooked, "hook"),
    "a gradient before": (plain, gradient_before, "gradient before backward"),
    "a history": (with_history, None, "with a history"),
    "gradients that are set": (sets_gradients, None, "sets .grad"),
}


def run_twice(backend, step, prepare):
    torch.manual_seed(0)
    model = Dense()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x_TD = torch.randn(5, 8)
    if prepare is not None:
        prepare(model, optimizer, x_TD)
    run = capture(step, backend=backend)
    report = explain(run)(model, optimizer, x_TD)
    again = run(model, optimizer, x_TD)
    return [report.result, again, *model.parameters(), *(p.grad for p in model.parameters())], report


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    step, prepare, why = REFUSED[what]
    backend = Graphs()
    expected, _ = run_twice("eager", step, prepare)
    actual, report = run_twice(backend, step, prepare)
    assert same_bits(expected, actual)
    assert report.breaks and why in report.breaks[0].detail, report.breaks
    assert not any("backward" in str(n.target) for gm in backend.given for n in gm.graph.nodes)


@pytest.mark.parametrize("step", [with_a_region, without_backward])
def test_refused_without_a_word(step):
    backend = Graphs()
    expected, _ = run_twice("eager", step, None)
    actual, _ = run_twice(backend, step, None)
    assert [a is None for a in actual] == [a is None for a in expected]
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True) if a is not None)
    assert not any("backward" in str(n.target) for gm in backend.given for n in gm.graph.nodes)


def test_parameters_that_share_memory():
    def losses(backend):
        base = torch.ones(8)
        first, second = nn.Parameter(base[:5]), nn.Parameter(base[3:])

        def step(first, second):
            loss = (first.sum() * second.sum()).square()
            loss.backward()
            with torch.no_grad():
                first.sub_(first.grad * 0.01)
                second.sub_(second.grad * 0.01)
            first.grad = second.grad = None
            return loss.detach()

        run = capture(step, backend=backend)
        return [run(first, second) for _ in range(3)]

    backend = Graphs()
    assert losses(backend) == losses("eager")
    assert not any("mul_backward" in str(n.target) for gm in backend.given for n in gm.graph.nodes)
    assert len(backend.given) > 1


def test_a_backend_that_cannot_compile_it_whole():
    def backend(gm, examples):
        if any("backward" in str(n.target) for n in gm.graph.nodes):
            raise NotImplementedError("not whole")
        return gm.forward

    expected, _ = run_twice("eager", plain, None)
    actual, report = run_twice(backend, plain, None)
    assert same_bits(expected, actual)
    assert "not whole" in report.breaks[0].detail


class Separate(Routed):
    """Experts that are modules: one that no token chose gets no gradient, and weight decay passes over it."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(4)])
        del self.gate_up_E2ND, self.down_EDN

    def forward(self, x_TD):
        logits_TE = self.router(x_TD) - torch.tensor([0.0, 0.0, 0.0, 1e9])
        weight_TK, index_TK = torch.topk(torch.softmax(logits_TE, -1), 2)
        out_TD = torch.zeros_like(x_TD)
        for e in range(4):
            token, slot = torch.where(index_TK == e)
            out_TD.index_add_(0, token, self.experts[e](x_TD[token]) * weight_TK[token, slot, None])
        return out_TD


def test_which_experts_get_gradients_is_as_in_plain_python():
    def left(backend):
        torch.manual_seed(0)
        model = Separate()
        optimizer = optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

        def step(x_TD):
            optimizer.zero_grad()
            model(x_TD).square().mean().backward()
            optimizer.step()

        run = step if backend is None else capture(step, backend=backend)
        for _ in range(3):
            run(torch.randn(6, 8))
        return [*(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters())]

    for plain_one, ours in zip(left(None), left(Graphs()), strict=True):
        assert (plain_one is None) == (ours is None)
        if ours is not None:  # lowered, the experts' products are summed in another order
            torch.testing.assert_close(plain_one, ours)


def late_gradient(model, x_TD):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def late_hook(model, x_TD):
    model.up.weight.register_hook(lambda g: g * 2)


def late_hooks_on_what_is_saved(model, x_TD):
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved)


@pytest.mark.parametrize("change", [late_gradient, late_hook, late_hooks_on_what_is_saved])
def test_a_later_call_that_does_not_fit(change):
    """What capture has no guard for is asked before each run."""

    def left(backend):
        torch.manual_seed(0)
        model, x_TD = Dense(), torch.randn(5, 8)

        def step():
            loss = model(x_TD).square().mean()
            loss.backward()
            return loss.detach()

        run = capture(step, backend=backend)
        losses = [run()]
        for p in model.parameters():
            p.grad = None
        with change(model, x_TD) or nullcontext():
            losses += [run(), run()]
        return [*losses, *(p.grad for p in model.parameters())]

    backend = Graphs()
    assert same_bits(left("eager"), left(backend))
    assert any("tanh_backward" in str(n.target) for n in backend.given[0].graph.nodes)


def test_a_later_call_that_looks_for_anomalies():
    weight_D = torch.zeros(3, requires_grad=True)

    def step():
        weight_D.grad = None
        (weight_D.sqrt() * weight_D).sum().backward()  # zero times infinity

    backend = Graphs()
    run = capture(step, backend=backend)
    run()
    assert len(backend.given) == 1
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="returned nan"):
        run()


@pytest.fixture(autouse=True)
def forgotten():
    moebius.reset()
    yield
    moebius.reset()

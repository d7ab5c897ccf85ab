"""Checkpointed calls that change what is older: in the graph where backward would not do it again, else a break."""

from __future__ import annotations

import contextvars

import pytest
import torch
from expert_layer import HitExperts
from torch.utils.checkpoint import checkpoint

from moebius import capture, explain, stats
from moebius.regions.recompute import Again

collecting = contextvars.ContextVar("collecting", default=None)
flags = {"on": False}


class Layer(HitExperts):
    def __init__(self):
        super().__init__()
        self.dropout, self.last, self.calls, self.seen = torch.nn.Dropout(0.1), None, 0, []

    def forward(self, x):
        return x + self.dropout(super().forward(x))


class Collects(Layer):
    """As transformers collects router logits: backward finds no collector."""

    def note(self, logits):
        found = collecting.get()
        if found is not None:
            found.append(logits)


class Flagged(Layer):
    def note(self, logits):
        if flags["on"]:
            self.last = logits
            self.calls += 1


class Always(Layer):
    def note(self, logits):
        self.seen.append(logits.detach().mean())


class Counts(Layer):
    def note(self, logits):
        self.calls += 1


class Other(Layer):
    """What backward runs is another graph, which plain Python refuses."""

    def note(self, logits):
        found = collecting.get()
        if found is not None:
            found.append(logits.sin().exp() * 2)


class Model(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = torch.nn.ModuleList(layer() for _ in range(2))

    def forward(self, x):
        logits = []
        token, flags["on"] = collecting.set(logits), True
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        collecting.reset(token)
        flags["on"] = False
        logits += [layer.last for layer in self.layers if layer.last is not None]
        return x, sum(part.logsumexp(-1).square().mean() for part in logits) if logits else 0.0


def step(model, optimizer, x):
    optimizer.zero_grad()
    y, auxiliary = model(x)
    loss = y.square().mean() + 0.1 * auxiliary
    loss.backward()
    optimizer.step()
    return loss.detach()


def build(layer):
    torch.manual_seed(0)
    model = Model(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def run(function, layer):
    """What three steps give, leave in the model, and raise."""
    (model, optimizer), found = build(layer), []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(6, 8)
        try:
            found.append(function(model, optimizer, x))
        except torch.utils.checkpoint.CheckpointError as error:
            found.append(str(error))
        found.append(torch.get_rng_state())
        for inner in model.layers:
            found += [inner.calls, len(inner.seen), *inner.seen, None if inner.last is None else inner.last.detach()]
    return [*found, *model.parameters()]


def same(a, b):
    return type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


@pytest.mark.share(2)
@pytest.mark.parametrize(("layer", "breaks"), [(Collects, 0), (Flagged, 0), (Always, 1), (Counts, 1), (Other, 1)])
def test_what_is_collected_is_what_plain_python_collects(layer, breaks):
    captured = capture(step, backend="eager")
    ours, plain = run(captured, layer), run(step, layer)
    assert len(ours) == len(plain) and all(map(same, ours, plain))
    report = explain(step)(*build(layer), torch.randn(6, 8)) if layer is not Other else None
    if report is not None:
        assert bool(report.breaks) == bool(breaks)
    if not breaks:
        assert [r.lowered for r in report.expert_regions] == [True, True]


@pytest.mark.parametrize("layer", [Always, Counts, Other])
def test_it_is_looked_at(layer, monkeypatch):
    """Without the second look the answer, or what is left behind, is wrong."""
    plain = run(step, layer)
    monkeypatch.setattr(Again, "is_the_same", lambda again: True)
    ours = run(capture(step, backend="eager"), layer)
    assert not (len(ours) == len(plain) and all(map(same, ours, plain)))


def test_with_backward_outside_of_the_step_it_is_a_break():
    def forward(model, x):
        y, auxiliary = model(x)
        return y.square().mean() + auxiliary

    (ours, _), (plain, _) = build(Always), build(Always)
    captured = capture(forward, backend="eager")
    for seed in range(2):
        for function, model in ((captured, ours), (forward, plain)):
            torch.manual_seed(seed)
            function(model, torch.randn(6, 8)).backward()
    assert stats(captured).breaks
    assert [len(layer.seen) for layer in ours.layers] == [len(layer.seen) for layer in plain.layers] == [4, 4]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), plain.parameters(), strict=True))


def test_a_step_whose_backward_is_retained():
    def twice(model, optimizer, x):
        optimizer.zero_grad()
        y, auxiliary = model(x)
        loss = y.square().mean() + auxiliary
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = capture(twice, backend="eager")
    ours, plain = run(captured, Collects), run(twice, Collects)
    assert all(map(same, ours, plain))


def test_transformers_router_logits_with_gradient_checkpointing():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=32, output_router_logits=True,
        use_cache=False, attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip

    def made():
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train(), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(model, optimizer, ids):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    ours, plain, captured = made(), made(), capture(train, backend="eager")
    for seed in range(3):
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(captured(*ours, ids), train(*plain, ids))
    assert all(map(torch.equal, ours[0].parameters(), plain[0].parameters()))
    report = explain(train)(*ours, ids)
    assert not report.breaks and [r.lowered for r in report.expert_regions] == [True, True]

"""Gradients of other kinds, and what modules of torch's own do with them: which are one graph, and which break.

Six calls of each beside plain Python (``tests/support/tables.py``).
"""

from __future__ import annotations

import warnings
import weakref

import plain_python
import pytest
import torch
import torch.nn.functional as F
from gradient_programs import FusedExperts
from tables import ROWS, hold
from torch import nn

from moebius import capture, explain
from moebius.tensors import gradients

# ----------------------------------------------------------------------------------------------------------------------
# Sparse gradients
# ----------------------------------------------------------------------------------------------------------------------


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4, sparse=True)

    def forward(self, index):
        return self.a(index) + self.b(index)


def trained(model, optimizer=None, read=lambda model: None, call=lambda model, x: model(torch.arange(x.shape[0]))):
    chosen = optimizer and optimizer(model.parameters())

    def step(x):
        model.zero_grad()
        loss = call(model, x).pow(2).mean()
        loss.backward()
        found = read(model)
        if chosen is not None:
            chosen.step()
        return loss.detach(), found

    return step, [model]


def sparse_sgd():
    return trained(Embeddings(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


def sparse_adam():
    return trained(Embeddings(), torch.optim.SparseAdam)


def sparse_error():
    return trained(Embeddings(), torch.optim.Adam)


def sparse_bag():
    bag = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    return trained(
        bag, lambda p: torch.optim.SGD(p, lr=0.1), call=lambda m, x: m(torch.arange(x.shape[0])[None])
    )


def sparse_asked():
    return trained(Embeddings(), read=lambda m: (m.a.weight.grad.is_sparse, str(m.b.weight.grad.layout)))


def sparse_numbers():
    return trained(Embeddings(), read=lambda m: m.b.weight.grad.coalesce().values().norm())


def sparse_gather():
    first = torch.zeros(4, 1, dtype=torch.long)
    return trained(
        nn.Linear(4, 4),
        read=lambda m: m.weight.grad.is_sparse,
        call=lambda m, x: torch.gather(m.weight, 1, first, sparse_grad=True),
    )


def sparse_positional():
    weight = nn.Parameter(torch.randn(10, 4))

    def step(x):
        F.embedding(torch.arange(3), weight, None, None, 2.0, False, True).sum().backward()
        sparse, weight.grad = weight.grad.is_sparse, None
        return sparse

    return step, [weight]


def sparse_hook():
    model = Embeddings()
    seen = []
    model.a.weight.register_hook(lambda g: g * 2 if g.is_sparse else g)
    step, reached = trained(model)
    return step, [*reached, seen]


def sparse_in_another_layer():
    """The layers are alike: the second one is not interpreted by itself."""
    layers = nn.ModuleList(nn.Embedding(5, 4, sparse=True) for _ in range(3))

    def call(layers, x):
        layers[0](torch.arange(3))
        return layers[1](torch.arange(3)) + layers[2](torch.arange(3))

    return trained(layers, read=lambda m: m[2].weight.grad.is_sparse, call=call)


def sparse_and_nobody_reads():
    return trained(Embeddings())


def sparse_frozen():
    model = Embeddings().requires_grad_(False)
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = layer(model(torch.arange(x.shape[0]))).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [model, layer, optimizer]


# ----------------------------------------------------------------------------------------------------------------------
# Modules that ask whether they are compiled
# ----------------------------------------------------------------------------------------------------------------------


def padded_encoder():
    """torch's fast path gives zeros where the rows are padding; the other path gives something else."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).eval()

    def step(x):
        padding = torch.zeros(2, x.shape[0], dtype=torch.bool)
        padding[1, -1] = True
        with torch.no_grad():
            return model(x[None].expand(2, -1, -1), src_key_padding_mask=padding)

    with warnings.catch_warnings():  # torch warns of it once in a process
        warnings.simplefilter("ignore")
        step(torch.rand(3, 4))
    return step, [model]


# ----------------------------------------------------------------------------------------------------------------------
# Recurrent layers: they hold their weights by weak references
# ----------------------------------------------------------------------------------------------------------------------


def recurrent(model):
    return trained(model, lambda p: torch.optim.AdamW(p, lr=0.1), call=lambda m, x: m(x.detach()[:, None])[0])


def lstm():
    return recurrent(nn.LSTM(4, 6, 2, dropout=0.5, bidirectional=True))


def gru():
    return recurrent(nn.GRU(4, 6, batch_first=True))


def lstm_with_a_state():
    model, kept = nn.LSTM(4, 6), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        out, state = model(x.detach()[:, None], kept.get("state"))
        kept["state"] = tuple(t.detach() for t in state)
        loss = out.pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), out.stride()

    return step, [model, kept]


def lstm_of_other_weights():
    """A parameter is replaced between calls: the references are to the old one."""
    model, count = nn.LSTM(4, 6), [0]

    def step(x):
        return model(x[:, None])[0]

    def run(x):
        count[0] += 1
        if count[0] == 3:
            model.weight_hh_l0 = nn.Parameter(torch.ones(24, 6))
        return step(x)

    return run, [model, count]


def packed():
    """How long each sequence is decides sizes."""
    model = nn.GRU(4, 6, batch_first=True)

    def call(model, x):
        rows = nn.utils.rnn.pack_padded_sequence(x.detach().expand(2, -1, -1), [x.shape[0], 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(model(rows)[0])[0]

    return trained(model, lambda p: torch.optim.SGD(p, lr=0.1), call=call)


def masked_attention():
    model = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.1)

    def call(model, x):
        rows = x.detach()[None]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0])
        return model(rows, rows, rows, attn_mask=mask, is_causal=True)[0]

    return trained(model, lambda p: torch.optim.AdamW(p, lr=0.1), call=call)


# ----------------------------------------------------------------------------------------------------------------------
# backward(create_graph=True)
# ----------------------------------------------------------------------------------------------------------------------


def penalised(model, loss_of, optimizer=None, inputs=False, prepare=lambda model: None):
    """A step whose loss has a penalty on the gradients that a first backward has left."""
    optimizer = optimizer and optimizer(model.parameters())
    prepare(model)

    def step(x):
        x = x.detach().clone().requires_grad_()
        model.zero_grad()
        loss = loss_of(model, x)
        loss.backward(create_graph=True, inputs=[x] if inputs else None)
        penalty = sum(p.grad.pow(2).sum() for p in ((x,) if inputs else (x, *model.parameters())))
        found = [p.grad.requires_grad for p in model.parameters() if p.grad is not None], x.grad.stride()
        model.zero_grad()
        (loss + penalty).backward()
        if optimizer is not None:
            optimizer.step()
        result = penalty.detach(), found, [p.grad * 1 for p in model.parameters()]
        model.zero_grad()
        x.grad = None
        return result

    return step, [model]


def squared(model, x):
    return model(x).pow(2).mean()


def penalty_on_all():
    return penalised(tanh(), squared, lambda p: torch.optim.AdamW(p, lr=0.1))


def penalty_on_inputs():
    return penalised(tanh(), squared, inputs=True)


def penalty_through_layers():
    """The layers are alike: a gradient goes through them, so each is interpreted."""
    return penalised(nn.Sequential(*(tanh() for _ in range(3))), squared)


def penalty_of_other_strides():
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(torch.randn(4, 4).t())
    return penalised(model, lambda m, x: m(x).pow(3).sum())


def penalty_that_is_linear():
    """Its gradients have no history."""

    def step(x):
        model.zero_grad()
        model(x.detach()).sum().backward(create_graph=True)
        return [(p.grad * 2, p.grad.requires_grad) for p in model.parameters()]

    model = nn.Linear(4, 4)
    return step, [model]


def penalty_under_autocast():
    def loss_of(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().pow(2).mean()

    return penalised(tanh(), loss_of)


def penalty_on_top():
    """The second backward adds to what the first has left."""
    model = tanh()

    def step(x):
        model.zero_grad()
        squared(model, x.detach()).backward(create_graph=True)
        penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
        penalty.backward()
        result = penalty.detach(), [p.grad.detach().clone() for p in model.parameters()]
        model.zero_grad()
        return result

    return step, [model]


def penalty_on_a_penalty():
    """The second one finds gradients, and makes new tensors of the sums."""
    model = tanh()

    def step(x):
        x = x.detach().clone().requires_grad_()
        loss = squared(model, x)
        for _ in range(2):
            loss.backward(create_graph=True)
            loss = x.grad.pow(2).sum()
        model.zero_grad()
        x.grad = None
        return loss.detach()

    return step, [model]


def penalty_with_hooks():
    return penalised(tanh(), squared, prepare=lambda model: model[0].weight.register_hook(lambda g: g * g))


def penalty_through_a_function():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 3 * x * x * gradient

    return penalised(tanh(), lambda model, x: Cube.apply(model(x)).mean())


def tanh():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


# ----------------------------------------------------------------------------------------------------------------------
# Averages
# ----------------------------------------------------------------------------------------------------------------------


def average_over_all_batches():
    return trained(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
        lambda p: torch.optim.SGD(p, lr=0.1),
        call=lambda m, x: m(x),
    )


def averaged_model_with_buffers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    swa = torch.optim.swa_utils
    step, reached = trained(model, lambda p: torch.optim.SGD(p, lr=0.1), call=lambda m, x: m(x.detach()))
    plain = swa.AveragedModel(model, use_buffers=True)
    ema = swa.AveragedModel(model, use_buffers=True, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))

    def run(x):
        result = step(x)
        plain.update_parameters(model)
        ema.update_parameters(model)
        return result, plain(x.detach()).detach().sum(), ema(x.detach()).detach().sum()

    return run, [*reached, plain, ema]


SPARSE = ("sparse gradient", "sparse=False")
TABLE = {
    sparse_sgd: SPARSE,
    sparse_adam: SPARSE,
    sparse_error: SPARSE,
    sparse_bag: SPARSE,
    sparse_asked: SPARSE,
    sparse_numbers: SPARSE,
    sparse_gather: SPARSE,
    sparse_positional: SPARSE,
    sparse_hook: SPARSE,
    sparse_in_another_layer: SPARSE,
    sparse_and_nobody_reads: None,
    sparse_frozen: None,
    lstm: None,
    gru: None,
    lstm_with_a_state: None,
    lstm_of_other_weights: ("result cannot be rebuilt", "return tensors"),
    masked_attention: None,
    packed: None,
    penalty_on_all: None,
    penalty_on_inputs: None,
    penalty_through_layers: None,
    penalty_of_other_strides: None,
    penalty_that_is_linear: None,
    penalty_under_autocast: None,
    penalty_on_top: None,
    penalty_on_a_penalty: ("Tensor.backward", "torch.autograd.grad"),
    penalty_with_hooks: ("Tensor.backward", "torch.autograd.grad"),
    penalty_through_a_function: ("autograd.Function", "give it as an argument"),
    average_over_all_batches: None,
    averaged_model_with_buffers: None,
    padded_encoder: ("operator without a fake", "runs natively"),
}


@pytest.fixture(scope="module", autouse=True)
def warned():
    """torch warns of create_graph=True once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ones(1, requires_grad=True).sum().backward(create_graph=True)


@pytest.mark.share(12)
@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_as_the_table_says(recipe):
    hold(recipe, TABLE[recipe])


@pytest.mark.parametrize("recipe", [sparse_asked, sparse_in_another_layer], ids=lambda r: r.__name__)
def test_taken_for_dense_it_would_be_wrong(recipe, monkeypatch):
    monkeypatch.setattr(gradients, "SPARSE_OPTIONS", {})
    with pytest.raises(AssertionError):
        plain_python.compare(recipe, "eager", ROWS)


def test_a_weak_reference_to_an_argument():
    """It is asked whether it is the argument's: in one call it is, in the next it is not."""
    one, other = torch.ones(4), torch.zeros(4)
    reference = weakref.ref(one)

    @capture
    def is_it(x, w):
        return x * 2 if reference() is w else x * 3

    found = [is_it(torch.ones(3), w)[0].item() for w in (one, other, one, one, other)]
    assert found == [2, 3, 2, 2, 3]


def test_experts_stay_as_they_are_written_where_backward_makes_a_graph():
    layer, rows = FusedExperts(), torch.rand(6, 4)

    def step(x):
        layer(x).pow(2).sum().backward(create_graph=True)
        penalty = layer.gate_up.grad.pow(2).sum()
        layer.zero_grad()
        penalty.backward()
        found = [p.grad for p in layer.parameters()]
        layer.zero_grad()
        return found

    report = explain(capture(step))(rows)
    for got, want in zip(report.result, step(rows), strict=True):
        torch.testing.assert_close(got, want)
    assert not report.breaks and "create_graph" in report.expert_regions[0].refusal

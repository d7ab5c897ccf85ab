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
from tables import ROWS, hold
from torch import nn

from moebius import capture
from moebius.tracking import gradients

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


def masked_attention():
    model = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.1)

    def call(model, x):
        rows = x.detach()[None]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0])
        return model(rows, rows, rows, attn_mask=mask, is_causal=True)[0]

    return trained(model, lambda p: torch.optim.AdamW(p, lr=0.1), call=call)


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
    lstm_of_other_weights: ("parameter made in the step", "before the step"),
    masked_attention: None,
    padded_encoder: ("operator without a fake", "runs natively"),
}


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

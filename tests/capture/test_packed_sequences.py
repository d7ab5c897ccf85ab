"""Packed sequences: torch's own fakes have another number of rows and another dtype than the operator gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from moebius import capture, explain, stats

LENGTHS = ([5, 3, 2], torch.tensor([5, 3, 2]), [5, 5, 5])
LAYERS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def what_it_is(packed, x):
    return packed.data * 2, packed.data.shape[0] * x.sum(), packed.batch_sizes.dtype, packed.batch_sizes + 1


def gradient(packed, x):
    (packed.data**2).sum().backward()
    return x.grad


def through(name, batch_first):
    torch.manual_seed(0)
    layer = LAYERS[name](4, 3, batch_first=batch_first)

    def use(packed, x):
        out, last = layer(packed)
        padded, lengths = pad_packed_sequence(out, batch_first=batch_first)
        return padded, lengths, last

    return use


USES = {"what it is": lambda _: what_it_is, "its gradient": lambda _: gradient} | {
    name: lambda batch_first, name=name: through(name, batch_first) for name in LAYERS
}


def plain(value):
    if isinstance(value, tuple):
        return [*map(plain, value)]
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("use, batch_first, sorted_", [*itertools.product(USES, (True, False), (True, False))])
def test_as_plain(use, batch_first, sorted_):
    for lengths in LENGTHS:
        used = USES[use](batch_first)
        given = lengths if sorted_ else lengths[::-1] if isinstance(lengths, list) else lengths.flip(0)

        def step(x, given=given, used=used):
            return used(pack_padded_sequence(x, given, batch_first=batch_first, enforce_sorted=sorted_), x)

        captured = capture(step, backend="eager")
        found = []
        for one in (step, captured, captured):
            x = torch.arange(60.0).reshape((3, 5, 4) if batch_first else (5, 3, 4)).requires_grad_()
            found.append(plain(one(x)))
        assert found[0] == found[1] == found[2]
        assert use not in ("what it is", "its gradient") or stats(captured).breaks == 0


def test_an_operator_in_c_that_takes_no_sizes_that_vary_is_a_break_and_no_error_of_ours():
    layer, reports = LAYERS["gru"](4, 3, batch_first=True), []

    def step(x, lengths):
        packed = pack_padded_sequence(x, lengths.tolist(), batch_first=True)
        return pad_packed_sequence(layer(packed)[0], batch_first=True)[0]

    captured = capture(step, backend="eager")
    for lengths in ([6, 5, 2, 2], [5, 4, 3, 1], [4, 4, 4, 2], [3, 2, 2]):
        x, lengths = torch.randn(len(lengths), 6, 4), torch.tensor(lengths)
        assert torch.equal(captured(x, lengths), step(x, lengths))
        reports += explain(captured)(x, lengths).breaks
    reasons = {found.reason for found in reports}
    assert "operator without a fake" in reasons and "exception that did not come" not in reasons

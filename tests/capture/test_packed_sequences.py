"""Packed sequences: torch's own fakes have another number of rows and another dtype than the operator gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from moebius import capture, stats

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


@pytest.mark.share(10)
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


# What a training step does with packed sequences: what is read of them, how the lengths come, the layer.
def tags(model, packed, x, targets):
    out, lengths = pad_packed_sequence(model.layer(packed)[0], batch_first=True)
    real = torch.arange(out.shape[1]) < lengths[:, None]
    return nn.functional.cross_entropy(model.out(out)[real], targets[real])


def padded_tags(model, packed, x, targets):
    out, _ = pad_packed_sequence(model.layer(packed)[0], batch_first=True, padding_value=0.5)
    return nn.functional.cross_entropy(model.out(out).view(-1, 6), targets.view(-1))


def to_full_length(model, packed, x, targets):
    out, _ = pad_packed_sequence(model.layer(packed)[0], batch_first=True, total_length=x.shape[1] + 1)
    return model.out(out[:, :-1] * x[..., :1]).square().mean()


def steps_first(model, packed, x, targets):
    out, lengths = pad_packed_sequence(model.layer(packed)[0])
    return (model.out(out).sum((0, 2)) / lengths).sum()


def last_state(model, packed, x, targets):
    last = model.layer(packed)[1]
    return nn.functional.cross_entropy(model.out(last[0][-1] if type(last) is tuple else last[-1]), targets[:, 0])


def of_rows(model, packed, x, targets):
    lengths = pad_packed_sequence(packed, batch_first=True)[1]
    rows = pack_padded_sequence(targets, lengths, batch_first=True, enforce_sorted=False).data
    return nn.functional.cross_entropy(model.out(model.layer(packed)[0].data), rows)


READ = (tags, padded_tags, to_full_length, steps_first, last_state, of_rows)
GIVEN = {"tensor": lambda lengths: lengths, "list": torch.Tensor.tolist, "read in the step": lambda lengths: lengths}


@pytest.mark.share(3)
@pytest.mark.parametrize("read, given, name", [*itertools.product(READ, GIVEN, LAYERS)])
def test_training_on_lengths_that_vary_is_one_graph(read, given, name):
    """Lengths are inputs: a batch of others is a hit once sizes are symbolic."""

    def trained(capture_it):
        torch.manual_seed(0)
        model = nn.Module()
        model.layer, model.out = LAYERS[name](4, 5, batch_first=True, bidirectional=False), nn.Linear(5, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, lengths, targets):
            optimizer.zero_grad()
            lengths = lengths.tolist() if given == "read in the step" else lengths
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            loss = read(model, packed, x, targets)
            loss.backward()
            optimizer.step()
            return loss.item()

        one = capture(step, backend="eager") if capture_it else step
        found = []
        for lengths in ([6, 2, 5, 2], [4, 5, 1, 3], [2, 4, 4, 7], [3, 2, 3], [2, 8, 5], [1, 1, 2, 2], [9, 4, 9]):
            longest, lengths = max(lengths), torch.tensor(lengths)
            x, targets = torch.randn(len(lengths), longest, 4), torch.randint(6, (len(lengths), longest))
            found.append(one(x, GIVEN[given](lengths), targets))
        return found, [p.tolist() for p in model.parameters()], one

    wanted, state, _ = trained(False)
    found, new_state, captured = trained(True)
    assert found == wanted and new_state == state
    assert stats(captured).breaks == 0 and stats(captured).misses <= 4


def test_a_count_that_the_step_has_written_is_not_how_many_were_packed():
    def step(x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        packed.batch_sizes[0] += 2
        return torch.zeros(packed.batch_sizes[0]), int(packed.batch_sizes[0])

    captured = capture(step, backend="eager")
    for lengths in ([3, 2], [4, 1], [2, 2, 1]):
        x, lengths = torch.randn(len(lengths), 4, 2), torch.tensor(lengths)
        assert plain(captured(x, lengths)) == plain(step(x, lengths))

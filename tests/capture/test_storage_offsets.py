"""Inputs that are views into other tensors: where they begin is no new capture, unless something shows it."""

from __future__ import annotations

import copy

import pytest
import torch

from moebius import capture, stats

OFFSETS = ((0, 4, 1, 2, 3, 8, 5), (1, 0, 3, 2, 5))


def computed(x):
    return x * 2 + x[1:].sum(), x.as_strided((2, 2), (1, 2)), x.as_strided((2,), (1,), 3)


def written(x):
    x.mul_(1.5)
    x[1:].add_(1)
    return x.sum()


def copied(x):
    return copy.deepcopy(x) * 2


def asked(x):
    return x.storage_offset(), x[1:].storage_offset(), x + 1


def of_data(x):
    p = torch.zeros(4)
    p.data = x
    return p + 1, p.data.storage_offset()


def as_other(x):
    return x.view(torch.float64) + 1


def handled(x):
    try:
        return x.view(torch.float64) + 1
    except RuntimeError as error:
        return str(error)


def as_complex(x):
    return torch.view_as_complex(x.view(2, 2)).abs()


def placed(x):
    y = x * 1
    return y.is_set_to(x), x.is_set_to(x), x[:].is_set_to(x)


def outcome(step, x):
    try:
        return str(step(x))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "step", [computed, written, copied, asked, of_data, as_other, handled, as_complex, placed], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("offsets", OFFSETS, ids=["even first", "odd first"])
def test_views_of_one_tensor(step, offsets):
    plain, ours = torch.arange(32.0), torch.arange(32.0)
    captured = capture(step, backend="eager")
    for begin in offsets:
        assert outcome(captured, ours[begin : begin + 4]) == outcome(step, plain[begin : begin + 4])
        assert torch.equal(ours, plain)
    if step in (computed, written):
        assert stats(captured).graphs == 1 and not stats(captured).recompiles


def test_two_names_of_one_place_are_set_to_one_another():
    def step(x, y):
        return x.is_set_to(y), x + y

    x = torch.arange(8.0)
    captured = capture(step, backend="eager")
    for y in (x[:], x[:], x * 1):
        assert captured(x, y)[0] == step(x, y)[0]


def test_what_shows_an_offset_is_guarded(monkeypatch):
    monkeypatch.setattr("moebius.tensors.offsets.Offsets.look", lambda *_: None)
    with pytest.raises(AssertionError):
        test_views_of_one_tensor(asked, OFFSETS[0])


def test_a_backend_of_torchs_is_given_each_offset_by_itself():
    captured = capture(lambda x: x * 2, backend=lambda gm, inputs: gm)
    for begin in (0, 1, 2):
        captured(torch.arange(8.0)[begin : begin + 4])
    assert stats(captured).graphs == 3

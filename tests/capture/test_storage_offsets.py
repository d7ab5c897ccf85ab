"""Inputs that are views into other tensors: where they begin is no new capture, unless something shows it."""

from __future__ import annotations

import copy
import itertools

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


# What asks of one tensor asks nothing of others: x is a view at another place in each call, and y is not.
OTHERS = {
    "made of it": lambda x, y: torch.view_as_complex((x * 1).view(2, 2)).abs(),
    "its copy": lambda x, y: x.clone().storage_offset(),
    "another input": lambda x, y: y.storage_offset(),
    "both as data": lambda x, y: (setattr(made := torch.zeros(4), "data", y), made + 1)[1],
    "at a place that is not known": lambda x, y: (y[x.argmax()], torch.view_as_complex(x.view(2, 2) * 1).abs())[1],
}


@pytest.mark.parametrize("asks", OTHERS)
def test_what_asks_of_one_tensor_asks_nothing_of_others(asks):
    def step(x, y):
        return OTHERS[asks](x, y), x + y

    captured, data, y = capture(step, backend="eager"), torch.arange(32.0), torch.arange(4.0)
    for begin in (0, 2, 3, 1, 8):
        x = data[begin : begin + 4]
        assert str(captured(x, y)) == str(step(x, y))
    assert stats(captured).graphs == 1 and not stats(captured).recompiles and not stats(captured).breaks


def test_the_memory_of_a_tensor_says_who_is_asked(monkeypatch):
    monkeypatch.setattr("moebius.tensors.offsets.memory_of", lambda _: None)
    with pytest.raises(AssertionError):
        test_what_asks_of_one_tensor_asks_nothing_of_others("made of it")


def in_a_branch(x, n):
    if n.sum() > 0:
        y = torch.view_as_complex(x.view(2, 2)).abs()
    else:
        y = x[:2] * 1
    return y


def test_what_asks_within_a_branch_asks_of_all():
    captured, data = capture(in_a_branch, backend="eager"), torch.arange(32.0)
    for begin in (0, 2, 3, 1, 8, 5):
        for n in (torch.ones(2), -torch.ones(2)):
            x = data[begin : begin + 4]
            assert told(captured, x, n) == told(in_a_branch, x, n)


def test_a_backend_of_torchs_is_given_each_offset_by_itself():
    captured = capture(lambda x: x * 2, backend=lambda gm, inputs: gm)
    for begin in (0, 1, 2):
        captured(torch.arange(8.0)[begin : begin + 4])
    assert stats(captured).graphs == 3


# A view at a position that only the running step knows: how the position comes, what is taken there, what asks.
POSITIONS = {
    "a number of the call": lambda n, t: n,
    "item()": lambda n, t: t.item(),
    "a tensor": lambda n, t: t,
    "computed": lambda n, t: int((t * 2).sum()) // 2,
}
TAKEN = {
    "a row": lambda x, i: x[i],
    "a row of a part": lambda x, i: x[1:][i],
    "within a row": lambda x, i: x[1, i],
    "columns": lambda x, i: x[:, i],
    "a part of a row": lambda x, i: x[i, 1:3],
}
ASKING = {
    "its offset": lambda view, x: view.storage_offset(),
    "of a view of it": lambda view, x: view.unsqueeze(0).storage_offset(),
    "whether it is another": lambda view, x: view.is_set_to(x[1]),
    "as its data": lambda view, x: (setattr(view, "data", x[1]), view + 1)[1],
    "as another dtype": lambda view, x: view.view(torch.int64),
    "as complex": lambda view, x: torch.view_as_complex(view.unflatten(-1, (-1, 2))),
    "its numbers": lambda view, x: view * 2,
}


def told(step, *given):
    try:
        found = step(*given)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__
    return (found.dtype, found.tolist()) if isinstance(found, torch.Tensor) else found


@pytest.mark.share(5)
@pytest.mark.parametrize("position, taken, asking", [*itertools.product(POSITIONS, TAKEN, ASKING)])
def test_a_view_begins_where_the_running_step_says(position, taken, asking):
    def step(x, n, t):
        return ASKING[asking](TAKEN[taken](x, POSITIONS[position](n, t)), x)

    captured = capture(step, backend="eager")
    for n in (2, 1, 0, 2, 1, 0):
        x, t = torch.arange(24.0).view(4, 6), torch.tensor(n)
        assert told(captured, x.clone(), n, t) == told(step, x.clone(), n, t)


@pytest.mark.parametrize("taken", TAKEN)
def test_a_number_that_selects_is_no_constant(taken):
    """Also where it is 0 or 1 today, which as a size would be one."""
    captured = capture(lambda x, n: TAKEN[taken](x, n) * 2, backend="eager")
    for n in (2, 1, 0, 2, 1, 0):
        x = torch.arange(24.0).view(4, 6)
        assert torch.equal(captured(x, n), TAKEN[taken](x, n) * 2)
    assert stats(captured).misses == 2


def test_a_view_of_real_numbers_as_complex_ones_is_a_break_where_torch_cannot_describe_it():
    captured = capture(lambda z: z * 2, backend="eager")
    for n in (1, 2, 0):
        z = torch.view_as_complex(torch.arange(24.0).view(4, 6)[n].unflatten(-1, (-1, 2)))
        assert torch.equal(captured(z), z * 2)
    assert not stats(captured).graphs

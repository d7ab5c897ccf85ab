"""numpy arrays of integers that are a tensor's memory: what is read of them is followed in the graph, at its place and
with numpy's meaning; what is not followed is a graph break. The same values and types as in plain Python, always."""

# ruff: noqa: B007, F841 (as users write)

from __future__ import annotations

import warnings

import numpy
import pytest
import torch
from answers import same

from moebius import capture, stats
from moebius.tensors import arrays
from moebius.torch_facts import torch_fakes

FOLLOWED, BROKEN = {}, {}


def followed(function):
    FOLLOWED[function.__name__] = function
    return function


def broken(function):
    BROKEN[function.__name__] = function
    return function


@followed
def slices(x, counts):
    out, start = [], 0
    for i, count in enumerate(counts.cpu().numpy()):
        end = start + count
        out.append(x[start:end] * (i + 1))
        start = end
    return torch.cat(out)


@followed
def running_ends(x, counts):
    ends = counts.numpy().cumsum(0)
    out = []
    for i, end in enumerate(ends):
        start = 0 if i == 0 else ends[i - 1]
        out.append(x[start:end].sum(0) + i)
    return torch.stack(out)


@followed
def by_zip(x, counts):
    return [part * n for part, n in zip((x, x + 1, x + 2), counts.numpy(), strict=True)]


@followed
def functions(x, counts):
    a = counts.numpy()
    return x * numpy.cumsum(a)[2] + x * a.sum() - x * a.max() + x[a.min() :].sum() + len(a) + a.ndim + a.size


@followed
def changed_before_it_is_read(x, counts):
    a = counts.numpy()
    counts[0] += 1
    return x[: a[0]] * 2, counts


@followed
def changed_while_it_is_read(x, counts):
    parts = []
    for n in counts.numpy():
        parts.append(x[:n].sum())
        counts.add_(1)
    return torch.stack(parts), counts


@followed
def changed_under_another_name(x, counts):
    a, data = counts.data.numpy(), counts.detach().data
    first = x[: a[0]].sum()
    counts[0] += 1
    second = x[: a[0]].sum()
    data.add_(1)
    return first, second, x[: a[0]].sum(), counts


@followed
def changed_in_a_copy(x, counts):
    a = counts.numpy().copy()
    counts.zero_()
    return x[: a[1]] * 2


@followed
def a_view_of_it(x, counts):
    tail = counts.numpy()[1:]
    counts[2] = 1
    return x[: tail[1]], x[: tail[0] + tail[1]]


@followed
def as_plain_numbers(x, counts):
    a = counts.numpy()
    return [int(n) for n in a], a.tolist(), x.split(a.tolist())


@followed
def split_by_it(x, counts):
    return x.split([counts.numpy()[0] + counts.numpy()[1], counts.numpy()[2]])


@followed
def compared_with_a_tensor(x, counts):
    return [(x > n).sum() for n in counts.numpy()]


@followed
def returned(x, counts):
    a = counts.numpy()
    return x * 2, a, a[0], a[0] + a[1]


@broken
def written_by_numpy(x, counts):
    a = counts.numpy()
    a[0] = 3
    return x[: a[0]], counts


@broken
def added_to_by_numpy(x, counts):
    a = counts.numpy()
    a += 1
    return x[: a[0]], counts


@broken
def a_text(x, counts):
    return x * 2, f"{counts.numpy()[0]} {counts.numpy()[0]!r} {counts.numpy()}"


@broken
def divided(x, counts):
    return x / (counts.numpy()[0] / 2), counts.numpy()[0] // 2


@broken
def an_answer_that_is_kept(x, counts):
    same = counts.numpy()[0] == 2
    return x * 2, same, type(same).__name__, same is True


@broken
def a_key(x, counts):
    return {n: x * i for i, n in enumerate(counts.numpy())}


@broken
def of_which_class(x, counts):
    n = counts.numpy()[0]
    return x * 2, isinstance(n, int), type(n).__name__, type(n + 1).__name__


@broken
def a_python_list_by_its_numbers(x, counts):
    return [("a", "b", "c", "d", "e", "f", "g")[n] for n in counts.numpy()]


@broken
def of_other_integers(x, counts):
    a = counts.to(torch.int8).numpy()
    return x * 2, a[0] + numpy.int8(120) if a[0] > 100 else a[0]


@broken
def of_floats(x, counts):
    return x * 2, x.detach().numpy().mean()


@broken
def without_an_axis(x, counts):
    return x[: counts.sum().numpy() // 2]


@broken
def too_far(x, counts):
    try:
        return counts.numpy()[9]
    except IndexError as error:
        return x, str(error)


@broken
def across_a_break(x, counts):
    a, numbers = counts.numpy(), enumerate(counts.numpy())
    next(numbers)
    setattr(torch, "_a_tests_own", a[0])  # noqa: B010
    del torch._a_tests_own
    return x[: a[1]], list(numbers), a[1]


def compare(function, batches=((2, 3, 1), (0, 6, 0), (4, 1, 1), (1, 1, 4))):
    captured = capture(function)
    for batch in batches:
        x = torch.randn(6, 3)
        mine, plain = (torch.tensor(batch) for _ in range(2))
        a, b = captured(x.clone(), mine), function(x.clone(), plain)
        assert same(a, b) and torch.equal(mine, plain)
    return captured


@pytest.mark.parametrize("name", FOLLOWED)
def test_one_graph(name):
    captured = compare(FOLLOWED[name])
    assert stats(captured).graphs == 1


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_followed(name):
    compare(BROKEN[name])


def test_an_array_that_is_returned_shares_the_tensors_memory():
    counts = torch.tensor([1, 2])
    a = capture(lambda counts: (counts * 2, counts.numpy()))(counts)[1]
    counts[0] = 7
    assert a[0] == 7


DTYPES = sorted(arrays.KINDS, key=str)


def kept(n, box):
    box.append(n)
    return n, {"n": n}


def as_numbers(n, box):
    return (n.item(), float(n)) if n.ndim == 0 else n.shape


USES = {
    "kept": kept,
    "as_numbers": as_numbers,
    "as_an_int": lambda n, box: int(n) if n.ndim == 0 else n.shape,  # (of one that nobody knows too little is known)
    "listed": lambda n, box: n.tolist(),
    "computed_with": lambda n, box: (n + 1, (n > 0).sum(), n.dtype),
    "as_texts": lambda n, box: (str(n), f"{n}"),
    "a_truth": lambda n, box: bool(n.any()) or 3,
    "of_one_part": lambda n, box: n[...].copy(),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("use", USES)
def test_an_array_of_each_dtype(use, dtype, dims):
    """With what is read of it before, and what the step writes into the tensor behind it."""

    def step(x, box):
        made = (x * 3).to(dtype)
        result = USES[use](made.detach().numpy(), box)
        made.zero_()
        return made, result

    boxes = [], []
    captured = capture(step)
    for i in range(3):
        torch.manual_seed(i)
        x = torch.rand((2, 3)[:dims])
        (a, found), (b, wanted) = captured(x, boxes[0]), step(x, boxes[1])
        assert torch.equal(a, b) and repr(found) == repr(wanted) and repr(boxes[0]) == repr(boxes[1])
        if use == "kept":
            a.fill_(1), b.fill_(1)
            assert found[0].all() and found[0] is found[1]["n"] is boxes[0][-1]
    assert stats(captured).graphs == 1 or use not in ("kept", "as_numbers")


def test_an_array_of_what_needs_a_gradient_is_the_plain_error():
    def step(x):
        return (x * 2).numpy()

    x = torch.ones(2, requires_grad=True)
    errors = [pytest.raises(RuntimeError, f, x).value for f in (step, capture(step))]
    assert str(errors[0]) == str(errors[1])


def test_its_numbers_are_read_again_once_it_was_written(monkeypatch):
    """With its writes not counted, a number from before the write would be used."""
    monkeypatch.setattr(torch_fakes.FakeWorld, "writes_into", lambda world, fake: 0)
    with pytest.raises(AssertionError):
        compare(changed_while_it_is_read)


def large(x, counts):
    """What numpy gives beyond 2**53, wrapped around in 64 bits, beside what the step changes and hands to others."""
    seen = []

    def first(numbers):
        seen.append("first")
        return numbers[0]

    a = counts.numpy()
    seen.append(len(a))
    total = first(a) + a[1]
    for place, n in enumerate(a):
        if n > 7:
            seen.append(place)
        total = total + n
    return x * 2, int(total), seen, type(total), int(a.max())


NUMBERS = [[1, 2, 3], [1 << 53, 2, 3], [1 << 62, 1 << 62, 0], [-(1 << 63), -1, 3], [3, 1, 2], [4, (1 << 63) - 1, 2]]


def called(step, numbers):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow", RuntimeWarning)
        return step(torch.ones(2), torch.tensor(numbers))


def test_numbers_beyond_what_the_graph_adds():
    captured = capture(large)
    for numbers in NUMBERS:
        assert same(called(captured, numbers), called(large, numbers))
    assert stats(captured).hits == len(NUMBERS) - 1 and stats(captured).graphs


def test_without_leaving_the_graph_sums_do_not_wrap_around(monkeypatch):
    monkeypatch.setattr("moebius.lowering.step.arrays.MOST", 1 << 80)
    captured = capture(large)
    assert not all(same(called(captured, numbers), called(large, numbers)) for numbers in NUMBERS)


def test_numbers_that_are_read_together_with_something_else():
    """The instruction that reads them cannot be run once more: the other iterator is a step further."""
    seen = []

    def counted():
        for number in range(3):
            seen.append(number)
            yield number

    def pairs(x, counts):
        seen.clear()
        found = []
        for number, n in zip(counted(), counts.numpy(), strict=True):
            found.append((number, int(n)))
            counts[2] = n
        return x + 1, found, list(seen)

    captured = capture(pairs)
    for numbers in NUMBERS:
        assert same(called(captured, numbers), called(pairs, numbers))


def test_a_branch_on_a_number():
    """A number that is numpy's or Python's, as a branch decides, has no known type."""

    def iterations(x, counts):
        out, start = torch.zeros_like(x), 0
        for n in counts.numpy():
            end = start + n
            if n == 0:
                continue
            out[start:end] += x[start:end] * 2
            start = end
        return out

    def and_its_type(x, counts):
        start = 0
        for n in counts.numpy()[:1]:
            if n == 0:
                continue
            x[start : start + n] += 1
            start = start + n
        return x * 2, start

    for function, batches in ((iterations, ((2, 3, 1), (0, 6, 0))), (and_its_type, ((2, 3, 1), (0, 6, 0), (1, 0, 5)))):
        compare(function, batches)

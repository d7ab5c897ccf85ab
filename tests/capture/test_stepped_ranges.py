"""``range(a, x.shape[0], c)`` in a loop is guarded by its number of iterations; a sort, by the order."""

import pytest
import torch

from moebius import capture, stats


def chunks(x, n):
    return torch.cat([x[i : i + 8] * 2 for i in range(0, x.shape[0], 8)])


def backward(x, n):
    total = x.sum()
    for i in range(40, -x.shape[0], -16):
        total = total * 0.5 + i
    return total


def from_argument(x, n):
    found = []
    for i in range(-3, n, 5):
        found.append(i)
    return x * len(found), found


def enumerated(x, n):
    return [(i, start) for i, start in enumerate(range(0, n * 2, 7))]


def held(x, n):
    numbers = range(0, x.shape[0], 8)
    return [i for i in numbers], numbers.stop, repr(numbers)


def mapped(x, n):
    return [r.stop for r in map(range, [0], [n], [8])]


def nothing(x, n):
    for i in range(100, x.shape[0], 8):
        x = x + i
    return x + 1


def of_zero(x, n):
    for i in range(0, x.shape[0], n - n):
        x = x + i
    return x


def by_size(x, n):
    return sorted([(x.shape[0], "a"), (n, "b"), (9, "c")]), sorted([n, x.shape[0], 9], reverse=True)


def by_key(x, n):
    items = [3, x.shape[0], 20, n]
    items.sort(key=lambda k: (k % 4, -k))
    return items


def by_floats(x, n):
    return sorted([x.shape[0] / 2, n * 0.5, 7.25]), sorted([(1.0, n), (1, x.shape[0]), (True, 5)])


def of_no_order(x, n):
    return sorted([x.shape[0], None, n])


PROGRAMS = (chunks, backward, from_argument, enumerated, held, mapped, nothing, of_zero, by_size, by_key, by_floats,
            of_no_order)  # fmt: skip


def shown(run, *args):
    try:
        found = run(*args)
    except (TypeError, ValueError) as error:
        return str(error)
    return found.tolist() if isinstance(found, torch.Tensor) else repr(found)


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_plain_python(program):
    step = capture(program, backend="eager")
    for rows, n in ((8, 3), (9, 12), (16, 9), (17, 5), (15, 5), (1, 0), (33, 40), (9, 16), (8, 3)):
        args = torch.arange(rows * 2.0).view(rows, 2), n
        assert shown(step, *args) == shown(program, *args), (rows, n)


def test_the_count_alone_is_guarded():
    step = capture(chunks, backend="eager")
    for rows in (17, 18, 19, 20, 21, 22, 23):
        step(torch.ones(rows, 2), 0)
    assert stats(step).graphs == 2 and stats(step).hits == 5  # the first is of one size


def test_an_order_of_sizes_is_one_capture():
    step = capture(by_size, backend="eager")
    for rows in range(20, 30):
        step(torch.ones(rows, 2), rows - 5)
    assert stats(step).breaks == 0 and stats(step).hits >= 7

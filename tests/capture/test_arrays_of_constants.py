"""numpy's functions of numbers that stay, which give an array: how it is made × what is done with it.

``offsets = np.cumsum([0] + lengths); [x[:, a:b] for a, b in zip(offsets[:-1], offsets[1:])]`` is one graph.
"""

from __future__ import annotations

import itertools
import threading
import warnings

import numpy as np
import pytest
import torch

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.python import numpy_calls

LENGTHS = [1, 3, 2]

MAKERS = {
    "cumsum": lambda: np.cumsum([0] + LENGTHS),  # noqa: RUF005
    "repeat": lambda: np.repeat([1, 4], [2, 2]),
    "tile": lambda: np.tile([3, 1], 2),
    "roll": lambda: np.roll(LENGTHS, 1),
    "argsort": lambda: np.argsort([5, 2, 9, 3]),
    "linspace": lambda: np.linspace(0, 1, 4),
    "diff": lambda: np.diff([0, 2, 3, 7]),
    "array": lambda: np.array(LENGTHS),
}


def sections(x, array):
    return [x[:, a:b].sum(1) for a, b in zip(array[:-1], array[1:], strict=True)]


def the_array(x, array):
    return array, x.sum()


def a_tensor(x, array):
    return torch.from_numpy(array) * x.sum()


def a_number(x, array):
    return x[:, int(array[1])], array[2], array[-1]


def columns(x, array):
    return x[:, array.astype(np.int64)]


def added(x, array):
    view = array[1:]
    array += 1
    return view, x[:, int(view[0])], x * float(array.sum())


def shared(x, array):
    tensor = torch.from_numpy(array)
    tensor.add_(1)
    return x[:, int(array[1])], tensor * x.mean()


USES = (sections, the_array, a_tensor, a_number, columns, added, shared)
WHOLE = (sections, the_array, a_tensor)  # one graph; numbers that were written, or are floats, are data
CASES = [(m, use) for m, use in itertools.product(MAKERS, USES) if (m, use) != ("linspace", sections)]


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("made, use", CASES)
def test_as_in_plain_python(made, use, backend):
    make = MAKERS[made]

    def step(x):
        return use(x, make())

    captured = capture(step, backend=backend)
    kept = []
    for rows in (2, 2, 3, 2):
        x = torch.randn(rows, 9)
        kept.append(captured(x))
        assert same(step(x), kept[-1])
    if use is the_array:  # another one in each call
        assert kept[0][0] is not kept[1][0]
    if use in WHOLE:
        assert not report_of(captured_of(captured)).breaks


def test_what_other_threads_warn_of_is_no_error_meanwhile():
    """Whether numpy's function gives an array is asked where any warning is one: of this thread's alone, whatever
    list of filters another thread has put in its place meanwhile."""
    raised = []

    def other():
        try:
            warnings.warn("from another thread", UserWarning, stacklevel=1)
        except UserWarning as error:
            raised.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, block = [*warnings.filters], warnings.catch_warnings()
        with numpy_calls.strictly():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            block.__enter__()
            with pytest.raises(UserWarning):
                warnings.warn("from this one", UserWarning, stacklevel=1)
        block.__exit__(None, None, None)
        assert warnings.filters == before
    assert not raised

"""Tensors and numpy arrays that come from outside: operations, dtypes and contents that change between the calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.tensors import aliases, array_inputs

TABLE = np.arange(24, dtype=np.float64).reshape(6, 4)
ORDER = np.array([2, 0, 1, 3])
ROWS = {dtype: TABLE.astype(dtype) for dtype in ("float64", "float32", "int64", "uint8", "bool")}
FORMS: dict[str, Callable[..., Any]] = {  # of rows of an array that existed before
    "index": lambda t, a: t[a],
    "among all": lambda t, a: t[:4, a],
    "among slices": lambda t, a: t[:, a][1:],
    "two": lambda t, a: t[a, a],
    "a column": lambda t, a: t[a, 1],
    "slice": lambda t, a: t[1:3],
    "row": lambda t, a: t[2],
    "last row": lambda t, a: t[-1],
    "columns": lambda t, a: t[:, 1:3],
    "number": lambda t, a: np.atleast_1d(t[2, 1]),
    "beyond": lambda t, a: t[9],
    "backwards": lambda t, a: t[::-1],
    "new axis": lambda t, a: t[None, a],
}
USES: dict[str, Callable[..., Any]] = {
    "FloatTensor": lambda x, rows: torch.FloatTensor(rows) * 2,
    "DoubleTensor": lambda x, rows: torch.DoubleTensor(rows) * 2,
    "Tensor": lambda x, rows: torch.Tensor(rows).sum(),
    "LongTensor": lambda x, rows: torch.LongTensor(rows) + 1,
    "from_numpy": lambda x, rows: torch.from_numpy(rows) * 2,
    "as_tensor": lambda x, rows: torch.as_tensor(rows, dtype=torch.float32),
    "tensor": lambda x, rows: torch.tensor(rows),
    "new_tensor": lambda x, rows: x.new_tensor(rows),
    "twice": lambda x, rows: (torch.FloatTensor(rows), torch.FloatTensor(rows)),
    "returned": lambda x, rows: (x * 2, rows.tolist()),
}


def changed_after(x, a):
    y = x[a]
    a[0] = 2
    return y, x[a]


INDEXED: dict[str, Callable[..., Any]] = {
    "rows": lambda x, a: x[a] * 2,
    "columns": lambda x, a: x[:, a] + 1,
    "pairs": lambda x, a: x[a, a],
    "among slices": lambda x, a: x[1:, a],
    "with None": lambda x, a: x[None, :, a],
    "global": lambda x, a: x[ORDER][a],
    "written": lambda x, a: x.clone().index_fill_(0, torch.from_numpy(a).long(), 0.5),
    "set": lambda x, a: torch.zeros_like(x).index_put((torch.as_tensor(a).long(),), x[a]),
    "twice": lambda x, a: x[a] + x[a].flip(0),
    "changed": changed_after,
}
MADE: dict[str, Callable[..., Any]] = {
    "from_numpy": lambda x, a: torch.from_numpy(a) * 2,
    "looked up": lambda x, a: torch.from_numpy(TABLE)[x.long()[0]],
    "tensor": lambda x, a: torch.tensor(a) + 1,
    "tensor of a dtype": lambda x, a: torch.tensor(a, dtype=torch.float32, device="cpu"),
    "as_tensor": lambda x, a: torch.as_tensor(a).flip(0),
    "as_tensor of a dtype": lambda x, a: torch.as_tensor(a, dtype=torch.float64),
    "as_tensor of int64": lambda x, a: torch.as_tensor(a, dtype=torch.int64),
    "new_tensor": lambda x, a: x.new_tensor(a) + x[0, 0],
    "new_tensor of a dtype": lambda x, a: x.new_tensor(a, dtype=torch.float16),
    "requires a gradient": lambda x, a: torch.tensor(a, dtype=torch.float32, requires_grad=True) * 2,
    "strides": lambda x, a: (
        torch.tensor(a).stride(),
        torch.from_numpy(a).stride(),
        torch.from_numpy(a).is_contiguous(),
    ),
}
INDEX_DTYPES = ("int64", "int32", "int16", "uint8", "bool")
DTYPES = (*INDEX_DTYPES, "float64", "float32", "float16", "complex64", "uint16", ">i4", "object")


def array_of(dtype: str, i: int, form: str) -> np.ndarray:
    draw = np.random.RandomState(i)
    if dtype == "bool":
        found = draw.rand(4) < 0.5
        found[:2] = True, False
    else:
        found = draw.permutation(4).astype(dtype)
    if form == "part":
        found = np.stack([found, found], 1)[:, 0]
    elif form == "backwards":
        found = found[::-1]
    elif form == "read only":
        found.flags.writeable = False
    return found


def outcome(function: Callable[..., Any], x: torch.Tensor, a: np.ndarray) -> Any:
    try:
        result = function(x, a)
    except Exception as error:
        return type(error)
    leaves = result if isinstance(result, tuple) else (result,)
    return [(str(v), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else v for v in leaves]


@pytest.mark.share(13)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["whole", "part", "backwards", "read only"])
@pytest.mark.parametrize("name", [*INDEXED, *MADE])
def test_same_as_plain(name: str, form: str) -> None:
    program = (INDEXED | MADE)[name]
    for dtype in INDEX_DTYPES if name in INDEXED else DTYPES:
        captured = capture(program, backend="eager")
        for i in range(4):
            x = torch.arange(16.0).reshape(4, 4) + i
            a, b = array_of(dtype, i, form), array_of(dtype, i, form)
            assert outcome(captured, x, a) == outcome(program, x, b), (dtype, i)
            assert a.tolist() == b.tolist()


@pytest.mark.share(8)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_array(form: str, use: str) -> None:
    for dtype, table in ROWS.items():
        program = lambda x, a: USES[use](x, FORMS[form](table, a))  # noqa: B023, E731
        captured = capture(program, backend="eager")
        for kind in ("int64", "int32", "uint8", "bool"):
            for i in range(2):
                x = torch.arange(16.0).reshape(4, 4) + i
                a = array_of(kind, i, "whole")
                a = np.resize(a, 6) if kind == "bool" and form in ("index", "new axis", "a column") else a
                assert outcome(captured, x, a) == outcome(program, x, a), (dtype, kind, i)


@pytest.mark.parametrize("use", [name for name in USES if name != "returned"])
@pytest.mark.parametrize("form", ["index", "among all", "two", "a column"])
def test_rows_of_an_array_are_one_graph(form: str, use: str) -> None:
    """With a replay buffer's contents that change, and the indices."""
    table = ROWS["float64" if use not in ("LongTensor",) else "int64"].copy()
    program = lambda x, a: USES[use](x, FORMS[form](table, a))  # noqa: E731
    captured = capture(program, backend="eager", fullgraph=True)
    for i in range(4):
        table += 1
        x, a = torch.arange(16.0).reshape(4, 4), array_of("int64", i, "whole")
        assert outcome(captured, x, a) == outcome(program, x, a)
    assert (stats(captured).graphs, stats(captured).hits) == (1, 3)


def test_rows_share_memory_where_numpys_do() -> None:
    """Rows by an index are a copy, a slice is not; a tensor of the same type lies in what the rows lie in."""
    table = ROWS["float32"].copy()

    def step(x, a):
        part, rows = table[1:3], table[a]
        return part, torch.FloatTensor(part), rows, torch.FloatTensor(rows)

    captured = capture(step, backend="eager")
    for function in (step, captured, captured):
        part, over_part, rows, over_rows = function(torch.ones(1), np.array([1, 2]))
        assert type(part) is type(rows) is np.ndarray
        part[:], rows[:] = 7, 8
        assert (table[1:3] == 7).all() and over_part.eq(7).all() and over_rows.eq(8).all()
        table[:] = 3
        assert over_part.eq(3).all() and over_rows.eq(8).all()


def test_rows_index_a_tensor_before_and_after_a_graph_break() -> None:
    """Each is one's own array after a break, and followed as such."""
    drawn = np.array([3, 1, 0, 2])

    def step(x, a):
        rows = drawn[a]
        y = x[rows]
        time.sleep(0)  # a break
        return y + x[rows], rows[1:3].tolist(), rows.flags.owndata

    captured = capture(step, backend="eager")
    for i in range(4):
        x, a = torch.arange(16.0).reshape(4, 4), array_of("int64", i, "whole")
        assert str(captured(x, a)) == str(step(x, a))
    found = report_of(captured_of(captured)).breaks
    assert "an operator got a ndarray" not in " ".join(one.detail for one in found)


def test_writes_into_what_is_made_of_rows() -> None:
    table = ROWS["float32"].copy()

    def step(a, part):
        made = torch.FloatTensor(table[1:3] if part else table[a])
        made += 1
        return made, table.tolist()

    for part in (False, True):
        captured, results = capture(step, backend="eager"), []
        for function in (step, captured):
            table[:] = ROWS["float32"]
            results.append([str(function(np.array([0, 2]), part)) for _ in range(3)])
        assert results[0] == results[1]


@pytest.mark.parametrize("name", [n for n in (*INDEXED, *MADE) if n not in ("changed", "requires a gradient")])
def test_one_graph(name: str) -> None:
    program = (INDEXED | MADE)[name]
    captured = capture(program, backend="eager", fullgraph=True)
    for i in range(4):
        captured(torch.arange(16.0).reshape(4, 4), array_of("int64", i, "whole"))
    assert (stats(captured).graphs, stats(captured).hits) == (1, 3)


def test_contents_in_place() -> None:
    """One array of a global, whose numbers change between the calls."""
    held = np.array([0, 1, 2, 3])

    def step(x):
        return x[held] * torch.from_numpy(held)

    captured = capture(step, backend="eager", fullgraph=True)
    x = torch.arange(4.0)
    for i in range(4):
        held[:] = np.roll(held, i)
        assert torch.equal(captured(x), step(x))
    assert stats(captured).hits == 3


def test_numbers_of_numpys() -> None:
    def step(x, i):
        return x[i] + x[i, :].sum() + x[1:i].sum()

    captured = capture(step, backend="eager")
    x = torch.arange(16.0).reshape(4, 4)
    for i in (0, 1, 2, 3, 2, 1):
        for kind in (np.int64, np.int32):
            assert torch.equal(captured(x, kind(i)), step(x, kind(i)))

    rows, of_ints = (capture(lambda x, i: x[i] * 2, backend="eager", fullgraph=True) for _ in range(2))
    for i in (0, 3, -1, 2):
        assert torch.equal(rows(x, np.int64(i)), x[i] * 2)
        assert torch.equal(of_ints(x, i), x[i] * 2)
    # the second value makes it a number of the graph, with the guard that it is not negative
    assert stats(rows).hits == 2 and stats(of_ints).hits == 1
    beyond = capture(lambda x, i: x[i] * 2, backend="eager")
    with pytest.raises(IndexError):
        beyond(x, np.int64(9))


def test_memory_is_shared_where_torch_shares_it() -> None:
    def step(x, a):
        return torch.from_numpy(a), torch.as_tensor(a), torch.tensor(a), x.new_tensor(a)

    captured = capture(step, backend="eager", fullgraph=True)
    for _ in range(3):
        a = np.zeros(3, dtype=np.float32)
        found = captured(torch.ones(2), a)
        a[:] = 5
        assert [t.tolist() for t in found] == [[5.0] * 3, [5.0] * 3, [0.0] * 3, [0.0] * 3]
        assert all(t.is_leaf and not t.requires_grad for t in found)


def writes_through(x, a):
    t = torch.from_numpy(a)
    t += 1
    return x[a], t


def writes_a_tensor_over_it(x, a, t):
    y = x[a]
    t.add_(1)
    return y, x[a]


def writes_before(x, a, t):
    t.add_(1)
    return x[a]


def test_writes_into_an_arrays_memory() -> None:
    captured = capture(writes_through, backend="eager")
    for _ in range(3):
        a, b, x = np.array([0, 1]), np.array([0, 1]), torch.arange(4.0)
        assert str(captured(x, a)) == str(writes_through(x, b)) and a.tolist() == b.tolist()
    assert stats(captured).breaks


@pytest.mark.parametrize("program", [writes_a_tensor_over_it, writes_before])
@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_a_tensor_that_lies_in_an_arrays_memory(program: Any, order: tuple[bool, ...]) -> None:
    for backend in ("eager", "moebius"):
        captured = capture(program, backend=backend)
        for over in (*order, *order, *order):
            x, results = torch.arange(9.0), []
            for function in (captured, program):
                a = np.array([0, 1])
                t = torch.from_numpy(a) if over else torch.tensor([0, 1])
                results.append((str(function(x, a, t)), a.tolist(), t.tolist()))
            assert results[0] == results[1]


def test_switched_off_it_is_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_inputs, "over_memory", lambda array: None)
    captured = capture(INDEXED["rows"], backend="eager")
    captured(torch.arange(16.0).reshape(4, 4), np.array([1, 0]))
    assert stats(captured).breaks


def test_an_arrays_memory_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard a tensor over the array is taken for one of its own. (Two tensors that come to overlap have
    one, too.)"""
    monkeypatch.setattr(aliases, "guard_overlaps", lambda *_: None)
    captured = capture(writes_a_tensor_over_it, backend="eager")
    x = torch.arange(9.0)
    captured(x, np.array([0, 1]), torch.tensor([0, 1]))
    a = np.array([0, 1])
    captured(x, a, torch.from_numpy(a))
    assert [r.old for r in stats(captured).recompiles] == ["has memory of its own"]

"""Progress bars in a step: what is drawn, what the bar holds, and in which order, beside plain Python."""

from __future__ import annotations

import io
import weakref
from typing import Any

import pytest
import torch
from plain_python import Reader, breaks_of, compare

from moebius import capture, stats
from moebius.errors import ExportError
from moebius.heap.late_writes import LateWrites
from moebius.python import bars

tqdm = pytest.importorskip("tqdm").tqdm
ROWS = (3, 3, 3, 4, 4, 5, 5)
FORMAT = "{desc}|{n_fmt}/{total_fmt}|{postfix}"  # (nothing of the clock's)


@pytest.fixture(autouse=True)
def no_other_bars(monkeypatch: Any) -> None:
    """A bar that another test of this process left to the garbage collector moves a new one a line down."""
    monkeypatch.setattr(tqdm, "_instances", weakref.WeakSet())


def bar_of(kind: Any = tqdm, file: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    """A bar that draws each change into a text, and what the comparison sees of it."""
    stream = io.StringIO() if file is None else file
    bar = kind(total=50, file=stream, mininterval=0, miniters=1, bar_format=FORMAT, ascii=True, position=0, **options)
    return bar, [
        Reader(
            lambda: (bar.n, [getattr(bar, name, "") for name in ("postfix", "desc")], bar.disable, stream.getvalue())
        )
    ]


def counted():
    bar, seen = bar_of()

    def step(x):
        y = x * 2
        bar.update(1)
        bar.set_postfix(loss=y.sum().item(), rows=x.shape[0], refresh=True)
        bar.set_description(f"mean {y.mean().item():.3f}")
        return y * 3

    return step, seen


def by_rows():
    bar, seen = bar_of()

    def step(x):
        bar.update(x.shape[0])
        bar.set_postfix({"a": 1})
        bar.set_postfix_str("plain", refresh=False)
        bar.refresh()
        return x * 2

    return step, seen


def between_operators():
    """Drawn before the operator that fails, and not after it."""
    bar, seen = bar_of()

    def step(x):
        bar.update(1)
        y = torch.ones(4)[(x.detach() * 0).long() + x.shape[0] - 1]
        bar.set_description("after")
        return x * y.sum()

    return step, seen


def on_the_way_of_data():
    bar, seen = bar_of()

    def step(x):
        bar.update(1)
        if x.sum() > -1:
            bar.set_postfix(loss=x.sum().item())
        bar.update(1)
        return x * 2

    return step, seen


def of_an_object():
    class Trainer:
        def __init__(self):
            self.bar, self.seen = bar_of()
            self.steps = 0

        def step(self, x):
            self.steps += 1
            loss = (x * self.steps).sum()
            self.bar.update()
            self.bar.set_postfix(loss=loss.item(), step=self.steps)
            return loss

    trainer = Trainer()
    return trainer.step, trainer.seen


def passed():
    bar, seen = bar_of()

    def draw(where, x):
        where.update(1)
        where.set_postfix(loss=x.sum().item())

    def step(x):
        for one in [bar]:
            draw(one, x)
        return x * 2

    return step, seen


def set_afterwards():
    bar, seen = bar_of()

    def step(x):
        bar.update(1)
        bar.desc = "set"
        return x * 2

    return step, seen


def switched_off():
    bar, seen = bar_of(disable=True)

    def step(x):
        bar.update(1)
        bar.set_postfix(loss=x.sum().item())
        return x * 2

    return step, seen


@pytest.mark.parametrize(
    "recipe",
    [counted, between_operators, on_the_way_of_data, of_an_object, set_afterwards, passed],
    ids=lambda r: r.__name__,
)
def test_one_graph(recipe: Any) -> None:
    found = compare(recipe, "moebius", ROWS)
    assert found.breaks == 0 and found.hits


def read_afterwards():
    bar, seen = bar_of()

    def step(x):
        bar.update(1)
        return x * bar.n, vars(bar)["n"]

    return step, seen


def read_before():
    bar, seen = bar_of()

    def step(x):
        if bar.n % 2 == 0:
            bar.update(2)
        bar.update(1)
        return x * 2

    return step, seen


def set_before():
    bar, seen = bar_of()

    def step(x):
        bar.n = 7
        bar.update(1)
        return x * 2

    return step, seen


def answer_used():
    bar, seen = bar_of()

    def step(x):
        drawn = bar.update(1)
        return x * 2, bool(drawn), drawn

    return step, seen


def of_a_derived_class():
    class Loud(tqdm):
        def update(self, n=1):
            return super().update(n * 2)

    bar, seen = bar_of(Loud)

    def step(x):
        bar.update(1)
        return x * 2

    return step, seen


def into_a_file_of_the_users():
    class File(io.StringIO):
        def write(self, text):
            return super().write(text.upper())

    bar, seen = bar_of(file=File())

    def step(x):
        bar.set_description("lower")
        return x * 2

    return step, seen


def with_a_method_of_its_own():
    bar, seen = bar_of()
    bar.display = lambda *args, **kwargs: None

    def step(x):
        bar.update(1)
        return x * 2

    return step, seen


def around_a_loop():
    stream = io.StringIO()

    def step(x):
        for i in tqdm(range(3), file=stream, mininterval=0, bar_format=FORMAT):
            x = x * i
        return x

    return step, [Reader(stream.getvalue)]


def wrong_type():
    bar, seen = bar_of()

    def step(x):
        try:
            bar.update("one")
        except TypeError as error:
            return x * 2, str(error)
        return x

    return step, seen


OTHERS = [
    by_rows, read_afterwards, read_before, set_before, answer_used, of_a_derived_class, into_a_file_of_the_users,
    with_a_method_of_its_own, around_a_loop, wrong_type, switched_off,
]  # fmt: skip


@pytest.mark.parametrize("recipe", OTHERS, ids=lambda r: r.__name__)
def test_as_in_plain_python(recipe: Any) -> None:
    breaks_of(recipe, ROWS)


def test_a_new_bar_for_each_epoch() -> None:
    """Nothing is drawn on the bar of the epoch before."""
    state: dict[str, Any] = {}

    @capture
    def step(x):
        y = x * 2
        state["bar"].update(1)
        return y

    for _ in range(4):
        state["bar"], _seen = bar_of()
        for n in range(5):
            step(torch.ones(2))
            assert state["bar"].n == n + 1
    assert stats(step).misses == 1  # for any bar: it has a __del__, so it is walked to and held weakly


def test_a_bar_cannot_be_in_a_file(tmp_path: Any) -> None:
    step, _ = counted()
    captured = capture(step)
    for _ in range(2):
        captured(torch.ones(2))
    with pytest.raises(ExportError):
        captured.export(tmp_path / "step")


def test_a_file_that_becomes_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, _ = bar_of()
    seen = []

    @capture
    def step(x):
        bar.set_description("text")
        return x * 2

    step(torch.ones(2))
    step(torch.ones(2))
    monkeypatch.setattr(bar, "display", lambda *args, **kwargs: seen.append(len(seen)), raising=False)
    for _ in range(2):
        step(torch.ones(2))
    assert seen == [0, 1]


def test_without_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "bar_call", lambda *_: nothing)
    for recipe in (counted, of_an_object):
        with pytest.raises(AssertionError, match="call "):
            compare(recipe, "moebius", ROWS)


def nothing(*values: Any) -> None: ...


def test_without_refusing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateWrites, "refuse_late", lambda self, record, key=None: None)
    with pytest.raises(AssertionError, match="call "):
        compare(read_afterwards, "moebius", ROWS)

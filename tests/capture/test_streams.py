"""Lines that a step writes to files: the same letters in the same order, beside plain Python; without a break where
writing runs none of the user's code."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from plain_python import Reader, compare
from torch import nn

from moebius.python import texts

SIZES = (3, 3, 3, 4, 4, 5, 5)
LETTERS: list[str] = []  # what files of the user's own have got
KEPT: list[Any] = []  # all files: one that dies writes what it still holds


class Noted(io.StringIO):
    def write(self, text: str) -> int:
        LETTERS.append(text)
        return super().write(text)


class FlushNoted(io.StringIO):
    def flush(self) -> None:
        LETTERS.append("flushed")


class AskedFor(io.StringIO):
    def __getattribute__(self, name: str) -> Any:
        if name == "write":
            LETTERS.append("asked")
        return super().__getattribute__(name)


class Plain(io.StringIO):
    pass


class Raw(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        LETTERS.append(bytes(data).decode())
        return len(data)


def own_write() -> Any:
    stream = Plain()
    stream.write = LETTERS.append  # type: ignore[assignment]
    return stream


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


def through(raw: Any) -> Callable[[], Any]:
    return lambda: io.TextIOWrapper(raw(), encoding="utf-8", write_through=True)


KNOWN: dict[str, Callable[[], Any]] = {
    "text": io.StringIO, "derived": Plain, "bytes": through(io.BytesIO), "stdout": lambda: None,
}  # fmt: skip
OWN: dict[str, Callable[[], Any]] = {
    "noted": Noted, "flush noted": FlushNoted, "own write": own_write, "own raw": through(Raw), "closed": closed,
    "asked for": AskedFor, "buffered": through(lambda: io.BufferedWriter(Raw(), 1)),
}  # fmt: skip


def written(f, x, n):
    f.write("one ")
    f.write(f"{x.sum().item():.3f} {n}\n")
    return x * 2


def printed(f, x, n):
    print("loss", x.sum().item(), n, sep=": ", end="!\n", file=f)
    return x * 2


def flushed(f, x, n):
    print(n, file=f, flush=True)
    y = x * 2
    f.flush()
    return y


def now_and_then(f, x, n):
    if n % 2 == 0:
        f.write(f"{x.sum().item():.3f}")
        f.flush()
    return x * 2


def in_a_loop(f, x, n):
    for i in range(3):
        x = x * 2
        f.write(f"{i} {x.mean().item():.2f};")
    return x


def among_others(f, x, n):
    f.write("a")
    print("b", n)
    f.write(f"{n}")
    sys.stdout.write("c")
    return x * 2


def counted(f, x, n):
    return x * f.write("three")


def before_an_error(f, x, n):
    f.write(f"{n}")
    y = x[x.detach().long().sum() * 0 + n]
    f.write("behind")
    return y


def handled(f, x, n):
    try:
        f.write(f"{n}")
    except ValueError as error:
        return x * 3, str(error)
    return x * 2


def read_behind(f, x, n):
    f.write(f"{x.sum().item():.3f}")
    return x * len(LETTERS), f.tell() if f.seekable() else 0


def count_used(f, x, n):
    count = f.write(f"{x.sum().item():.3f}")
    return x * count, bool(count), count


ONE_GRAPH = (written, printed, flushed, now_and_then, in_a_loop, among_others, counted, before_an_error, handled)


def recipe_of(way: Any, stream: Callable[[], Any]) -> Callable[[], Any]:
    def recipe() -> Any:
        LETTERS.clear()
        f = stream()
        KEPT.append(f)

        def look() -> Any:
            if f is None or f.closed:
                return [*LETTERS], "closed"
            return [*LETTERS], getattr(f if isinstance(f, io.StringIO) else f.buffer, "getvalue", str)()

        holder = [0]

        def step(x: Any) -> Any:
            holder[0] += 1
            return way(sys.stdout if f is None else f, x, holder[0])

        return step, [Reader(look)]

    return recipe


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("stream", KNOWN)
@pytest.mark.parametrize("way", ONE_GRAPH, ids=lambda w: w.__name__)
def test_one_graph(way: Any, stream: str, backend: str) -> None:
    found = compare(recipe_of(way, KNOWN[stream]), backend, SIZES)
    assert found.breaks == 0 and found.hits


@pytest.mark.parametrize("stream", OWN)
@pytest.mark.parametrize("way", [*ONE_GRAPH, read_behind, count_used], ids=lambda w: w.__name__)
def test_files_of_the_users_own(way: Any, stream: str) -> None:
    compare(recipe_of(way, OWN[stream]), "moebius", SIZES)


@pytest.mark.parametrize("stream", KNOWN)
@pytest.mark.parametrize("way", [read_behind, count_used], ids=lambda w: w.__name__)
def test_what_asks_for_what_was_written(way: Any, stream: str) -> None:
    compare(recipe_of(way, KNOWN[stream]), "moebius", SIZES)


def of_equal_modules() -> Any:
    """Each of two equal modules writes to its own file."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.log = nn.Linear(4, 4), io.StringIO()

        def forward(self, x: Any) -> Any:
            y = self.lin(x)
            self.log.write(f"{y.sum().item():.4f} ")
            print("then", file=self.log)
            return y

    layers = nn.ModuleList(Layer() for _ in range(3))
    layers[2].log = layers[0].log

    def step(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    return step, [*layers, Reader(lambda: [layer.log.getvalue() for layer in layers])]


def in_other_files() -> Any:
    """Another file in each call, and one that is made in the step."""
    files: list[Any] = []

    def step(x: Any) -> Any:
        f = io.StringIO()
        f.write(f"{x.sum().item():.4f} ")
        print("then", x.shape[0], file=f)
        files.append(f)
        print(f.getvalue(), file=files[len(files) // 2])
        return x * 2

    return step, [Reader(lambda: [f.getvalue() for f in files])]


@pytest.mark.parametrize("recipe", [of_equal_modules, in_other_files], ids=lambda r: r.__name__)
def test_which_file(recipe: Any) -> None:
    compare(recipe, "moebius", SIZES)


@pytest.mark.parametrize("stream", sorted(OWN.keys() - {"closed"}))
def test_without_the_question_letters_are_read_too_early(stream: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(texts, "is_stream", lambda stream: True)
    monkeypatch.setattr("moebius.python.streams.is_stream", lambda stream: True)

    def letters_behind(f: Any, x: Any, n: int) -> Any:
        print(n, file=f, flush=True)
        return x * len(LETTERS)

    with pytest.raises(AssertionError):
        compare(recipe_of(letters_behind, OWN[stream]), "moebius", SIZES)

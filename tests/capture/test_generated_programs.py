"""The program fuzzer's programs through @capture: the same ones each time and fresh ones, with tensors and without."""

from __future__ import annotations

from pathlib import Path

import fuzz
import pytest
import torch
from fuzz.captured import difference_captured
from fuzz.choices import SeededChoices
from fuzz.grammar import generate
from fuzz.grammar.program import CAPTURED_FAMILIES
from seeds import seed_of_the_code

from moebius import capture

KEPT = sorted((Path(fuzz.__file__).parent / "kept").glob("*.txt"))
FRESH = 10**6 + seed_of_the_code()


@pytest.mark.share(1)
@pytest.mark.parametrize("tensors", [False, True], ids=["plain", "tensors"])
@pytest.mark.parametrize("first, count", [(0, 25), (FRESH, 25)], ids=["fixed", "fresh"])
def test_a_program_does_the_same_captured(first: int, count: int, tensors: bool) -> None:
    said_nothing = 0
    for number in range(first, first + count):
        source = generate(SeededChoices(number), tensors=tensors, families=CAPTURED_FAMILIES)
        different = difference_captured(source)
        said_nothing += different is None
        assert not different, f"seed {number}: {different}\n{source}"
    assert said_nothing < count // 4


def test_a_difference_is_seen() -> None:
    """What a program can tell apart from a captured call, it does."""
    assert difference_captured("def main(): log.append(__import__('torch').compiler.is_compiling())") == ""
    seen = "import moebius\ndef main(): log.append(type(moebius.stats).__name__); return main.__name__"
    assert difference_captured(seen) == ""
    assert difference_captured("import time\ndef main(): log.append(time.perf_counter_ns())")


class Meta(type):
    def __call__(cls, *args):
        made.append(args)
        return super().__call__(*args)


class Needs(metaclass=Meta):
    def __init__(self, n):
        self.n = n


made: list[object] = []


def test_a_method_that_super_found_is_not_looked_up_again() -> None:
    def step() -> str:
        print(end="")  # a graph break: what follows is another segment
        try:
            Needs()
        except TypeError as error:
            return str(error)
        return ""

    made.clear()
    expected = step()
    assert made == [()]
    assert capture(step)() == expected
    assert made == [(), ()]


class Plain:
    pass


def test_arguments_that_object_takes_not() -> None:
    def step() -> list[str]:
        found = []
        for make in (lambda: Plain(3), lambda: object.__init__(Plain(), 3)):
            try:
                make()
            except TypeError as error:
                found.append(str(error))
        return found

    assert capture(step)() == step() and len(step()) == 2


class Asked(type):
    def __getattr__(cls, name):
        made.append(name)
        raise AttributeError(name)


class Subscripted(metaclass=Asked):
    pass


class Item:
    def __class_getitem__(cls, key):
        made.append(key)
        return key


def test_an_item_of_a_class_is_asked_for_once() -> None:
    def step() -> int:
        try:
            Subscripted[3]
        except TypeError:
            return Item[4]
        return 0

    made.clear()
    assert capture(step)() == 4
    assert made == ["__class_getitem__", 4]


def test_an_exception_that_a_graph_break_outlives_keeps_its_chain() -> None:
    def step() -> list[str]:
        try:
            try:
                raise KeyError("first")
            except KeyError as error:
                raise ValueError("second") from error
        except ValueError as error:
            print(end="")
            return [repr(error.__cause__), repr(error.__context__), repr(error.__suppress_context__)]

    assert capture(step)() == step()


@pytest.mark.parametrize("raised", [StopIteration(4), SystemExit(3), AttributeError("n", name="n"), NameError("k")])
def test_an_exception_that_a_graph_break_outlives_keeps_what_it_says(raised: BaseException) -> None:
    kind, args, name = type(raised), raised.args, getattr(raised, "name", None)

    def step() -> list[object]:
        try:
            if name is None:
                raise kind(*args)
            raise kind(*args, name=name)
        except BaseException as error:
            print(end="")
            return [error.args, *(getattr(error, part, "none") for part in ("value", "code", "name"))]

    assert capture(step)() == step()


@pytest.mark.share(12)
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_programs_that_once_differed(path: Path) -> None:
    source = path.read_text()
    try:
        compile(source, path.name, "exec")
    except SyntaxError:
        pytest.skip("syntax of a later Python")
    assert difference_captured(source) == ""


def test_a_comparison_with_a_tensor_asks_the_objects_method() -> None:
    class Num:
        def __eq__(self, other: object) -> str:  # type: ignore[override]
            return "eq"

        def __lt__(self, other: object) -> str:
            return "lt"

    n, t = Num(), torch.tensor([1, 2])

    def step() -> list[object]:
        return [n == t, t == n, n != t, t != n, n < t, t > n]

    assert capture(step)() == step() == ["eq", "eq", False, False, "lt", "lt"]


def test_an_exception_that_a_graph_break_outlives_shows_its_line() -> None:
    def step() -> list[object]:
        found: list[object] = []
        try:
            x = 1
            raise KeyError(x)
        except KeyError as error:
            print(end="")
            found.append(error.__traceback__.tb_lineno)  # type: ignore[union-attr]
            context, before = error.__context__, error.__traceback__
            print(end="")
            found += [error.__context__ is context, error.__traceback__ is before, error.__traceback__.tb_next]  # type: ignore[union-attr]
        return found

    assert capture(step)() == step()


class Finalized:
    def __del__(self) -> None:
        made.append("del")


def test_an_object_with_a_finalizer_dies_in_each_call() -> None:
    def step(x_T: torch.Tensor) -> torch.Tensor:
        held = Finalized()
        del held
        made.append("after")
        return x_T + 1

    captured = capture(step)
    for _ in range(3):
        made.clear()
        assert captured(torch.ones(2)).tolist() == [2, 2]
        assert sorted(made) == ["after", "del"]  # a resume function may hold it until the call returns

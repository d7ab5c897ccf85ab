"""The report's coverage adds up: what it counts is what ``sys.settrace`` counts on the plain run, for each call."""

from __future__ import annotations

import contextlib
import dis
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fuzz.choices import SeededChoices
from reconciling import outcome, plain_counts, reported_counts
from small import breaks, names

from moebius import capture, disable, explain, reset
from moebius.bytecode import counting


@pytest.fixture(autouse=True)
def no_callbacks() -> Iterator[None]:
    """A collection runs whatever registered for it (hypothesis does), in one of the two runs."""
    kept, gc.callbacks[:] = gc.callbacks[:], []
    yield
    gc.callbacks[:] = kept


MANY = 12  # programs in one case
CASES = [(kind, first) for kind, count in (("breaks", 240), ("names", 120)) for first in range(0, count, MANY)]


def made_of(kind: str, seed: int) -> tuple[Any, list[tuple]]:
    """What makes a generated program twice, and the arguments of its calls."""
    if kind == "names":
        source = names.generate(SeededChoices(seed))
        return lambda: (names.World(source).step, names.World(source).step), [
            (torch.full((2, 3), float(number)),) for number in range(3)
        ]
    source = breaks.generate(SeededChoices(seed))

    def one() -> Any:
        namespace: dict[str, Any] = {"brk": breaks.brk, "bad": breaks.bad, "Context": breaks.Context}
        exec(compile(source, "<program>", "exec"), namespace)
        return namespace["step"]

    return lambda: (one(), one()), [(torch.full((2,), float(number)),) for number in range(3)]


@pytest.mark.share(2)
@pytest.mark.parametrize(("kind", "first"), CASES)
def test_generated_programs(kind: str, first: int) -> None:
    compared, ran = 0, 0
    for seed in range(first, first + MANY):
        reset()
        found = outcome(*made_of(kind, seed))
        assert not found.differs, f"seed {seed}: {found.differs}"
        compared += found.compared
        ran += len(found.statuses)
    assert compared or ran < MANY  # (of some programs each call raises)


def helper(x: torch.Tensor, n: int) -> torch.Tensor:
    for i in range(n):
        x = x * 2 + i
    return x


@disable
def slow(n: int) -> int:
    total = 0
    for i in range(n):
        total += i
    return total


def one_graph(x: torch.Tensor) -> Any:
    y = helper(x, 3)
    parts = [i * y for i in range(3)]
    with torch.no_grad():
        total = sum(v for v in (1, 2, 3))
    try:
        raise ValueError
    except ValueError:
        total += 1
    return parts[0] + total, (lambda u: u + 1)(y)


def two_breaks(x: torch.Tensor) -> torch.Tensor:
    y = x * slow(300)
    slow(int(y.sum().item()) % 7)
    return helper(y, 3)


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for i in range(4):
        slow(i)
        x = helper(x, i)
    return x


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.linear(x), 2).relu()


LAYERS = torch.nn.ModuleList(Block() for _ in range(5))


def equal_layers(x: torch.Tensor) -> torch.Tensor:
    for layer in LAYERS:
        x = layer(x)
    return x


class Key:
    """All are in one place of a table."""

    def __init__(self, number: int):
        self.number = number

    def __hash__(self) -> int:
        return 4

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number


def by_new_keys(x: torch.Tensor) -> torch.Tensor:
    table = {Key(1): 1, Key(2): 2, Key(3): 5}
    table[Key(2)] = 7
    return x + table[Key(3)] + table.get(Key(9), 1) + (Key(1) in table) + len({Key(1), Key(2), Key(1)})


KEY = Key(1)


def by_a_known_key(x: torch.Tensor) -> torch.Tensor:
    return x + {Key(2): 3, KEY: 2, Key(1): 4}[KEY] + len({KEY, KEY})


@pytest.mark.parametrize("step", [one_graph, two_breaks, in_a_loop, equal_layers, by_new_keys, by_a_known_key])
def test_each_call_of_a_step(step: Any) -> None:
    """Captured anew and hit, whatever runs below a break, and where equal layers were not interpreted twice."""
    x = torch.ones(3, 4)
    expected = plain_counts(step, x)
    captured = capture(step)
    statuses = []
    for _ in range(3):
        report = explain(captured)(x)
        assert reported_counts(report) == expected and sum(report.coverage.values()) == sum(expected.values())
        assert bool(report.coverage["native"]) == bool(report.breaks)
        statuses.append(report.status)
    assert (statuses[0], statuses[-1]) == ("captured", "hit")


def test_a_tensor_hook_is_opaque() -> None:
    """Python runs it, for a call that the graph makes."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return grad * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.sum().backward()
        return y

    x = torch.ones(3, requires_grad=True)
    x.register_hook(hook)
    report = explain(step)(x)
    assert sum(report.coverage.values()) == sum(plain_counts(step, x).values())


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_hook_counts_in_the_backward_that_reaches_it(times: int) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            p = x.detach().requires_grad_()
            q = p * 2
            q.register_hook(lambda grad: grad + 1)
            q.sum().backward()
            x = x + p.grad
        return x

    assert reported_counts(explain(step)(torch.ones(3))) == plain_counts(step, torch.ones(3))


def test_what_runs_in_numpy_is_a_librarys() -> None:
    """Python that numpy runs, for the program or for a graph, counts nowhere; a break below it has the user's line."""

    def in_a_graph(x: torch.Tensor) -> torch.Tensor:
        stacked = np.stack([x.numpy(), np.linspace(0, 1, 3, dtype=np.float32)]).mean(0)
        return x + torch.from_numpy(stacked) + np.prod([2, 3]) + float(np.log(x.numpy()).mean())

    def breaks(x: torch.Tensor) -> torch.Tensor:
        with np.errstate(all="ignore"):
            return x + float(np.log(x.numpy()).mean())

    for step in (in_a_graph, breaks):
        x, captured = torch.ones(3) + 1, capture(step)
        expected = plain_counts(step, x)
        for _ in range(2):
            report = explain(captured)(x)
            assert reported_counts(report) == expected == Counter({next(iter(expected)): expected.total()})
        assert not report.coverage["opaque"]
        assert {item.file for item in report.breaks} <= {__file__}


def test_an_operator_in_python_is_opaque() -> None:
    """A graph calls it: what it runs is the user's, of no graph, and no graph break."""
    library = torch.library.Library("reconciling", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")

    def doubled(x: torch.Tensor) -> torch.Tensor:
        total = 1
        for _ in range(3):
            total += 1
        return x * (total - 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.reconciling.doubled(x) + 1
        slow(4)
        return helper(y, 2)

    library.impl("doubled", doubled, "CompositeExplicitAutograd")
    torch.library.register_fake("reconciling::doubled", torch.empty_like, lib=library)
    x = torch.ones(3)
    expected = plain_counts(step, x)
    captured = capture(step)
    for _ in range(3):
        report = explain(captured)(x)
        assert reported_counts(report) == expected
        by_name = {name: known for (_, name, _), known in report.functions.items()}
        opaque = {name: known["opaque"] for name, known in by_name.items() if known["opaque"]}
        assert opaque == {doubled.__qualname__: expected[doubled.__qualname__, doubled.__code__.co_firstlineno]}
        assert {name for name, known in by_name.items() if known["native"]} == {"slow", step.__qualname__}
    assert report.status == "hit"


LONG = """
def long(x, slow):
    {names}
    for k in range(2):
        try:
            x = x + 1
            assert k > 5, "no"
        except AssertionError as error:
            x = x + len(str(error))
        finally:
            x = x + 2
        for e in (1, 2):
            x = x + e
            {middle}
        {more}
    return x + a299
"""


@pytest.mark.parametrize("middle", ["pass", "slow(1)"])
@pytest.mark.parametrize("native", [False, True])
def test_an_instruction_with_prefixes_counts_as_python_counts_it(middle: str, native: bool) -> None:
    """A jump over more than 256 code units has a prefix of its own (EXTENDED_ARG), and so has the 256th name: code that
    goes on behind a break has other ones. Python 3.11 has one event for both, 3.12 one for each."""
    names, more = ("; ".join(f"{name}{i} = x + {i}" for i in range(count)) for name, count in (("a", 300), ("b", 80)))
    namespace: dict[str, Any] = {}
    exec(compile(LONG.format(names=names, more=more, middle=middle), __file__, "exec"), namespace)
    long = namespace["long"]
    assert any(i.opname == "EXTENDED_ARG" for i in dis.get_instructions(long))
    if native:
        long = disable(long)

    def step(x: torch.Tensor) -> torch.Tensor:
        return long(x, slow) * 2

    captured, x = capture(step, backend="eager"), torch.ones(2)
    for _ in range(2):
        assert reported_counts(explain(captured)(x)) == plain_counts(step, x)


@contextlib.contextmanager
def around(x: torch.Tensor) -> Iterator[torch.Tensor]:
    x = x + 1
    try:
        yield x
    finally:
        x = x + 2


def rows(x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    for i in range(n):
        yield x + i
    yield x


def handed_on(x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    yield from rows(x, n)


def by_with(x: torch.Tensor) -> torch.Tensor:
    with around(x) as y:
        slow(1)
        x = x + y
    return x * 2


def by_loop(x: torch.Tensor) -> torch.Tensor:
    for row in rows(x, 3):
        slow(1)
        x = x + row
    return x


def by_delegation(x: torch.Tensor) -> torch.Tensor:
    for row in handed_on(x, 2):
        slow(1)
        x = x + row
    return x


def by_zip(x: torch.Tensor) -> torch.Tensor:
    for row, other in zip(rows(x, 2), (y * 2 for y in rows(x, 3)), strict=False):
        slow(1)
        x = x + row * other
    return x


def by_next(x: torch.Tensor) -> torch.Tensor:
    left = rows(x, 3)
    x = x + next(left)
    slow(1)
    x = x + next(left)
    slow(2)
    return x + sum(left)


@pytest.mark.parametrize("step", [by_with, by_loop, by_delegation, by_zip, by_next])
def test_a_generator_that_a_break_finds_suspended(step: Any) -> None:
    """It is made again where it stands: the yield that takes it there is not the user's, which has run."""
    captured, x = capture(step, backend="eager"), torch.ones(3)
    for _ in range(3):
        report = explain(captured)(x)
        assert report.breaks and reported_counts(report) == plain_counts(step, x)


class Lazy(torch.nn.Module):
    """Installs a hook in its first call, under a lock, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock, self.installed = torch.nn.Linear(4, 4), threading.Lock(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.installed:
            with self.lock:
                self.linear.register_forward_hook(lambda module, args, output: output * 2)
                self.installed = True
        return self.linear(x) + 1


def lazy_step(before: bool, after: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    model = Lazy()

    def step(x: torch.Tensor) -> torch.Tensor:
        if before:
            slow(1)
        x = model(x).relu()
        if after:
            slow(2)
        return x * 2

    return step


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_second_call_that_is_captured_anew_counts_once(before: bool, after: bool) -> None:
    """What broke the first time only is looked at again and captured anew: the hit that led there was no run."""
    captured, plain, x = capture(lazy_step(before, after), backend="eager"), lazy_step(before, after), torch.ones(3, 4)
    for status in ("captured", "recaptured", "hit", "hit"):
        report = explain(captured)(x)
        assert report.status == status and reported_counts(report) == plain_counts(plain, x)


E, WEIGHTS = 4, torch.randn(4, 3, 3)


def every_expert(x_TD: torch.Tensor, chosen_TE: torch.Tensor) -> torch.Tensor:
    out_TD = torch.zeros_like(x_TD)
    for e in range(E):
        token_S = torch.where(chosen_TE[:, e])[0]
        out_TD.index_add_(0, token_S, x_TD[token_S] @ WEIGHTS[e])
    return out_TD


def carried_result(x_TD: torch.Tensor, chosen_TE: torch.Tensor) -> torch.Tensor:
    out_TD = torch.zeros_like(x_TD)
    for e in range(E):
        token_S = torch.where(chosen_TE[:, e])[0]
        out_TD = out_TD.index_add(0, token_S, x_TD[token_S] @ WEIGHTS[e])
    return out_TD


def chosen_experts(x_TD: torch.Tensor, chosen_TE: torch.Tensor) -> torch.Tensor:
    out_TD = torch.zeros_like(x_TD)
    for e in range(E):
        token_S = torch.where(chosen_TE[:, e])[0]
        if token_S.numel() == 0:
            continue
        out_TD.index_add_(0, token_S, x_TD[token_S] @ WEIGHTS[e])
    return out_TD


@pytest.mark.parametrize("experts", [every_expert, carried_result])
def test_a_loop_over_all_experts_counts_each_iteration(experts: Any) -> None:
    """It is recorded once (twice, until it is known what iterations carry); how often it runs is known."""
    arguments = torch.randn(6, 3), torch.rand(6, E) > 0.5
    report = explain(experts)(*arguments)
    assert len(report.expert_regions) == 1
    assert not report.in_loops and "counted once" not in str(report)
    assert reported_counts(report) == plain_counts(experts, *arguments)


def test_what_the_data_decides_is_counted() -> None:
    """An iteration up to its condition runs for each expert, behind it for those that the data has."""
    x_TD, all_TE, none_TE = torch.randn(6, 3), torch.ones(6, E, dtype=torch.bool), torch.zeros(6, E, dtype=torch.bool)
    captured = capture(chosen_experts)
    for chosen_TE in (all_TE, none_TE, torch.rand(6, E) > 0.8):
        report = explain(captured)(x_TD, chosen_TE)
        assert reported_counts(report) == plain_counts(chosen_experts, x_TD, chosen_TE) and not report.in_loops


class Chosen(torch.nn.Module):
    def forward(self, x_TD: torch.Tensor, chosen_TE: torch.Tensor) -> torch.Tensor:
        return chosen_experts(x_TD, chosen_TE)


def test_equal_layers_count_what_the_data_decides() -> None:
    """Also where a layer was not interpreted, being like the one before."""
    arguments, layers = (torch.randn(6, 3), torch.rand(6, E) > 0.5), [Chosen() for _ in range(3)]

    def step(count: int) -> torch.Tensor:
        return sum(layer(*arguments) for layer in layers[:count])

    report = explain(capture(step))(3)
    assert len(report.expert_regions) == 3
    assert reported_counts(report) == plain_counts(step, 3)


def test_a_second_capture_is_not_summed() -> None:
    def step(x: torch.Tensor, mode: str) -> torch.Tensor:
        return x * 2 if mode == "a" else helper(x, 2)

    captured, x = capture(step), torch.ones(3)
    for mode, status in (("a", "captured"), ("b", "recaptured"), ("a", "hit")):
        report = explain(captured)(x, mode)
        assert report.status == status and reported_counts(report) == plain_counts(step, x, mode)
        assert len(report.graphs) == 1


def test_what_gave_up_says_so(recwarn: pytest.WarningsRecorder) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return helper(x, 2)

    captured = capture(step, dynamic=False)
    for size in range(2, 20):
        captured(torch.ones(size))
    report, x = explain(captured)(torch.ones(30)), torch.ones(30)
    assert report.status == "native" and report.verdict.startswith("NOT captured: it was captured 16 times")
    assert report.coverage["captured"] == 0 and "100%" not in str(report)
    assert sum(report.coverage.values()) == sum(plain_counts(step, x).values())


def test_the_marks_of_continuations_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "goes_on", lambda code: False)
    x = torch.ones(3, 4)
    assert reported_counts(explain(capture(two_breaks))(x)) != plain_counts(two_breaks, x)


def test_a_settrace_tool_sees_every_line() -> None:
    """Under a debugger's or coverage.py's trace function the call runs as Python; without it, captured again."""
    captured, x = capture(one_graph), torch.ones(3, 4)
    captured(x)
    assert plain_counts(captured, x) == plain_counts(one_graph, x)
    assert explain(captured)(x).status == "hit"

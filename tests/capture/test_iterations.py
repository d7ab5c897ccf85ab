"""Iterations of a loop over tensors that are not interpreted again, and those that must be.

Each loop runs captured, where like iterations are passed over, and as plain Python; the results are the same bits. With
optimizers, the graph, its guards and what is counted are the same as where each iteration is interpreted.
"""

from __future__ import annotations

import collections
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.regions.iteration_reuse import IterationReuse

SHAPES = [(4, 4)] * 3 + [(3,)] + [(4, 4)] * 2 + [(3,)] * 3 + [(2, 5)] + [(4, 4)]
OPTIMIZERS = [
    (optim.SGD, {"lr": 0.1}, True),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, True),
    (optim.AdamW, {"lr": 0.1}, True), (optim.AdamW, {"lr": 0.1, "amsgrad": True}, False),
    (optim.AdamW, {"lr": 0.1, "maximize": True}, True), (optim.AdamW, {"lr": torch.tensor(0.1)}, True),
    (optim.Adam, {"lr": 0.1, "weight_decay": 0.1}, True), (optim.AdamW, {"lr": 0.1, "foreach": True}, False),
    (optim.Adagrad, {"lr": 0.1}, True), (optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}, True),
    (optim.Adamax, {"lr": 0.1}, False), (optim.NAdam, {"lr": 0.1}, True), (optim.RAdam, {"lr": 0.1}, False),
    (optim.ASGD, {"lr": 0.1}, False), (optim.Rprop, {"lr": 0.1}, True), (optim.Adadelta, {"lr": 0.1}, True),
    (optim.Adafactor, {"lr": 0.1}, True),
]  # fmt: skip


@pytest.fixture
def passed(monkeypatch) -> list[str]:
    """The functions whose iterations were passed over."""
    found: list[str] = []
    inner = IterationReuse.passes

    def passes(self: Any, frame: Any, loop: Any) -> bool:
        answer = inner(self, frame, loop)
        if answer:
            found.append(frame.code.co_name)
        return answer

    monkeypatch.setattr(IterationReuse, "passes", passes)
    return found


def trained(kind: Any, options: dict[str, Any], captured: bool) -> tuple[Any, Any]:
    """What four steps leave, and what was captured."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(*shape)) for shape in SHAPES]
    optimizer = kind(parameters, **options)

    def step(optimizer, parameters, scale):
        loss = sum(((p * scale) ** 2).sum() + (p * scale).sum() for p in parameters)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = capture(step, backend="eager") if captured else step
    losses = [run(optimizer, parameters, torch.tensor(0.5 + i)) for i in range(4)]
    state = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    left = [*(p.detach().clone() for p in parameters), *losses, *state]
    if not captured:
        return left, None
    report = report_of(captured_of(run))
    graphs = [
        (g.gm.code, [(str(getattr(n.meta.get("val"), "shape", None)), n.meta.get("number"), n.meta.get("stack"))
                     for n in g.gm.graph.nodes])
        for g in report.graphs
    ]  # fmt: skip
    return left, (graphs, sorted((g.source, g.check) for g in report.guards), report.coverage)


def same(ours: Any, plain: Any) -> bool:
    if isinstance(plain, torch.Tensor):
        return torch.equal(ours, plain)
    if isinstance(plain, list | tuple):
        return len(ours) == len(plain) and all(map(same, ours, plain))
    return ours == plain


@pytest.mark.share(1)
@pytest.mark.parametrize("kind, options, passes", OPTIMIZERS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_optimizers_are_captured_as_they_were(kind, options, passes, passed, monkeypatch):
    plain, _ = trained(kind, options, captured=False)
    ours, graphs = trained(kind, options, captured=True)
    assert same(ours, plain)
    assert bool(passed) == passes
    monkeypatch.setattr(IterationReuse, "may_begin", lambda _: False)
    each, as_each = trained(kind, options, captured=True)
    assert same(each, plain)
    assert graphs == as_each


# ----------------------------------------------------------------------------------------------------------------------
# Loops
# ----------------------------------------------------------------------------------------------------------------------

LOOPS: list[tuple[Callable[..., Any], bool]] = []


def loop(function: Callable[..., Any]) -> Callable[..., Any]:
    LOOPS.append((function, False))
    return function


def passing(function: Callable[..., Any]) -> Callable[..., Any]:
    LOOPS.append((function, True))
    return function


@passing
def updates(ps, qs):
    for p, q in zip(ps, qs, strict=True):
        p.mul_(0.5).add_(q, alpha=2)


@passing
def by_position(ps, qs):
    ps, qs = list(ps), list(qs)
    for i, p in enumerate(ps):
        p.lerp_(qs[i], 0.25)


@loop
def carries_a_tensor(ps, qs):
    total = torch.zeros(4, 4)
    for p in ps:
        total = total + p
    return total


@loop
def keeps_the_last(ps, qs):
    last = ps[0]
    for p in ps:
        last = p
        p.add_(1)
    return last + 1


@loop
def makes_one_that_is_read_later(ps, qs):
    for p, q in zip(ps, qs, strict=True):
        d = (p + q).abs()
        p.sub_(d)
    return d


@passing
def writes_into_a_shared_one(ps, qs):
    total = torch.zeros(4, 4)
    for p in ps:
        total.add_(p)
        p.mul_(total)
    return total


@passing
def draws(ps, qs):
    for p in ps:
        p.add_(torch.rand_like(p))


@passing
def numbers_of_tensors(ps, qs):
    for p, q in zip(ps, qs, strict=True):
        n = q.sum().item()
        p.mul_(1 - 0.5**n)


@loop
def calls_a_function(ps, qs):
    def decay(p, q, rate=0.1):
        return p.mul_(1 - rate).add_(q * rate)

    for p, q in zip(ps, qs, strict=True):
        decay(p, q)


@loop
def uses_the_position(ps, qs):
    for i, p in enumerate(ps):
        p.add_(i)


@loop
def chooses_by_the_position(ps, qs):
    ps = list(ps)
    for i, p in enumerate(ps):
        if i % 2:
            p.add_(ps[i])
        else:
            p.mul_(3)


@loop
def counts(ps, qs):
    n = 0
    for p in ps:
        n += 1
        p.add_(n)
    return n


@loop
def counts_behind_a_cell(ps, qs):
    n = 0

    def more():
        nonlocal n
        n += 1
        return n

    for p in ps:
        p.add_(1)
        more()
    return n


@loop
def reads_what_a_cell_counts(ps, qs):
    n = 0

    def more(p):
        nonlocal n
        n += 1
        return p.add_(n)

    for p in ps:
        more(p)
    return n


@loop
def appends(ps, qs):
    seen = []
    for p in ps:
        p.add_(1)
        seen.append(p)
    return len(seen), [s + 1 for s in seen]


@loop
def asks_how_many(ps, qs):
    seen = []
    for p in ps:
        p.add_(len(seen))
        seen.append(1)


@loop
def pops(ps, qs):
    rates = [0.1 * i for i in range(len(ps))]
    for p in ps:
        p.mul_(rates.pop())


@loop
def pops_from_the_left(ps, qs):
    rates = collections.deque(0.1 * i for i in range(len(ps)))
    for p in ps:
        p.mul_(rates.popleft())


@passing
def rates_by_position(ps, qs):
    rates = [0.1 * (i // 3) for i in range(len(ps))]
    for i, p in enumerate(ps):
        p.mul_(rates[i])


@loop
def advances_another(ps, qs):
    numbers = itertools.count(1)
    for p in ps:
        p.mul_(next(numbers))


@loop
def advances_a_generator(ps, qs):
    numbers = (0.5 * i for i in range(20))
    for p in ps:
        p.mul_(next(numbers))


@loop
def sets_an_attribute(ps, qs):
    class State:
        n = 0

    state = State()
    for p in ps:
        p.add_(state.n)
        state.n += 1
    return state.n


@loop
def sets_items(ps, qs):
    rates = {"now": 1.0}
    for p in ps:
        p.mul_(rates["now"])
        rates["now"] += 0.5
    return rates


@loop
def replaces_items(ps, qs):
    ps = list(ps)
    for i, p in enumerate(ps):
        p.add_(1)
        ps[i] = ps[i] * 2
    return ps


@loop
def reads_the_next(ps, qs):
    ps = list(ps)
    for i, p in enumerate(ps):
        p.add_(ps[i - 1])


@loop
def stops_early(ps, qs):
    for p, q in zip(ps, qs, strict=True):
        p.add_(1)
        if q is qs[4]:
            break
    else:
        return 1
    return p + 1


@passing
def goes_on_now_and_then(ps, qs):
    for p, flag in zip(ps, itertools.cycle([True, False]), strict=False):
        if flag:
            continue
        p.add_(1)


@passing
def has_a_loop_in_it(ps, qs):
    for p in ps:
        for q in qs:
            p.add_(q)


@passing
def has_a_short_loop_in_it(ps, qs):
    for p in ps:
        for rate in (0.5, 0.25):
            p.mul_(rate)


@passing
def handles(ps, qs):
    for p in ps:
        try:
            p.add_(1)
        finally:
            p.mul_(2)


@passing
def prints(ps, qs):
    for p in ps:
        p.add_(1)
        print("one")


@loop
def warns(ps, qs):
    for p in ps:
        p.add_(1)
        warnings.warn("one", stacklevel=1)


@loop
def draws_in_python(ps, qs):
    for p in ps:
        p.mul_(random.random())


@loop
def branches_on_data(ps, qs):
    for p in ps:
        if p.sum() > 0:
            p.add_(1)


@passing
def switches_gradients(ps, qs):
    for p in ps:
        p.add_(1)
        torch.set_grad_enabled(False)


@passing
def unpacks_in_the_body(ps, qs):
    for pair in zip(ps, qs, strict=True):
        p, q = pair
        p.add_(q)


@loop
def sets_the_position_anew(ps, qs):
    rates = [0.5, 0.25, 0.125]
    for i, p in enumerate(ps):
        i = i % 3
        p.mul_(rates[i])
    return i


@passing
def position_is_read_later(ps, qs):
    ps = list(ps)
    for i, p in enumerate(ps):
        p.add_(ps[i])
    return i


@loop
def attributes_of_tensors(ps, qs):
    for i, p in enumerate(ps):
        p.rate = 0.5 * i
    for p in ps:
        p.mul_(p.rate)


@loop
def deletes(ps, qs):
    for p in ps:
        d = p + 1
        p.mul_(d)
        del d


@passing
def asks_whether_it_is_one(ps, qs):
    for p, q in zip(ps, qs, strict=True):
        p.add_(1 if p is q else 2)


RATES: dict[Any, float] = {}
BY_IDENTITY: dict[int, float] = {}


@loop
def rates_by_tensor(ps, qs):
    for p in ps:
        p.mul_(RATES[p])


@loop
def rates_by_identity(ps, qs):
    for p in ps:
        p.mul_(BY_IDENTITY[id(p)])


@loop
def is_one_of_a_set(ps, qs):
    chosen = {id(q) for q in qs[4:]}
    for p, q in zip(ps, qs, strict=True):
        p.add_(2 if id(q) in chosen else 1)


@passing
def attributes_that_were_there(ps, qs):
    for q in qs:
        q.mul_(getattr(q, "rate", 3.0))


@passing
def attributes_of_one_of_two(ps, qs):
    for _, q in zip(ps, qs, strict=True):
        q.mul_(getattr(q, "rate", 3.0))


@passing
def attributes_by_position(ps, qs):
    qs = list(qs)
    for i in range(len(qs)):
        q = qs[i]
        q.mul_(1 if hasattr(q, "rate") else 2)


def rate_of(q):
    return getattr(q, "rate", 3.0)


@passing
def attributes_in_a_function(ps, qs):
    for _, q in zip(ps, qs, strict=True):
        q.mul_(rate_of(q))


@loop
def unpacks_further(ps, qs):
    for p, (_, rate) in zip(ps, zip(qs, [0.5, 0.5, 0.5, 0.25, 0.5, 0.25, 0.5], strict=True), strict=True):
        p.mul_(rate)


@loop
def unpacks_further_where_nothing_is_read(ps, qs):
    for i, (p, q) in enumerate(zip(ps, qs, strict=True)):  # noqa: B007
        qs[0].add_(1)
    return i, p + 1, q + 1


@loop
def asks_where_it_begins(ps, qs):
    for p in ps:
        p.add_(p.storage_offset())


@loop
def reads_gradients(ps, qs):
    for p in ps:
        if p.grad is None:
            p.mul_(2)
        else:
            p.sub_(p.grad)


@loop
def sets_gradients(ps, qs):
    for i, p in enumerate(ps):
        if i < 5:
            p.grad = None
        p.add_(1)


def tensors(alias: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    ps, qs = [torch.randn(4, 4) for _ in range(7)], [torch.rand(4, 4) for _ in range(7)]
    if alias == "one is twice there":
        ps[5] = ps[2]
    if alias == "the same in both":
        qs[3] = ps[3]
        qs[5] = ps[4]
    if alias == "parts of one":
        flat = torch.randn(7 * 16)
        ps = [flat[16 * i : 16 * i + 16].view(4, 4) for i in range(7)]
    if alias == "one overlaps":
        qs[4] = ps[4].view(16).view(4, 4)
    if alias == "a transposed one":
        ps[3] = torch.randn(4, 4).t()
    RATES.clear()
    for i, (p, q) in enumerate(zip(ps, qs, strict=True)):
        RATES[p] = BY_IDENTITY[id(p)] = 0.5 * (i // 3)
        if i % 4:
            q.rate = 0.5 * (i // 3)
        if i > 2 and alias == "none":
            p.grad = torch.randn(4, 4)
    return ps, qs


ALIASES = ("none", "one is twice there", "the same in both", "parts of one", "one overlaps", "a transposed one")


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("loop, passes", LOOPS, ids=lambda v: getattr(v, "__name__", str(v)))
@pytest.mark.filterwarnings("ignore")
def test_loops_give_what_they_gave(loop, passes, alias, passed, capsys):
    def step(ps, qs):
        with torch.no_grad():
            found = loop(ps, qs)
        return found, [p + 0 for p in ps], [q + 0 for q in qs]

    captured, left = capture(step, backend="eager"), []
    for run in (step, captured):
        random.seed(0)
        ps, qs = tensors(alias)
        torch.manual_seed(1)
        left.append([run(ps, qs), run(ps, qs), ps, qs, capsys.readouterr().out])
    assert same(left[1], left[0])
    if alias == "none":
        assert (loop.__name__ in passed) == passes
